"""`python -m prl.runtime.afterwards --list FILE --code N`: what the batch script of a SLURM job does after its step.

An agent that was killed (SIGKILL, the kernel for want of memory) cannot tell its end, and cannot requeue its job. The
batch script outlives it: here the attempt is concluded for it, as a failure of the node that may pass, or of memory.
Nothing is done for an attempt that has told its own end, and for a job that SLURM ends.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from prl.config.console import shield_console
from prl.config.errors import UserError
from prl.config.place_names import a_path
from prl.runtime.agent import choose, conclude, read_plan
from prl.runtime.directory.identity import job_name
from prl.runtime.directory.status_file import read_attempts, status_path
from prl.runtime.nodes.slurm_job import requeue, state_of
from prl.runtime.process.failures import log_tail
from prl.runtime.process.reaper import record_root_death

RUNNING = "RUNNING"  # what a job is while its batch script goes on, and nobody ends it or sends it back to the queue
OOM_TEXTS = ("oom_kill", "oom-kill", "OOM Killed")  # slurmstepd's, and srun's


def main() -> None:
    shield_console()
    parser = argparse.ArgumentParser(prog="prl afterwards", description=__doc__)
    parser.add_argument("--list", type=a_path, required=True, help="a file of run directories, as the agent's")
    parser.add_argument("--code", type=int, required=True, help="the exit code of srun")
    arguments = parser.parse_args()
    job = job_name()
    try:
        if job is not None and is_unconcluded(path := choose(arguments.list).absolute(), job):
            conclude_killed(path, job, arguments.code, arguments.list.parent / f"{job}.log")
    except UserError as error:
        print(error.render(), file=sys.stderr)
    sys.exit(arguments.code)


def is_unconcluded(path: Path, job: str) -> bool:
    """Whether the last attempt at a point was this job's, and has not told its end, and SLURM does not end the job."""
    attempts = read_attempts(path)
    mine = bool(attempts) and attempts[-1].get("job") == job and "ended" not in attempts[-1]
    return mine and state_of(job) == RUNNING


def conclude_killed(path: Path, job: str, code: int, log: Path) -> None:
    """Write down how the attempt ended, and requeue its job if it may go on. Raises UserError for a damaged plan."""
    plan, before = read_plan(path), read_attempts(path)[:-1]
    kind, message = "node", f"the root process was killed (srun: exit code {code})"
    if any(text in line for line in log_tail(log) for text in OOM_TEXTS):
        kind, message = "oom", "the job ran out of its memory; hydra.launcher.slurm.mem=SIZE asks for more"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # none yet, or a damaged one
        record_root_death(str(status_path(path)), kind, message)
    if conclude(plan, path, job, before, code, failure={"class": kind, "message": message}):
        requeue(job)


if __name__ == "__main__":
    main()
