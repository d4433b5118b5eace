"""How points ended that cannot say so themselves: their job died before its agent, or with it, or never was."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from launch.slurm_queue import QueuedJob, how_jobs_ended, queued_jobs
from launch.sweep_file import job_of_points, refused_points
from prl.config.console import one_line
from prl.config.errors import UserError
from prl.runtime.directory.ledger import last_failure
from prl.runtime.directory.status_file import FINAL_STATES, read_status, status_path
from prl.runtime.people.faults import MISSING, NOT_STARTED, PLAN, UNREADABLE, find_faults
from prl.runtime.process.failures import log_tail

SLURM_SAYS = re.compile(r"^(srun|slurmstepd|slurmd)[^:]*: (error|fatal): ")
NO_WORD = "its job is gone without a last word"


def points_without_word(sweep_dir: Path, sweep: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Points of a sweep's record of which SLURM knows more than they tell of themselves, by name: state and why.

    "queued" while SLURM has a job for them that waits, or has not told of itself yet; "suspended"; "starting" where the
    job of a point that had ended runs again. While its job has not ended, and SLURM may start it again, the state in
    which the point ended, or "lost" for one that has not told its end (its lock says whether it lives). If they never
    started "missing" (their job has ended, or they have no plan), "refused" (sbatch did not take it), "not started", or
    "unreadable".
    """
    jobs, refused = job_of_points(sweep), refused_points(sweep)
    try:
        live = queued_jobs(set(jobs.values()))
    except UserError:  # no SLURM here: the record is all there is
        live = {}
    found: dict[str, tuple[str, str]] = {}
    gone: dict[str, str] = {}
    for point in sweep["points"]:
        name = point["dir"]
        has_begun, job = os.path.exists(status_path(sweep_dir / name)), jobs.get(name, "")
        if job in live:
            if told := _of_live_job(job, live[job], sweep_dir / name if has_begun else None):
                found[name] = told
        elif not has_begun and name in refused:
            found[name] = ("refused", refused[name])
        elif not has_begun and job:
            gone[name] = job
        elif not has_begun:
            has_plan = os.path.lexists(sweep_dir / name / PLAN)
            refusal = last_failure(sweep_dir / name)  # of an attempt that was over before it began
            found[name] = (NOT_STARTED, refusal) if has_plan else (MISSING, f"there is no {name}/{PLAN}")
    ends = why_gone(sweep_dir, gone.values())
    found |= {name: (MISSING, ends[job]) for name, job in gone.items()}
    for name in [name for name, (state, _) in found.items() if state in (MISSING, NOT_STARTED)]:
        if faults := find_faults(sweep_dir / name):
            found[name] = (UNREADABLE, "; ".join(faults))
    return found


def _of_live_job(job: str, queued: QueuedJob, begun: Path | None) -> tuple[str, str] | None:
    """State and why of its point; None where what that tells is enough. `begun`: its directory, if it has begun."""
    if queued.state == "PENDING":
        return "queued", _why_it_waits(job, queued.reason)
    if queued.state == "SUSPENDED":
        return "suspended", f"job {job} is suspended: scontrol resume {job} lets it go on"
    if begun is None:
        return "queued", ""
    status = read_status(begun)
    if not status or status["state"] == "done":
        return None
    if queued.state != "COMPLETING" and queued.began is not None and queued.began > status["updated"]:
        return "starting", f"job {job} runs again"
    return status["state"] if status["state"] in FINAL_STATES else "lost", f"job {job} has not ended yet"


def _why_it_waits(job: str, reason: str) -> str:
    if "held" in reason.lower():
        lets_go = "an administrator lets it go" if "admin" in reason.lower() else f"scontrol release {job} lets it go"
        return f"job {job} is held ({reason}): {lets_go}"
    return f"job {job} waits: {reason}" if reason else ""


def why_gone(sweep_dir: Path, jobs: Collection[str]) -> dict[str, str]:
    """Of jobs that have ended, in one line each: what SLURM and their logs say of it."""
    ended = how_jobs_ended(jobs)
    return {job: _tell(job, ended, sweep_dir / "slurm" / f"{job}.log") for job in jobs}


def _tell(job: str, ended: Mapping[str, str], log: Path) -> str:
    lines = [line.strip() for line in log_tail(log) if line.strip()]
    last = next((line for line in lines if SLURM_SAYS.match(line)), lines[-1] if lines else "")
    where = f"{log.parent.name}/{log.name}"
    said = f"{last} ({where})" if last else f"{where} is empty" if os.path.exists(log) else f"there is no {where}"
    return one_line(f"job {job}: {ended.get(job) or 'SLURM knows nothing of it any more'}; {said}")


def why_lost(run_dir: Path, job: str) -> str:
    """Of a run whose attempt was this job's ("" for none): what is known of its end."""
    if not job:
        return "its processes are gone without a last word: killed, or with their machine"
    folder = run_dir if os.path.isdir(run_dir / "slurm") else run_dir.parent
    return f"{NO_WORD}: {why_gone(folder, [job])[job]}"
