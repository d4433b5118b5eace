"""The model of an evaluated run: `eval.run` says it, by the run's plan.json, and no key beside it."""

from __future__ import annotations

from typing import Any

from prl.config.chosen import said_by_user
from prl.config.errors import ConfigError, UserError
from prl.config.keys import is_group, schema_keys
from prl.config.locate import file_of_choice
from prl.config.other_run import read_other
from prl.config.schema import ModelConfig, RunConfig

KEY = "eval.run"
COMPOSED = "tiny_qwen3_moe"  # the choice of conf/eval.yaml, which nobody has made


def take_model(config: RunConfig) -> RunConfig:
    """The same with the run's own model, and its directory by its full path. Raises ConfigError."""
    run, of_run, model = read_other(KEY, str(config.eval.run))
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


def _at(model: ModelConfig, key: str) -> Any:
    node: Any = model
    for name in key.split(".")[1:]:
        node = getattr(node, name)
    return node
