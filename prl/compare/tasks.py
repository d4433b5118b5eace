"""On which tasks points were measured: values of different tasks are no better or worse than one another."""

from __future__ import annotations

import json
from typing import Any

from prl.compare.points import Point


def tasks_of(point: Point, held_out: bool) -> str:
    """What tells the tasks apart that a point's value is a mean over; "" where its configuration is not known.

    RL and evaluations: the environments with their arguments; held out, how many of their tasks; in training, with
    which weights they are mixed. SFT: the data, and held out, how many rows of it.
    """
    if not point.config:
        return ""
    env, sft = _node(point.config, "env"), _node(point.config, "sft")
    if point.job == "sft":
        facts: Any = [_node(sft, "data"), sft.get("val_rows") if held_out else None]
    else:
        mix = {name: _node(_node(env, "mix"), name) for name in sorted(_node(env, "mix"))}
        keys = ("id", "args") if held_out else ("id", "args", "weight")
        of_each = {name: [one.get(key) for key in keys] for name, one in mix.items()}
        number = _node(point.config, "eval").get("num_tasks") if held_out else None
        facts = [of_each, env.get("id"), env.get("args"), number]
    return json.dumps(facts, sort_keys=True, default=str)


def _node(tree: dict[str, Any], key: str) -> dict[str, Any]:
    found = tree.get(key)
    return found if isinstance(found, dict) else {}
