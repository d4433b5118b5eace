"""What SLURM says of jobs."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Collection

from prl.config.errors import UserError

DEFAULT_MAX_ARRAY_SIZE = 1001  # SLURM's own


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
