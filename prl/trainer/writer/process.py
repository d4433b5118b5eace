"""The trainer's side of the process that writes: start it, stage the state, and talk to the other ranks for it.

torch's own (`AsyncCheckpointerType.PROCESS`) is not used: it passes each tensor as a file descriptor of its own, which
it keeps (thousands, where 1024 are common); its process listens on a port of every host, and survives its trainer until
it is done; once it has died, every later save fails.
"""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from traceback import StackSummary
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh

from prl.models.sharding import is_sharded, local_part
from prl.runtime.process.failures import count_oom_kills, describe
from prl.trainer.writer.failures import WriterDied
from prl.trainer.writer.starting import Started, spawned
from prl.trainer.writer.writing import COORDINATOR, Staged

DEATH_S = 5.0  # from the end of its socket to its exit code

ALIKE = ("model.", "optimizer.")  # what plain tensors are called that all ranks hold: random states are each its own


class WriterProcess:
    """One rank's. Made on all ranks together."""

    def __init__(self, started: Started | None = None) -> None:
        """`started`: None for one that is started now."""
        self.group = dist.new_group(backend="gloo")  # its collectives must not mix with those of training
        started = started or spawned()
        self.memory, self.process, self.socket = started.memory, started.process, started.socket
        self.oom_kills_before = count_oom_kills()
        self.preparing: threading.Thread | None = None

    def prepare(self, state: dict[str, Any]) -> None:
        """Have memory for such a state allocated, and pinned, beside training. A shortage is for the next save to tell:
        it tries again.
        """
        _, tensors, _ = _divided(state)

        def allocate() -> None:
            with contextlib.suppress(Exception):
                self.memory.place(tensors)

        self.preparing = threading.Thread(target=allocate, daemon=True)
        self.preparing.start()

    def save(self, path: str, state: dict[str, Any]) -> Future[None]:
        """Copy the state, then begin to write. A collective in the background: the future is done on all ranks alike,
        with a CheckpointException if any of them failed.
        """
        if self.preparing is not None:
            self.preparing.join()
        plan, tensors, objects = _divided(state)
        slots = self.memory.place(tensors)
        self.memory.fill(slots, tensors)
        staged, pickled = Staged(self.memory.size, slots, objects), pickle.dumps(plan)
        future: Future[None] = Future()
        threading.Thread(target=_settle, args=(future, lambda: self._write(path, pickled, staged)), daemon=True).start()
        return future

    # --- beside it

    def _write(self, path: str, plan: bytes, staged: Staged) -> None:
        """As `torch.distributed.checkpoint.save`."""
        given = self._meet(plan, lambda plans: self._ask("plan", path, plans))
        if isinstance(given, Exception):
            raise dcp.api.CheckpointException("save", _failures({COORDINATOR: given}))
        written = self._ask("write", path, given, staged)
        failed = self._meet(written, lambda parts: [self._conclude(path, parts)] * len(parts))
        if failed:
            raise dcp.api.CheckpointException("save", failed)

    def _conclude(self, path: str, parts: list[Any]) -> dict[int, Any]:
        """On the first rank, once all have written or failed: the failures of all."""
        failed = {rank: part for rank, part in enumerate(parts) if isinstance(part, Exception)}
        if not failed and isinstance(error := self._ask("finish", path, parts), Exception):
            failed = {COORDINATOR: error}
        return _failures(failed)

    def _meet(self, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """What the first rank decides for this one, once it has what each has to say. A failure is one for all."""
        size = dist.get_world_size()
        everyones: list[Any] | None = [None] * size if dist.get_rank() == COORDINATOR else None
        dist.gather_object(mine, everyones, dst=COORDINATOR, group=self.group)
        decided: list[Any] | None = None
        if everyones is not None:
            answer = decide(everyones)
            decided = [answer] * size if isinstance(answer, Exception) else answer
        own: list[Any] = [None]
        dist.scatter_object_list(own, decided, src=COORDINATOR, group=self.group)
        return own[0]

    def _ask(self, name: str, *arguments: Any) -> Any:
        """The answer of the process, or the exception: its own, or that it has died."""
        try:
            self.socket.send((name, arguments))
            return self.socket.recv()
        except (EOFError, OSError):
            return WriterDied(f"the process that writes checkpoints: {self._death()}")

    def _death(self) -> str:
        try:
            code = self.process.wait(DEATH_S)
        except subprocess.TimeoutExpired:
            return "does not answer"
        return describe(code, {}, count_oom_kills() - self.oom_kills_before) if code else "ended"


def _failures(errors: dict[int, Exception]) -> dict[int, Any]:
    """Rank -> its error, as DCP has them: with a traceback, here an empty one."""
    return {rank: (error, StackSummary()) for rank, error in errors.items()}


def _settle(future: Future[None], work: Callable[[], None]) -> None:
    try:
        work()
        future.set_result(None)
    except BaseException as error:  # CheckpointException is no Exception
        future.set_exception(error)


def _divided(state: dict[str, Any]) -> tuple[SavePlan, dict[MetadataIndex, Tensor], dict[MetadataIndex, bytes]]:
    """This rank's own plan, and what is to be written by it."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=dist.get_rank() == COORDINATOR)
    plan = planner.create_local_plan()
    items = _shared_out(planner.state_dict, plan.items)
    tensors: dict[MetadataIndex, Tensor] = {}
    objects: dict[MetadataIndex, bytes] = {}
    for item in items:
        data = planner.resolve_data(item)
        if isinstance(data, Tensor):
            tensors[item.index] = data.detach()
        else:
            objects[item.index] = data.getvalue()
    return SavePlan(items, planner_data=plan.planner_data), tensors, objects


def _shared_out(state: dict[str, Any], items: list[WriteItem]) -> list[WriteItem]:
    """Of what several ranks hold alike (shards under HSDP; without FSDP whole tensors) each is staged by one: by whom,
    all of them find alike, for they hold the same in the same order. Objects are small, and DCP's to decide.
    """
    mine: list[WriteItem] = []
    loads: dict[Any, list[int]] = {}  # bytes so far, of each replica
    for item in items:
        tensor = state[item.index.fqn]
        if item.type == WriteItemType.SHARD and is_sharded(tensor):
            mesh, dims = tensor.device_mesh, [d for d, placed in enumerate(tensor.placements) if placed.is_replicate()]
            holders: Any = (mesh, *dims)
            replica, replicas = _place_in(mesh, dims)
        elif item.type == WriteItemType.TENSOR and item.index.fqn.startswith(ALIKE):
            holders, replica, replicas = None, dist.get_rank(), dist.get_world_size()
        else:
            mine.append(item)
            continue
        load = loads.setdefault(holders, [0] * replicas)
        taker = load.index(min(load))
        load[taker] += local_part(tensor).nbytes
        if taker == replica:
            mine.append(item)
    return mine


def _place_in(mesh: DeviceMesh, dims: list[int]) -> tuple[int, int]:
    """Which of how many along these dimensions this rank is."""
    place, count = 0, 1
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for dim in dims:
        place, count = place * mesh.size(dim) + coordinate[dim], count * mesh.size(dim)
    return place, count
