"""Attention over packed documents, for the trainer.

`packed_attention(doc_lens)` prepares index tables once per micro-batch and returns the `attend` callable that the model
wants. On CUDA it is cuDNN's or varlen attention; elsewhere documents are laid out in right-padded batches, one per
power-of-two length class, because a dense [T, T] mask over many short documents would cost T/len times the work.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from prl.config.errors import UserError
from prl.config.packages import FLASH_ATTENTION_3, FLASH_ATTENTION_4
from prl.models.by_hand import PaddedQueries, ShortAttentionByHand, by_hand, is_by_hand
from prl.models.layers.attention import Attend
from prl.models.layers.attention_kernels import PackedAttention, widened
from prl.models.layers.shared_prefixes import SharedPrefixes

AttentionImpl = Literal["auto", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4"]


def packed_attention(
    doc_lens: list[int], device: torch.device, impl: AttentionImpl = "auto", prefixes: SharedPrefixes | None = None
) -> Attend:
    """Causal attention inside each document; doc_lens sum to N tokens. With `prefixes` N are those that are run.

    impl: what `model.attn` says. "auto" takes cuDNN for long documents and varlen attention for short ones on Hopper,
    varlen attention on other GPUs, and SDPA on CPU and for float32, which the flash kernels do not know. Nor do these
    know shared prefixes: such documents are padded.
    """
    if prefixes is not None:
        return _padded_with_prefixes(prefixes, device)
    if device.type != "cuda":
        return _padded_attention(doc_lens, device)
    mixed = impl == "auto" and prefers_cudnn(device) and not torch.are_deterministic_algorithms_enabled()
    flash = _mixed_attention(doc_lens, device) if mixed else _varlen_attention(doc_lens, device)
    padded: list[Attend] = []  # built at the first call that needs it

    def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if impl != "sdpa" and q.dtype != torch.float32:
            return flash(layer_idx, q, k, v)
        if not padded:
            padded.append(_padded_attention(doc_lens, device))
        return padded[0](layer_idx, q, k, v)

    return attend


def activate_attention(impl: AttentionImpl) -> None:
    """Have PyTorch run its flash attention through FlashAttention 3 or 4, if `model.attn` asks for it.

    Raises UserError when the package that holds the kernels is not installed.
    """
    if impl not in ("flash_attention_3", "flash_attention_4"):
        return
    try:
        if impl == "flash_attention_4":
            from prl.models.layers.flash_attention_4 import activate

            activate()
        else:
            from torch.nn.attention import activate_flash_attention_impl

            activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError, ValueError) as error:
        package = FLASH_ATTENTION_4 if impl.endswith("4") else FLASH_ATTENTION_3
        raise UserError(
            f"{impl} cannot be activated: {error}",
            where=f"model.attn={impl}",
            why=f"PyTorch takes these kernels from a package of their own ({package.name}: {package.module})",
            fix=f"{package.install}, or model.attn=auto",
        ) from error


@functools.cache
def prefers_cudnn(device: torch.device) -> bool:
    """Whether cuDNN's attention beats the built-in flash kernels: on Hopper by 1.7 to 2 times (prl/README.md)."""
    return torch.cuda.get_device_capability(device)[0] == 9 and torch.backends.cudnn.is_available()


def _varlen_attention(doc_lens: list[int], device: torch.device) -> Attend:
    ends = torch.tensor([0, *doc_lens], device=device).cumsum(0).to(torch.int32)
    longest = max(doc_lens)

    def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return PackedAttention.apply(q, k, v, ends, longest)

    return attend


LONG_DOCUMENT = 2048  # tokens from which cuDNN, one call per document, beats one varlen call
CUDNN_GRAIN = 256  # lengths are rounded up to multiples of this: cuDNN builds a plan for every new shape


def _mixed_attention(doc_lens: list[int], device: torch.device) -> Attend:
    """Long documents one by one through cuDNN's attention, runs of short ones between them through varlen attention.

    A document's slice is extended to a round length into the tokens behind it. Causality keeps these from the
    document's own queries; their outputs are cut off, so no gradient comes from them.
    """
    parts: list[tuple[int, int, Attend]] = []  # start, length, attention of the slice
    start = 0
    for is_long, run in itertools.groupby(doc_lens, key=lambda length: length >= LONG_DOCUMENT):
        lengths = list(run)
        if is_long:
            for length in lengths:
                parts.append((start, length, _cudnn_attention))
                start += length
        else:
            parts.append((start, sum(lengths), _varlen_attention(lengths, device)))
            start += sum(lengths)

    def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        for first, length, part in parts:
            size = -(-length // CUDNN_GRAIN) * CUDNN_GRAIN if part is _cudnn_attention else length
            outs.append(part(layer_idx, *(slice_rows(t, first, size) for t in (q, k, v)))[:length])
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    return attend


def slice_rows(x: Tensor, first: int, size: int) -> Tensor:
    """x[first : first + size], with zeros for rows beyond the end."""
    rows = x[first : first + size]
    return F.pad(rows, (0, 0, 0, 0, 0, size - rows.shape[0])) if rows.shape[0] < size else rows


def _cudnn_attention(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over the whole slice."""
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))  # [1, H, S, D]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)


def _length_class(length: int) -> int:
    return max(length - 1, 15).bit_length()


def _length_classes(doc_lens: list[int]) -> list[list[tuple[int, int]]]:
    """Documents as (start, length), grouped so that padding to the longest of a group at most doubles it."""
    classes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    start = 0
    for length in doc_lens:
        classes[_length_class(length)].append((start, length))
        start += length
    return [classes[key] for key in sorted(classes)]


BY_HAND_TOKENS = 128  # of the longest document, up to which keeping its probabilities is faster


def _padded_attention(doc_lens: list[int], device: torch.device) -> Attend:
    short: list[PaddedQueries] = []
    if device.type == "cpu" and max(doc_lens) <= BY_HAND_TOKENS:
        short = [PaddedQueries(*torch.tensor(docs).unbind(1)) for docs in _length_classes(doc_lens)]
    total = sum(doc_lens)
    gathers: list[Tensor] = []  # per class [B, S]: flat token index of each padded slot
    unpad = torch.empty(total, dtype=torch.int64)  # flat token -> row in the concatenated padded outputs
    offset = 0
    for docs in _length_classes(doc_lens):
        longest = max(length for _, length in docs)
        starts = torch.tensor([s for s, _ in docs])[:, None]
        lengths = torch.tensor([n for _, n in docs])[:, None]
        columns = torch.arange(longest)[None, :]
        # padding repeats the last token: masked by causality
        gathers.append((starts + columns.minimum(lengths - 1)).to(device))
        valid = columns < lengths
        rows = torch.arange(valid.numel()).view(valid.shape) + offset
        unpad[(starts + columns)[valid]] = rows[valid]
        offset += valid.numel()
    unpad = unpad.to(device)

    def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if short and is_by_hand(q) and v.shape == k.shape:
            return by_hand(ShortAttentionByHand, q, k, v, short)
        outs = []
        values = widened(v, q.shape[-1])  # of different widths, only a kernel of quadratic memory takes them
        for index in gathers:
            qc, kc, vc = (t[index].transpose(1, 2) for t in (q, k, values))  # [B, H, S, D]
            out = F.scaled_dot_product_attention(qc, kc, vc, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            outs.append(out[..., : v.shape[-1]].transpose(1, 2).flatten(0, 1))
        return torch.cat(outs)[unpad] if len(outs) > 1 else outs[0][unpad]

    return attend


def _padded_with_prefixes(prefixes: SharedPrefixes, device: torch.device) -> Attend:
    """Queries are each document's own tokens, keys all of its tokens, wherever they are run."""
    classes: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for start, length, common in prefixes.documents():
        classes[_length_class(length - common), _length_class(length)].append((start, length, common))
    padded = []
    for key in sorted(classes):
        starts, lengths, shared = torch.tensor(classes[key]).unbind(1)
        padded.append(PaddedQueries(starts, lengths, shared, prefixes.place))
    is_short = device.type == "cpu" and max(prefixes.doc_lens) <= BY_HAND_TOKENS
    on_device: list[tuple[Tensor, ...]] = []  # per class: slots of queries and of keys, mask; places and tokens

    def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if is_short and is_by_hand(q) and v.shape == k.shape:
            return by_hand(ShortAttentionByHand, q, k, v, padded)
        if not on_device:
            on_device.extend(tuple(part.to(device) for part in c.as_indices()) for c in padded)
        values, outs, tokens = widened(v, q.shape[-1]), [], []
        for of_queries, of_keys, seen, places, own in on_device:
            qc, kc, vc = (t[i].transpose(1, 2) for t, i in ((q, of_queries), (k, of_keys), (values, of_keys)))
            out = F.scaled_dot_product_attention(qc, kc, vc, attn_mask=seen, enable_gqa=q.shape[1] != k.shape[1])
            outs.append(out[..., : v.shape[-1]].transpose(1, 2).flatten(0, 1)[places])
            tokens.append(own)
        return torch.cat(outs)[torch.cat(tokens).argsort()]

    return attend
