"""Weights from trainer to engines: what arrives is what was sent, and nothing is left behind."""

import errno
import itertools
import json
import os
import socket
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from weight_rounds import data_of, shards
from weight_updates import published

from prl.config.errors import UserError
from prl.config.schema import WeightTransportConfig
from prl.transport import shelves, to_host, weights_shared
from prl.transport.boxes import Table
from prl.transport.weights import SharedMemoryPublisher, make_publisher, receive, stage
from prl.transport.weights_files import FilesystemPublisher
from prl.transport.weights_tcp import TcpPublisher

KINDS = ("filesystem", "shared_memory", "tcp")
LOOPBACK = "127.0.0.1"


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


ELSEWHERE = torch.device("meta")  # where tensors go of which nobody says where: in vLLM's workers that is a GPU


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def publisher(kind, tmp_path):
    config = WeightTransportConfig(type=kind, keep=2, timeout_s=5)
    made = make_publisher(config, tmp_path / "weights", Path(f"/dev/shm/prl-test{os.getpid()}"), LOOPBACK)
    yield made
    made.acknowledge()


def test_what_arrives_is_what_was_sent(publisher):
    for version in (1, 2):
        sent = tensors(version)
        info = json.loads(json.dumps(published(publisher, version, iter(sent))))  # it travels as JSON
        assert info["version"] == version
        with ELSEWHERE:
            got = dict(receive(info))
        assert list(got) == [name for name, _ in sent] or set(got) == {name for name, _ in sent}
        for name, tensor in sent:
            assert got[name].dtype == tensor.dtype
            assert torch.equal(got[name], tensor.detach())
        publisher.acknowledge()


def test_what_was_received_outlives_the_acknowledgement(publisher):
    info = published(publisher, 1, tensors())
    got = dict(receive(info))
    publisher.acknowledge()
    published(publisher, 2, tensors(1))
    assert torch.equal(got["matrix"], dict(tensors())["matrix"])


@pytest.fixture
def file_publisher(tmp_path, request):
    config = WeightTransportConfig(type=request.param, keep=2)
    made = make_publisher(config, tmp_path / "weights", Path(f"/dev/shm/prl-test{os.getpid()}"), LOOPBACK)
    yield made
    made.acknowledge()


in_files = pytest.mark.parametrize("file_publisher", ["filesystem", "shared_memory"], indirect=True)


def data_file(info):
    path = Path(info["path"])
    return path / "model.safetensors" if path.is_dir() else path.with_name(f"{path.name}-0")


@in_files
def test_a_flipped_bit_is_noticed(file_publisher):
    info = published(file_publisher, 1, tensors())
    path = data_file(info)
    with path.open("r+b") as file:
        file.seek(-300, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-300, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(ValueError, match=f"{path.name} is damaged: CRC-32"):
        list(receive(info))
    assert len(list(receive(info, verify=False))) == len(tensors())


@in_files
def test_a_source_that_is_gone_is_an_os_error(file_publisher):
    info = published(file_publisher, 1, tensors())
    data_file(info).unlink()
    with pytest.raises(OSError, match="No such file"):
        list(receive(info))


def test_files_are_written_one_after_another_and_no_more_than_one_is_held(tmp_path):
    """Ten tensors of 4 KiB, files of 12: what has been written is let go before the next is asked for."""
    publisher = FilesystemPublisher(tmp_path / "weights", 2, file_bytes=12 << 10)
    alive, most = weakref.WeakSet(), []

    def made():
        for i in range(10):
            tensor = torch.full((1024,), float(i))
            alive.add(tensor)
            most.append(len(alive))
            yield f"t{i}", tensor
            del tensor

    info = published(publisher, 1, made())
    assert max(most) <= 5, most  # three of a file, the one that did not fit any more, and the newest
    names = sorted(path.name for path in Path(info["path"]).glob("*.safetensors"))
    assert names == ["model-1.safetensors", "model-2.safetensors", "model-3.safetensors", "model.safetensors"]
    assert {name: float(tensor[0]) for name, tensor in receive(info)} == {f"t{i}": float(i) for i in range(10)}
    (Path(info["path"]) / names[1]).unlink()
    with pytest.raises(OSError, match="No such file"):
        stage(info)


def tcp_publisher(timeout_s=5.0):
    return make_publisher(
        WeightTransportConfig(type="tcp", timeout_s=timeout_s), Path("unused"), Path("unused"), LOOPBACK
    )


def test_a_bit_flipped_on_the_way_is_noticed():
    publisher = tcp_publisher()
    info = published(publisher, 1, tensors())
    ((_, data),) = publisher.server.versions.values()
    data[3] ^= 1
    with pytest.raises(ValueError, match=f"127.0.0.1:{info['port']} are damaged: CRC-32"):
        list(receive(info))
    assert len(list(receive(info, verify=False))) == len(tensors())


def test_a_version_goes_only_to_those_who_know_its_key():
    info = published(tcp_publisher(), 1, tensors())
    with pytest.raises(OSError, match=f"version 1 from the trainer at 127.0.0.1:{info['port']}: the other side ended"):
        list(receive(info | {"key": "00" * 32}))
    assert len(list(receive(info))) == len(tensors())


def test_an_acknowledged_version_is_no_longer_held():
    publisher = tcp_publisher()
    info = published(publisher, 1, tensors())
    publisher.acknowledge()
    assert publisher.server.versions == {}
    with pytest.raises(OSError, match="ended with"):
        list(receive(info))


def test_a_trainer_that_says_nothing_is_given_up_and_named():
    with socket.create_server((LOOPBACK, 0)) as silent:
        port = silent.getsockname()[1]
        info = published(tcp_publisher(), 3, tensors()) | {"port": port, "timeout_s": 0.3}
        with pytest.raises(OSError, match=f"version 3 from the trainer at 127.0.0.1:{port}: timed out"):
            list(receive(info))


def test_engines_fetch_a_version_at_the_same_time():
    big = [("w", torch.arange(1 << 20, dtype=torch.float32))]
    info = published(tcp_publisher(), 1, big)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: dict(receive(info)), range(4)):
            assert torch.equal(got["w"], big[0][1])


def test_only_the_newest_versions_are_kept(tmp_path):
    publisher = FilesystemPublisher(tmp_path / "weights", keep=2)
    for version in (8, 9, 10, 11):
        published(publisher, version, tensors())
        publisher.acknowledge()
    assert {p.name for p in (tmp_path / "weights").iterdir()} == {"step_10", "step_11"}


def test_versions_of_an_earlier_attempt_are_removed(tmp_path):
    published(FilesystemPublisher(tmp_path / "weights", keep=2), 7, tensors())
    (tmp_path / "weights" / "step_8.partial").mkdir()
    publisher = FilesystemPublisher(tmp_path / "weights", keep=2)
    assert list((tmp_path / "weights").iterdir()) == []
    published(publisher, 7, tensors())


def test_nothing_is_left_in_shared_memory():
    before = set(os.listdir("/dev/shm"))
    config = WeightTransportConfig(type="shared_memory")
    publisher = make_publisher(config, Path("unused"), Path(f"/dev/shm/prl-nothing{os.getpid()}"), LOOPBACK)
    info = published(publisher, 1, tensors())
    (name,) = set(os.listdir("/dev/shm")) - before
    assert info["path"] + "-0" == f"/dev/shm/{name}"
    assert os.stat(f"/dev/shm/{name}").st_mode & 0o777 == 0o600
    published(publisher, 2, tensors())  # without an acknowledgement in between
    (newer,) = set(os.listdir("/dev/shm")) - before
    assert info["path"] + "-0" == f"/dev/shm/{name}" != f"/dev/shm/{newer}", (
        "who is late must not take the one for the other"
    )
    publisher.acknowledge()
    publisher.acknowledge()
    assert set(os.listdir("/dev/shm")) == before


def test_full_shared_memory_is_explained_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(weights_shared.os, "posix_fallocate", full)
    publisher = SharedMemoryPublisher(tmp_path / "segment")
    with pytest.raises(UserError, match=r"(?s)shared memory.*weight_transport=filesystem"):
        published(publisher, 1, tensors())
    assert list(tmp_path.iterdir()) == []


# --- of several ranks -------------------------------------------------------------------------------------------


def ranks_of(make, held, table):
    """Publishers of ranks that are threads, and a pool for them. `make(rank, gather)`: one."""
    meeting, words = threading.Barrier(len(held), timeout=30), {}

    def gather_as(rank):
        def gather(word):
            words[rank] = word
            meeting.wait()
            everyones = [words[other] for other in range(len(held))]
            meeting.wait()
            return everyones

        return gather

    made = [make(rank, gather_as(rank)) for rank in range(len(held))]
    pool = ThreadPoolExecutor(len(held))
    list(pool.map(lambda publisher, boxes: publisher.hold(table, boxes), made, held))
    return made, pool


@pytest.mark.parametrize("by_columns", [False, True])
def test_ranks_write_what_they_hold_and_what_is_read_is_whole(tmp_path, by_columns):
    named = tensors(1)
    table = Table.of(named)
    held = [*shards(table, 3, by_columns)] * 2  # of two replicas, one writes
    made, pool = ranks_of(lambda *of: FilesystemPublisher(tmp_path / "weights", 2, 1 << 10, *of), held, table)
    told = []
    for version in (1, 2, 3):
        named = tensors(version)
        parts = [data_of(boxes, named, table) for boxes in held]
        list(pool.map(lambda publisher, own, v=version: publisher.publish(v, iter(own), told.append), made, parts))
        info = told[-1]
        with ELSEWHERE:
            got = dict(receive(info))
        assert list(got) == [name for name, _ in named]
        for name, tensor in named:
            assert got[name].dtype == tensor.dtype
            assert torch.equal(got[name], tensor)
        assert [chunk[0][0] for chunk in stage(info)] == list(got)
    assert len(told) == 3
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["step_2", "step_3"]
    last = tmp_path / "weights" / "step_3"
    written = sum(path.stat().st_size for path in last.glob("*.safetensors"))
    assert written < sum(tensor.nbytes for _, tensor in tensors()) + 2000 * len(list(last.glob("*.safetensors")))
    file = sorted(last.glob("rank-1*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match=r"rank-1.*is damaged"):
        list(receive(told[-1]))
    manifest = json.loads((last / "manifest.json").read_text())
    manifest["tensors"]["matrix"][2].pop()
    (last / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="the parts of matrix are not the whole"):
        list(receive(told[-1], verify=False))


@pytest.fixture
def segments():
    """What segments of a test are called, which are gone afterwards."""
    path = Path(f"/dev/shm/prl-ranks{os.getpid()}")
    yield path
    for left in path.parent.glob(f"{path.name}-*"):
        left.unlink()


KEPT = {
    "tcp": lambda segments: lambda *of: TcpPublisher(LOOPBACK, 5.0, *of),
    "shared_memory": lambda segments: lambda *of: SharedMemoryPublisher(segments, *of),
}


def publish_all(made, pool, held, table, version, device="cpu"):
    """The update_info of a version of which each rank has its part."""
    named, told = tensors(version), []
    parts = [[part.to(device) for part in data_of(boxes, named, table)] for boxes in held]
    list(pool.map(lambda publisher, own: publisher.publish(version, iter(own), told.append), made, parts))
    (info,) = told
    return json.loads(json.dumps(info))


@pytest.fixture
def small_buffers(monkeypatch):
    """Through which all goes that is on a GPU."""
    monkeypatch.setattr(to_host, "PINNED_BYTES", 64)
    monkeypatch.setattr(to_host, "BUFFERS", 2)
    to_host._made_once.cache_clear()
    yield
    assert to_host.pinned_buffers().qsize() == 2, "one was not put back"
    to_host._made_once.cache_clear()


@pytest.mark.parametrize("way", ["at once", "in stretches", "from a GPU"])
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("kind", KEPT)
def test_engines_put_together_what_ranks_keep(kind, by_columns, way, segments, small_buffers, monkeypatch):
    monkeypatch.setattr(shelves, "PARCEL_BYTES", 256)  # several of a tensor
    if way == "from a GPU" and not torch.cuda.is_available():
        pytest.skip("needs a GPU; its way is that in stretches but for the events")
    if way == "in stretches":
        monkeypatch.setattr(shelves, "is_elsewhere", lambda part: True)
    device = "cuda" if way == "from a GPU" else "cpu"
    table = Table.of(tensors())
    held = [*shards(table, 3, by_columns)] * 2  # of two replicas, one keeps it
    made, pool = ranks_of(KEPT[kind](segments), held, table)
    assert sum(table.nbytes(one.shelf.boxes).sum() for one in made) == table.nbytes(table.whole()).sum()
    assert all(publisher.shelf.nbytes == 0 for publisher in made[3:])
    for version in (1, 2):
        info = publish_all(made, pool, held, table, version, device)
        with ELSEWHERE:
            both = dict(receive(info)), {name: t for chunk in stage(info) for name, t in chunk}
        for got in both:
            assert list(got) == table.names
            for name, tensor in tensors(version):
                assert got[name].dtype == tensor.dtype
                assert torch.equal(got[name], tensor)
        list(pool.map(lambda publisher: publisher.acknowledge(), made))
        with pytest.raises(OSError):  # noqa: PT011 (a connection that ends, or a file that is gone)
            list(receive(info))


def test_a_rank_that_sends_damaged_bytes_or_is_gone_is_named(segments):
    table = Table.of(tensors())
    held = shards(table, 3, by_columns=False)
    made, pool = ranks_of(KEPT["tcp"](segments), held, table)
    info, port = publish_all(made, pool, held, table, 1), made[2].server.server_address[1]
    ((_, data),) = made[2].server.versions.values()
    data[0] ^= 1
    with pytest.raises(ValueError, match=f"127.0.0.1:{port} are damaged: CRC-32"):
        list(receive(info))
    assert len(list(receive(info, verify=False))) == len(tensors())
    made[2].server.shutdown()
    made[2].server.server_close()
    with pytest.raises(OSError, match=f"weights version 1 from the trainer at 127.0.0.1:{port}: "):
        list(receive(info))


def test_parts_that_are_not_the_whole_are_refused(segments):
    table = Table.of(tensors())
    held = shards(table, 2, by_columns=False)
    held[1] = held[1][:-1]
    for kind in KEPT:
        made, pool = ranks_of(KEPT[kind](segments), held, table)
        with pytest.raises(ValueError, match="the parts of trained are not the whole"):
            list(receive(publish_all(made, pool, held, table, 1)))


@pytest.mark.parametrize("cut", [(0, b"\xff" * 32), (40, b"\0" * 40)], ids=["lengths", "boxes"])
def test_a_head_that_no_trainer_has_packed_is_refused(cut, segments):
    table = Table.of(tensors())
    made, pool = ranks_of(KEPT["shared_memory"](segments), [table.whole()], table)
    info = publish_all(made, pool, [table.whole()], table, 1)
    with Path(f"{segments}-1-0").open("r+b") as file:
        file.seek(cut[0])
        file.write(cut[1])
    with pytest.raises(ValueError, match="packed"):
        list(receive(info))


def test_a_stretch_that_cannot_be_moved_is_told_and_leaves_its_buffer(small_buffers, monkeypatch):
    """Another version must find all of them."""
    monkeypatch.setattr(shelves, "is_elsewhere", lambda part: True)

    def fail(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(to_host.np, "copyto", fail)
    table = Table.of(tensors())
    (made,), pool = ranks_of(lambda *of: TcpPublisher(LOOPBACK, 5.0, *of), [table.whole()], table)
    with pytest.raises(MemoryError, match="no room"):
        publish_all([made], pool, [table.whole()], table, 1)


def test_threads_that_begin_together_share_their_buffers(small_buffers, monkeypatch):
    """To pin memory takes a while, in which others ask for it."""
    make = torch.empty

    def slowly(*args, **kwargs):
        time.sleep(0.05)
        return make(*args, **kwargs)

    monkeypatch.setattr(to_host.torch, "empty", slowly)
    with ThreadPoolExecutor(4) as pool:
        found = [future.result() for future in [pool.submit(to_host.pinned_buffers) for _ in range(4)]]
    assert len({id(queue) for queue in found}) == 1


def test_bytes_are_summed_once_they_are_there(small_buffers, monkeypatch):
    """A stretch that takes long, while threads are free for what comes after it."""
    copy, turn = to_host.np.copyto, itertools.count()

    def slowly(*args):
        time.sleep(0.1 if next(turn) % 4 == 0 else 0)
        copy(*args)

    monkeypatch.setattr(to_host.np, "copyto", slowly)
    monkeypatch.setattr(shelves, "PARCEL_BYTES", 256)
    monkeypatch.setattr(shelves, "THREADS", 8)
    monkeypatch.setattr(shelves, "is_elsewhere", lambda part: True)
    table = Table.of(tensors())
    (made,), pool = ranks_of(lambda *of: TcpPublisher(LOOPBACK, 5.0, *of), [table.whole()], table)
    got = dict(receive(publish_all([made], pool, [table.whole()], table, 1)))
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors(1))
