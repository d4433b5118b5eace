"""Context parallelism of sparse attention: all ranks gather what keys are made of, and keep their own queries.

A query may choose any key before it, so neither the ring (whose keys pass by in an order of their own) nor the exchange
of heads (of which all choose the same keys) fits. What is gathered is small: one latent and one index key a token. The
queries lie as the ring's do, an early and a late chunk of every document on each rank, so that scores cost all ranks
the same. In backward the ranks' shares of a latent's gradient are added up where it came from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prl.config.schema import ModelCard
from prl.models.layers.packed_sparse_attention import PackedSparseAttention
from prl.models.sharding import gather_into
from prl.trainer.context.group import ContextGroup, all_to_all
from prl.trainer.context.ring_attention import zigzag_positions


class GatheredSparseAttention(PackedSparseAttention):
    """On the slots of `shard_row`. A collective: every rank of the group calls it for the same layers."""

    def __init__(self, doc_lens: list[int], card: ModelCard, context: ContextGroup, device: torch.device) -> None:
        super().__init__(doc_lens, card, device)
        self.context = context
        places = [zigzag_positions(doc_lens, context.of(rank)) for rank in range(context.size)]
        index = torch.cat([position for position, _ in places])  # of all ranks' slots, one rank after another
        slots = torch.cat([valid for _, valid in places]).nonzero().squeeze(1)
        self.slot_of = torch.empty(sum(doc_lens), dtype=torch.int64).index_copy(0, index[slots], slots).to(device)
        mine = places[context.rank][0].to(device)
        self.low, self.high = self.low[mine], self.high[mine]

    def gathered(self, x: Tensor) -> Tensor:
        """x [n, ...] of every rank's slots -> [T, ...] in the order of the row."""
        return gather(x, self.context).index_select(0, self.slot_of)


def gather(x: Tensor, context: ContextGroup) -> Tensor:
    """x [n, ...] -> those of all ranks, [cp * n, ...]. Gradients add up where x came from."""
    return _Gather.apply(x, context)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: ContextGroup) -> Tensor:
        ctx.context = context
        everyone = x.new_empty(context.size * len(x), *x.shape[1:])
        gather_into(everyone, x.contiguous(), context.group)
        return everyone

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        shares = all_to_all(grads[0].unflatten(0, (ctx.context.size, -1)), ctx.context)
        wide = torch.promote_types(shares.dtype, torch.float32)
        return shares.sum(0, dtype=wide).to(shares.dtype), None
