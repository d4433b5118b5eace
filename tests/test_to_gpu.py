"""Weights on their way from the host's memory to a GPU's: by the same threads and buffers also where there is none."""

from __future__ import annotations

import pytest
import torch

from prl.transport import to_gpu

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture
def small_buffers(monkeypatch):
    monkeypatch.setattr(to_gpu, "PINNED_BYTES", 64)
    monkeypatch.setattr(to_gpu, "BUFFERS", 3)
    to_gpu._ring.cache_clear()
    yield
    to_gpu._ring.cache_clear()


def tensors() -> dict[str, torch.Tensor]:
    sizes = {"large": (37, 9), "empty": (0, 4), "scalar": (), "exact": (16,), "turned": (8, 5)}
    made = {name: torch.randn(shape, dtype=torch.float32) for name, shape in sizes.items()}
    return made | {"turned": made["turned"].mT, "short": torch.arange(7, dtype=torch.uint8)}


def moved(named) -> dict[str, torch.Tensor]:
    with to_gpu.ThreadPoolExecutor(2) as pool:
        return dict(to_gpu._moved(named, DEVICE, pool))


def test_all_bytes_arrive_in_order(small_buffers):
    """Through buffers that are smaller than the tensors, and fewer than their parts."""
    given = tensors()
    arrived = moved(given.items())
    assert list(arrived) == list(given)
    for name, tensor in arrived.items():
        assert tensor.device == DEVICE
        assert tensor.dtype == given[name].dtype
        assert torch.equal(tensor.cpu(), given[name]), name
        assert not tensor.numel() or tensor.data_ptr() != given[name].data_ptr()


def test_the_default_device_is_another_ones_matter(small_buffers):
    """vLLM loads under one that is a GPU, whose memory cannot be pinned."""
    given = tensors()
    with torch.device("meta"):
        arrived = moved(given.items())
    assert all(torch.equal(tensor.cpu(), given[name]) for name, tensor in arrived.items())


def test_what_finds_no_room_stays_where_it_is(small_buffers, monkeypatch):
    given, empty = tensors(), torch.empty

    def full(shape, **how):
        if shape in (given["large"].shape, given["turned"].shape):
            raise torch.OutOfMemoryError
        return empty(shape, **how)

    monkeypatch.setattr(to_gpu.torch, "empty", full)
    to_gpu._ring(DEVICE)  # its shape is a number
    arrived = moved(given.items())
    assert arrived["large"] is given["large"]
    assert arrived["turned"] is given["turned"]
    assert all(torch.equal(tensor.cpu(), given[name]) for name, tensor in arrived.items())


def test_what_cannot_be_read_ends_it(small_buffers, monkeypatch):
    """A segment that is gone, say; nothing hangs, and the ring serves the next version."""
    copy = to_gpu.np.copyto
    monkeypatch.setattr(to_gpu.np, "copyto", lambda *both: (_ for _ in ()).throw(OSError("gone")))
    with pytest.raises(OSError, match="gone"):
        moved(tensors().items())
    monkeypatch.setattr(to_gpu.np, "copyto", copy)
    test_all_bytes_arrive_in_order(None)


def test_chunks_hold_many_small_tensors(monkeypatch):
    monkeypatch.setattr(to_gpu, "CHUNK_BYTES", 1000)
    given = [[(str(i), torch.full((60,), float(i)))] for i in range(9)]  # of 240 bytes
    found = list(to_gpu.on_device(iter(given), DEVICE))
    assert [name for chunk in found for name, _ in chunk] == [str(i) for i in range(9)]
    assert max(map(len, found)) == 5
