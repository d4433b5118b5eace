"""What several runs need and one makes, into cache_dir: the claim while it is made, and its publication."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prl.runtime.directory.claims import Claim
from prl.runtime.directory.intact import filling, seal
from prl.runtime.directory.phases import SHARED, START
from prl.runtime.directory.status_file import StatusFile
from prl.runtime.supervisor import Household, Outcome

LOOK_S = 0.2


def publish(made: Path, cached: Path, claim: Claim) -> None:
    """Into the cache by a rename, so that nobody ever sees half of it."""
    for left in cached.parent.glob(f"{cached.name}.partial-*"):  # by one who was killed over it
        if left != made:
            shutil.rmtree(left, ignore_errors=True)
    partial = partial_of(cached, claim)
    with filling(cached):
        try:
            if made != partial:
                shutil.move(made, partial)
            seal(partial)
            os.rename(partial, cached)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            if not cached.is_dir():  # else somebody has made the same meanwhile: see claims.py
                raise


def partial_of(cached: Path, claim: Claim) -> Path:
    """Where it may lie in the cache while it is made."""
    return cached.with_name(f"{cached.name}.partial-{claim.number}")


@contextmanager
def claimed(
    cached: Path, what: str, run_dir: Path, home: Household, status: StatusFile
) -> Iterator[tuple[Claim | None, Outcome | None]]:
    """Until it is ours to make, or there. Yields our claim, or None where nothing is to be made, and how the run ends
    if it ends here.

    Args:
        what: it is called in notes.
        status: of the run, shown to be up to date while it waits.
    """
    cached.parent.mkdir(parents=True, exist_ok=True)
    claim, told = Claim(cached), None
    try:
        while not cached.is_dir() and not claim.take():
            failure = home.presence.find_loss() or home.nodes.find_lost(run_dir)
            if failure is not None or home.signals.count:
                yield None, Outcome("stopped" if failure is None else "failed", 0, failure)
                return
            if home.hours.phases.stage != SHARED:
                home.hours.enter(SHARED)
            status.update(doing=f"waits for another run's {what}")
            home.hours.beat()
            if claim.holder and claim.holder.get("pid") != told:
                told = claim.holder.get("pid")
                home.progress.note(f"{what}: process {told} on {claim.holder.get('host')} is making it; waiting")
            time.sleep(LOOK_S)
        if cached.is_dir():  # also if it has just become ours: who had it before us was done
            home.progress.note(f"{what}: made by another run meanwhile ({cached})")
            yield None, None
        else:
            status.content["doing"] = what
            status.write()
            yield claim, None
    finally:
        status.content["doing"] = ""
        if home.hours.phases.stage == SHARED:
            home.hours.enter(START)
        with contextlib.suppress(OSError):
            claim.release()
