"""Names of configurations: the id of a point, the key of a warm start, the label of a point within its sweep."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from prl.config.schema import RunConfig

ID_LENGTH = 10  # hex digits; 40 bits tell any number of points apart that a person could run

# Where things lie, what is written about them, and what they are called: none of it changes what is computed.
NOT_IDENTITY = {"output_dir", "cache_dir", "logging", "name", "choices", "sweep", "swept", "slurm"}


def short_hash(content: Any) -> str:
    """A hash of plain data that depends on its values only."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]


def point_id(config: RunConfig) -> str:
    """Equal for two configurations that compute the same thing, whatever their directories and labels."""
    return short_hash(config.model_dump(mode="json", exclude=NOT_IDENTITY))


def warm_start_key(config: RunConfig) -> str:
    """The cache key of the warm start: what its result depends on, which is the model, its own settings and the seed.

    The layout (parallelism, deployment) and the memory recipe are left out: they change the speed, not the policy.
    """
    assert config.warm_start is not None, "a run without warm start has no key"
    model = config.model.model_dump(mode="json", exclude={"name": True, "card": {"cp_styles", "ac_targets"}})
    return short_hash({"model": model, "warm_start": config.warm_start.model_dump(mode="json"), "seed": config.seed})


def point_label(config: RunConfig) -> str:
    """The directory of a point in its sweep: the swept choices, readable, and the point id, unique.

    Without `=` and `,`, so that a path can be pasted as `output_dir=PATH` unquoted.
    """
    swept = "_".join(f"{key.rsplit('.', 1)[-1]}-{value.replace(',', '+')}" for key, value in config.swept.items())
    readable = re.sub(r"[^\w.+-]", "", swept)[:120]
    return f"{readable}-{point_id(config)}" if readable else point_id(config)
