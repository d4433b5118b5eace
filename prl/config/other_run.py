"""The frozen configuration of another run that trains, which a key names by its directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prl.config.errors import ConfigError, UserError
from prl.config.schema import ModelConfig

PLAN = "plan.json"
MOST_RUNS = 8  # that are named


def read_other(key: str, said: str) -> tuple[Path, dict[str, Any], ModelConfig]:
    """Its directory by its full path, its configuration as JSON has it, and its model.

    Args:
        key: that says where it is.

    Raises:
        ConfigError: where there is no run, or one that trains nothing.
    """
    run = Path(said).expanduser().absolute()
    refuse_unreadable(key, run, run / PLAN)
    try:
        of_run = json.loads((run / PLAN).read_text())["config"]
        model = ModelConfig.model_validate(of_run["model"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError([no_run(key, run) if run.is_dir() else nowhere(key, run)]) from error
    if of_run.get("job") not in ("rl", "sft"):
        raise ConfigError([no_run(key, run, f"it is one of prl.{of_run.get('job')}, which trains nothing")])
    return run, of_run, model


def refuse_unreadable(key: str, run: Path, *paths: Path) -> None:
    """Raise ConfigError for files and directories of that run which are there and may not be read, or not now."""
    for path in paths:
        try:
            if path.is_dir():
                next(path.iterdir(), None)
            elif path.exists():
                path.open("rb").close()
        except OSError as error:
            raise ConfigError(
                [
                    UserError(
                        f"{error.filename or path} cannot be read: {error.strerror or error}.",
                        where=f"{key}={run}",
                        why="what the run was, and what it has saved, is read there",
                        fix="as its owner: chmod -R a+rX on that directory; else a copy of your own",
                    )
                ]
            ) from error


def no_run(key: str, run: Path, why: str = "") -> UserError:
    """Of a directory that is there. `why`: known already."""
    below = sorted(str(path.parent) for path in run.glob(f"*/{PLAN}"))
    fix = _fix(key)
    if below and not why and not (run / PLAN).exists():
        why = f"it holds {len(below)} run{'s' * (len(below) > 1)}, as a sweep does"
        more = f" and {len(below) - MOST_RUNS} more" if len(below) > MOST_RUNS else ""
        every = f", or all of them: -m '{key}={','.join(below[:MOST_RUNS])}'{more}" if below[1:] else ""
        fix = f"{key}={below[0]}{every}"
    found = "its plan.json is damaged, or of another version" if (run / PLAN).exists() else "there is no plan.json"
    return UserError(f"{run} is no run that trains a model.", where=f"{key}={run}", why=why or found, fix=fix)


def nowhere(key: str, run: Path) -> UserError:
    above = next(path for path in run.parents if path.exists())
    return UserError(
        f"There is {'a file, and no directory' if run.exists() else 'no directory'} {run}.",
        where=f"{key}={run}",
        why="it is to be the directory of a run"
        + ("" if run.exists() or above == run.parent else f"; {above} is the last on that path that is there"),
        fix=_fix(key),
    )


def _fix(key: str) -> str:
    return f"{key}=outputs/RUN; weights alone: model.path=DIRECTORY and their model="
