"""The other nodes of a run as the root sees them: it waits for their agents, and starts children there through them.

Under SLURM, srun has started one agent on each node. Elsewhere the root starts agents on its own machine, each posing
as a node: a rehearsal of a layout of several nodes, with the node's GPUs cut out of this machine's, or on CPU slots.
Roles that are started by hand, or by torchrun, have agents with seats of their own, on this machine too.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prl.config.errors import UserError
from prl.planning.run_plan import RolePlan, RunPlan
from prl.runtime.nodes.door import Door, addresses_of
from prl.runtime.nodes.job_nodes import (
    BY_HAND,
    KEY,
    NODES_FILE,
    Meeting,
    announce,
    host_name,
    job_key,
    nodes_of_step,
    own_hosts,
)
from prl.runtime.nodes.seats import Seat, seats_of_nodes
from prl.runtime.nodes.wire import Message, Wire
from prl.runtime.process.child import Boot
from prl.runtime.process.child_process import log_path
from prl.runtime.process.failures import Failure
from prl.runtime.process.ports import LOOPBACK
from prl.runtime.process.python_path import python_command, python_path
from prl.runtime.process.reaper import MARKER, Reaper
from prl.runtime.process.signals import StopSignals

ANSWER_LIMIT_S = 60.0
STOP_S = 5.0
POLL_S = 0.02
READ_INTERVAL_S = 0.01
JOIN_POLL_S = 0.1


class Node:
    """One other agent, of a node or of some roles. `children` are those of the tree that now lives there."""

    def __init__(self, index: int, seat: Seat, host: str, wire: Wire, signals: StopSignals) -> None:
        self.index, self.seat, self.host, self.wire, self.signals = index, seat, host, wire, signals
        self.children: dict[str, RemoteChild] = {}
        self.answer: Message | None = None
        self.read_s = 0.0

    def read(self) -> None:
        """Take in what has come; at most once in READ_INTERVAL_S, as it is asked for each of hundreds of children."""
        now = time.monotonic()
        if now - self.read_s < READ_INTERVAL_S:
            return
        self.read_s = now
        for message in self.wire.poll():
            if "child" in message:
                child = self.children.get(message["child"])
                if child is not None:  # else of the tree before this one
                    try:
                        child.hear(message)
                    except (KeyError, TypeError):  # no agent of this version says that
                        self.wire.close()
            elif "stop" in message:  # somebody has asked it, where it runs
                self.signals.hear(message["stop"], message["count"], message["left_s"])
            else:
                self.answer = message

    @property
    def lost(self) -> str | None:
        self.read()
        return self.wire.lost

    def lease(self, run_dir: Path) -> dict[str, str]:
        """Endpoints of a tree's roles on this node; none if the node is lost. Raises the UserError of the agent."""
        self.children.clear()
        self.answer = None
        self.wire.send({"do": "lease", "run_dir": str(run_dir)})
        deadline = time.monotonic() + ANSWER_LIMIT_S
        while self.answer is None and self.lost is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if self.answer is not None and "refused" in self.answer:
            raise UserError(**self.answer["refused"])
        return {} if self.answer is None else self.answer["leased"]


class RemotePulse:
    """`Pulse` of a child elsewhere, as its agent reports it."""

    def __init__(self) -> None:
        self.ready = self.saving = False
        self.started_s = self.heard_s = time.monotonic()
        self.silent_then_s = 0.0

    def check(self) -> None:
        """Nothing to look at: reports come by themselves."""

    def silent_s(self) -> float:
        return self.silent_then_s + time.monotonic() - self.heard_s

    def age_s(self) -> float:
        return time.monotonic() - self.started_s


class RemoteChild:
    """What `ChildProcess` is for a child on this node, for one on another. Of a lost node all children are dead."""

    def __init__(self, run_dir: Path, role: RolePlan, node: Node) -> None:
        self.name, self.role, self.node = role.name, role, node
        self.log = log_path(run_dir, role.name, role)
        self.restarts = 0
        self.pulse = RemotePulse()
        self.pid = 0
        self.oom_kills = 0
        self.exit_code: int | None = None
        self.error: dict[str, Any] = {}

    def start(self, boot: Boot, environment: dict[str, str]) -> None:
        """The agent makes the environment, which depends on its node."""
        self.pulse = RemotePulse()
        self.exit_code, self.error = None, {}
        self.node.children[self.name] = self
        self.node.wire.send({"do": "start", "name": self.name, "boot": asdict(boot)})

    def hear(self, message: Message) -> None:
        self.pid, self.oom_kills, self.error = message["pid"], message["oom_kills"], message["error"]
        self.pulse.ready, self.pulse.saving = message["ready"], message["saving"]
        self.pulse.heard_s, self.pulse.silent_then_s = time.monotonic(), message["silent_s"]
        self.exit_code = message["exit"]

    def poll(self) -> int | None:
        self.node.read()
        if self.exit_code is None and self.node.wire.lost is not None:
            self.exit_code = -9
        return self.exit_code

    @property
    def alive(self) -> bool:
        return self.poll() is None

    def terminate(self) -> None:
        self._signal("TERM")

    def kill(self) -> None:
        self._signal("KILL")

    def dump_stacks(self) -> None:
        self._signal("STACKS")

    def _signal(self, name: str) -> None:
        if self.alive:
            self.node.wire.send({"do": "signal", "name": self.name, "signal": name})

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self.alive:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    def snapshot(self) -> dict[str, Any]:
        exit_code = self.poll()
        state = "exited" if exit_code is not None else "ready" if self.pulse.ready else "starting"
        return {"pid": self.pid, "state": state, "exit": exit_code, "restarts": self.restarts, "node": self.node.host}


class Waited:
    """Which seats are free, and which roles have nobody yet."""

    def __init__(self, plan: RunPlan, seats: tuple[Seat, ...]) -> None:
        self.plan, self.seats, self.taken = plan, seats, [seats[0]]

    def is_free(self, index: int) -> bool:
        return any(map(self.seats[index].has, self._without()))

    def take(self, index: int) -> Seat:
        self.taken.append(self.seats[index])
        return self.seats[index]

    def missing(self) -> list[Seat]:
        """The first seat of each role that nobody has."""
        wanted = self._without()
        found = [next(seat for seat in self.seats if seat.has(role) and seat not in self.taken) for role in wanted]
        return list(dict.fromkeys(found))

    def tell(self) -> str:
        lines = [seat.command for seat in self.missing()]
        return "waiting for " + ", ".join(lines) if lines else "all are here"

    def _without(self) -> list[RolePlan]:
        return [role for role in self.plan.roles if not any(seat.has(role) for seat in self.taken)]


class Nodes:
    """All other nodes of a run; none for a run on one. With `seats`, whose first is the root's: all other agents."""

    def __init__(self, seats: tuple[Seat, ...] = ()) -> None:
        self.seats = seats
        self.by_index: dict[int, Node] = {}
        self.address: str | None = None  # of this node, as the others reach it
        self.posing: list[subprocess.Popen[bytes]] = []  # agents that the root itself has started
        self.announced: list[Path] = []
        self._ended = threading.Event()

    def gather(
        self, plan: RunPlan, run_dir: Path, reaper: Reaper, signals: StopSignals, note: Callable[[str], None]
    ) -> Failure | None:
        """Wait until all other nodes have joined. Returns why they could not; None also when a signal came."""
        seats = self.seats or seats_of_nodes(plan)
        if len(seats) == 1:
            return None
        alone = not self.seats and has_no_agents()
        is_one_machine = alone or (bool(self.seats) and plan.num_nodes == 1)
        key = secrets.token_hex(8) if alone else job_key()
        hosts = (LOOPBACK,) if is_one_machine else own_hosts()
        token = secrets.token_hex(16)
        waited = Waited(plan, seats)
        door = Door(addresses_of(hosts), token, len(seats), reaper.marker, waited.is_free)
        try:
            self.announced.append(run_dir / NODES_FILE)
            announce(run_dir, Meeting(key, plan.num_nodes, hosts, door.port, token, machine=host_name()))
            if alone:
                note(f"{plan.num_nodes} nodes, all of them on this machine")
                self._pose(plan, run_dir, key, reaper, signals)
            limit_s = plan.config.deployment.start_timeout_s
            deadline = time.monotonic() + limit_s
            if self.seats:
                note(waited.tell())
            while waited.missing() and not signals.count and time.monotonic() < deadline:
                for arrival in door.arrivals(JOIN_POLL_S):
                    seat = waited.take(arrival.node)
                    self.by_index[arrival.node] = Node(arrival.node, seat, arrival.host, arrival.wire, signals)
                    self.address = arrival.wire.own_address
                    if self.seats:
                        note(f"{seat.name} joined from {arrival.host}; {waited.tell()}")
                lost = self.find_lost(run_dir)  # reads, too, whether somebody has stopped the run there
                if lost is not None:
                    return lost
        finally:
            door.close()
        threading.Thread(target=self._ping, daemon=True).start()
        missing = waited.missing()
        if not missing:
            announce(run_dir, Meeting(key, plan.num_nodes, machine=host_name(), complete=True))
        if signals.count or not missing:
            return None
        names = ", ".join(seat.name.removeprefix("node ") for seat in missing)
        message = f"did not join within deployment.start_timeout_s={limit_s:g}"
        message = f"{waited.tell()}: they {message}" if self.seats else f"node {names} {message}"
        return Failure("node", "agent", missing[0].node, missing[0].node, message, str(run_dir / "logs"))

    def is_here(self, role: RolePlan) -> bool:
        """Whether the root itself starts it."""
        return self.seats[0].has(role) if self.seats else role.node == 0

    def of(self, role: RolePlan) -> Node:
        """Whose agent starts it."""
        return next(node for node in self.by_index.values() if node.seat.has(role))

    def _pose(self, plan: RunPlan, run_dir: Path, key: str, reaper: Reaper, signals: StopSignals) -> None:
        variables = {
            "PYTHONPATH": python_path(),
            KEY: key,
            MARKER: reaper.marker,
        }  # by the marker it is found, should the root die just now
        for node in range(1, plan.num_nodes):
            if signals.count:
                return
            log = run_dir / "logs" / f"agent.{node}.log"
            log.parent.mkdir(exist_ok=True)
            with log.open("ab") as file:
                agent = subprocess.Popen(
                    python_command("prl.runtime.agent", str(run_dir), f"--node={node}"),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **variables, **devices_of(node, plan.config.deployment.gpus_per_node)},
                    start_new_session=True,
                )
            reaper.tell(f"+{agent.pid}")
            self.posing.append(agent)

    def _ping(self) -> None:
        """A thread, because the main one may check a large checkpoint for minutes."""
        while not self._ended.wait(1.0):
            for node in self.by_index.values():
                node.wire.ping()

    def lease(self, run_dir: Path) -> dict[str, str]:
        """Endpoints of a tree's roles on all other nodes. Raises UserError when a port is taken there."""
        return {name: url for node in self.by_index.values() for name, url in node.lease(run_dir).items()}

    def find_lost(self, run_dir: Path) -> Failure | None:
        for node in self.by_index.values():
            why = node.lost
            if why is not None:
                message = f"{node.seat.name} ({node.host}) is lost: {why}"
                message += f" ({node.seat.command})" if node.seat.command else ""
                return Failure("node", "agent", node.seat.node, node.seat.node, message, str(run_dir / "logs"))
        return None

    def end(self, verdict: str = "") -> None:
        """Send the agents home, with what to tell who started them; those that this process has are waited for."""
        self._ended.set()
        for path in self.announced:
            with contextlib.suppress(OSError):  # a disk that became read-only: the agents are sent home all the same
                path.unlink(missing_ok=True)
        for node in self.by_index.values():
            node.wire.send({"do": "end", "verdict": verdict})
            node.wire.close()
        deadline = time.monotonic() + STOP_S
        for agent in self.posing:
            try:
                agent.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()


def has_no_agents() -> bool:
    """Whether nobody else starts agents: neither SLURM, nor a person on other machines."""
    return nodes_of_step() <= 1 and os.environ.get(KEY) != BY_HAND


def devices_of(node: int, gpus_per_node: int) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of an agent that poses as a node on this machine: its cut of what the root has."""
    outer = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = node * gpus_per_node
    names = [str(i) for i in range(first, first + gpus_per_node)]
    if outer is not None:
        names = [name for name in outer.split(",") if name.strip()][first : first + gpus_per_node]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)}
