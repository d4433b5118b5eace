"""Weights from trainer to engines: what arrives is what was sent, and nothing is left behind."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from prl.config.errors import UserError
from prl.config.schema import WeightTransportConfig
from prl.transport import weights
from prl.transport.weights import FilesystemPublisher, SharedMemoryPublisher, make_publisher, receive

KINDS = ("filesystem", "shared_memory")


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    stack = torch.randn(4, 6, 5, generator=generator)
    return [
        ("scalar", torch.tensor(3.5)),
        ("matrix", torch.randn(33, 7, generator=generator)),
        ("half", torch.randn(5, 3, generator=generator).bfloat16()),
        ("view.0", stack[0, :3]),
        ("view.1", stack[0, 3:]),
        ("transposed", torch.randn(4, 9, generator=generator).T),
        ("trained", torch.nn.Parameter(torch.randn(3, generator=generator))),
    ]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def publisher(kind, tmp_path):
    made = make_publisher(WeightTransportConfig(type=kind, keep=2), tmp_path / "weights", f"test{os.getpid()}")
    yield made
    made.acknowledge()


def test_what_arrives_is_what_was_sent(publisher):
    for version in (1, 2):
        sent = tensors(version)
        info = json.loads(json.dumps(publisher.publish(version, iter(sent))))  # it travels as JSON
        assert info["version"] == version
        got = dict(receive(info))
        assert list(got) == [name for name, _ in sent] or set(got) == {name for name, _ in sent}
        for name, tensor in sent:
            assert got[name].dtype == tensor.dtype
            assert torch.equal(got[name], tensor.detach())
        publisher.acknowledge()


def test_what_was_received_outlives_the_acknowledgement(publisher):
    info = publisher.publish(1, tensors())
    got = dict(receive(info))
    publisher.acknowledge()
    publisher.publish(2, tensors(1))
    assert torch.equal(got["matrix"], dict(tensors())["matrix"])


def data_file(info):
    path = Path(info["path"])
    return path / "model.safetensors" if path.is_dir() else path


def test_a_flipped_bit_is_noticed(publisher):
    info = publisher.publish(1, tensors())
    path = data_file(info)
    with path.open("r+b") as file:
        file.seek(-20, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-20, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(ValueError, match=f"{path.name} is damaged: CRC-32"):
        list(receive(info))
    assert len(list(receive(info, verify=False))) == len(tensors())


def test_a_source_that_is_gone_is_an_os_error(publisher):
    info = publisher.publish(1, tensors())
    data_file(info).unlink()
    with pytest.raises(OSError, match="No such file"):
        list(receive(info))


def test_only_the_newest_versions_are_kept(tmp_path):
    publisher = FilesystemPublisher(tmp_path / "weights", keep=2)
    for version in (8, 9, 10, 11):
        publisher.publish(version, tensors())
        publisher.acknowledge()
    assert {p.name for p in (tmp_path / "weights").iterdir()} == {"step_10", "step_11"}


def test_versions_of_an_earlier_attempt_are_removed(tmp_path):
    FilesystemPublisher(tmp_path / "weights", keep=2).publish(7, tensors())
    (tmp_path / "weights" / "step_8.partial").mkdir()
    publisher = FilesystemPublisher(tmp_path / "weights", keep=2)
    assert list((tmp_path / "weights").iterdir()) == []
    publisher.publish(7, tensors())


def test_nothing_is_left_in_shared_memory():
    before = set(os.listdir("/dev/shm"))
    publisher = make_publisher(WeightTransportConfig(type="shared_memory"), Path("unused"), f"token{os.getpid()}")
    info = publisher.publish(1, tensors())
    (name,) = set(os.listdir("/dev/shm")) - before
    assert os.stat(f"/dev/shm/{name}").st_mode & 0o777 == 0o600
    publisher.publish(2, tensors())  # without an acknowledgement in between
    assert set(os.listdir("/dev/shm")) - before == {name}
    assert info["path"] == f"/dev/shm/{name}"
    publisher.acknowledge()
    publisher.acknowledge()
    assert set(os.listdir("/dev/shm")) == before


def test_full_shared_memory_is_explained_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(weights.os, "posix_fallocate", full)
    publisher = SharedMemoryPublisher(tmp_path / "segment")
    with pytest.raises(UserError, match=r"(?s)shared memory.*weight_transport=filesystem"):
        publisher.publish(1, tensors())
    assert list(tmp_path.iterdir()) == []
