"""Attention over packed documents, for the trainer.

`packed_attention(doc_lens)` prepares index tables once per micro-batch and returns the `attend` callable that the model
wants. On CUDA it is cuDNN's or varlen attention; elsewhere documents are laid out in right-padded batches, one per
power-of-two length class, because a dense [T, T] mask over many short documents would cost T/len times the work.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from prl.config.errors import UserError
from prl.config.packages import FLASH_ATTENTION_3, FLASH_ATTENTION_4, NOT_LOADED
from prl.models.by_hand import PaddedQueries, ShortAttentionByHand, by_hand, is_by_hand
from prl.models.layers.attention import Attend
from prl.models.layers.attention_kernels import PackedAttention, widened
from prl.models.layers.cudnn_attention import LONG_DOCUMENT, cudnn_attention, prefers_cudnn, rounded, slice_rows
from prl.models.layers.prefix_attention import (
    ends_of,
    flash_attention_with_prefixes,
    length_class,
    padded_attention_with_prefixes,
)
from prl.models.layers.shared_prefixes import SharedPrefixes

AttentionImpl = Literal["auto", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4"]


def packed_attention(
    doc_lens: list[int], device: torch.device, impl: AttentionImpl = "auto", prefixes: SharedPrefixes | None = None
) -> Attend:
    """Causal attention inside each document; doc_lens sum to N tokens. With `prefixes` N are those that are run.

    impl: what `model.attn` says. "auto" takes cuDNN for long documents and varlen attention for short ones on Hopper,
    varlen attention on other GPUs, and SDPA on CPU and for float32, which the flash kernels do not know.
    """
    if device.type != "cuda":
        return _plain_attention(doc_lens, device, prefixes)
    cudnn = impl == "auto" and prefers_cudnn(device) and not torch.are_deterministic_algorithms_enabled()
    if prefixes is not None:
        flash = flash_attention_with_prefixes(prefixes, device, cudnn)
    else:
        flash = _mixed_attention(doc_lens, device) if cudnn else _varlen_attention(doc_lens, device)
    plain: list[Attend] = []  # built at the first call that needs it

    def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if impl != "sdpa" and q.dtype != torch.float32:
            return flash(layer_idx, q, k, v)
        if not plain:
            plain.append(_plain_attention(doc_lens, device, prefixes))
        return plain[0](layer_idx, q, k, v)

    return attend


def activate_attention(impl: AttentionImpl) -> None:
    """Have PyTorch run its flash attention through FlashAttention 3 or 4, if `model.attn` asks for it.

    Raises UserError when the package that holds the kernels is not installed, or has none for this GPU.
    """
    if impl not in ("flash_attention_3", "flash_attention_4"):
        return
    if impl == "flash_attention_3" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        if major != 9:
            raise UserError(
                "FlashAttention 3 does not run on this GPU",
                where=f"model.attn={impl}",
                why=f"its kernels are Hopper's (compute capability 9.0); this one has {major}.{minor}",
                fix="model.attn=auto",
            )
    try:
        if impl == "flash_attention_4":
            from prl.models.layers.flash_attention_4 import activate

            activate()
        else:
            from torch.nn.attention import activate_flash_attention_impl

            activate_flash_attention_impl("FA3")
    except (*NOT_LOADED, ValueError) as error:
        package = FLASH_ATTENTION_4 if impl.endswith("4") else FLASH_ATTENTION_3
        raise UserError(
            f"{impl} cannot be activated: {error}",
            where=f"model.attn={impl}, {package.installed}",
            why=f"PyTorch takes these kernels from a package of their own ({package.name}: {package.module})",
            fix=f"{package.install}, or model.attn=auto",
        ) from error


def _varlen_attention(doc_lens: list[int], device: torch.device) -> Attend:
    ends = ends_of(doc_lens, device)
    longest = max(doc_lens)

    def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return PackedAttention.apply(q, k, v, ends, longest)

    return attend


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
                parts.append((start, length, cudnn_attention))
                start += length
        else:
            parts.append((start, sum(lengths), _varlen_attention(lengths, device)))
            start += sum(lengths)

    def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        for first, length, part in parts:
            size = rounded(length) if part is cudnn_attention else length
            outs.append(part(layer_idx, *(slice_rows(t, first, size) for t in (q, k, v)))[:length])
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    return attend


def _length_classes(doc_lens: list[int]) -> list[list[tuple[int, int]]]:
    """Documents as (start, length), grouped so that padding to the longest of a group at most doubles it."""
    classes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    start = 0
    for length in doc_lens:
        classes[length_class(length)].append((start, length))
        start += length
    return [classes[key] for key in sorted(classes)]


BY_HAND_TOKENS = 128  # of the longest document, up to which keeping its probabilities is faster


def _plain_attention(doc_lens: list[int], device: torch.device, prefixes: SharedPrefixes | None) -> Attend:
    if prefixes is None:
        return _padded_attention(doc_lens, device)
    return padded_attention_with_prefixes(
        prefixes, device, BY_HAND_TOKENS, lambda lengths: _padded_attention(lengths, device)
    )


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
