"""What SLURM says of jobs."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from prl.config.errors import UserError

DEFAULT_MAX_ARRAY_SIZE = 1001  # SLURM's own
MOST_ASKED = 20  # jobs, each by a command of its own, where there is no accounting


def is_configured() -> bool:
    """Whether this machine belongs to a cluster: the programs may be installed without one. A cluster that does not
    answer is one.
    """
    if shutil.which("sbatch") is None:
        return False
    asked = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, check=False, timeout=60)
    return asked.returncode == 0 or "configuration source" not in asked.stderr


def live_jobs(jobs: Collection[str]) -> dict[str, str]:
    """Of these jobs (`123`, `123_4`) those that wait or run, with their state. Raises UserError if squeue fails."""
    return {job: state for job, state in _ask({job.partition("_")[0] for job in jobs}) if job in jobs}


def _ask(parents: set[str]) -> list[tuple[str, str]]:
    """(job, state) of all elements of these jobs that have not ended."""
    if not parents:
        return []
    listing = run_slurm("squeue", "--noheader", "--array", "--format=%i %T", f"--jobs={','.join(sorted(parents))}")
    pairs = [line.split() for line in (listing or "").splitlines()]
    return [(pair[0], pair[1]) for pair in pairs if len(pair) == 2]


@dataclass(frozen=True)
class QueuedJob:
    """One that waits or runs. `reason`: SLURM's word for why it waits, or "". `began`: when it was started last, Unix
    seconds, or None.
    """

    state: str
    reason: str = ""
    began: float | None = None


def queued_jobs(jobs: Collection[str]) -> dict[str, QueuedJob]:
    """As `live_jobs`, with all that the queue says of them."""
    parents = {job.partition("_")[0] for job in jobs}
    if not parents:
        return {}
    asked = ("--noheader", "--array", "--format=%i|%T|%S|%r", f"--jobs={','.join(sorted(parents))}")
    found = {}
    for line in (run_slurm("squeue", *asked) or "").splitlines():
        job, state, began, reason = (*line.strip().split("|", 3), "", "", "")[:4]
        if job in jobs:
            found[job] = QueuedJob(state, "" if reason == "None" else reason, _unix(began))
    return found


def _unix(time: str) -> float | None:
    """Of what SLURM writes of a time: none (N/A), or in a form of the user's own (SLURM_TIME_FORMAT)."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return None


def how_jobs_ended(jobs: Collection[str]) -> dict[str, str]:
    """State and exit code of jobs that have ended, as far as accounting or, for some minutes, the controller knows.

    An element of an array that never started may have no row of its own there: it is in that of the array.
    """
    if not jobs:
        return {}
    found: dict[str, str] = {}
    asked = ",".join(sorted({*jobs, *(job.partition("_")[0] for job in jobs)}))
    listing = _ask_or_nothing("sacct", "-nXP", "--format=JobID,State,ExitCode", f"--jobs={asked}")
    for line in listing.splitlines():
        job, state, code = (*line.split("|"), "", "")[:3]
        found[job] = _told_end(state, code)
    arrays = {name.partition("_")[0]: end for name, end in found.items() if name.partition("_")[2][:1] in ("", "[")}
    for job in jobs:
        if job not in found and "_" in job and job.partition("_")[0] in arrays:
            end = arrays[job.partition("_")[0]]
            found[job] = "cancelled while it waited" if end.startswith(("PENDING", "RUNNING")) else end
    for job in [job for job in jobs if job not in found][:MOST_ASKED]:
        told = dict(re.findall(r"(JobState|ExitCode)=(\S+)", _ask_or_nothing("scontrol", "-o", "show", "job", job)))
        if "JobState" in told:
            found[job] = _told_end(told["JobState"], told.get("ExitCode", ""))
    return found


def _told_end(state: str, code: str) -> str:
    """`code` is EXIT_CODE:SIGNAL."""
    exit_code, _, number = code.partition(":")
    if number not in ("", "0"):
        return f"{state}, signal {number}"
    return f"{state}, exit code {exit_code}" if exit_code else state


def _ask_or_nothing(*command: str) -> str:
    try:
        return run_slurm(*command) or ""
    except UserError:
        return ""


def max_array_size() -> int:
    """One more than the highest index that an array may have here."""
    found = re.search(r"MaxArraySize\s*=\s*(\d+)", run_slurm("scontrol", "show", "config") or "")
    return int(found.group(1)) if found else DEFAULT_MAX_ARRAY_SIZE


def run_slurm(*command: str) -> str | None:
    """What a command of SLURM prints; None for jobs that it does not know (any more).

    Raises UserError when SLURM cannot be asked.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise UserError(f"SLURM cannot be asked: {error}", where=command[0], fix="try from a login node") from error
    if done.returncode and "Invalid job id" in done.stderr:
        return None
    if done.returncode:
        raise UserError(
            f"{command[0]} failed: {done.stderr.strip()}",
            where=" ".join(command),
            why="SLURM's controller does not answer, or refuses",
            fix="sinfo shows whether it is up",
        )
    return done.stdout
