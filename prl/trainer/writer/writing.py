"""What the writing process does: DCP's planner and writer, called as `torch.distributed.checkpoint.save` calls them.

That function would need tensors and a process group here. Instead each rank's trainer sends its plan and where the
tensors lie, and the collectives between the parts are the trainers', to whom plans are bytes: the first rank's would
otherwise hold Python's lock for as long as it takes to read those of all.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, Metadata
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from prl.trainer.writer.staging import Slot, StagingMemory

COORDINATOR = 0


@dataclass(frozen=True)
class Staged:
    """The state of a rank as its trainer has left it."""

    size: int  # of the memory
    slots: dict[MetadataIndex, Slot]
    objects: dict[MetadataIndex, bytes]  # as `torch.save` writes them


class StagedPlanner(DefaultSavePlanner):
    """Finds what is to be written in shared memory."""

    def __init__(self, memory: StagingMemory, staged: Staged) -> None:
        super().__init__()
        self.memory, self.staged = memory, staged

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        slot = self.staged.slots.get(write_item.index)
        return io.BytesIO(self.staged.objects[write_item.index]) if slot is None else self.memory.tensor(slot)


class Writing:
    """One rank's. The first one's also plans for all, and writes the metadata."""

    def __init__(self, memory: int) -> None:
        torch.set_num_threads(1)
        self.memory = StagingMemory(memory)
        self.metadata: Metadata | None = None

    def plan(self, path: str, pickled: list[bytes]) -> list[bytes]:
        """Every rank's own `SavePlan` -> what each is to write: what several hold is written by one."""
        writer, plans = FileSystemWriter(path), [pickle.loads(plan) for plan in pickled]
        writer.prepare_local_plan(plans[COORDINATOR])
        plans, self.metadata = DefaultSavePlanner().create_global_plan(plans)
        return [pickle.dumps(plan) for plan in writer.prepare_global_plan(plans)]

    def write(self, path: str, pickled: bytes, staged: Staged) -> bytes:
        """This rank's part, until it is on the disk. Returns its `WriteResult`s."""
        plan = pickle.loads(pickled)
        self.memory.map(staged.size)
        writer, planner = FileSystemWriter(path), StagedPlanner(self.memory, staged)
        writer.prepare_local_plan(plan)
        return pickle.dumps(writer.write_data(planner.finish_plan(plan), planner).wait())

    def finish(self, path: str, written: list[bytes]) -> None:
        """What makes it complete."""
        assert self.metadata is not None
        FileSystemWriter(path).finish(self.metadata, [pickle.loads(results) for results in written])
