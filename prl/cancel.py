"""`python -m prl.cancel DIR`: stop a run, or what runs and waits of a sweep; on SLURM and here.

Exit codes: 0: all that ran or waited was told to stop. 1: something runs that could not be told, or nothing ran and
nothing waited. 2: there is no run, no sweep and no directory of them.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from prl.config.console import leave_interrupted, one_line, shield_console
from prl.config.errors import UserError
from prl.config.place_names import a_path
from prl.runtime.directory.files import find_directories, refuse_unreadable
from prl.runtime.directory.identity import signal_process
from prl.runtime.directory.rundir import is_locked
from prl.runtime.directory.status_file import read_status, status_path
from prl.runtime.people.faults import holds_run
from prl.status import cause_of, find_runs, silent_points, state_alone, state_of_point


def main() -> None:
    shield_console()
    try:
        _cancel()
    except KeyboardInterrupt:  # what was told to stop stops
        leave_interrupted()


def _cancel() -> None:
    parser = argparse.ArgumentParser(prog="prl cancel", description=__doc__)
    parser.add_argument("directory", type=a_path, help="a run directory, or that of a sweep")
    directory = parser.parse_args().directory.expanduser().absolute()
    try:
        refuse_no_run(directory)
        jobs = cancel_jobs(directory)
    except UserError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(2)
    runs, others = stop_runs(directory, set(jobs))
    if jobs or runs:
        print(one_line(f"cancelled: {', '.join([*jobs, *runs])}"))
    for other in others:
        print(one_line(other), file=sys.stderr)
    if not (jobs or runs or others):
        print(one_line(f"nothing was running or waiting: {what_it_is(directory)}"), file=sys.stderr)
    sys.exit(0 if (jobs or runs) and not others else 1)


def refuse_no_run(directory: Path) -> None:
    """Raise UserError for what is neither a run nor a sweep, and holds none."""
    from launch.sweep_file import SWEEP_FILE

    refuse_unreadable(directory)
    if directory.is_dir():
        if holds_run(directory) or os.path.exists(directory / SWEEP_FILE) or find_directories(directory, holds_run):
            return
        what, why = f"{one_line(directory)} is no run and no sweep.", "a run has a plan.json, a sweep a sweep.json"
        why += f"; here {'are other files' if any(directory.iterdir()) else 'is nothing'}, and no run below"
    elif os.path.lexists(directory):
        what, why = f"{one_line(directory)} is no directory.", "a run, or a sweep, is named by its directory"
    else:
        what, why = f"There is no directory {one_line(directory)}.", "a run, or a sweep, is named by its directory"
    fix = "python -m prl.status outputs lists runs and sweeps below outputs"
    raise UserError(what, where=one_line(directory), why=why, fix=fix)


def what_it_is(directory: Path) -> str:
    """A run and its state, or a sweep and those of its points."""
    from launch.sweep_file import SWEEP_FILE

    if holds_run(directory):
        status = read_status(directory)
        state, _ = state_alone(directory)
        step = f", step {status['step']}/{status['max_steps']}" if status else ""
        why = cause_of(directory, status)
        return f"{directory} is a run that is {state}{step}" + (f" ({why})" if why else "")
    is_sweep = os.path.exists(directory / SWEEP_FILE)
    silent = silent_points(directory) if is_sweep else {}
    runs = {run.relative_to(directory).as_posix(): run for run in find_runs(directory)}
    states = {name: state for name, (state, _) in silent.items()}
    states |= {name: state_of_point(run, name, silent)[0] for name, run in runs.items()}
    counts = Counter(states.values())
    told = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    kind = "a sweep with" if is_sweep else "no run and no sweep, but holds"
    return f"{directory} is {kind} {len(states)} {'points' if is_sweep else 'runs'} ({told or 'none of them started'})"


def cancel_jobs(directory: Path) -> list[str]:
    """Cancel the jobs of a sweep's points, or of the point that `directory` is. Returns them."""
    from launch.slurm_queue import live_jobs
    from launch.submitting import adopt_if_free
    from launch.sweep_file import SWEEP_FILE, job_of_points, read_sweep

    is_sweep = os.path.exists(directory / SWEEP_FILE)
    adopt_if_free(directory if is_sweep else directory.parent)
    jobs = job_of_points(read_sweep(directory if is_sweep else directory.parent))
    wanted = set(jobs.values()) if is_sweep else {job for name, job in jobs.items() if name == directory.name}
    live = sorted(live_jobs(wanted))
    if live:
        subprocess.run(["scancel", *live], check=True)
    return [f"job {job}" for job in live]


def stop_runs(directory: Path, jobs: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """SIGTERM, which saves a checkpoint, to the runs of this machine; never to a process that is not theirs.

    Args:
        jobs: what was cancelled on SLURM; runs elsewhere are theirs.

    Returns: names of the runs that were told, and a line for each that lives and could not be.
    """
    runs = [directory] if holds_run(directory) else find_directories(directory, holds_run)
    stopped, others = [], []
    for run in runs:
        root = read_status(run).get("root", {})
        if not is_locked(run):
            continue
        where = signal_process(root, signal.SIGTERM)
        if where == "alive":
            stopped.append(run.name)
        elif where == "elsewhere" and not jobs:
            others.append(f"{run.name} runs on {root['host']}: python -m prl.cancel {shlex.quote(str(run))} there")
        elif where != "elsewhere":
            others.append(f"{run.name} is alive, but {status_path(run)} does not say which process it is: {where}")
    return stopped, others


if __name__ == "__main__":
    main()
