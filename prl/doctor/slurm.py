"""What SLURM says of itself and of its nodes."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass

from prl.doctor.asking import Asker

PROGRAMS = ("sbatch", "squeue", "scancel", "scontrol", "sinfo", "srun")
NODE_FORMAT = "%N|%R|%T|%G|%c|%m|%f|%l"
USABLE = ("idle", "mixed", "allocated", "completing", "reserved", "planned")


@dataclass(frozen=True)
class SlurmNode:
    """A node as a member of one partition."""

    name: str
    partition: str
    state: str
    gpus: int
    features: tuple[str, ...]
    time_limit: str

    @property
    def usable(self) -> bool:
        """Now or when other jobs have ended; `*` marks a node that does not answer."""
        return self.state.rstrip("~#!%$@+-^") in USABLE


@dataclass(frozen=True)
class SlurmFacts:
    """`configured`: the machine belongs to a cluster; packages alone do not make one."""

    missing: tuple[str, ...] = PROGRAMS
    configured: bool = False
    error: str = ""  # why the controller did not answer; empty if it did
    default_partition: str = ""
    nodes: tuple[SlurmNode, ...] = ()
    in_job: bool = False

    @property
    def answers(self) -> bool:
        return self.configured and not self.error


def ask_slurm(asker: Asker) -> SlurmFacts:
    missing = tuple(name for name in PROGRAMS if shutil.which(name) is None)
    in_job = "SLURM_JOB_ID" in os.environ
    if "sbatch" in missing or "scontrol" in missing:
        return SlurmFacts(missing, in_job=in_job)
    ping = asker.ask("scontrol", "ping")
    if not ping.ok and "configuration source" in ping.err:
        return SlurmFacts(missing, in_job=in_job)
    if not ping.ok or " is UP" not in ping.out:
        return SlurmFacts(missing, True, ping.last_line, in_job=in_job)
    partitions = asker.ask("sinfo", "--noheader", "--format=%P")
    nodes = asker.ask("sinfo", "--noheader", "--Node", f"--format={NODE_FORMAT}")
    if not nodes.ok or not partitions.ok:
        return SlurmFacts(missing, True, (nodes if not nodes.ok else partitions).last_line, in_job=in_job)
    default = next((line.strip("* \n") for line in partitions.out.splitlines() if line.strip().endswith("*")), "")
    return SlurmFacts(missing, True, "", default, tuple(read_nodes(nodes.out)), in_job)


def read_nodes(listing: str) -> list[SlurmNode]:
    """Of `sinfo --Node --format=NODE_FORMAT`."""
    found = []
    for line in listing.splitlines():
        parts = [part.strip() for part in line.split("|")]
        if len(parts) == len(NODE_FORMAT.split("|")):
            name, partition, state, gres, _, _, features, limit = parts
            known = () if features in ("", "(null)") else tuple(features.split(","))
            found.append(SlurmNode(name, partition, state, count_gpus(gres), known, limit))
    return found


def count_gpus(gres: str) -> int:
    """Of a list like `gpu:h200:8(S:0-1),nvme:2`, over all types."""
    bare = re.sub(r"\([^)]*\)", "", gres)
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,]+)*?:(\d+)(?=,|$)", bare))
