"""How points ended that cannot say so themselves: their job died before its agent, or with it, or never was."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from launch.slurm_queue import how_jobs_ended, live_jobs
from launch.sweep_file import job_of_points, refused_points
from prl.config.console import one_line
from prl.config.errors import UserError
from prl.runtime.directory.status_file import status_path
from prl.runtime.people.faults import UNREADABLE, find_faults
from prl.runtime.process.failures import log_tail

SLURM_SAYS = re.compile(r"^(srun|slurmstepd|slurmd)[^:]*: (error|fatal): ")
NO_WORD = "its job is gone without a last word"


def points_without_word(sweep_dir: Path, sweep: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Points of a sweep's record that do not tell of themselves, by name: state and why. "queued" while SLURM has a job
    for them that has not told of itself yet; if they never started "missing" (their job has ended), "refused" (sbatch
    did not take it), "planned", or "unreadable".
    """
    jobs, refused = job_of_points(sweep), refused_points(sweep)
    try:
        live = live_jobs(set(jobs.values()))
    except UserError:  # no SLURM here: the record is all there is
        live = {}
    found, gone = {}, {}
    for point in sweep["points"]:
        name = point["dir"]
        has_begun, job = os.path.exists(status_path(sweep_dir / name)), jobs.get(name, "")
        state = live.get(job)
        if state == "PENDING" or (state is not None and not has_begun):
            found[name] = ("queued", "")
        elif not has_begun and name in refused:
            found[name] = ("refused", refused[name])
        elif not has_begun and job:
            gone[name] = job
        elif not has_begun:
            found[name] = ("planned", "")
    ends = why_gone(sweep_dir, gone.values())
    found |= {name: ("missing", ends[job]) for name, job in gone.items()}
    for name in [name for name, (state, _) in found.items() if state in ("missing", "planned")]:
        if faults := find_faults(sweep_dir / name):
            found[name] = (UNREADABLE, "; ".join(faults))
    return found


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
