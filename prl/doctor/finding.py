"""What is found about one thing: a line of the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# nodes: the job needs it, this machine lacks it, and the job runs on other machines
State = Literal["ok", "absent", "broken", "nodes"]
Purpose = Literal["train", "infer", "scale", "cluster", "storage", "logging"]
PURPOSES: tuple[Purpose, ...] = ("train", "infer", "scale", "cluster", "storage", "logging")


@dataclass(frozen=True)
class Finding:
    """`prevents`: the job that was asked about cannot run here because of it."""

    purpose: Purpose
    name: str
    state: State
    found: str
    needed_by: str = ""  # choices of the configuration
    remedy: str = ""  # a command, or an override of the configuration
    prevents: bool = False
