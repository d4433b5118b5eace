"""Points on this machine: one after another, or several at a time, each on devices of its own."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import time
from pathlib import Path

from launch.code_copy import freeze_code
from launch.places import refusal
from launch.points import Point, is_to_start
from launch.session import Session
from launch.settings import LauncherSettings
from launch.states import renewed, state_in, take
from prl.config.console import one_line
from prl.config.errors import ConfigError, UserError
from prl.runtime.directory.identity import job_name
from prl.runtime.nodes.job_nodes import without_job
from prl.runtime.process.python_path import python_command
from prl.runtime.process.signals import STOP_SIGNALS, StopSignals

INTERRUPTED = tuple(128 + number for number in STOP_SIGNALS)  # exit codes
POLL_S = 0.2


def device_places(points: list[Point], settings: LauncherSettings) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each point that may run at a time; None: as it is.

    Raises ConfigError when the GPUs do not hold as many as asked for.
    """
    wanted, devices = settings.parallel_points, visible_gpus()
    need = max((point.plan.gpus_per_node * point.plan.num_nodes for point in points), default=1)
    on_cpu = not devices or all(point.config.deployment.device == "cpu" for point in points)
    if on_cpu:
        return [None] * min(1 if wanted == "auto" else wanted, max(len(points), 1))
    fit = len(devices) // need
    if wanted != "auto" and wanted > fit:
        raise ConfigError(
            [
                UserError(
                    f"{wanted} points at a time do not fit on {len(devices)} GPUs.",
                    where=f"hydra.launcher.parallel_points={wanted}",
                    why=f"a point takes up to {need}",
                    fix=f"hydra.launcher.parallel_points={max(fit, 1)}",
                )
            ]
        )
    count = min(fit if wanted == "auto" else wanted, len(points))
    return [",".join(devices[i * need : (i + 1) * need]) for i in range(count)] if count > 1 else [None]


def visible_gpus() -> list[str]:
    """GPUs as CUDA_VISIBLE_DEVICES or nvidia-smi names them; none without either."""
    outer = os.environ.get("CUDA_VISIBLE_DEVICES")
    if outer is not None:
        return [name for name in outer.split(",") if name.strip()]
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    return [str(index) for index, line in enumerate(done.stdout.splitlines()) if line.startswith("GPU ")]


def run_points(session: Session, points: list[Point], places: list[str | None], settings: LauncherSettings) -> None:
    """Each point in a process of its own, from a copy of the code as it is now; one that fails is remembered in the
    session, and the others go on. Where several run at a time, their consoles go to POINT/console.log.

    A signal to this process stops all in order, a second one at once; should it be killed, they die with it. After a
    point that was interrupted otherwise (prl.cancel) no further ones start, and those that run go on. What another
    sweep runs or has done by the time a point's turn comes is left to it.
    """
    frozen = freeze_code(points[0].path.parent, points)
    with StopSignals() as signals:
        agents = Agents(session, signals, points, places, frozen.python_path, settings)
        try:
            while agents.are_more():
                agents.start()
                agents.pass_signals_on()
                agents.stop_late_ones()
                time.sleep(POLL_S)
                agents.collect()
        finally:
            agents.end()
        if agents.ended_by():
            if agents.waiting:
                print(f"not started: {len(agents.waiting)}; the same command starts them", flush=True)
            raise SystemExit(agents.ended_by())


class Agents:
    """Those of a sweep's points, each at a place of its own: devices and CPU cores."""

    def __init__(
        self,
        session: Session,
        signals: StopSignals,
        points: list[Point],
        places: list[str | None],
        python_path: str,
        settings: LauncherSettings,
    ) -> None:
        self.settings, self.in_hand = settings, dict[Path, int]()  # point -> what `take` gave
        self.session, self.signals, self.waiting, self.places = session, signals, list(points), places
        self.python_path, self.cores, self.free = python_path, share_cores(len(places)), list(range(len(places)))
        self.running: dict[int, tuple[Point, subprocess.Popen[bytes]]] = {}
        self.deadlines: dict[int, float] = {}  # place -> when its point has taken settings.timeout_min
        self.late: set[Path] = set()  # points that were stopped then
        self.told = 0  # signals that were passed on
        self.interrupted = 0  # exit code of a point that was, by somebody else

    def ended_by(self) -> int:
        """The exit code of a signal; 0: nothing was interrupted."""
        return self.signals.exit_code if self.signals.count else self.interrupted

    def are_more(self) -> bool:
        return bool(self.running or (self.waiting and not self.ended_by()))

    def start(self) -> None:
        while self.waiting and self.free and not self.ended_by():
            place, point = self.free.pop(0), self.waiting.pop(0)
            console = point.path / "console.log" if len(self.places) > 1 else None
            try:
                if not self.take(point):
                    self.free.append(place)
                    continue
                agent = start_agent(point.path, self.places[place], self.cores[place], self.python_path, console)
            except OSError as error:  # the others may run
                self.free.append(place)
                self.let_go(point)
                _tell_not_started(self.session, point, error)
                continue
            self.running[place] = (point, agent)
            self.deadlines[place] = time.monotonic() + 60 * (self.settings.timeout_min or math.inf)
            if console is not None:
                print(one_line(f"{point.path.name}: started, console in {console}"), flush=True)

    def take(self, point: Point) -> bool:
        """Whether it is still to be started, and by us. Raises OSError."""
        fd = take(point.path)
        state = "active" if fd is None else renewed(state_in(point.path), point.path, point.config)
        if fd is not None:
            self.in_hand[point.path] = fd
        if is_to_start(state, self.settings):
            return True
        self.let_go(point)
        self.session.leave(point.path, state)
        return False

    def let_go(self, point: Point) -> None:
        if point.path in self.in_hand:
            os.close(self.in_hand.pop(point.path))

    def pass_signals_on(self) -> None:
        """Each once, to each agent: they are in sessions of their own and hear nothing from the terminal. One at a
        look: of two that come together, the kernel keeps one.
        """
        if self.told == min(self.signals.count, 2):
            return
        assert self.signals.first is not None
        if not self.told:
            print("stopping: all points save a checkpoint; a second signal ends everything at once", flush=True)
        self.told += 1
        for _, agent in self.running.values():
            agent.send_signal(self.signals.first)

    def stop_late_ones(self) -> None:
        """Those that have taken longer than they may: in order, with a checkpoint, and the others go on."""
        for place, (point, agent) in self.running.items():
            if time.monotonic() > self.deadlines[place] and point.path not in self.late:
                print(one_line(f"{point.path.name}: stopped after {self.settings.timeout_min:g} minutes"), flush=True)
                self.late.add(point.path)
                agent.terminate()

    def collect(self) -> None:
        """Those that have ended."""
        for place, (point, agent) in list(self.running.items()):
            if agent.poll() is not None:
                del self.running[place]
                self.free.append(place)
                self.let_go(point)
                code = exit_code(agent.returncode)
                _tell_end(self.session, point, code)
                if code in INTERRUPTED and point.path not in self.late:
                    self.interrupted = code

    def end(self) -> None:
        for _, agent in self.running.values():
            agent.terminate()
        for point, agent in self.running.values():
            agent.wait()
            self.let_go(point)


def exit_code(returncode: int) -> int:
    """As shells have it, of an agent that a signal ended before it could look for signals, too."""
    return returncode if returncode >= 0 else 128 - returncode


def _tell_end(session: Session, point: Point, code: int) -> None:
    how = "done" if code == 0 else "stopped" if code in INTERRUPTED else f"failed with exit code {code}"
    print(one_line(f"{point.path.name}: {how}"), flush=True)
    if code:
        session.failed[str(point.path)] = code


def _tell_not_started(session: Session, point: Point, error: OSError) -> None:
    told = refusal(error, point.path.parent)
    line = one_line(f"{point.path.name}: not started: {error}")
    print(line if told is None else told.render(), file=sys.stderr, flush=True)
    session.failed[str(point.path)] = 2


def share_cores(count: int) -> list[set[int]]:
    """This process's CPU cores in as many parts; where there are fewer cores than parts, parts share them. Only Linux
    can hold a process to some cores.
    """
    if sys.platform != "linux":
        return [set() for _ in range(count)]
    cores = sorted(os.sched_getaffinity(0))
    if count > len(cores):
        return [{cores[i % len(cores)]} for i in range(count)]
    return [set(cores[i * len(cores) // count : (i + 1) * len(cores) // count]) for i in range(count)]


def start_agent(
    path: Path, devices: str | None, cores: set[int], python_path: str, console: Path | None = None
) -> subprocess.Popen[bytes]:
    """The point's roles take as many threads as there are cores (prl.runtime.process.environment). console: None: ours.
    The SLURM job that this sweep may run in is none of the agent's, but its end leaves no more than KillWait.
    """
    within = [] if job_name() is None else [f"--within={job_name()}"]
    own = {"PYTHONPATH": python_path} | ({} if devices is None else {"CUDA_VISIBLE_DEVICES": devices})
    with contextlib.nullcontext() if console is None else console.open("ab") as output:
        process = subprocess.Popen(
            python_command("prl.runtime.agent", str(path), f"--parent={os.getpid()}", *within),
            env=without_job(os.environ) | own,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    if cores:
        with contextlib.suppress(OSError):  # it has ended; or cores were taken away meanwhile
            os.sched_setaffinity(process.pid, cores)  # what it starts inherits it
    return process
