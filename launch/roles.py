"""What each role of a point is given, for people to read: written when a point is submitted, or shown by a dry run."""

from __future__ import annotations

from typing import Any

import yaml

from launch.points import Point
from prl.planning.commands import render_commands

FAST = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # libyaml's, where PyYAML was built with it
ROLES = "roles"  # in a point's directory: what each role is given, for people to read
COMMANDS = "commands.txt"  # every process with its environment
SHARED = ("job", "seed", "max_steps", "seq_len", "cache_dir", "logging", "debug")
SECTIONS = {  # role -> the parts of the configuration that it reads, beside those that all do
    "inference": ("model", "inference", "deployment", "weight_transport"),
    "router": ("model", "inference", "deployment"),
    "orchestrator": ("model", "algo", "env", "eval", "inference", "deployment", "ckpt"),
    "trainer": (
        *("model", "parallelism", "memory_recipe", "optim", "algo", "deployment", "weight_transport", "ckpt"),
        *("warm_start", "sft", "bench"),
    ),
    "env": ("env",),
}


def role_configs(point: Point) -> dict[str, dict[str, Any]]:
    """Role -> its part of the resolved configuration, for the roles that the plan has."""
    whole = point.config.model_dump(mode="json")
    roles = dict.fromkeys(role.role for role in point.plan.roles)
    parts = {role: (*SHARED, *SECTIONS[role]) for role in roles}
    return {role: {key: whole[key] for key in keys if whole[key] is not None} for role, keys in parts.items()}


def write_roles(point: Point) -> dict[str, dict[str, Any]]:
    """POINT/roles/ROLE.yaml and every process' command. Returns role -> what it is given."""
    configs = role_configs(point)
    (point.path / ROLES).mkdir(exist_ok=True)
    (point.path / ROLES / COMMANDS).write_text(render_commands(point.plan))
    for role, config in configs.items():
        head = "# To read: what starts is plan.json, and editing this file changes nothing.\n"
        (point.path / ROLES / f"{role}.yaml").write_text(head + to_yaml(config))
    return configs


def to_yaml(config: dict[str, Any]) -> str:
    return yaml.dump(config, Dumper=FAST, sort_keys=False, width=110, default_flow_style=None)
