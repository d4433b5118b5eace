"""Weights from trainer ranks to processes of engines: the same code that NCCL carries between GPUs, over gloo here."""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from test_transport_device import CPU, tensors

from prl.transport.boxes import Table
from prl.transport.nccl_group import connect
from prl.transport.receiving_nccl import receive_nccl
from prl.transport.staging import checksum
from prl.transport.stores import serve_store
from prl.transport.weights_nccl import NcclPublisher


def received(info: dict[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
    with torch.device("meta"):  # where nothing may go of which nobody says where: in vLLM's workers that is a GPU
        return {name: tensor.cpu().clone() for chunk in receive_nccl(info, device) for name, tensor in chunk}


def engine(updates: Any, answers: Any, device: torch.device) -> None:
    """A process of an engine: receives what it is told of."""
    torch.set_num_threads(1)
    while (info := updates.get()) is not None:
        try:
            answers.put(received(info, device))
        except Exception as error:
            answers.put(f"{type(error).__name__}: {error}")


class Engines:
    def __init__(self, count: int, target: Callable[..., None] = engine, on_gpus: bool = False) -> None:
        self.context = mp.get_context("spawn")
        self.updates: list[Any] = []
        self.answers: list[Any] = []
        self.processes: list[Any] = []
        self.devices: list[torch.device] = []
        self.on_gpus = on_gpus
        for _ in range(count):
            self.add(target)

    def add(self, target: Callable[..., None] = engine) -> None:
        self.updates.append(self.context.Queue())
        self.answers.append(self.context.Queue())
        free = next(i for i in range(1, 9) if torch.device("cuda", i) not in self.devices)  # the first is the trainer's
        self.devices.append(torch.device("cuda", free) if self.on_gpus else CPU)
        args = self.updates[-1], self.answers[-1], self.devices[-1]
        self.processes.append(self.context.Process(target=target, args=args, daemon=True))
        self.processes[-1].start()

    def kill(self, index: int) -> None:
        """It leaves the lists; what follows moves up."""
        process = self.processes.pop(index)
        process.kill()
        process.join()
        del self.updates[index], self.answers[index], self.devices[index]

    def announce(self, info: dict[str, Any]) -> None:
        for queue in self.updates:
            queue.put(json.loads(json.dumps(info)))  # it travels as JSON

    def results(self) -> list[Any]:
        return [queue.get(timeout=60) for queue in self.answers]

    def end(self) -> None:
        for process in self.processes:
            process.kill()


def many(device: torch.device = CPU) -> Iterator[tuple[str, torch.Tensor]]:
    """Each a bucket of its own."""
    return ((f"w{i}", torch.full((256,), float(i), device=device)) for i in range(100))


def everything(version: int) -> dict[str, torch.Tensor]:
    return dict(tensors(version)) | dict(many())


def publisher_for(
    count: int,
    sent: dict[str, torch.Tensor] | None = None,
    timeout_s: float = 60.0,
    num_buckets: int = 2,
    device: torch.device = CPU,
) -> NcclPublisher:
    """Of a trainer of one rank that holds what is to be `sent` (None: `everything`)."""
    store = serve_store("127.0.0.1", timedelta(seconds=timeout_s))
    options = {"timeout_s": timeout_s, "bucket_bytes": 1024, "num_buckets": num_buckets, "verify": True}
    publisher = NcclPublisher(store, 0, 1, count, device, **options)
    table = Table.of((everything(0) if sent is None else sent).items())
    publisher.hold(table, table.whole())
    return publisher


@pytest.fixture
def two_engines():
    engines = Engines(2)
    yield engines
    engines.end()


@pytest.mark.slow
@pytest.mark.parametrize("num_buckets", [2, 50], ids=["streamed", "staged"])
def test_every_engine_gets_every_version(two_engines: Engines, num_buckets: int) -> None:
    publisher = publisher_for(2, dict(tensors()), num_buckets=num_buckets)
    for version in (1, 2, 3):
        sent = dict(tensors(version))
        publisher.publish(version, iter(sent.values()), two_engines.announce)
        for got in two_engines.results():
            assert not isinstance(got, str), got
            assert list(got) == list(sent)
            for name, tensor in sent.items():
                assert torch.equal(got[name], tensor)
    publisher.acknowledge()
    assert not publisher.store.check(["3/group"]), "what was said of a publication is forgotten"


def reaches_all(publisher: NcclPublisher, engines: Engines, version: int, absent: int = 0) -> int:
    """Publish; every engine that there is gets it. Returns the number of the group in which they met."""
    sent = everything(version)
    on_device = (tensor.to(publisher.device) for tensor in sent.values())
    publisher.publish(version, on_device, lambda info: engines.announce(info | {"absent": absent}))
    for got in engines.results():
        assert not isinstance(got, str), got
        assert torch.equal(got["long"], sent["long"])
    publisher.acknowledge()
    assert publisher.group is not None
    return publisher.group.number


THREE_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three GPUs")
OVER = pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda", 0), marks=THREE_GPUS)], ids=str)


@pytest.mark.slow
@OVER
def test_a_dead_member_is_done_without_and_a_new_one_taken_in(device: torch.device) -> None:
    engines = Engines(2, on_gpus=device != CPU)
    publisher = publisher_for(2, device=device)
    assert [reaches_all(publisher, engines, version) for version in (1, 2)] == [1, 1], "the same group"
    engines.kill(0)
    assert [reaches_all(publisher, engines, version, absent=1) for version in (3, 4)] == [2, 2]
    engines.add()
    # the last of them the same version again
    assert [reaches_all(publisher, engines, version) for version in (5, 6, 6)] == [3, 3, 3]
    engines.end()
    assert publisher.store.num_keys() < 40, "what was said of a publication is forgotten"


@pytest.mark.slow
def test_what_nobody_is_there_to_take_is_withdrawn() -> None:
    publisher = publisher_for(1)

    def announce(info: dict[str, Any]) -> None:
        threading.Timer(0.1, publisher.withdraw).start()

    publisher.publish(1, everything(1).values(), announce)
    publisher.acknowledge()
    engines = Engines(1)
    assert reaches_all(publisher, engines, 2) == 1
    engines.end()


def deserter(updates: Any, answers: Any, device: torch.device) -> None:
    """Dies in its second update."""
    answers.put(received(updates.get(), device))
    next(receive_nccl(updates.get(), device))
    os._exit(1)


def latecomer(updates: Any, answers: Any, device: torch.device) -> None:
    """Dies before its second update, when the others wait for it."""
    answers.put(received(updates.get(), device))
    updates.get()
    time.sleep(0.5)
    os._exit(1)


@pytest.mark.slow
def test_a_death_among_buckets_that_nobody_tells_of_ends_it_and_says_who_took_part() -> None:
    engines = Engines(1, deserter)
    publisher = publisher_for(1)
    reaches_all(publisher, engines, 1)
    publisher.timeout_s = 1.0
    with pytest.raises(RuntimeError, match=rf"weights of version 2: .* to process {engines.processes[0].pid} of"):
        publisher.publish(2, everything(2).values(), engines.announce)
    engines.end()


@pytest.mark.slow
@OVER
@pytest.mark.parametrize("dying", [deserter, latecomer])
def test_those_left_when_one_dies_finish_with_nonsense_and_take_the_next(
    dying: Callable[..., None], device: torch.device
) -> None:
    engines = Engines(1, on_gpus=device != CPU)
    engines.add(dying)
    publisher = publisher_for(2, device=device)
    reaches_all(publisher, engines, 1)

    def withdraw() -> None:
        engines.processes[1].join()
        time.sleep(0.3)  # till somebody has noticed
        publisher.withdraw()

    thread = threading.Thread(target=withdraw)
    thread.start()
    publisher.publish(2, (tensor.to(device) for tensor in everything(2).values()), engines.announce)
    publisher.acknowledge()
    thread.join()
    engines.kill(1)
    (got,) = engines.results()
    assert list(got) == list(everything(2)), "a loader must see the whole model"
    engines.add()
    assert [reaches_all(publisher, engines, version) for version in (3, 4)] == [2, 2]
    engines.end()


@pytest.mark.slow
def test_a_version_that_fits_does_not_keep_the_trainer() -> None:
    """The weights sent are those of the moment of publishing, whatever the trainer does to them meanwhile."""
    engines, announced = Engines(1), []
    weights = torch.arange(1000.0)
    publisher = publisher_for(1, {"w": weights}, num_buckets=50)
    publisher.publish(1, [weights], announced.append)
    weights.zero_()
    engines.announce(announced[0])  # only now
    (got,) = engines.results()
    assert torch.equal(got["w"], torch.arange(1000.0))
    publisher.acknowledge()
    engines.end()


@pytest.mark.slow
def test_a_version_that_does_not_fit_waits_for_its_engines() -> None:
    engines, announced, asked = Engines(1), [], []

    def stream():
        for i in range(10):
            asked.append(i)
            yield torch.full((256,), float(i))

    publisher = publisher_for(1, dict(list(many())[:10]))  # two buckets, of one tensor each
    thread = threading.Thread(target=lambda: publisher.publish(1, stream(), announced.append))
    thread.start()
    while len(asked) < 3:
        assert thread.is_alive()
        time.sleep(0.01)
    time.sleep(0.5)
    assert thread.is_alive()
    assert asked == [0, 1, 2]
    engines.announce(announced[0])
    thread.join(timeout=60)
    assert not thread.is_alive()
    (got,) = engines.results()
    assert [got[f"w{i}"][0].item() for i in range(10)] == list(range(10))
    engines.end()


@pytest.mark.slow
def test_an_engine_that_does_not_come_is_named(two_engines: Engines) -> None:
    publisher = publisher_for(2, timeout_s=60.0)
    publisher.publish(1, everything(1).values(), two_engines.announce)
    two_engines.results()
    victim = two_engines.processes[0]
    two_engines.kill(0)
    publisher.timeout_s = 1.0
    with pytest.raises(TimeoutError, match=rf"version 2: not ready within 1 s: process {victim.pid} of \S+ on cpu"):
        publisher.publish(2, everything(2).values(), two_engines.announce)


@pytest.mark.slow
def test_engines_have_time_from_when_they_are_told(two_engines: Engines) -> None:
    """Before, they may be busy with an evaluation."""
    publisher, told = publisher_for(2), threading.Event()
    publisher.publish(1, everything(1).values(), two_engines.announce)
    two_engines.results()
    publisher.acknowledge()
    publisher.timeout_s = 3.0

    def announce(info: dict[str, Any]) -> threading.Event:
        def tell() -> None:
            two_engines.announce(info)
            told.set()

        threading.Timer(5, tell).start()
        return told

    publisher.publish(2, everything(2).values(), announce)
    assert all(torch.equal(got["long"], dict(tensors(2))["long"]) for got in two_engines.results())
    publisher.acknowledge()


def test_an_engine_that_never_joined_is_counted() -> None:
    publisher = publisher_for(1, timeout_s=0.2)
    with pytest.raises(TimeoutError, match="1 engine process that never joined"):
        publisher.publish(0, everything(0).values(), lambda info: None)


@pytest.mark.slow
def test_damage_on_the_way_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prl.transport.staging.checksum", lambda bucket: checksum(bucket) + 1)  # here, not there
    engines = Engines(1)
    publisher = publisher_for(1)

    def publish() -> None:
        with contextlib.suppress(RuntimeError, TimeoutError):  # its engine ends
            publisher.publish(1, everything(1).values(), engines.announce)
            publisher.acknowledge()

    threading.Thread(target=publish, daemon=True).start()
    (answer,) = engines.results()
    assert "ValueError: round 1 of version 1 is damaged: what came from trainer/0" in answer
    engines.end()


# --- trainers of several ranks ----------------------------------------------------------------------------------------


class Trainers:
    """Ranks of a trainer, each a thread with a connection of its own; rows of all tensors are cut over them."""

    def __init__(self, ranks: int, engines: Engines, timeout_s: float = 60.0, bucket_bytes: int = 1024) -> None:
        store = serve_store("127.0.0.1", timedelta(seconds=timeout_s))
        options = {"timeout_s": timeout_s, "bucket_bytes": bucket_bytes, "num_buckets": 2, "verify": True}
        stores = [store, *(connect("127.0.0.1", store.port, timeout_s) for _ in range(1, ranks))]
        count = len(engines.processes)
        self.publishers = [NcclPublisher(s, rank, ranks, count, CPU, **options) for rank, s in enumerate(stores)]
        self.engines, self.pool = engines, ThreadPoolExecutor(ranks)
        table = Table.of(everything(0).items())
        self.held = [table.whole() for _ in range(ranks)]
        for rank, boxes in enumerate(self.held):
            step = -(-boxes[:, 2] // ranks)
            boxes[:, 1] = np.minimum(step * rank, boxes[:, 2])
            boxes[:, 2] = np.minimum(step, boxes[:, 2] - boxes[:, 1])
        for rank, boxes in enumerate(self.held):
            self.held[rank] = boxes[(boxes[:, 2] > 0) | ((rank == 0) & (table.rows == 0))]
        self.each(lambda rank, publisher: publisher.hold(table, self.held[rank]))

    def each(self, do: Callable[[int, NcclPublisher], Any]) -> list[Any]:
        return [done.result(60) for done in [self.pool.submit(do, *item) for item in enumerate(self.publishers)]]

    def publish(
        self, version: int, absent: int = 0, acknowledging: int | None = None, told: Callable[[], None] = lambda: None
    ) -> None:
        """`acknowledging`: that many of the first ranks (None: all); `told` is called when engines have been."""
        sent = list(everything(version).values())

        def announce(info: dict[str, Any]) -> None:
            self.engines.announce(info | {"absent": absent})
            told()

        def one(rank: int, publisher: NcclPublisher) -> None:
            matrices = (sent[box[0]].reshape(max(1, len(sent[box[0]])) if sent[box[0]].ndim else 1, -1)
                        if sent[box[0]].numel() else sent[box[0]] for box in self.held[rank].tolist())  # fmt: skip
            rows = [box[1:3] for box in self.held[rank].tolist()]
            parts = (m[r[0] : r[0] + r[1]] for m, r in zip(matrices, rows, strict=True))
            publisher.publish(version, parts, announce)
            if acknowledging is None or rank < acknowledging:
                publisher.acknowledge()

        self.each(one)


def assert_got(engines: Engines, version: int) -> None:
    for got in engines.results():
        assert not isinstance(got, str), got
        sent = everything(version)
        assert got.keys() == sent.keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in sent.items())


@pytest.mark.slow
def test_ranks_send_what_each_of_them_holds(two_engines: Engines) -> None:
    trainers = Trainers(3, two_engines)
    for version in (1, 2):
        trainers.publish(version)
        assert_got(two_engines, version)
    assert {publisher.group.number for publisher in trainers.publishers} == {1}
    two_engines.kill(0)
    trainers.publish(3, absent=1)
    assert_got(two_engines, 3)
    two_engines.add()
    trainers.publish(4)
    assert_got(two_engines, 4)
    assert {publisher.group.number for publisher in trainers.publishers} == {3}
    assert trainers.publishers[0].store.num_keys() < 60, "what was said of a publication is forgotten"


@pytest.mark.slow
@pytest.mark.parametrize("dying", [deserter, latecomer])
def test_all_ranks_leave_a_group_in_which_an_engine_died(dying: Callable[..., None]) -> None:
    engines = Engines(1)
    engines.add(dying)
    trainers = Trainers(2, engines)
    trainers.publish(1)
    engines.results()

    def withdraw() -> None:
        engines.processes[1].join()
        time.sleep(0.3)  # till somebody has noticed
        trainers.publishers[0].withdraw()

    thread = threading.Thread(target=withdraw)
    thread.start()
    trainers.publish(2)
    thread.join()
    engines.kill(1)
    (got,) = engines.results()
    assert got.keys() == everything(2).keys(), "a loader must see the whole model"
    engines.add()
    for version in (3, 4):
        trainers.publish(version)
        assert_got(engines, version)
    assert {publisher.group.number for publisher in trainers.publishers} == {2}
    engines.end()


@pytest.mark.slow
def test_a_survivor_comes_free_at_once_whenever_another_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from a rank that has given up and does not look after its group before it has trained on: 30 kills of
    such a run kept engines until `timeout_s` was over, twice.
    """
    large = Table.of((f"w{i}", torch.empty(1024, 1024)) for i in range(24))
    monkeypatch.setattr(
        "test_transport_nccl.everything",
        lambda version: {name: torch.full((1024, 1024), i + version) for i, name in enumerate(large.names)},
    )
    engines = Engines(2)
    trainers = Trainers(2, engines, bucket_bytes=4 << 20)
    trainers.publish(1)
    engines.results()
    for number, delay_s in enumerate((0.0, 0.02, 0.05, 0.08, 0.088, 0.1)):
        victim = engines.processes[0]

        def kill(victim: Any = victim, delay_s: float = delay_s) -> None:
            time.sleep(delay_s)
            victim.kill()
            victim.join()
            time.sleep(0.1)  # till somebody has noticed
            trainers.publishers[0].withdraw()

        thread = threading.Thread(target=kill)
        began = time.monotonic()
        trainers.publish(2 + number, acknowledging=1, told=thread.start)
        thread.join()
        engines.kill(0)
        engines.results()
        assert time.monotonic() - began < 30, "half of timeout_s"
        engines.add()
        trainers.publish(100 + number)
        assert_got(engines, 100 + number)
    engines.end()


@pytest.mark.slow
def test_ranks_wait_for_no_engines_that_do_not_come() -> None:
    engines = Engines(0)
    engines.processes = [None]  # one is expected
    trainers = Trainers(2, engines)
    threading.Timer(0.5, trainers.publishers[0].withdraw).start()
    trainers.publish(1)
    engines.processes = []
    engines.add()
    trainers.publish(2)
    assert_got(engines, 2)
    engines.end()
