"""The agent of a node that is not the first: starts, watches and ends this node's children as the root tells it.

The root decides; the agent reports. When the root is gone, everything here is ended. Signals are the root's business:
a scheduler sends them to every node, and the root is told too. Agents that people or torchrun have started, with a
seat of their own, pass on what they are told.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from prl.config.errors import UserError
from prl.planning.run_plan import RunPlan, plan_from_json
from prl.runtime.directory.rundir import is_locked
from prl.runtime.nodes.door import knock
from prl.runtime.nodes.job_nodes import BY_HAND, NODES_FILE, connect, host_name, job_key, read_meeting
from prl.runtime.nodes.seats import LEADERS, Seat, commands_by_hand
from prl.runtime.nodes.wire import Message, Wire
from prl.runtime.process.child import WANDB, Boot
from prl.runtime.process.child_process import ChildProcess
from prl.runtime.process.environment import child_environment
from prl.runtime.process.ports import Leases, lease_ports
from prl.runtime.process.reaper import Reaper
from prl.runtime.process.restarts import why_final
from prl.runtime.process.signals import STOP_SIGNALS, StopSignals

POLL_S = 0.02
REPORT_INTERVAL_S = 1.0  # of a child with no news
STOP_S = 5.0
NOT_JOINED = "not joined"


def serve_node(run_dir: Path, node: int, limit_s: float) -> int:
    """Take part in the run that lives in `run_dir` as its node `node`, to its end. Returns the exit code.

    Raises UserError if no root is found within `limit_s`.
    """
    if job_key() != BY_HAND:
        leave_signals_to_the_root()
    deadline = time.monotonic() + limit_s
    while (found := connect(run_dir, deadline, limit_s)) is not None:
        connection, meeting = found
        try:
            wire, marker = knock(connection, meeting.token, node, host_name(), os.getpid(), limit_s)
        except ConnectionError:  # crowded out by others, or it was somebody else's port
            time.sleep(POLL_S)
            continue
        if marker is None:
            return 0
        leave_signals_to_the_root()  # before, whoever has started this by hand may end it
        return NodeAgent(wire, Seat(f"node {node}", node), marker).run()
    return 0


def serve_seat(run_dir: Path, plan: RunPlan, index: int, seat: Seat, signals: StopSignals) -> str | None:
    """Take part in a run whose roles others have started, to its end. Returns how it ended; None: nobody told;
    NOT_JOINED: a signal came before there was a run.

    Args:
        index: of the seat, among those that the root has worked out from the same plan.

    Raises UserError if no root is found within the start timeout, or where this seat cannot be.
    """
    limit_s = plan.config.deployment.start_timeout_s
    deadline = time.monotonic() + limit_s

    def is_over() -> bool:
        refuse_taken(run_dir, seat)
        return signals.count > 0

    leader = "" if LEADERS[plan.config.job] in (seat.roles or ()) else commands_by_hand(plan, run_dir)[0]
    while not signals.count and (found := connect(run_dir, deadline, limit_s, is_over, leader)) is not None:
        connection, meeting = found
        if plan.num_nodes == 1 and meeting.machine != host_name():
            connection.close()
            raise UserError(
                f"The run's root is on {meeting.machine}, and this is {host_name()}.",
                where=str(run_dir / NODES_FILE),
                why="the plan has one node, so all of its roles are on one machine",
                fix="start them there; a point of several machines is frozen with deployment=multi_node",
            )
        try:
            wire, marker = knock(connection, meeting.token, index, host_name(), os.getpid(), limit_s)
        except ConnectionError:
            time.sleep(POLL_S)
            continue
        if marker is None:
            raise _taken(run_dir, seat)
        agent = NodeAgent(wire, seat, marker, signals)
        agent.run()
        return agent.verdict
    return NOT_JOINED if signals.count else None


def refuse_taken(run_dir: Path, seat: Seat) -> None:
    """Raise UserError where the run is alive and all of its roles have somebody. A root that was killed leaves the same
    word, and no lock.
    """
    meeting = read_meeting(run_dir)
    if meeting is not None and meeting.complete and is_locked(run_dir):
        raise _taken(run_dir, seat)


def _taken(run_dir: Path, seat: Seat) -> UserError:
    return UserError(
        f"{seat.name} has somebody already.",
        where=str(run_dir / NODES_FILE),
        why="another process has joined the run for the same roles",
        fix="end this one or that one; each role is started once",
    )


def leave_signals_to_the_root() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class NodeAgent:
    """One agent of one run. `run` is called once."""

    def __init__(self, wire: Wire, seat: Seat, marker: str, signals: StopSignals | None = None) -> None:
        """`signals`: which the root is told of; None: they are ignored already."""
        self.wire, self.seat, self.marker, self.signals = wire, seat, marker, signals
        self.passed_on = 0
        self.verdict: str | None = None
        self.reaper = Reaper(marker, None)
        self.leases = Leases()
        self.plan: RunPlan | None = None
        self.run_dir = Path()
        self.children: dict[str, ChildProcess] = {}
        self.told: dict[str, tuple[float, Message]] = {}  # child -> when it was last reported, and how
        self.ended = False

    def run(self) -> int:
        try:
            while not self.ended and self.wire.lost is None:
                for message in self.wire.poll():
                    self.obey(message)
                self.report()
                self.pass_signals_on()
                self.reaper.revive()
                self.wire.ping()
                time.sleep(POLL_S)
        finally:
            self.forget_children()
            self.reaper.finish()
            self.wire.close()
        return 0 if self.ended else 1

    def obey(self, message: Message) -> None:
        do = message["do"]
        if do == "lease":
            self.lease(Path(message["run_dir"]))
        elif do == "start":
            self.start(message["name"], message["boot"])
        elif do == "signal":
            child = self.children[message["name"]]
            {"TERM": child.terminate, "KILL": child.kill, "STACKS": child.dump_stacks}[message["signal"]]()
        elif do == "end":
            self.ended, self.verdict = True, message.get("verdict")

    def pass_signals_on(self) -> None:
        signals = self.signals
        if signals is not None and signals.count > self.passed_on:
            self.passed_on = signals.count
            left_s = signals.seconds_left()
            limit_s = None if left_s == float("inf") else left_s
            self.wire.send({"stop": signals.first, "count": signals.count, "left_s": limit_s})

    def lease(self, run_dir: Path) -> None:
        """A new tree begins (the warm start, then the job): its ports on this node, or why they are not to be had."""
        self.forget_children()
        self.run_dir = run_dir
        self.plan = plan_from_json((run_dir / "plan.json").read_text())
        try:
            self.leases = lease_ports(self.plan, self.seat.has, self.wire.own_address)
        except UserError as error:
            parts = {"what": error.what, "where": error.where, "why": error.why, "fix": error.fix}
            self.wire.send({"refused": parts})
            return
        self.wire.send({"leased": self.leases.endpoints})

    def start(self, name: str, boot: dict[str, Any]) -> None:
        assert self.plan is not None
        assert name != WANDB, "the mirror lives on the first node"
        role = next(role for role in self.plan.roles if role.name == name)
        child = self.children.get(name) or ChildProcess(self.run_dir, name, role, self.reaper)
        leased = self.leases.socket_for(name)
        listen_fd = None if leased is None else leased.fileno()
        environment = child_environment(self.plan, role, self.marker, self.wire.own_address)
        child.start(Boot.from_json(boot | {"root_pid": os.getpid(), "listen_fd": listen_fd}), environment)
        self.children[name] = child
        self.told.pop(name, None)
        if why_final(self.plan.config, role.role):  # else it may be started again, and needs its socket then
            self.leases.release(name)

    def report(self) -> None:
        """What has changed about the children; all of it once a second."""
        for name, child in self.children.items():
            state = self.state_of(child)
            told_s, before = self.told.get(name, (0.0, {}))
            fresh = {"silent_s": 0.0}
            if before | fresh != state | fresh or (child.alive and time.monotonic() - told_s >= REPORT_INTERVAL_S):
                self.told[name] = (time.monotonic(), state)
                self.wire.send({"child": name, **state})

    def state_of(self, child: ChildProcess) -> Message:
        exit_code = child.poll()
        child.pulse.check()  # of a dead one, too: it may have been ready for a moment
        return {
            "pid": child.popen.pid,
            "ready": child.pulse.ready,
            "saving": child.pulse.saving,
            "silent_s": child.pulse.silent_s(),
            "exit": exit_code,
            "error": child.error,
            "oom_kills": child.oom_kills,
        }

    def forget_children(self) -> None:
        """Whatever lives of an earlier tree ends here."""
        for child in self.children.values():
            child.kill()
        for child in self.children.values():
            child.wait(STOP_S)
        self.children.clear()
        self.told.clear()
        self.leases.close()
