# mypy: allow-untyped-defs, allow-untyped-calls
"""Triton kernels that number rows: three launches where sorting takes twenty, which matters where the device waits for
the host to launch them (`all_to_all.py`).

A counting sort: programs count what their block of assignments (or of tokens) has of each column (an expert, a place);
the counts before each block are added up along the blocks; and programs number theirs from there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ASSIGNMENTS = 128  # of one program: it compares each with each
TOKENS = 32  # of one program
CHUNK = 1024  # blocks that are added up at once


@triton.jit
def _load_local(experts, index, total, top_k, stride, first, held):
    """Which of the experts here each assignment is for, `held` where it is for none."""
    row = (index // top_k).to(tl.int64)
    local = tl.load(experts + row * stride + index % top_k, mask=index < total, other=-1).to(tl.int32) - first
    return tl.where((index < total) & (local >= 0) & (local < held), local, held)


@triton.jit
def _count_assignments(experts, before, total, top_k, stride, first, held, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    block, column = tl.program_id(0), tl.arange(0, WIDTH)
    local = _load_local(experts, block * BLOCK + tl.arange(0, BLOCK), total, top_k, stride, first, held)
    tl.store(before + block.to(tl.int64) * held + column, tl.histogram(local, WIDTH), mask=column < held)


@triton.jit
def _add_up(before, totals, blocks, columns, CHUNK: tl.constexpr):
    """One column of `before` [blocks, columns]: each block's count becomes that of the blocks before it."""
    column = tl.program_id(0)
    passed = 0
    for start in range(0, blocks, CHUNK):
        block = (start + tl.arange(0, CHUNK)).to(tl.int64)
        counts = tl.load(before + block * columns + column, mask=block < blocks, other=0)
        tl.store(before + block * columns + column, passed + tl.cumsum(counts, 0) - counts, mask=block < blocks)
        passed += tl.sum(counts, 0)
    tl.store(totals + column, passed)


@triton.jit
def _place_assignments(
    experts, before, totals, positions, counts, total, top_k, stride, first, held,
    ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    block, lane, column = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    index = block * BLOCK + lane
    local = _load_local(experts, index, total, top_k, stride, first, held)
    rows = tl.load(totals + column, mask=column < held, other=0)
    padded = (rows + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    begin = tl.gather(tl.cumsum(padded, 0) - padded, local, 0)
    begin += tl.load(before + block.to(tl.int64) * held + local, mask=local < held, other=0)
    alike = (local[:, None] == local[None, :]) & (lane[None, :] < lane[:, None])
    position = tl.where(local < held, begin + tl.sum(alike.to(tl.int32), 1), -1)
    tl.store(positions + index, position.to(tl.int64), mask=index < total)
    if block == 0:
        tl.store(counts + column, rows.to(tl.int64), mask=column < held)


def place_assignments(experts: Tensor, first: int, held: int, alignment: int) -> tuple[Tensor, Tensor]:
    """`placement.place`: experts [R, K] -> positions [R, K] int64, counts [held] int64."""
    if not experts.numel():
        return experts.new_empty(experts.shape, dtype=torch.int64), experts.new_zeros(held, dtype=torch.int64)
    experts = experts if experts.stride(1) == 1 else experts.contiguous()
    rows, top_k = experts.shape
    positions = torch.empty(rows, top_k, dtype=torch.int64, device=experts.device)
    counts = torch.empty(held, dtype=torch.int64, device=experts.device)
    blocks, width = triton.cdiv(rows * top_k, ASSIGNMENTS), triton.next_power_of_2(held + 1)
    before = torch.empty(blocks + 1, held, dtype=torch.int32, device=experts.device)
    totals = before[blocks]
    what = (rows * top_k, top_k, experts.stride(0), first, held)
    with torch.cuda.device(experts.device):
        _count_assignments[(blocks,)](experts, before, *what, BLOCK=ASSIGNMENTS, WIDTH=width)
        _add_up[(held,)](before, totals, blocks, held, CHUNK=CHUNK)
        _place_assignments[(blocks,)](
            experts, before, totals, positions, counts, *what, ALIGNMENT=alignment, BLOCK=ASSIGNMENTS, WIDTH=width
        )
    return positions, counts


# --- tokens, each once to every place that holds any of its experts ---------------------------------------------------


@triton.jit
def _load_reached(experts, token, tokens, stride, num_experts, per_place, TOP_K: tl.constexpr, PLACES: tl.constexpr):
    """[TOKENS, PLACES] int32: 1 where a token goes."""
    place = tl.arange(0, PLACES)
    hit = tl.zeros([token.shape[0], PLACES], dtype=tl.int32)
    for k in tl.static_range(TOP_K):
        expert = tl.load(experts + token.to(tl.int64) * stride + k, mask=token < tokens, other=-1).to(tl.int32)
        inside = (expert >= 0) & (expert < num_experts)
        hit = tl.where(inside[:, None] & ((expert // per_place)[:, None] == place[None, :]), 1, hit)
    return hit


@triton.jit
def _count_tokens(
    experts, before, tokens, stride, num_experts, per_place, places, TOP_K: tl.constexpr, TOP_K_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    block, place, column = tl.program_id(0), tl.arange(0, PLACES), tl.arange(0, WIDTH)
    token, k = block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, TOP_K_WIDTH)
    before += block.to(tl.int64) * (places + num_experts)
    hit = _load_reached(experts, token, tokens, stride, num_experts, per_place, TOP_K, PLACES)
    tl.store(before + place, tl.sum(hit, 0), mask=place < places)
    inside = (token < tokens)[:, None] & (k < TOP_K)[None, :]
    expert = tl.load(experts + token.to(tl.int64)[:, None] * stride + k[None, :], mask=inside, other=-1).to(tl.int32)
    expert = tl.where((expert >= 0) & (expert < num_experts), expert, num_experts)
    pairs = tl.histogram(tl.reshape(expert, [TOKENS * TOP_K_WIDTH]), WIDTH)
    tl.store(before + places + column, pairs, mask=column < num_experts)


@triton.jit
def _place_tokens(
    experts, before, totals, positions, counts, tokens, stride, num_experts, per_place, places,
    TOP_K: tl.constexpr, TOKENS: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    block, place = tl.program_id(0), tl.arange(0, PLACES)
    token = block * TOKENS + tl.arange(0, TOKENS)
    hit = _load_reached(experts, token, tokens, stride, num_experts, per_place, TOP_K, PLACES)
    rows = tl.load(totals + place, mask=place < places, other=0)
    begin = tl.cumsum(rows, 0) - rows
    begin += tl.load(before + block.to(tl.int64) * (places + num_experts) + place, mask=place < places, other=0)
    position = tl.where(hit == 1, begin[None, :] + tl.cumsum(hit, 0) - 1, -1).to(tl.int64)
    inside = (token < tokens)[:, None] & (place < places)[None, :]
    tl.store(positions + token.to(tl.int64)[:, None] * places + place[None, :], position, mask=inside)
    if block == 0:
        tl.store(counts + place * (1 + per_place), rows.to(tl.int64), mask=place < places)
        expert = tl.arange(0, WIDTH)
        pairs = tl.load(totals + places + expert, mask=expert < num_experts, other=0)
        target = counts + expert // per_place * (1 + per_place) + 1 + expert % per_place
        tl.store(target, pairs.to(tl.int64), mask=expert < num_experts)


def place_tokens(experts: Tensor, places: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """`all_to_all.Route`: experts [N, K] -> positions [N, P] int64, and of each place its rows and then the assignments
    to each of its experts, counts [P, 1 + E / P] int64.
    """
    per_place = num_experts // places
    (tokens, top_k), device = experts.shape, experts.device
    if not experts.numel():
        counts = torch.zeros(places, 1 + per_place, dtype=torch.int64, device=device)
        return torch.full((tokens, places), -1, dtype=torch.int64, device=device), counts
    experts = experts if experts.stride(1) == 1 else experts.contiguous()
    positions = torch.empty(tokens, places, dtype=torch.int64, device=device)
    counts = torch.empty(places, 1 + per_place, dtype=torch.int64, device=device)
    blocks, columns = triton.cdiv(tokens, TOKENS), places + num_experts
    before = torch.empty(blocks + 1, columns, dtype=torch.int32, device=device)
    totals = before[blocks]
    what = (tokens, experts.stride(0), num_experts, per_place, places)
    sizes = {
        "TOP_K": top_k,
        "TOKENS": TOKENS,
        "PLACES": triton.next_power_of_2(places),
        "WIDTH": triton.next_power_of_2(num_experts + 1),
    }
    with torch.cuda.device(device):
        _count_tokens[(blocks,)](experts, before, *what, TOP_K_WIDTH=triton.next_power_of_2(top_k), **sizes)
        _add_up[(columns,)](before, totals, blocks, columns, CHUNK=CHUNK)
        _place_tokens[(blocks,)](experts, before, totals, positions, counts, *what, **sizes)
    return positions, counts
