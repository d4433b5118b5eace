"""Whether what was evaluated is still what the words of the command mean: a run has gone on since, or other weights lie
where those lay.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prl.config.errors import UserError
from prl.config.schema import RunConfig
from prl.runtime.directory.checkpoints import step_dir
from prl.runtime.directory.files import read_object, replace_file
from prl.runtime.directory.inputs import fingerprint
from prl.runtime.directory.rundir import ENV
from prl.runtime.policy_source import find_policy

EVALUATED = "evaluated.json"  # in an evaluation's directory


def note_evaluated(run_dir: Path, config: RunConfig) -> None:
    """Keep which weights an evaluation begins with. Raises UserError where the run has no such step."""
    replace_file(run_dir / EVALUATED, json.dumps(_identity(config), indent=1) + "\n")


def why_outdated(run_dir: Path, config: RunConfig) -> str:
    """In words; "" where nothing says that it is, as of servers, models of the hub, steps that are there no more."""
    before = read_object(run_dir / EVALUATED) if config.job == "eval" else None
    if not before:
        return ""
    try:
        now = _identity(config)
    except UserError:
        return ""
    if now.get("run") != before.get("run"):
        return f"{config.eval.run} holds another run than the one that was evaluated"
    if now.get("step") != before.get("step"):
        return f"step {before.get('step')} was evaluated, and {config.eval.run} has step {now.get('step')} now"
    if None in (now.get("weights"), before.get("weights")) or now["weights"] == before["weights"]:
        return ""
    return f"the weights in {now['path']} are others than those that were evaluated"


def _identity(config: RunConfig) -> dict[str, Any]:
    """Empty where it cannot be told."""
    if config.inference.urls:
        return {}
    if config.eval.run is None:
        path = None if config.model.path is None else Path(config.model.path).expanduser()
        return {"path": str(path), "weights": fingerprint(path)} if path is not None and path.is_dir() else {}
    run = Path(config.eval.run)
    step, path = find_policy(config)
    place = step_dir(run, step) if path is None and step else path
    weights = None if place is None else fingerprint(place)
    return {
        "run": (read_object(run / ENV) or {}).get("run_id"),
        "step": step,
        "path": None if place is None else str(place),
        "weights": weights,
    }
