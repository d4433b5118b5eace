"""Who waits in a group of trainer ranks and engines, on CPUs, comes free when it is given up."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from prl.transport.nccl_group import GivenUp, Group, make_group
from prl.transport.stores import serve_store


def two_of_gloo(given_up: threading.Event) -> list[Group]:
    """Both sides of a group of two, in this process."""
    store = serve_store("127.0.0.1", timedelta(seconds=60))
    with ThreadPoolExecutor(2) as pool:
        sides = [pool.submit(make_group, store, 1, rank, 2, torch.device("cpu"), 60.0, given_up) for rank in range(2)]
        return [side.result(30) for side in sides]


def test_who_waits_in_a_group_comes_free_when_it_is_dropped() -> None:
    one, other = two_of_gloo(threading.Event())
    nothing, got = torch.empty(0, dtype=torch.uint8), torch.empty(8, dtype=torch.uint8)
    waiting = one.exchange(got, [0, 8], nothing, [0, 0])
    threading.Timer(0.2, one.drop).start()
    began = time.monotonic()
    with pytest.raises(GivenUp):
        waiting.wait()
    assert time.monotonic() - began < 30, "half of its timeout"
    with pytest.raises(GivenUp):
        one.exchange(got, [0, 8], nothing, [0, 0])
    assert not other.given_up.is_set()


def test_nobody_waits_for_a_member_that_does_not_come() -> None:
    given_up, store = threading.Event(), serve_store("127.0.0.1", timedelta(seconds=60))
    threading.Timer(0.2, given_up.set).start()
    began = time.monotonic()
    with pytest.raises(GivenUp):
        make_group(store, 1, 0, 2, torch.device("cpu"), 60.0, given_up)
    assert not store.check(["withdrawn"]), "the connection is free"
    assert time.monotonic() - began < 30, "half of its timeout"


def test_a_group_made_too_late_is_one_that_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = threading.Event()
    make = dist.ProcessGroupGloo

    def late(*args: Any) -> Any:
        made = make(*args)
        given_up.set()
        return made

    monkeypatch.setattr(dist, "ProcessGroupGloo", late)
    monkeypatch.setattr("prl.transport.nccl_group.unless", lambda _, blocking: blocking())
    assert all(side.given_up.is_set() for side in two_of_gloo(given_up))
