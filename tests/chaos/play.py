"""One round: start the job, hit somebody, see that all ends, start it again, and look at what is there."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from check import check_points, check_truth, points_of
from disk import SmallDisk
from jobs import END_S, Job, LocalJob, SlurmJob
from rounds import ENGINE_RESTART, SMALL, Round
from runs import environment, rows, with_faults

GONE_S = 60.0  # for its last process
STOPPED_S = 2.0  # SIGSTOP until SIGCONT


@dataclass
class Told:
    """What a round left to tell."""

    name: str
    hit: bool = False  # the victim was there when its time came
    code: int = 0
    state: str = ""
    failure: str | None = None  # class
    role: str | None = None  # whom the failure blames
    resumed: bool = False  # by the same command
    again: int = 0  # steps that had been done already
    resume_s: float | None = None  # from that start to the first new step
    problems: list[str] = field(default_factory=list)


def play(drawn: Round, folder: Path, cache: Path, reference: Path | None) -> Told:
    """Play a round in an empty folder. reference: an undisturbed run of the synchronous job."""
    folder.mkdir(parents=True)
    told = Told(drawn.name)
    with SmallDisk(folder / "disk", wanted=drawn.victim == "disk") as disk:
        home = folder / "disk" if drawn.victim == "disk" else folder
        arguments = arguments_of(drawn, home, cache)
        job = start(drawn, arguments, folder, environment_of(drawn, folder), drawn.signal == "terminal closed")
        try:
            wait_for_the_time(drawn, folder, job)
            told.hit = hit(drawn, job, folder, disk)
        finally:
            (folder / "go").touch()
        code = job.wait()
        told.code = 999 if code is None else code
        if code is None:
            told.problems.append(f"still running {END_S:.0f} s later")
            job.kill()
        disk.free()
        check_gone(folder, told)
        check_truth(drawn, home, told)
        if isinstance(job, SlurmJob) and told.code == 0 and (began := job.began_again()) is not None:
            told.resumed, told.resume_s = True, time_to_a_row(points_of(drawn, home), began)
        if told.code != 0:
            resume(drawn, arguments, folder, home, told)
        if not told.problems:
            told.problems += check_points(drawn, home, reference)
    return told


def start(drawn: Round, arguments: list[str], folder: Path, env: dict[str, str], terminal: bool = False) -> Job:
    """The command of a round."""
    return SlurmJob(arguments, folder, env) if drawn.deployment.slurm else LocalJob(arguments, folder, env, terminal)


def arguments_of(drawn: Round, home: Path, cache: Path) -> list[str]:
    arguments = [*SMALL, f"cache_dir={cache}", *drawn.deployment.overrides]
    if drawn.deployment.slurm or drawn.deployment.points > 1:
        return ["-m", *arguments]
    return [*arguments, f"output_dir={home}/run"]


def environment_of(drawn: Round, folder: Path) -> dict[str, str]:
    if drawn.moment is None:
        return environment()
    name, _, count = drawn.moment.rpartition(":")
    if drawn.victim == "http":
        return with_faults("network", HTTP_ROUTE=name, HTTP_COUNT=count, HTTP_FAULT=drawn.signal, FAULT_DIR=str(folder))
    return with_faults("moments", MOMENT=drawn.moment, MOMENT_DIR=str(folder))


def wait_for_the_time(drawn: Round, folder: Path, job: Job) -> None:
    """Until somebody comes to the moment, or the job is over without."""
    if drawn.victim == "http":
        return
    if drawn.moment is not None and drawn.moment.startswith(ENGINE_RESTART):
        kill_an_engine(drawn, folder, job)
    while drawn.moment is not None and not (folder / "reached").exists() and not job.ended():
        time.sleep(0.01)
    deadline = time.monotonic() + drawn.delay_s
    while time.monotonic() < deadline and not job.ended():
        time.sleep(0.01)


def kill_an_engine(drawn: Round, folder: Path, job: Job) -> None:
    """When the job is under way."""
    going: list[Path] = []
    while not job.ended() and not going:
        going = [run for run in points_of(drawn, folder) if rows(run, "trainer.0")]
        time.sleep(0.05)
    root = job.root()
    pid = None if root is None or not going else find(root, "inference/0", going[0])
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


def hit(drawn: Round, job: Job, folder: Path, disk: SmallDisk) -> bool:
    """Whether there was somebody to be hit."""
    if drawn.victim == "http":
        job.wait()
        return (folder / "reached").exists()
    if job.ended():
        return False
    if drawn.victim == "disk":
        disk.fill()
        return True
    if isinstance(job, LocalJob) and drawn.signal == "terminal closed":
        job.close_terminal()
        return True
    if isinstance(job, SlurmJob) and drawn.victim == "job":
        job.disturb(drawn.signal)
        return True
    root = job.root()
    pid = root if root is None or drawn.victim == "root" else find(root, drawn.victim)
    if pid is None:
        return False
    try:
        send(pid, drawn.signal)
    except ProcessLookupError:
        return False
    return True


def send(pid: int, how: str) -> None:
    if how == "TERM twice":
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.2)
        os.kill(pid, signal.SIGTERM)
    elif how == "STOP":
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        os.kill(pid, signal.SIGCONT)
    else:
        os.kill(pid, getattr(signal, f"SIG{how}"))


def find(root: int, victim: str, run: Path | None = None) -> int | None:
    """The process of a role (of this run), or the reaper or the second node's agent, among the root's descendants."""
    special = {"reaper": ["reaper.py"], "agent": ["prl.runtime.agent", "--node=1"]}
    marks = special.get(victim, ["prl.runtime.process.child", victim]) + ([] if run is None else [str(run)])
    try:
        family = psutil.Process(root).children(recursive=True)
    except psutil.NoSuchProcess:  # it has just ended
        return None
    for process in family:
        try:
            line = process.cmdline()
        except psutil.Error:
            continue
        if all(any(part.endswith(mark) for part in line) for mark in marks):
            return process.pid
    return None


def check_gone(folder: Path, told: Told) -> None:
    deadline = time.monotonic() + GONE_S
    while (left := processes_in(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        told.problems.append(f"{len(left)} processes are left, first {left[0]}")


def processes_in(folder: Path) -> list[str]:
    """Command lines of living processes that work in the folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()).is_relative_to(folder):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def resume(drawn: Round, arguments: list[str], folder: Path, home: Path, told: Told) -> None:
    """The same command again: undisturbed, or killed once more before that."""
    if drawn.again_s is not None:
        again = LocalJob(arguments, folder, environment())
        deadline = time.monotonic() + drawn.again_s
        while not again.ended() and time.monotonic() < deadline:
            time.sleep(0.01)
        if (root := again.root()) is not None:
            os.kill(root, signal.SIGKILL)
        again.wait()
        check_gone(folder, told)
    runs, began = points_of(drawn, home), time.time()
    reached = {run: max((row["step"] for row in rows(run, "trainer.0")), default=0) for run in runs}
    size = (folder / "console.log").stat().st_size
    job = start(drawn, arguments, folder, environment())
    code = job.wait()
    output = (folder / "console.log").read_bytes()[size:].decode(errors="replace")
    if code != 0:
        told.problems.append(f"resuming ended with {code}: {output[-1500:]}")
        job.kill()
        return
    new = {run: rows_after(run, began) for run in points_of(drawn, home)}
    told.resumed = True
    told.again = max((reached.get(run, 0) + 1 - found[0]["step"] for run, found in new.items() if found), default=0)
    told.resume_s = time_to_a_row(points_of(drawn, home), began)
    check_gone(folder, told)


def rows_after(run: Path, began: float) -> list[dict[str, Any]]:
    return [row for row in rows(run, "trainer.0") if row["time"] > began]


def time_to_a_row(runs: list[Path], began: float) -> float | None:
    """Seconds from there to the first step after it."""
    return min((found[0]["time"] - began for run in runs if (found := rows_after(run, began))), default=None)
