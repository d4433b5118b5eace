"""What torchrun tells the processes that it starts: each is to be one trainer rank.

Only its full set of variables counts: RANK or WORLD_SIZE alone may come from SLURM, a notebook, or anybody.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prl.config.errors import UserError
from prl.runtime.nodes.job_nodes import without_job
from prl.runtime.process.signals import StopSignals

if TYPE_CHECKING:
    from prl.planning.run_plan import RunPlan

RUN_ID = "TORCHELASTIC_RUN_ID"
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
SET = (RUN_ID, *NUMBERS, "MASTER_ADDR")
OF_TORCHRUN = (*SET, "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")
PREFIX = "TORCHELASTIC_"
RUN = "prl/run"  # the key in torchrun's store
PATIENCE_S = 26.0  # torchrun kills 30 s after its SIGTERM


@dataclass
class Torchrun:
    """One process of torchrun's."""

    rank: int
    world_size: int
    local_world_size: int
    host: str
    port: int
    restart: int
    has_store: bool  # torchrun's own agent serves it; else rank 0 does
    _store: Any = field(default=None, repr=False)
    _told: bool = False

    def store(self, limit_s: float) -> Any:
        """Its key-value store, in which rank 0 says where the run is."""
        if self._store is None:
            import torch.distributed as dist

            serves = self.rank == 0 and not self.has_store
            limit = timedelta(seconds=limit_s)
            found = dist.TCPStore(self.host, self.port, self.world_size, serves, limit, wait_for_workers=False)
            self._store = dist.PrefixStore(f"prl/{self.restart}", found)
        return self._store

    def tell(self, run_dir: Path | None, key: str, limit_s: float = 60.0) -> None:
        """The other ranks, once: where the run is, None that there is none. It is no secret."""
        if not self._told and self.world_size > 1:
            self._told = True
            self.store(limit_s).set(RUN, json.dumps({"run_dir": run_dir and str(run_dir), "key": key}))

    def ask(self, limit_s: float) -> tuple[Path, str] | None:
        """Run directory and key of the job, from rank 0; None: it has ended without a run."""
        import torch.distributed as dist

        try:
            told = json.loads(self.store(limit_s).get(RUN))
        except dist.DistError:
            return None
        return None if told["run_dir"] is None else (Path(told["run_dir"]), told["key"])

    def signals(self) -> StopSignals:
        """For this process: torchrun passes on what it gets, and kills who has not ended in time."""
        signals = StopSignals(scheduled=True, repeated=(signal.SIGTERM, signal.SIGINT))
        signals.time_to_end_s = PATIENCE_S
        return signals


def find_torchrun(environment: Mapping[str, str]) -> Torchrun | None:
    """What torchrun has told; None if it has not started this process."""
    if any(not environment.get(name) for name in SET):
        return None
    for name in NUMBERS:
        if not environment[name].isdecimal():
            raise UserError(
                f"{name}={environment[name]} is no number.",
                where=name,
                why="with all of torchrun's variables set, each process is one trainer rank",
                fix=f"torchrun sets it; `env -u {RUN_ID}` for a run that torchrun does not start",
            )
    rank, world_size, _, local_world_size, port = (int(environment[name]) for name in NUMBERS)
    return Torchrun(
        rank,
        world_size,
        local_world_size,
        environment["MASTER_ADDR"],
        port,
        int(environment.get(f"{PREFIX}RESTART_COUNT", "0")),
        environment.get(f"{PREFIX}USE_AGENT_STORE") == "True",
    )


def looks_like_ranks(environment: Mapping[str, str], instead: str = "a run of its own") -> str:
    """A line for who has set the variables of ranks by other means than torchrun: they count for nothing here."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
    if environment.get(RUN_ID) or not all(map(environment.get, names)) or environment["WORLD_SIZE"] == "1":
        return ""
    given = " ".join(f"{name}={environment[name]}" for name in names)
    return f"{given} without {RUN_ID}: not started by torchrun, so this is {instead}, not one rank of a run"


def take_torchrun() -> Torchrun | None:
    """`find_torchrun` of this process, from whose environment all of it goes, for what it starts is torchrun's no more.
    So does a SLURM job around (`srun torchrun`): torchrun has brought the processes to its nodes.
    """
    found = find_torchrun(os.environ)
    if found is not None:
        kept = without_job(os.environ)
        for name in list(os.environ):
            if name not in kept or name in OF_TORCHRUN or name.startswith(PREFIX):
                del os.environ[name]
    return found


def refuse_torchrun(job: str) -> None:
    """Raise UserError in a process of torchrun's, for an entry point that starts its own processes."""
    if find_torchrun(os.environ) is not None:
        raise UserError(
            f"torchrun does not start {job}.",
            where=f"{RUN_ID}, RANK, WORLD_SIZE",
            why="each of torchrun's processes is one trainer rank, and this command starts all processes of a run",
            fix="the command without torchrun; torchrun -m prl.sft, or -m prl.trainer POINT; "
            f"`env -u {RUN_ID}` if torchrun is somebody else's",
        )


def check_layout(plan: RunPlan, torchrun: Torchrun, frozen: bool = False) -> None:
    """Raise UserError unless torchrun's processes are the plan's trainer ranks. A frozen plan takes no overrides."""
    otherwise = ", or a point frozen anew with" if frozen else ", or"
    ranks = plan.roles_of("trainer")
    sizes = {sum(role.node == node for role in ranks) for node in {role.node for role in ranks}}
    nodes = len({role.node for role in ranks})
    per_node = max(sizes)
    wanted = f"torchrun --nproc-per-node={per_node}" + (f" --nnodes={nodes}" if nodes > 1 else "")
    if torchrun.world_size != len(ranks):
        raise UserError(
            f"torchrun has started {torchrun.world_size} processes, and the plan has {len(ranks)} trainer ranks.",
            where=f"WORLD_SIZE={torchrun.world_size}",
            why="under torchrun each process is one trainer rank",
            fix=f"{wanted}{otherwise} deployment.num_train_gpus={torchrun.world_size}",
        )
    if sizes != {torchrun.local_world_size}:
        raise UserError(
            f"torchrun has {torchrun.local_world_size} processes on a node, and the plan {per_node}.",
            where=f"LOCAL_WORLD_SIZE={torchrun.local_world_size}, deployment.gpus_per_node",
            why="devices of a rank are counted on its node",
            fix=f"{wanted}{otherwise} deployment=multi_node deployment.num_train_nodes="
            f"{torchrun.world_size // torchrun.local_world_size} deployment.gpus_per_node={torchrun.local_world_size}",
        )
