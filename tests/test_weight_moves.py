"""Boxes of bytes on their way from buckets into parameters: planned as arrays, and what comes of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weight_rounds import send, shards

from prl.inference.vllm.copies import Copies, Copy
from prl.transport.boxes import Table
from prl.transport.moves import Moves, bytes_of
from prl.transport.rounds import Schedule, alike

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
NUMBER = st.integers(0, 9)


def moves_of(sizes: list[tuple[int, int, int, int]], memories: int) -> tuple[Moves, int, list[int]]:
    """Boxes of so many rows and bytes, with so many bytes between rows on both sides, one behind the other on both;
    and what the memories must hold.
    """
    rows, width, gap_here, gap_there = np.array(sizes, dtype=np.int64).T
    step, place_step = width + gap_here, width + gap_there
    memory = np.arange(len(sizes), dtype=np.int64) * memories // len(sizes)
    source = np.cumsum(rows * step) - rows * step
    ends = [np.cumsum(np.where(memory == m, rows * place_step, 0)) for m in range(memories)]
    target = np.choose(memory, [end - rows * place_step for end in ends])
    moves = Moves(source, step, target, place_step, rows, width, memory)
    return moves, int((rows * step).sum()), [int(end[-1]) for end in ends]


def by_hand(moves: Moves, source: torch.Tensor, targets: list[torch.Tensor]) -> None:
    columns = (moves.source, moves.source_step, moves.target, moves.target_step, moves.rows, moves.width, moves.memory)
    for here, step, there, place_step, rows, width, memory in zip(*(c.tolist() for c in columns), strict=True):
        for row in range(rows):
            for byte in range(width):
                targets[memory][there + row * place_step + byte] = source[here + row * step + byte]


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.tuples(NUMBER, NUMBER, st.sampled_from([0, 0, 3]), st.sampled_from([0, 0, 8])), min_size=1),
    memories=st.integers(1, 3),
    unit=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_all_bytes_come_where_they_belong_and_no_others_are_touched(device, sizes, memories, unit) -> None:
    moves, count, room = moves_of([(rows, *(unit * n for n in more)) for rows, *more in sizes], memories)
    source = torch.arange(count).remainder_(251).to(torch.uint8)
    expected = [torch.full((size,), 253, dtype=torch.uint8) for size in room]
    found = [target.to(device, copy=True) for target in expected]
    by_hand(moves, source, expected)
    joined = moves.joined()
    assert len(joined) <= len(moves)
    joined.run(source.to(device), found)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(expected, found, strict=True))


def test_neighbours_on_both_sides_are_one() -> None:
    moves, *_ = moves_of([(1, 8, 0, 0)] * 4 + [(2, 8, 0, 8)] + [(3, 8, 0, 0)] * 2, 1)
    assert moves.joined().width.tolist() == [32, 8, 48]
    assert moves.at(slice(0)).joined().width.tolist() == []
    two, eight = np.array([0, 8]), np.array([8, 8])
    side_by_side = Moves(two, eight, two, eight, np.array([1, 1]), eight, np.array([0, 0]))
    assert side_by_side.joined().width.tolist() == [16]
    assert replace(side_by_side, memory=np.array([0, 1])).joined().width.tolist() == [8, 8], "not into one memory"
    assert [m.width.tolist() for m in side_by_side.by_round(np.array([0, 0]), 2)] == [[16], []]
    assert [m.width.tolist() for m in side_by_side.by_round(np.array([0, 1]), 2)] == [[8], [8]], "not at one time"
    wide = Moves(*(np.array([n]) for n in (0, 8, 0, 8, 2, 8, 0)))
    with pytest.raises((ValueError, TypeError)):
        wide.run(torch.zeros(16, dtype=torch.uint8), [torch.zeros(15, dtype=torch.uint8)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bucket_bytes", [64, 1 << 12])
@pytest.mark.parametrize("by_columns", [False, True])
def test_engines_parameters_get_what_was_seen_to_be_copied(device, bucket_bytes: int, by_columns: bool) -> None:
    """Parts of tensors into parts of parameters: stacked, cut, of another dtype, turned round, and twice the same."""
    named = [(f"w{i}", torch.arange(48.0).view(6, 8).mul(i + 1).to(torch.bfloat16)) for i in range(4)]
    named.append(("bias", torch.arange(7.0)))
    stacked, cut = torch.zeros(2, 6, 8, dtype=torch.bfloat16), torch.zeros(6, 12, dtype=torch.bfloat16)
    exact, turned, twice = torch.zeros(6, 8), torch.zeros(8, 6, dtype=torch.bfloat16), torch.zeros(7)
    narrow = torch.zeros(7, dtype=torch.bfloat16)
    stacked, cut, exact, turned, twice, narrow = (t.to(device) for t in (stacked, cut, exact, turned, twice, narrow))
    copies = Copies({name: [] for name, _ in named}, {name: (t.shape, t.dtype) for name, t in named})
    whole, half = ((6, 8), (8, 1), 0), ((6, 4), (8, 1), 4)
    copies.of["w0"] += [Copy(stacked[1], *whole), Copy(exact, *whole)]
    copies.of["w1"] += [Copy(cut[:, 8:], *half)]
    copies.of["w2"] += [Copy(turned.T, *whole)]
    copies.of["bias"] += [Copy(twice, (7,), (1,), 0), Copy(narrow, (7,), (1,), 0), Copy(twice, (7,), (1,), 0)]
    table = Table.of(named)
    wanted = copies.boxes(table)
    assert wanted.tolist() == [[0, 0, 6, 0, 8], [1, 0, 6, 4, 4], [2, 0, 6, 0, 8], [4, 0, 7, 0, 1]]
    holdings = shards(table, 3, by_columns)
    schedule = Schedule.of(table, holdings, bucket_bytes)
    (incoming,), (got,) = send(schedule, holdings, named, [wanted], verify=True)
    for _ in range(2):  # by a plan that is made, and by the one that there is
        for tensor in (stacked, cut, exact, turned, twice, narrow):
            tensor.zero_()
        with torch.device(device):  # as vLLM's workers have it
            copies.repeat_rounds((arrived, data.to(device)) for arrived, data in zip(incoming.rounds, got, strict=True))
        assert torch.equal(stacked[1].cpu(), named[0][1])
        assert torch.equal(exact.cpu(), named[0][1].float())
        assert torch.equal(cut[:, 8:].cpu(), named[1][1][:, 4:])
        assert torch.equal(turned.T.cpu(), named[2][1])
        assert torch.equal(twice.cpu(), named[4][1])
        assert torch.equal(narrow.cpu(), named[4][1].to(torch.bfloat16))
        assert not stacked[0].any()
        assert not cut[:, :8].any()
    assert len(copies._fillings) == schedule.rounds
    del incoming
    assert not copies._fillings, "plans are kept for those alone who may come again"


def test_all_of_a_storage() -> None:
    whole = torch.arange(6, dtype=torch.int16).view(2, 3)
    assert bytes_of(whole[1:, :2]).tolist() == [0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0]


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.tuples(*[st.integers(0, 3)] * 2, *[st.integers(0, 1 << 62)] * 2), max_size=30),
    times=st.integers(1, 3),
)
def test_rows_that_are_alike(rows: list[tuple[int, ...]], times: int) -> None:
    table = np.array(rows * times, dtype=np.int64).reshape(-1, 4)
    same, count = alike(table)
    found = {}
    for number, row in zip(same.tolist(), table.tolist(), strict=True):
        assert found.setdefault(number, row) == row
    assert sorted(found) == list(range(len(set(rows))))
    assert [count[number] for number in found] == [rows.count(tuple(row)) * times for row in found.values()]
