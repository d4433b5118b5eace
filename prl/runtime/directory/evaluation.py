"""Files of an evaluation's directory: which policy it is of, and what it came to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prl.runtime.directory.files import read_object

RESULT = "result.json"  # avg@k and pass@k of each environment, with intervals; rewards by task
SOURCE = "policy.json"  # the run, step and place that weights were taken from
CONVERTED = "model"  # what a checkpoint was turned into, until the evaluation is done


def read_source(run_dir: Path) -> dict[str, Any]:
    """What `prl.runtime.policy_stage` told: run, step, path; nothing where the model came from elsewhere."""
    return read_object(run_dir / SOURCE) or {}
