"""The model over the KV cache: prefill of many prompts at once, decode of one token for all running sequences.

Tokens of all sequences lie in one flat dimension [N]; only attention tells them apart.
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from prl.config.schema import ModelCard
from prl.inference.kv_cache import KVCache
from prl.inference.sampling import SamplingTable
from prl.inference.sequences import Sequence
from prl.inference.sparse_attention import CachedSparseAttention
from prl.inference.states import PaddedRows
from prl.models.experts.routing import RoutingRecorder
from prl.models.layers.attention import Attend
from prl.models.layers.decoder import Decoder
from prl.models.layers.hybrid import HybridAttend

log = logging.getLogger(__name__)

SHORTEST_CLASS = 64  # prompts up to this length are padded together
SCORED_AT_ONCE = 256  # tokens of a prompt, each of which has logits for the whole vocabulary
VIEW_OVERHEAD = 1.25  # computing a few idle slots beats copying the keys and values of the busy ones


# --- prefill ----------------------------------------------------------------------------------------------------------


@dataclass
class _LengthClass:
    """Sequences padded to one another: B sequences, T new tokens, S tokens of context at most."""

    flat: Tensor  # [n] index of each of their new tokens among all new tokens
    row: Tensor  # [n]
    column: Tensor  # [n]
    slots: Tensor  # [B]
    new: int  # T
    context: int  # S
    mask: Tensor | None  # [B, 1, T, S] bool; None: plain causal, nothing was cached
    cached: Tensor  # [B] tokens before the new ones


def _length_classes(sequences: list[Sequence], device: torch.device) -> list[_LengthClass]:
    """Classes within which padding at most doubles new tokens and context."""
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    lengths = [len(s.token_ids) - s.computed for s in sequences]
    for i, sequence in enumerate(sequences):
        sizes = (lengths[i], len(sequence.token_ids))
        new, context = ((max(size, SHORTEST_CLASS) - 1).bit_length() for size in sizes)
        members[new, context].append(i)
    starts = np.cumsum([0, *lengths])
    return [
        _length_class([sequences[i] for i in members[key]], starts[members[key]], device) for key in sorted(members)
    ]


def _length_class(sequences: list[Sequence], flat_starts: np.ndarray, device: torch.device) -> _LengthClass:
    cached = torch.tensor([s.computed for s in sequences])
    lengths = torch.tensor([len(s.token_ids) - s.computed for s in sequences])
    new, context = int(lengths.max()), max(len(s.token_ids) for s in sequences)
    row, column = torch.nonzero(torch.arange(new) < lengths[:, None], as_tuple=True)
    mask = None
    if cached.any():  # the query at column c of a row stands at position cached + c and sees everything up to there
        mask = torch.arange(context) <= (cached[:, None] + torch.arange(new))[:, :, None]
        mask = mask[:, None].to(device)
    return _LengthClass(
        flat=(torch.from_numpy(flat_starts)[row] + column).to(device),
        row=row.to(device),
        column=column.to(device),
        slots=torch.tensor([s.slot for s in sequences], device=device),
        new=new,
        context=context,
        mask=mask,
        cached=cached.to(device),
    )


def _prefill_attention(cache: KVCache, classes: list[_LengthClass], slots: Tensor, positions: Tensor) -> Attend:
    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.write(layer, slots, positions, k, v)
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        for c in classes:
            padded = q.new_zeros(len(c.slots), c.new, *q.shape[1:])
            padded[c.row, c.column] = q[c.flat]
            keys, values = (cached[c.slots, :, : c.context] for cached in cache.of(layer))
            attended = F.scaled_dot_product_attention(
                padded.transpose(1, 2),
                keys,
                values,
                attn_mask=c.mask,
                is_causal=c.mask is None,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            out[c.flat] = attended.transpose(1, 2)[c.row, c.column]
        return out

    return attend


class PrefillRows:
    """Sequences [P] whose uncomputed tokens [N] are to be forwarded into their slots."""

    def __init__(self, model: Decoder, cache: KVCache, sequences: list[Sequence]) -> None:
        self.sequences, device = sequences, cache.device
        self.lengths = lengths = [len(s.token_ids) - s.computed for s in sequences]
        self.input_ids = torch.tensor([t for s in sequences for t in s.token_ids[s.computed :]], device=device)
        self.positions = torch.tensor(
            [p for s in sequences for p in range(s.computed, len(s.token_ids))], device=device
        )
        slots = torch.tensor([s.slot for s, n in zip(sequences, lengths, strict=True) for _ in range(n)], device=device)
        self.ends = torch.tensor(lengths, device=device).cumsum(0) - 1  # [P] each one's last token
        self.attend: Attend
        if model.card.index_topk:
            longest = max(len(s.token_ids) for s in sequences)
            self.attend = CachedSparseAttention(cache, model.card, slots, self.positions, longest)
            return
        classes = _length_classes(sequences, device)
        self.attend = _prefill_attention(cache, classes, slots, self.positions)
        if cache.states:
            padded = [PaddedRows(c.flat, c.row, c.column, c.slots, c.new, c.cached > 0) for c in classes]
            self.attend = HybridAttend(self.attend, cache.states.prefill(padded))

    def tell_prompts(self, model: Decoder, hidden: Tensor) -> None:
        """Log-probabilities of the prompts of those that asked; hidden [N, H] of the tokens here."""
        starts = np.cumsum([0, *self.lengths])
        for sequence, start in zip(self.sequences, starts, strict=False):
            if sequence.request.params.prompt_logprobs is not None:
                sequence.prompt_logprobs = _of_prompt(model, hidden[start:], sequence.request.prompt_ids)


def prefill(
    model: Decoder, cache: KVCache, sequences: list[Sequence], recorder: RoutingRecorder | None
) -> tuple[Tensor, list[np.ndarray]]:
    """Forward the uncomputed tokens of each sequence into its slot.

    Returns logits [B, V] after each one's last token, and each one's routing [new tokens, L, K] (none if not recorded).
    """
    rows = PrefillRows(model, cache, sequences)
    hidden = model(rows.input_ids, rows.positions, rows.attend, recorder=recorder)
    rows.tell_prompts(model, hidden)
    return model.logits(hidden[rows.ends]), routing_pieces(recorder, rows.lengths, model.card)


def _of_prompt(model: Decoder, hidden: Tensor, prompt_ids: list[int]) -> list[float]:
    """Log-probability of each token but the first, at temperature 1; `hidden` [N, H] begins with the prompt's."""
    found: list[float] = []
    targets = torch.tensor(prompt_ids[1:], device=hidden.device)
    for piece, wanted in zip(hidden[: len(targets)].split(SCORED_AT_ONCE), targets.split(SCORED_AT_ONCE), strict=True):
        logits = model.logits(piece).float()
        found += (logits.gather(1, wanted[:, None])[:, 0] - logits.logsumexp(-1)).tolist()
    return found


def routing_pieces(recorder: RoutingRecorder | None, lengths: list[int], card: ModelCard) -> list[np.ndarray]:
    """Recorded routing, cut into one [length, L, K] uint8 or uint16 array per sequence."""
    if recorder is None or not recorder.experts:
        return []
    return np.split(recorder.stacked(card).cpu().numpy(), np.cumsum(lengths)[:-1])


# --- decode -----------------------------------------------------------------------------------------------------------


class DecodeRows:
    """The running sequences as tensors, rebuilt only when the set changes. B rows in order of slots."""

    def __init__(self, sequences: list[Sequence], eos: tuple[int, ...], vocab: int, device: torch.device) -> None:
        self.sequences = sorted(sequences, key=lambda s: s.slot)
        self.slots = torch.tensor([s.slot for s in self.sequences], device=device)
        self.positions = torch.tensor([s.computed for s in self.sequences], device=device)
        self.last_token = torch.tensor([s.token_ids[-1] for s in self.sequences], device=device)
        self.eos, self.vocab, self.device = eos, vocab, device
        self.num_slots = self.sequences[-1].slot + 1  # slots [0, num_slots) hold all rows
        self.dense = self.num_slots == len(self.sequences)
        self.view = self.num_slots <= VIEW_OVERHEAD * len(self.sequences)

    @functools.cached_property
    def table(self) -> SamplingTable:
        return sampling_table(self.sequences, self.eos, self.vocab, self.device)

    def forward(self, model: Decoder, cache: KVCache, recorder: RoutingRecorder | None) -> Tensor:
        """Logits [B, V] after the last token of each row; `positions` move on to the token to be drawn."""
        attend: Attend
        if model.card.index_topk:
            attend = CachedSparseAttention(cache, model.card, self.slots, self.positions, self._context)
        else:
            attend = self._attention(cache)
            if cache.states:
                attend = HybridAttend(attend, cache.states.decode(self.slots))
        hidden = model(self.last_token, self.positions, attend, recorder=recorder)
        self.positions += 1
        return model.logits(hidden)

    def forward_beside(
        self, model: Decoder, cache: KVCache, new: PrefillRows, recorder: RoutingRecorder | None
    ) -> tuple[Tensor, list[np.ndarray]]:
        """As `forward`, and in the same pass what is to be prefilled: what a pass costs besides its tokens comes once.

        Returns logits [B + P, V] and as many pieces of routing (none if not recorded), those of the rows here first.
        """
        count, decode = len(self.sequences), self._attention(cache)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            running = decode(layer, q[:count], k[:count], v[:count])
            return torch.cat([running, new.attend(layer, q[count:], k[count:], v[count:])])

        input_ids, positions = torch.cat([self.last_token, new.input_ids]), torch.cat([self.positions, new.positions])
        hidden = model(input_ids, positions, attend, recorder=recorder)
        new.tell_prompts(model, hidden[count:])
        self.positions += 1
        logits = model.logits(torch.cat([hidden[:count], hidden[count:][new.ends]]))
        return logits, routing_pieces(recorder, [1] * count + new.lengths, model.card)

    def advance(self, tokens: Tensor) -> None:
        """tokens [B] int64 were drawn; the next forward pass takes them."""
        self.last_token = tokens
        for sequence in self.sequences:
            sequence.computed += 1

    @property
    def _context(self) -> int:
        """Tokens that the longest row sees: short sequences do not pay for max_model_len."""
        return max(s.computed for s in self.sequences) + 1

    def _attention(self, cache: KVCache) -> Attend:
        if cache.by_kernels:
            return decode_attention(cache, self.slots, self.positions, self.positions)
        context = self._context
        spread = self.view and not self.dense  # rows are laid out by slot, with holes
        ends = self.positions
        if spread:
            ends = ends.new_zeros(self.num_slots).index_copy(0, self.slots, ends)
        mask = torch.where(torch.arange(context, device=self.device) <= ends[:, None], 0.0, -torch.inf)
        chosen = slice(self.num_slots) if self.view else self.slots
        masks: dict[int, Tensor] = {}  # by heads of keys: [rows * Hkv, 1, S]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.write(layer, self.slots, self.positions, k, v)
            if spread:
                q = q.new_zeros(self.num_slots, *q.shape[1:]).index_copy(0, self.slots, q)
            keys, values = (cached[chosen, :, :context].flatten(0, 1) for cached in cache.of(layer))
            grouped, heads = q.view(len(keys), -1, q.shape[-1]), len(keys) // len(q)  # [rows * Hkv, G, D]
            if heads not in masks:
                masks[heads] = mask.repeat_interleave(heads, dim=0)[:, None]
            if q.dtype == torch.float32:  # one pass less over the scores
                scores = torch.baddbmm(masks[heads], grouped, keys.mT, alpha=q.shape[-1] ** -0.5)
            else:
                scores = torch.bmm(grouped * q.shape[-1] ** -0.5, keys.mT).float() + masks[heads]
            out = torch.bmm(scores.softmax(dim=-1).to(q.dtype), values).view(*q.shape[:2], -1)
            return out[self.slots] if spread else out

        return attend


def decode_attention(cache: KVCache, slots: Tensor, positions: Tensor, places: Tensor) -> Attend:
    """By kernels, of one token a row: at `positions` [B] int64 of its slot, its keys and values written to `places`."""
    from prl.inference import decode_kernels

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = cache.of(layer)
        decode_kernels.write(k, v, keys, values, slots, places)
        return decode_kernels.attend(q, keys, values, slots, positions)

    return attend


def kernels_run(cache: KVCache, query_heads: int) -> bool:
    """Whether `decode_attention` may be asked for on this cache: tried once, for a GPU may lack what they need."""
    if not cache.by_kernels:
        return False
    try:
        from prl.inference import decode_kernels

        keys, values = (x[0, :1, :, :1].clone() for x in (cache.k, cache.v))  # one slot, of one token
        zero = torch.zeros(1, dtype=torch.int64, device=cache.device)
        decode_kernels.write(keys[:, :, 0], values[:, :, 0], keys, values, zero, zero)
        decode_kernels.attend(keys.new_zeros(1, query_heads, keys.shape[-1]), keys, values, zero, zero)
    except Exception as error:  # Triton has many
        log.warning("the kernels of decoding do not run here, PyTorch's do: %s: %s", type(error).__name__, error)
        return False
    return True


def sampling_table(sequences: list[Sequence], eos: tuple[int, ...], vocab: int, device: torch.device) -> SamplingTable:
    params, seeds = [s.request.params for s in sequences], [s.seed for s in sequences]
    return SamplingTable.build(params, seeds, [s.num_prompt for s in sequences], eos, vocab, device)
