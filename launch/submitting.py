"""Between sbatch and the record of its job: a job that no record names could be neither cancelled nor left alone.

Signals wait until the record is made. For a command that is killed meanwhile, `slurm/N.submitting` has what was to be
recorded; whoever looks at the sweep next finds the job in SLURM's queue by its script, and records it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.slurm_queue import run_slurm
from launch.sweep_file import read_sweep, record_job
from prl.config.console import one_line
from prl.config.errors import UserError
from prl.runtime.directory.files import read_object, replace_file

# in the sweep's directory; held from the look at its points to the record of the last that is ours
SUBMIT_LOCK = ".submit.lock"
SUFFIX = ".submitting"
FORGOTTEN_AFTER_S = 3600.0  # a controller that was down may still take a job some minutes after sbatch was killed
TOLD_AFTER_S = 5.0
HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Signals that would end this command take effect at the end. Programs that it starts do not get them either."""
    came: list[int] = []
    # blocked for what is started from here on; other threads of this process, a library's, take them none the less
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    handlers = {number: signal.signal(number, lambda number, _: came.append(number)) for number in HELD}
    timer = threading.Timer(TOLD_AFTER_S, _tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for each in dict.fromkeys(came):
            signal.raise_signal(each)


def _tell() -> None:
    print("waiting for sbatch's answer; Ctrl-C takes effect after it", file=sys.stderr, flush=True)


def intend(script: Path, row: dict[str, Any]) -> Path:
    """Say what `script` is about to be submitted as: a row of sweep.json but for the job. Returns the place."""
    place = script.with_suffix(SUFFIX)
    replace_file(place, json.dumps(row))
    return place


def adopt(sweep_dir: Path) -> None:
    """Record jobs of commands that were killed while they submitted. The caller holds SUBMIT_LOCK.

    Raises UserError if SLURM does not answer, or the record is damaged.
    """
    places = sorted((sweep_dir / "slurm").glob(f"*{SUFFIX}"))
    if not places:
        return
    listing = run_slurm("squeue", "--noheader", "--me", "--format=%F %o") or ""
    rows = (line.strip().partition(" ") for line in listing.splitlines())
    jobs = {os.path.realpath(script): job for job, _, script in rows}
    known = {submission["job_id"] for submission in read_sweep(sweep_dir)["submissions"]}
    for place in places:
        row, script = read_object(place), place.with_suffix(".sbatch")
        job = jobs.get(os.path.realpath(script))
        if job is not None and job not in known and row is not None:
            record_job(sweep_dir, {**row, "job_id": job})
            print(one_line(f"job {job} was submitted by a command that was killed: {script}"), file=sys.stderr)
        if job is not None or time.time() - place.stat().st_mtime > FORGOTTEN_AFTER_S:
            place.unlink(missing_ok=True)


def adopt_if_free(sweep_dir: Path) -> None:
    """The same for who only looks, or cancels: not while a command submits, and nothing where it cannot be."""
    with contextlib.suppress(OSError, UserError):
        if not any((sweep_dir / "slurm").glob(f"*{SUFFIX}")):
            return
        fd = os.open(sweep_dir / SUBMIT_LOCK, os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            adopt(sweep_dir)
        finally:
            os.close(fd)
