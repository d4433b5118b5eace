"""`python -m prl.cancel DIR`: stop a run, or what runs and waits of a sweep; on SLURM and here."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from prl.config.console import one_line, shield_console
from prl.config.errors import UserError
from prl.runtime.directory.identity import signal_process
from prl.runtime.directory.rundir import is_locked
from prl.runtime.directory.status_file import read_status
from prl.status import find_runs, status_path


def main() -> None:
    shield_console()
    parser = argparse.ArgumentParser(prog="prl cancel", description=__doc__)
    parser.add_argument("directory", type=Path, help="a run directory, or that of a sweep")
    directory = parser.parse_args().directory.absolute()
    try:
        if not directory.is_dir():
            raise UserError(f"there is no directory {directory}", where="prl cancel", fix="ls outputs outputs/sweeps")
        jobs = cancel_jobs(directory)
    except UserError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(2)
    runs, others = stop_runs(directory, set(jobs))
    print(one_line(f"cancelled: {', '.join([*jobs, *runs]) or 'nothing was running or waiting'}"))
    for other in others:
        print(one_line(other), file=sys.stderr)
    sys.exit(1 if others else 0)


def cancel_jobs(directory: Path) -> list[str]:
    """Cancel the jobs of a sweep's points, or of the point that `directory` is. Returns them."""
    from launch.slurm_queue import live_jobs
    from launch.sweep_file import SWEEP_FILE, job_of_points, read_sweep

    is_sweep = (directory / SWEEP_FILE).exists()
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
    runs = [directory] if status_path(directory).exists() else find_runs(directory)
    stopped, others = [], []
    for run in runs:
        root = read_status(run).get("root", {})
        if not is_locked(run):
            continue
        where = signal_process(root, signal.SIGTERM)
        if where == "alive":
            stopped.append(run.name)
        elif where == "elsewhere" and not jobs:
            others.append(f"{run.name} runs on {root['host']}: python -m prl.cancel {run} there")
        elif where != "elsewhere":
            others.append(f"{run.name} is alive, but {status_path(run)} does not say which process it is: {where}")
    return stopped, others


if __name__ == "__main__":
    main()
