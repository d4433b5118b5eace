"""Weights from GPU to GPU: every trainer rank sends what it holds straight to the engine processes that need it.

Nothing is gathered. Trainer ranks and engine processes form a process group of their own (`nccl_group.py`); all of them
work out the same rounds from who holds and who wants what (`rounds.py`). A rank casts its shards into buckets, a lap at
a time (`staging.py`), and a thread sends them. The first rank leads: it finds out who takes part, and waits until all
have everything.

An engine that dies in the middle leaves the others in an exchange that never ends. The trainer is told so, withdraws
the publication and aborts the group, and so does each process, of trainer and engines, that sees it withdrawn. Engine
processes still go through all that was to come, with whatever their buckets hold: a loader that has seen a part of a
model is in no state to see another. Nobody may sample from that, so the orchestrator keeps them paused until the next
publication.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from prl.transport.boxes import Boxes, Table, pack_boxes, unpack_boxes
from prl.transport.buckets import Announce
from prl.transport.nccl_group import POLL_S, WATCH_S, Group, Party, connect, make_group, set_bytes
from prl.transport.rounds import Schedule
from prl.transport.staging import Bucket, Outgoing, Staging, fill

BUCKETS = 2  # one travels while the other is filled
BEAT_S = 1.0
FOREVER = timedelta(days=365)


class NcclPublisher:
    """One trainer rank's side, the rank of that number in the group.

    `publish` fills buckets, and a thread with a stream of its own sends them. What fits into the buckets leaves the
    trainer free at once; of more, filling waits for buckets that have been sent. What goes wrong in the thread is
    raised by the next `publish` or `acknowledge`: TimeoutError naming the engines that did not come.

    Who takes part is settled anew for each publication: the engines say how many are absent, for they are told by whom
    the engines are watched.
    """

    def __init__(
        self,
        store: dist.TCPStore,
        rank: int,
        trainers: int,
        num_receivers: int,
        device: torch.device,
        *,
        timeout_s: float,
        bucket_bytes: int,
        num_buckets: int,
        verify: bool,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """`store`: the first rank's; `num_receivers`: processes of all engines that hold weights; `beat`: called while
        the trainer waits here.
        """
        self.store, self.rank, self.trainers, self.beat = store, rank, trainers, beat
        self.num_receivers, self.device = num_receivers, device
        self.timeout_s, self.bucket_bytes, self.verify = timeout_s, bucket_bytes, verify
        self.group: Group | None = None
        self.members: dict[str, str] = {}  # of the group: identity -> name; the first rank knows
        self.groups = self.publications = 0  # so far
        self.withdrawn = threading.Event()
        self.free: queue.SimpleQueue[Bucket] = queue.SimpleQueue()
        self.num_left = max(BUCKETS, num_buckets)  # buckets that may still be made
        self.sender = ThreadPoolExecutor(1, "weights")
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # of that thread
        self.sending: Future[None] | None = None
        self.spent: list[str] = []  # keys of the store, of the publication sent last
        self.party: Party | None = None  # of which `outgoing` is
        self.outgoing: Outgoing | None = None
        self.given: list[Bucket] = []  # messages on their way

    def hold(self, table: Table, boxes: Boxes) -> None:
        """Tell what this rank holds, and hear it of all others: before the first `publish`. A collective."""
        if self.rank == 0:
            set_bytes(self.store, "table", table.pack())
        set_bytes(self.store, f"holds/{self.rank}", pack_boxes(boxes))
        holdings = [unpack_boxes(self.store.get(f"holds/{rank}"), table) for rank in range(self.trainers)]
        self.schedule = Schedule.of(table, holdings, self.bucket_bytes)
        self.staging = Staging(self.schedule, self.rank)

    def publish(self, version: int, parts: Iterable[Tensor], announce: Announce) -> None:
        """`parts`: of each box that this rank holds. The first rank announces.

        Returns when every bucket is filled. The version before must have been sent, or this waits for it.
        """
        self._await_sent()
        self.publications += 1
        self.withdrawn.clear()
        told = None
        if self.rank == 0:
            told = announce(
                {
                    "type": "nccl",
                    "host": self.store.host,
                    "port": self.store.port,
                    "version": version,
                    "publication": self.publications,
                    "bucket_bytes": self.bucket_bytes,
                    "timeout_s": self.timeout_s,
                    "checksums": self.verify,
                }
            )
        filled: queue.SimpleQueue[Bucket] = queue.SimpleQueue()
        self.sending = self.sender.submit(self._send, version, told, filled)
        if not self.staging.places:  # at once, for others may wait for it while this rank takes part in their gathers
            for _ in range(self.schedule.laps):
                filled.put(Bucket.of(0, self.device))
            for _ in parts:
                pass
            return
        for runs in self.staging.casts(parts):
            bucket = self._take_bucket()
            bucket.await_last_use()
            fill(bucket.data, runs)
            bucket.mark()
            filled.put(bucket)

    def _take_bucket(self) -> Bucket:
        """A free one, a new one, or the next that has been sent."""
        if self.free.empty() and self.num_left:
            self.num_left -= 1
            return Bucket.of(self.staging.bytes, self.device)
        while True:
            try:
                return self.free.get(timeout=POLL_S)
            except queue.Empty:
                self.beat()
                if self.sending is not None and self.sending.done():
                    self.sending.result()  # raises what ended it

    def withdraw(self) -> None:
        """Give up what was published last: no engine is there to take it, or one died when it should have.

        Engines that have begun to take it end up with nonsense.
        """
        self.withdrawn.set()
        self.store.set(self._key("withdrawn"), "")
        if self.group is not None:
            self.group.drop()

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _send(self, version: int, told: threading.Event | None, filled: queue.SimpleQueue[Bucket]) -> None:
        """Everything of one version, until every engine has it."""
        done, names = threading.Event(), dict[str, str]()
        if self.rank == 0:
            if told is not None:
                told.wait()
            party, names = self._gather(version)
            self._set("group", party.pack())
        else:
            party = self._follow()
            threading.Thread(target=self._watch, args=(self._key("withdrawn"), done), daemon=True).start()
        try:
            self._run(version, party, names, filled)
        finally:
            done.set()
        if self.rank == 0:
            self._await_received(version, names)
        else:
            self.store.set(self._key(f"sent/{self.rank}"), "")

    def _run(self, version: int, party: Party, names: dict[str, str], filled: queue.SimpleQueue[Bucket]) -> None:
        with contextlib.ExitStack() as stack:
            if self.stream is not None:
                torch.cuda.set_device(self.device)
                stack.enter_context(torch.cuda.stream(self.stream))
            with self._unless_withdrawn(version, names):
                self._meet(party, names)
            for lap in range(self.schedule.laps):
                bucket = filled.get()
                bucket.await_last_use()
                with self._unless_withdrawn(version, names):
                    self._send_lap(lap, bucket)
                bucket.mark()
                if bucket.data.numel():
                    self.free.put(bucket)
            if self.stream is not None:
                self.stream.synchronize()

    def _meet(self, party: Party, names: dict[str, str]) -> None:
        """In the present group if it consists of the same, else in a new one."""
        if self.group is not None and self.group.number != party.number:
            self.group.drop()
            self.group = None
        if party != self.party and party.number:
            self.party, self.outgoing = party, self._outgoing(party)
            self.given = [Bucket.of(self.outgoing.bytes, self.device) for _ in range(BUCKETS)]
        if self.group is None and party.number:
            self.group = make_group(
                self.store, party.number, self.rank, party.size, self.device, self.timeout_s, self.withdrawn
            )
            self.members = names

    def _outgoing(self, party: Party) -> Outgoing:
        messages = []
        for engine, (identity, number) in enumerate(zip(party.members, party.wants, strict=True)):
            wants = self.store.get(f"wants/{identity}/{number}") if number else None
            boxes = None if wants is None else unpack_boxes(wants, self.schedule.table)
            messages.append(self.schedule.message(self.rank, engine, boxes))
        return Outgoing(self.schedule, self.rank, messages, self.verify)

    def _send_lap(self, lap: int, bucket: Bucket) -> None:
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        count = self.schedule.rounds_per_lap
        for number in range(lap * count, (lap + 1) * count):
            if self.group is None or self.outgoing is None or self.withdrawn.is_set():
                return
            given = self.given[number % BUCKETS]
            given.await_last_use()
            sizes = self.outgoing.sizes[number]
            packed = self.outgoing.pack(number, bucket.data, given.data)
            got_sizes = [0] * (self.trainers + len(sizes))
            self.group.exchange(nothing, got_sizes, packed, [0] * self.trainers + sizes).wait()
            given.mark()

    # --- who takes part -----------------------------------------------------------------------------------------------

    def _gather(self, version: int) -> tuple[Party, dict[str, str]]:
        """All that take part, in the order in which they came, and their names. Not all of them if withdrawn."""
        deadline = time.monotonic() + self.timeout_s
        names: dict[str, str] = {}
        wants: dict[str, int] = {}
        expected = self.num_receivers
        while len(names) < expected and not self.withdrawn.is_set():
            key = self._key(f"ready/{len(names) + 1}")
            if self.store.check([key]):
                come = json.loads(self.store.get(key))
                names[come["identity"]], wants[come["identity"]] = come["name"], come["wants"]
                expected = self.num_receivers - come["absent"]
                self.spent.append(key)
            elif time.monotonic() > deadline:
                missing = [name for identity, name in self.members.items() if identity not in names]
                self._raise_late("ready", version, missing, expected - len(names))
            else:
                time.sleep(POLL_S)
        self.spent.append(self._key("come"))
        if self.withdrawn.is_set():
            return Party(0, self.trainers, (), ()), names
        same = self.group is not None and self.party is not None and self.members.keys() == names.keys()
        self.groups += not same
        order = self.members if same else names
        return Party(self.groups, self.trainers, tuple(order), tuple(wants[who] for who in order)), names

    def _follow(self) -> Party:
        """What the first rank found out, who may take as long as engines do."""
        key = self._key("group")
        self.store.wait([key], FOREVER)  # many ranks that ask again and again keep the store from its work
        return Party.unpack(self.store.get(key))

    def _watch(self, key: str, done: threading.Event) -> None:
        """In another thread, of ranks that are not told: leave a group that is given up."""
        store = connect(self.store.host, self.store.port, self.timeout_s)
        while not done.wait(WATCH_S):
            if store.check([key]) and not done.is_set():  # else it may be the next publication's turn
                self.withdrawn.set()
                if self.group is not None:
                    self.group.drop()
                return

    @contextlib.contextmanager
    def _unless_withdrawn(self, version: int, names: dict[str, str]) -> Iterator[None]:
        """What fails inside may do so because a member died: that is for others to find out, who withdraw it then."""
        try:
            yield
        except RuntimeError as error:
            if not self.withdrawn.wait(self.timeout_s):
                whom = ", ".join(names.values()) or f"{self.num_receivers} engine processes"
                raise RuntimeError(
                    f"weights of version {version}: {error}; they were on their way to {whom}"
                ) from error

    def _await_received(self, version: int, names: dict[str, str]) -> None:
        deadline = time.monotonic() + self.timeout_s
        waiting = {self._key(f"received/{identity}"): name for identity, name in names.items()}
        waiting |= {self._key(f"sent/{rank}"): f"trainer/{rank}" for rank in range(1, self.trainers)}
        self.spent += waiting
        while not self.store.check(list(waiting)) and not self.withdrawn.is_set():
            is_late = time.monotonic() > deadline
            if is_late and (late := [name for key, name in waiting.items() if not self.store.check([key])]):
                self._raise_late("received", version, late, len(late))
            time.sleep(POLL_S)

    def _raise_late(self, what: str, version: int, names: list[str], count: int) -> NoReturn:
        unknown = count - len(names)
        if unknown > 0:
            names = [*names, f"{unknown} engine process{'es' if unknown > 1 else ''} that never joined"]
        raise TimeoutError(f"weights of version {version}: not {what} within {self.timeout_s:g} s: {', '.join(names)}")

    def _key(self, what: str) -> str:
        return f"{self.publications}/{what}"

    def _set(self, what: str, value: str) -> None:
        key = self._key(what)
        self.spent.append(key)
        self.store.set(key, value)

    def _await_sent(self) -> None:
        if self.sending is None:
            return
        while not self.sending.done():
            self.beat()
            wait([self.sending], BEAT_S)
        self.sending.result()
        self.sending = None
        if self.withdrawn.is_set():  # engines may still be reading
            self.group, self.members, self.party = None, {}, None
        else:
            for key in self.spent:
                self.store.delete_key(key)
        self.spent = []

    def acknowledge(self) -> None:
        """Every engine serves the version, or it was withdrawn. Raises what went wrong in sending it."""
        self._await_sent()
