"""Names of configurations: the id of a point, its label within its sweep, and what it finds in cache_dir by."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from prl.config.place_names import as_file_name
from prl.config.schema import ModelConfig, RunConfig

ID_LENGTH = 10  # hex digits; 40 bits tell any number of points apart that a person could run

# Where things lie, what is written about them, and what they are called: none of it changes what is computed.
NOT_IDENTITY = {"output_dir", "cache_dir", "logging", "name", "choices", "sweep", "swept", "slurm"}

UNTRAINED = {"cp_styles", "ac_targets"}  # of a model's card: what a trainer may do with it, and not what it is


def short_hash(content: Any) -> str:
    """A hash of plain data that depends on its values only."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]


def point_id(config: RunConfig) -> str:
    """Equal for two configurations that compute the same thing, whatever their directories and labels."""
    return short_hash(config.model_dump(mode="json", exclude=NOT_IDENTITY))


def warm_start_key(config: RunConfig) -> str:
    """What the result of the warm start depends on, hashed: the model and the warm start's own settings, its seed too.

    Left out is what changes the speed and not the policy: the layout (parallelism, deployment), the memory recipe, the
    attention kernel, and validation where nothing stops upon its loss. The run's own seed has no part in it: runs that
    differ in their seed start from the same policy. Files that these settings name are `runtime/warm_cache.py`'s part.
    """
    assert config.warm_start is not None, "a run without warm start has no key"
    model = config.model.model_dump(mode="json", exclude={"name": True, "attn": True, "card": UNTRAINED})
    is_watched = config.warm_start.target_val_loss > 0
    stage = config.warm_start.model_dump(mode="json", exclude=None if is_watched else {"val_interval", "val_rows"})
    return short_hash({"model": model, "warm_start": stage})


def random_checkpoint_dir(config: ModelConfig, cache_dir: str | Path) -> Path:
    """Where a model of random weights is kept: one for each card, seed and tokenizer."""
    identity = json.dumps(
        [config.card.model_dump(exclude=UNTRAINED), config.init_seed, config.tokenizer], sort_keys=True
    )
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return Path(cache_dir).expanduser() / "models" / f"{as_file_name(config.name)}-{digest}"


def point_label(config: RunConfig) -> str:
    """The directory of a point in its sweep: the swept choices, readable, and the point id, unique.

    Without `=` and `,`, so that a path can be pasted as `output_dir=PATH` unquoted.
    """
    swept = "_".join(f"{key.rsplit('.', 1)[-1]}-{value.replace(',', '+')}" for key, value in config.swept.items())
    readable = re.sub(r"[^\w.+-]", "", swept)[:120]
    return f"{readable}-{point_id(config)}" if readable else point_id(config)
