"""The process group of trainer ranks and engine processes, and what is said about it in the trainer's TCPStore.

Trainer ranks come first, in their order, then engine processes in the order in which they came. Members of a group are
fixed, so when others come than the last time, because an engine died or one was started again, the group is dropped and
another made. It is NCCL's on GPUs; on CPUs, where tests run, it is gloo's.

Keys of the store, P being a publication (a version may be published more than once):

    table, holds/R     what tensors there are, and which boxes of them the trainer rank R holds
    wants/I/N          which boxes the engine process I wants; N counts what it has wanted so far, 0 is everything
    P/come             how many have come
    P/ready/I          the I-th to come: who it is, what it wants, how many are absent
    P/group            number of the group, its engine processes and what they want
    P/received/I       who has everything             P/sent/R   which trainer rank is done
    P/withdrawn        set when the trainer gave it up
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

POLL_S = 0.005
WATCH_S = 0.2
GIVE_UP_S = 0.2  # until it is noticed that a group was given up

T = TypeVar("T")


class GivenUp(RuntimeError):
    """Of a group that was dropped meanwhile."""


class Works:
    """Several of gloo's, to be waited for as one. Raises GivenUp once `given_up` is set, and what the first raises."""

    def __init__(self, works: Sequence[Any], given_up: threading.Event) -> None:
        self.works, self.given_up = works, given_up

    def wait(self) -> None:
        unless(self.given_up, lambda: [work.wait() for work in self.works])


def unless(given_up: threading.Event, blocking: Callable[[], T]) -> T:
    """The result of something of gloo's. Its calls end when a peer dies or time is up, and `abort` ends none of them
    (torch 2.13): this one goes on in a thread, of which nothing is heard any more, when `given_up` is set.

    Raises GivenUp then, and what `blocking` raises.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(blocking())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    while not given_up.is_set():
        if wait([done], timeout=GIVE_UP_S).done:
            return done.result()
    raise GivenUp("the group was given up")


@dataclass
class Group:
    """Of trainer ranks and those engine processes that took part when it was made."""

    number: int  # counts the groups of a trainer
    group: Any  # ProcessGroupNCCL or ProcessGroupGloo
    given_up: threading.Event = field(default_factory=threading.Event)

    def exchange(self, got: Tensor, got_sizes: list[int], given: Tensor, given_sizes: list[int]) -> Any:
        """What everyone gives everyone, in bytes by rank; `got` and `given` hold them one after another, [n] uint8.

        Returns work to wait for. Raises GivenUp if the group was dropped.
        """
        if self.given_up.is_set():
            raise GivenUp("the group was given up")
        if isinstance(self.group, dist.ProcessGroupGloo):
            return self._in_pairs(got.split(got_sizes), given.split(given_sizes))
        return self.group.alltoall_base(got, given, got_sizes, given_sizes)

    def _in_pairs(self, got: Sequence[Tensor], given: Sequence[Tensor]) -> Works:
        """As NCCL does it: gloo's own all-to-all also sends nothing to everybody, which takes longer than the rest."""
        sends = [self.group.send([data], rank, 0) for rank, data in enumerate(given) if data.numel()]
        receives = [self.group.recv([data], rank, 0) for rank, data in enumerate(got) if data.numel()]
        return Works(sends + receives, self.given_up)

    def drop(self) -> None:
        """Whoever waits in it comes free, with an error, and nobody is waited for: a member may be dead."""
        self.given_up.set()
        self.group.abort()


def make_group(
    store: dist.TCPStore,
    number: int,
    rank: int,
    size: int,
    device: torch.device,
    timeout_s: float,
    given_up: threading.Event,
) -> Group:
    """Raises GivenUp when `given_up` is set before all others have come."""
    limit = timedelta(seconds=timeout_s)
    own = connect(store.host, store.port, timeout_s)  # on the other one nobody is heard while this waits for members
    prefixed = dist.PrefixStore(f"group/{number}", own)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        group: Any = dist.ProcessGroupNCCL(prefixed, rank, size, options)
    else:
        group = unless(given_up, lambda: dist.ProcessGroupGloo(prefixed, rank, size, limit))
    made = Group(number, group)
    if given_up.is_set():  # by somebody who found no group to drop
        made.drop()
    return made


@dataclass(frozen=True)
class Party:
    """Who takes part in a publication: the group's number (0: nobody, it was withdrawn before it began), trainer ranks,
    and of each engine process its identity and what it wants, by number.
    """

    number: int
    trainers: int
    members: tuple[str, ...]
    wants: tuple[int, ...]

    def pack(self) -> str:
        return json.dumps([self.number, self.trainers, self.members, self.wants])

    @staticmethod
    def unpack(text: bytes | str) -> Party:
        """Raises ValueError for what `pack` has not made."""
        match json.loads(text):
            case [int(number), int(trainers), [*members], [*wants]] if len(members) == len(wants):
                if all(isinstance(m, str) for m in members) and all(type(w) is int and w >= 0 for w in wants):
                    return Party(number, trainers, tuple(members), tuple(wants))
        raise ValueError("the trainer's word on who takes part in an update is not understood")

    @property
    def size(self) -> int:
        return self.trainers + len(self.members)


def connect(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """To the trainer's store, from another process of trainer or engine."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def set_bytes(store: dist.Store, key: str, value: bytes) -> None:
    store.set(key, value)  # type: ignore[arg-type]  # it takes them, and `get` returns them
