"""Attention over packed documents, for the trainer.

`packed_attention(doc_lens)` prepares index tables once per micro-batch and returns the `attend` callable that the model
wants. On CUDA it is torch's varlen attention; elsewhere documents are laid out in right-padded batches, one per
power-of-two length class, because a dense [T, T] mask over many short documents would cost T/len times the work.
"""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import Tensor

from prl.models.qwen3 import Attend


def packed_attention(doc_lens: list[int], device: torch.device) -> Attend:
    """Causal attention inside each document; doc_lens sum to N tokens. varlen_attn has no float32, so that goes
    padded.
    """
    if device.type != "cuda":
        return _padded_attention(doc_lens, device)
    varlen = _varlen_attention(doc_lens, device)
    padded: list[Attend] = []  # built at the first call that needs it

    def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.dtype != torch.float32:
            return varlen(layer_idx, q, k, v)
        if not padded:
            padded.append(_padded_attention(doc_lens, device))
        return padded[0](layer_idx, q, k, v)

    return attend


def _varlen_attention(doc_lens: list[int], device: torch.device) -> Attend:
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.tensor([0, *doc_lens], device=device).cumsum(0).to(torch.int32)
    longest = max(doc_lens)

    def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        if groups > 1:  # torch 2.11 has no enable_gqa here
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        window = (-1, 0)  # all to the left, nothing to the right
        out = varlen_attn(q, k, v, ends, ends, longest, longest, window_size=window)
        assert isinstance(out, Tensor)
        return out

    return attend


def _length_classes(doc_lens: list[int]) -> list[list[tuple[int, int]]]:
    """Documents as (start, length), grouped so that padding to the longest of a group at most doubles it."""
    classes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    start = 0
    for length in doc_lens:
        classes[max(length - 1, 15).bit_length()].append((start, length))
        start += length
    return [classes[key] for key in sorted(classes)]


def _padded_attention(doc_lens: list[int], device: torch.device) -> Attend:
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
        outs = []
        for index in gathers:
            qc, kc, vc = (t[index].transpose(1, 2) for t in (q, k, v))  # [B, H, S, D]
            out = F.scaled_dot_product_attention(qc, kc, vc, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            outs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outs)[unpad] if len(outs) > 1 else outs[0][unpad]

    return attend
