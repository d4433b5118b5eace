"""Context parallelism: one packed row over several ranks.

Every rank of a context group holds the whole micro-batch on the host and takes its share of the tokens to the device.
What works on single tokens (embedding, norms, MLPs, LM head) then runs on the share alone; only attention and
state-space layers communicate.

    shard = shard_row(doc_lens, context, device)
    attend = context_attention(card, doc_lens, context, device)
    hidden = model(input_ids[shard.index], positions[shard.index], attend)
    row = hidden.new_zeros(T).index_put((shard.index[shard.valid],), f(hidden)[shard.valid])
    loss = loss_of(sum_over_context(row, context))

Rows of any length and documents of any length fit: padding slots repeat a real token, are read by no real one, and
must stay out of the loss. `ulysses` costs two all-to-alls a layer (three with states) and needs cp to divide the query
heads; `ring` passes keys and values cp - 1 times; `gather`, that of latent attention, dense or sparse, gathers latents.
Both pad documents to multiples of 2 * cp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prl.config.schema import ModelCard
from prl.models.layers.attention import Attend, LatentAttend
from prl.models.layers.hybrid import HybridAttend
from prl.models.layers.packed_attention import AttentionImpl
from prl.models.layers.shared_prefixes import SharedPrefixes
from prl.trainer.context.gather import GatheredSparseAttention
from prl.trainer.context.gather_latents import GatheredLatentAttention
from prl.trainer.context.group import ContextGroup, sum_over_context
from prl.trainer.context.ring_attention import ring_attention, zigzag_positions
from prl.trainer.context.ulysses import chunk_positions, ulysses_attention, ulysses_states

__all__ = ["ContextGroup", "TokenShard", "context_attention", "shard_row", "sum_over_context"]


@dataclass(frozen=True)
class TokenShard:
    """This rank's tokens of a packed row; n is the same on every rank of the group."""

    index: Tensor  # [n] int64 on the device: row position of each local slot; padding slots repeat a real token's
    valid: Tensor  # [n] bool on the device: False for padding slots


def shard_row(doc_lens: list[int], context: ContextGroup, device: torch.device) -> TokenShard:
    """Which tokens of a row with documents of these lengths (each at least 1) this rank holds, in which order."""
    if context.style in ("ring", "gather"):
        index, valid = zigzag_positions(doc_lens, context)
    else:
        index, valid = chunk_positions(sum(doc_lens), context)
    return TokenShard(index.to(device), valid.to(device))


def context_attention(
    card: ModelCard,
    doc_lens: list[int],
    context: ContextGroup,
    device: torch.device,
    impl: AttentionImpl = "auto",
    prefixes: SharedPrefixes | None = None,
) -> Attend | LatentAttend:
    """Causal attention inside each document, on the slots of `shard_row`: q [n, Hq, D], k, v [n, Hkv, D] -> [n, Hq, D].

    A collective: every rank of the group calls it for the same layers in the same order, and so in backward. `impl` is
    that of `packed_attention`, for ulysses; the ring needs the log-sum-exp and always runs the flash kernels on GPUs.
    `prefixes` are known to ulysses alone: slots are then parts of what is run.
    """
    assert prefixes is None or context.style == "ulysses"
    if context.style == "gather":
        if card.index_topk:
            return GatheredSparseAttention(doc_lens, card, context, device)
        return GatheredLatentAttention(doc_lens, context, device)
    if context.style == "ring":
        return ring_attention(doc_lens, context, device)
    attend = ulysses_attention(doc_lens, context, device, impl, prefixes)
    return HybridAttend(attend, ulysses_states(doc_lens, context, device)) if card.state_layers else attend
