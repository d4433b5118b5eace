"""Weights in buckets from process to process: the same code that NCCL carries between GPUs, over gloo here."""

from __future__ import annotations

import json
from inspect import signature
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from prl.transport.buckets import Assembler, fill, parts_of, read_header
from prl.transport.staging import checksum
from prl.transport.weights_ipc import arguments_of, handle_of, read_handles

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8)


def tensors(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    stack = torch.randn(3, 40, 11, generator=generator)
    return [
        ("scalar", torch.tensor(3.5)),
        ("empty", torch.empty(0, 4)),
        *((f"part.{i}", stack[i]) for i in range(3)),
        ("transposed", torch.randn(9, 40, generator=generator).T),
        ("half", torch.randn(129, generator=generator).bfloat16()),
        ("long", torch.randn(500, generator=generator)),  # longer than a bucket
    ]


# --- buckets ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 200), max_size=12),
    bucket_bytes=st.sampled_from([64, 128, 192, 1024]),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=12, max_size=12),
)
def test_what_is_put_into_buckets_comes_out(sizes: list[int], bucket_bytes: int, dtypes: list[torch.dtype]) -> None:
    sent = [(f"w{i}", (torch.arange(size) % 251).to(dtypes[i])) for i, size in enumerate(sizes)]
    assembler, got = Assembler(), {}
    for parts, runs in parts_of(sent, bucket_bytes):
        bucket = torch.full((bucket_bytes,), 7, dtype=torch.uint8)
        assert sum(part[4] for part in parts) <= bucket_bytes
        fill(bucket, runs)
        for name, tensor in assembler.take(bucket, json.loads(json.dumps(parts))):
            got[name] = tensor.clone()
    assert list(got) == [name for name, _ in sent]
    for name, tensor in sent:
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)


def test_tensors_are_asked_for_one_bucket_at_a_time() -> None:
    asked = []

    def stream():
        for i in range(10):
            asked.append(i)
            yield f"w{i}", torch.zeros(16)

    buckets = parts_of(stream(), bucket_bytes=128)
    next(buckets)
    assert asked == [0, 1], "a whole model must never be gathered at once"


def test_a_checksum_depends_on_every_bit() -> None:
    bucket = torch.arange(256, dtype=torch.int64).to(torch.uint8)
    before = checksum(bucket)
    for byte in (0, 100, 255):
        changed = bucket.clone()
        changed[byte] ^= 1
        assert checksum(changed) != before


def test_what_lies_together_is_copied_together_and_nothing_else_is() -> None:
    stack = torch.arange(64 * 6, dtype=torch.float32).view(6, 64)
    sent = [
        *((f"e{i}", stack[i]) for i in (0, 1, 2, 4, 5, 3)),
        ("other", torch.ones(64)),
        ("odd", stack[0, :3]),
        ("after", stack[0, 3:]),
    ]
    ((parts, runs),) = parts_of(sent, 1 << 14)
    assert [run.count for run in runs] == [3 * 256, 2 * 256, 256, 256, 12, 244]
    bucket = torch.zeros(1 << 14, dtype=torch.uint8)
    fill(bucket, runs)
    got = dict(Assembler().take(bucket, parts))
    for name, tensor in sent:
        assert torch.equal(got[name], tensor), name


def test_a_handle_travels_as_fields_and_names_the_gpu_as_its_own_process_counts() -> None:
    """What torch hands out for a flat tensor of bytes on its GPU 1, and wants for the same on another's GPU 5."""
    size, storage = torch.Size([4096]), torch.storage.TypedStorage
    own = (
        torch.Tensor,
        size,
        (1,),
        0,
        storage,
        torch.uint8,
        1,
        b"c\x01",
        4096,
        512,
        False,
        b"/torch_1_2",
        3,
        b"e",
        True,
    )
    handle = handle_of(own)
    (read, _) = read_handles(json.dumps([handle, handle]).encode())
    expected = dict(zip(signature(rebuild_cuda_tensor).parameters, own, strict=True)) | {"storage_device": 5}
    assert arguments_of(read, 5) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"storage_handle": "c"},
        {"storage_handle": "00" * 2000},
        {"event_handle": 7},
        {"storage_size_bytes": -1},
        {"storage_size_bytes": True},
        {"ref_counter_offset": 1 << 63},
        {"event_sync_required": 1},
        {"more": 1},
    ],
    ids=str,
)
def test_a_handle_of_another_form_is_refused(change: dict[str, Any]) -> None:
    numbers = {"storage_size_bytes": 64, "storage_offset_bytes": 0, "ref_counter_offset": 0}
    good = {
        **numbers,
        "storage_handle": "00",
        "ref_counter_handle": "",
        "event_handle": "",
        "event_sync_required": True,
    }
    assert read_handles(json.dumps([good, good]).encode()) == [good, good]
    for wrong in ([good | change, good], [good], {"a": good}):
        with pytest.raises(ValueError, match="handles"):
            read_handles(json.dumps(wrong).encode())


@pytest.mark.parametrize(
    "part",
    [
        ["w", "float32", [4], 0, 16, 1024],
        ["w", "float32", [4], 8, 16, 0],
        ["w", "float32", [-4], 0, 0, 0],
        ["w", "load", [4], 0, 16, 0],
        ["w", "float32", [1 << 60, 1 << 60], 0, 16, -64],
        ["w", "float32", 4, 0, 16, 0],
        ["w", "float32", [4]],
        [7, "float32", [4], 0, 16, 0],
    ],
    ids=str,
)
def test_a_bucket_whose_parts_do_not_fit_is_refused(part: list[Any]) -> None:
    assert read_header(json.dumps({"parts": [["w", "float32", [4], 0, 16, 0]], "checksum": 3}), 1024)["checksum"] == 3
    with pytest.raises(ValueError, match=r"part|tensor"):
        read_header(json.dumps({"parts": [part], "checksum": None}), 1024)
