"""One fetch for a context group: its ranks train on the same rows, so the first asks, and tells the others.

A row with the experts of its tokens is large (781 bytes a token of a model with 94 sparse layers and 8 experts each),
and the orchestrator sends it once to each group, not to each rank. Between the ranks it goes over gloo, on the host.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from prl.trainer.loops.batches import BatchClient
from prl.trainer.world import World
from prl.transport.batch import TrainBatch


class SharedFetch:
    """The batches of this rank's context group. Construct on all ranks of the world, which make the groups together."""

    def __init__(self, world: World, client: BatchClient) -> None:
        self.world, self.client = world, client
        self.group: dist.ProcessGroup | None = None  # None: this rank is alone
        for ranks in world.data.mesh.tolist() if world.cp > 1 else []:
            group = dist.new_group(ranks, backend="gloo")  # bodies lie on the host, whatever the mesh is of
            if world.rank in ranks:
                self.group, self.first = group, ranks[0]

    def fetch(self, step: int, publications: int) -> TrainBatch:
        """As `BatchClient.fetch`, of this rank's data rank. All ranks of a context group call it alike."""
        if self.group is None:
            return self.client.fetch(step, self.world.data_rank, publications)
        while True:
            body: bytes | bytearray | None = None
            if self.world.is_first_of_context:
                body = self.client.poll(step, self.world.data_rank, publications)
            else:
                self.client.beat()
            if (told := self._tell(body)) is not None:
                return TrainBatch.from_bytes(told)

    def _tell(self, body: bytes | bytearray | None) -> memoryview | None:
        """What the first rank of the group holds, on all of them; None as long as it has nothing."""
        size = torch.tensor([-1 if body is None else len(body)])
        dist.broadcast(size, self.first, self.group)
        if size.item() < 0:
            return None
        whole = torch.empty(int(size), dtype=torch.uint8)
        if body is not None:
            whole.numpy().data[:] = body
        dist.broadcast(whole, self.first, self.group)
        return whole.numpy().data
