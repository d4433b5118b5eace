"""Weights from whoever holds a part of them to whoever needs it: plans, without processes."""

from __future__ import annotations

import json
import time
import zlib
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from weight_rounds import data_of, send, shards

from prl.inference.vllm.copies import Copy
from prl.transport.boxes import COLUMNS, ROWS, Boxes, Table, divide, intersect, pack_boxes, unpack_boxes
from prl.transport.flat import DTYPES
from prl.transport.receiving_nccl import assemble
from prl.transport.rounds import Schedule

KINDS = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]


def tensors(shapes: list[list[int]], kinds: list[int]) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randint(0, 100, shape, generator=generator) for shape in shapes)
    return [(f"w{i}", data.to(KINDS[kinds[i % len(kinds)]])) for i, data in enumerate(drawn)]


SHAPE = st.lists(st.integers(0, 17), max_size=3).filter(lambda shape: prod(shape) <= 1000)  # more are more rounds alone
CASES = {
    "shapes": st.lists(SHAPE, min_size=1, max_size=8),
    "kinds": st.lists(st.integers(0, 3), min_size=1, max_size=4),
    "ranks": st.integers(1, 5),
    "engines": st.integers(1, 3),
    "bucket_bytes": st.sampled_from([64, 256, 1024, 1 << 20]),
    "replicas": st.integers(1, 2),
    "by_columns": st.booleans(),
}


@settings(max_examples=150, deadline=None)
@given(**CASES)
def test_all_that_ranks_hold_reaches_all_engines(
    shapes, kinds, ranks, engines, bucket_bytes, replicas, by_columns
) -> None:
    named = tensors(shapes, kinds)
    table = Table.unpack(Table.of(named).pack())
    holdings = [unpack_boxes(pack_boxes(held), table) for held in shards(table, ranks, by_columns)] * replicas
    schedule = Schedule.of(table, holdings, bucket_bytes)
    incoming, got = send(schedule, holdings, named, [None] * engines, verify=True)
    for engine in range(engines):
        unfinished, found = {}, {}
        for number, data in enumerate(got[engine]):
            incoming[engine].check(number, data, version=1)
            for name, tensor in assemble(incoming[engine].rounds[number].parts(data), table, unfinished):
                assert name not in found
                found[name] = tensor.clone()
        assert not unfinished
        assert found.keys() == dict(named).keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in named)


@settings(max_examples=100, deadline=None)
@given(**CASES, cuts=st.lists(st.integers(0, 17), min_size=4, max_size=4))
def test_an_engine_gets_what_it_wants_and_nothing_else(
    shapes, kinds, ranks, engines, bucket_bytes, replicas, by_columns, cuts
) -> None:
    named = tensors(shapes, kinds)
    table = Table.of(named)
    holdings = shards(table, ranks, by_columns) * replicas
    wanted = table.whole()
    wanted[:, 1], wanted[:, 3] = np.minimum(cuts[0], wanted[:, 2]), np.minimum(cuts[1], wanted[:, 4])
    wanted[:, 2] = np.minimum(cuts[2], wanted[:, 2] - wanted[:, 1])
    wanted[:, 4] = np.minimum(cuts[3], wanted[:, 4] - wanted[:, 3])
    wanted = wanted[::-1]  # in any order
    schedule = Schedule.of(table, holdings, bucket_bytes)
    incoming, got = send(schedule, holdings, named, [None, wanted] * engines, verify=False)
    for engine in range(1, 2 * engines, 2):
        found = [
            torch.full((int(rows), int(columns)), 101, dtype=DTYPES[table.dtypes[number]])
            for number, _, rows, _, columns in wanted
        ]
        place = {table.names[box[0]]: i for i, box in enumerate(wanted.tolist())}
        for number, data in enumerate(got[engine]):
            for part in incoming[engine].rounds[number].parts(data):
                i = place[part.name]
                row, column = part.row - int(wanted[i, 1]), part.column - int(wanted[i, 3])
                assert row >= 0
                assert column >= 0
                there = found[i][row : row + part.data.shape[0], column : column + part.data.shape[1]]
                assert (there == 101).all(), "it came twice"
                there.copy_(part.data)
        for box, expected in zip(found, data_of(wanted, named, table), strict=True):
            assert torch.equal(box, expected)


def layout(ranks: int, ep: int, layers: int, experts: int, size: int) -> tuple[Table, list[Boxes]]:
    """Of a mixture of experts under expert parallelism: dense matrices in as many parts as ranks, experts over groups
    of `ep`, each cut by rows over the others.
    """
    names, shapes, held = [], [], [[] for _ in range(ranks)]
    for layer in range(layers):
        for expert in [None, *range(experts)]:
            number = len(names)
            names.append(f"{layer}.{expert}")
            rows = size * (16 if expert is None else 1)
            shapes.append([rows, size])
            if expert is None:
                holders = range(ranks)
            else:
                first = expert // (experts // ep)
                holders = range(first, ranks, ep)
            step = rows // len(holders)
            for i, rank in enumerate(holders):
                held[rank].append([number, i * step, step, 0, size])
    return Table(names, ["bfloat16"] * len(names), shapes), [np.array(h, dtype=np.int64) for h in held]


@pytest.mark.parametrize("bucket_bytes", [1 << 16, 1 << 18])
def test_ranks_send_all_the_time_and_no_more_than_a_bucket_at_a_time(bucket_bytes: int) -> None:
    table, holdings = layout(ranks=16, ep=4, layers=6, experts=32, size=64)
    schedule = Schedule.of(table, holdings, bucket_bytes)
    assert max(schedule.lap_bytes) <= bucket_bytes
    tensor_parallel = 4
    wanted = []
    for rank in range(tensor_parallel):
        boxes = table.whole()
        boxes[:, COLUMNS] //= tensor_parallel
        boxes[:, 3] = boxes[:, COLUMNS] * rank
        wanted.append(boxes)
    sent = np.array(
        [[schedule.message(rank, e, wanted[e % 4]).sizes for e in range(8)] for rank in range(16)]
    )  # [T, E, R]
    total = int(table.nbytes(table.whole()).sum())
    assert sent.sum() == 2 * total, "two engines of four processes"
    of_ranks = sent.sum(axis=(1, 2))
    assert of_ranks.max() <= 1.01 * of_ranks.mean()
    assert sent.sum(axis=0).max() <= bucket_bytes, "what an engine process gets in a round"
    assert sent.sum(axis=1).max() <= bucket_bytes
    busy = sent.sum(axis=1).max(axis=0).sum()  # if a round takes as long as its busiest rank sends
    assert busy <= 1.35 * of_ranks.mean()


@pytest.mark.slow
def test_a_235b_goes_from_64_ranks_to_32_processes_evenly() -> None:
    """Qwen3-235B-A22B's matrices under FSDP and ep=8, engines of 8 processes with tensor parallelism."""
    ranks, ep, parallel, engines, bucket_bytes = 64, 8, 8, 4, 256 << 20
    names, shapes, cuts = [], [], []
    held: list[list[list[int]]] = [[] for _ in range(ranks)]

    def add(name: str, rows: int, columns: int, cut: str, holders: range) -> None:
        step = rows // len(holders)
        for i, rank in enumerate(holders):
            held[rank].append([len(names), i * step, step, 0, columns])
        names.append(name)
        shapes.append([rows, columns])
        cuts.append(cut)

    everyone = range(ranks)
    add("embed", 151936, 4096, "rows", everyone)
    for layer in range(94):
        for name, size in (("q", 64), ("k", 4), ("v", 4)):
            add(f"{layer}.{name}", 128 * size, 4096, "rows" if size == 64 else "", everyone)
        add(f"{layer}.o", 4096, 64 * 128, "columns", everyone)
        for expert in range(128):
            holders = range(expert // (128 // ep), ranks, ep)
            add(f"{layer}.{expert}.gate", 1536, 4096, "rows", holders)
            add(f"{layer}.{expert}.up", 1536, 4096, "rows", holders)
            add(f"{layer}.{expert}.down", 4096, 1536, "columns", holders)
    add("head", 151936, 4096, "rows", everyone)
    table = Table(names, ["bfloat16"] * len(names), shapes)
    began = time.perf_counter()
    schedule = Schedule.of(table, [np.array(boxes, dtype=np.int64) for boxes in held], bucket_bytes)
    planned_s = time.perf_counter() - began
    assert max(schedule.lap_bytes) <= bucket_bytes
    wanted = []
    for rank in range(parallel):
        boxes = table.whole()
        for dim, cut in ((1, "rows"), (3, "columns")):
            of_them = np.array([c == cut for c in cuts])
            boxes[of_them, dim + 1] //= parallel
            boxes[of_them, dim] = boxes[of_them, dim + 1] * rank
        wanted.append(boxes)
    sent = np.array([sum(schedule.message(rank, 0, boxes).sizes for boxes in wanted) for rank in range(0, ranks, 8)])
    got = sum(schedule.message(rank, 0, wanted[3]).sizes for rank in everyone)
    of_ranks = engines * sent.sum(axis=1)
    assert of_ranks.max() <= 1.1 * of_ranks.mean()
    assert got.max() <= bucket_bytes
    busiest = np.maximum(engines * sent.max(axis=0), got).sum()
    assert busiest <= 1.1 * got.sum()
    total = table.nbytes(table.whole()).sum()
    print(
        f"{total / 1e9:.0f} GB, {schedule.rounds} rounds, planned in {planned_s:.1f} s; a rank sends "
        f"{of_ranks.min() / 1e9:.1f} to {of_ranks.max() / 1e9:.1f} GB, an engine process gets {got.sum() / 1e9:.1f}, "
        f"{int(got.max()) >> 20} MiB a round at most; {busiest / 50e9:.2f} s at 50 GB/s a GPU, "
        f"{total / 50e9:.1f} from one"
    )


def test_replicas_take_turns() -> None:
    table, holdings = layout(ranks=4, ep=2, layers=2, experts=4, size=16)
    schedule = Schedule.of(table, holdings * 2, 1 << 12)
    sent = np.array([[schedule.message(rank, e, None).sizes.sum() for e in range(4)] for rank in range(8)])
    assert (sent[:4, [1, 3]] == 0).all()
    assert (sent[4:, [0, 2]] == 0).all()
    assert sent[:, 0].sum() == sent[:, 1].sum() == table.nbytes(table.whole()).sum()


@pytest.mark.parametrize(
    "boxes",
    [
        [[2, 0, 1, 0, 1]],
        [[-1, 0, 1, 0, 1]],
        [[0, 3, 2, 0, 1]],
        [[0, 0, 1, 2, 4]],
        [[0, -1, 1, 0, 1]],
        [[0, 0, 1 << 60, 0, 1]],
    ],
    ids=str,
)
def test_boxes_that_lie_in_no_tensor_are_refused(boxes: list[list[int]]) -> None:
    table = Table(["a", "b"], ["float32", "float32"], [[4, 5], [3]])
    assert len(unpack_boxes(pack_boxes(table.whole()), table)) == 2
    with pytest.raises(ValueError, match="box"):
        unpack_boxes(pack_boxes(np.array(boxes, dtype=np.int64)), table)


@pytest.mark.parametrize(
    "data", [b"", b"x", pack_boxes(np.zeros((1, 5), dtype=np.int64))[:-3]], ids=["no", "odd", "cut"]
)
def test_what_no_trainer_has_packed_is_refused(data: bytes) -> None:
    table = Table(["a"], ["float32"], [[4, 5]])
    for unpack in (lambda: unpack_boxes(data, table), lambda: Table.unpack(data)):
        with pytest.raises(ValueError, match="packed"):
            unpack()


@pytest.mark.parametrize("text", [["a", "float32", [1]], [["a"], ["float32"], []], [["a"], ["f"], [[1]]], {}], ids=str)
def test_tables_of_no_tensors_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match="tensor"):
        Table.unpack(zlib.compress(json.dumps(text).encode()))


def test_pieces_are_cut_between_rows() -> None:
    table = Table(["a", "b"], ["float32", "bfloat16"], [[10, 3], [4, 100]])
    pieces = divide(table.whole(), table, 40)
    assert pieces[:, ROWS].tolist() == [3, 3, 3, 1, 1, 1, 1, 1]
    assert pieces[:, 1].tolist() == [0, 3, 6, 9, 0, 1, 2, 3]
    index, common = intersect(pieces, np.array([[1, 2, 9, 10, 20], [0, 2, 2, 1, 1]]))
    assert index.tolist() == [0, 1, 6, 7]
    assert common.tolist() == [[0, 2, 1, 1, 1], [0, 3, 1, 1, 1], [1, 2, 1, 10, 20], [1, 3, 1, 10, 20]]


@settings(max_examples=200, deadline=None)
@given(
    shape=st.sampled_from([(12,), (6, 8), (6, 1, 4), (6, 1), (1, 8), (5, 2, 3)]),
    cuts=st.lists(st.integers(0, 11), min_size=6, max_size=6),
)
def test_what_loaders_cut_out_is_a_box(shape: tuple[int, ...], cuts: list[int]) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    part = tensor
    for dim, length in enumerate(shape[:2]):
        first = cuts[2 * dim] % length
        part = part.narrow(dim, first, 1 + cuts[2 * dim + 1] % (length - first))
    target = torch.zeros(part.shape, dtype=tensor.dtype)
    copy = Copy(target, tuple(part.shape), tuple(part.stride()), part.storage_offset())
    box = copy.box_in(tensor.shape)
    assert box is not None
    matrix = tensor.reshape(shape[0], -1)
    copy.matrix(box).copy_(matrix[box.row : box.row + box.rows, box.column : box.column + box.columns])
    assert torch.equal(target, part)


def test_what_is_no_box_is_told() -> None:
    turned = torch.arange(48).view(6, 8).T
    copy = Copy(torch.zeros(8, 6), tuple(turned.shape), tuple(turned.stride()), 0)
    assert copy.box_in(torch.Size((6, 8))) is None
