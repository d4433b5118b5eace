"""The model of an evaluated run: `eval.run` says it, by the run's plan.json, and no key beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prl.config.chosen import said_by_user
from prl.config.errors import ConfigError, UserError
from prl.config.keys import is_group, schema_keys
from prl.config.locate import file_of_choice
from prl.config.schema import ModelConfig, RunConfig

PLAN = "plan.json"
MOST_RUNS = 8  # that are named
COMPOSED = "tiny_qwen3_moe"  # the choice of conf/eval.yaml, which nobody has made


def take_model(config: RunConfig) -> RunConfig:
    """The same with the run's own model, and its directory by its full path. Raises ConfigError."""
    run = Path(str(config.eval.run)).expanduser().absolute()
    try:
        of_run = json.loads((run / PLAN).read_text())["config"]
        model = ModelConfig.model_validate(of_run["model"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError([_no_run(run) if run.is_dir() else _nowhere(run)]) from error
    if of_run.get("job") not in ("rl", "sft"):
        raise ConfigError([_no_run(run, f"it is one of prl.{of_run.get('job')}, which trains nothing")])
    chosen, own = config.choices.get("model"), (of_run.get("choices") or {}).get("model")
    contradicting = [] if chosen in (None, COMPOSED, own) else [f"model={chosen}"]
    if config.model != model:
        keys = [key for key in schema_keys(ModelConfig, "model.") if not is_group(key)]
        contradicting += [
            f"{key}={_at(config.model, key)}"
            for key in keys
            if said_by_user(config, key) and _at(config.model, key) != _at(model, key)
        ]
    if contradicting:
        raise ConfigError(
            [
                UserError(
                    "The run says which model is evaluated.",
                    where=f"{', '.join(contradicting)}, eval.run={run}",
                    why=f"its weights are those of {model.name}",
                    fix="leave them out; inference.dtype says in which numbers the engine computes",
                )
            ]
        )
    choices = config.choices | ({"model": own} if own and file_of_choice("model", own).is_file() else {})
    return config.model_copy(
        update={
            "model": model,
            "choices": choices,
            "eval": config.eval.model_copy(update={"run": str(run)}),
        }
    )


def _no_run(run: Path, why: str = "") -> UserError:
    below = sorted(str(path.parent) for path in run.glob(f"*/{PLAN}"))
    fix = "eval.run=outputs/RUN; weights alone: model.path=DIRECTORY and their model="
    if below and not why and not (run / PLAN).exists():
        why = f"it holds {len(below)} run{'s' * (len(below) > 1)}, as a sweep does"
        more = f" and {len(below) - MOST_RUNS} more" if len(below) > MOST_RUNS else ""
        every = f", or all of them: -m 'eval.run={','.join(below[:MOST_RUNS])}'{more}" if below[1:] else ""
        fix = f"eval.run={below[0]}{every}"
    found = "its plan.json is damaged, or of another version" if (run / PLAN).exists() else "there is no plan.json"
    return UserError(f"{run} is no run that trains a model.", where=f"eval.run={run}", why=why or found, fix=fix)


def _nowhere(run: Path) -> UserError:
    above = next(path for path in run.parents if path.exists())
    return UserError(
        f"There is {'a file, and no directory' if run.exists() else 'no directory'} {run}.",
        where=f"eval.run={run}",
        why="it is to be the directory of a run"
        + ("" if run.exists() or above == run.parent else f"; {above} is the last on that path that is there"),
        fix="eval.run=outputs/RUN; weights alone: model.path=DIRECTORY and their model=",
    )


def _at(model: ModelConfig, key: str) -> Any:
    node: Any = model
    for name in key.split(".")[1:]:
        node = getattr(node, name)
    return node
