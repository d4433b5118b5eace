"""`python -m prl.cancel DIR`: stop a run, or what runs and waits of a sweep; on SLURM and here."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

from prl.config.errors import UserError
from prl.runtime.rundir import is_locked
from prl.runtime.status_file import read_status
from prl.status import find_runs, status_path


def main() -> None:
    parser = argparse.ArgumentParser(prog="prl cancel", description=__doc__)
    parser.add_argument("directory", type=Path, help="a run directory, or that of a sweep")
    directory = parser.parse_args().directory.absolute()
    try:
        jobs = cancel_jobs(directory)
    except UserError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(2)
    runs = stop_runs(directory)
    print(f"cancelled: {', '.join([*jobs, *runs]) or 'nothing was running or waiting'}")


def cancel_jobs(directory: Path) -> list[str]:
    """Cancel the jobs of a sweep's points, or of the point that `directory` is. Returns them."""
    from launch.points import SWEEP_FILE, job_of_points, read_sweep
    from launch.slurm_queue import live_jobs

    is_sweep = (directory / SWEEP_FILE).exists()
    jobs = job_of_points(read_sweep(directory if is_sweep else directory.parent))
    wanted = set(jobs.values()) if is_sweep else {job for name, job in jobs.items() if name == directory.name}
    live = sorted(live_jobs(wanted))
    if live:
        subprocess.run(["scancel", *live], check=True)
    return [f"job {job}" for job in live]


def stop_runs(directory: Path) -> list[str]:
    """SIGTERM, which saves a checkpoint, to the runs of this machine. Returns their names."""
    runs = [directory] if status_path(directory).exists() else find_runs(directory)
    stopped = []
    for run in runs:
        pid = read_status(run).get("root_pid")
        if pid and is_locked(run) and Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGTERM)
            stopped.append(run.name)
    return stopped


if __name__ == "__main__":
    main()
