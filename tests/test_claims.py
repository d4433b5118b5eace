"""Who makes what several processes need: one, and another one if that dies; on one machine and on several."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from prl.runtime.directory import claims
from prl.runtime.directory.claims import Claim
from prl.runtime.directory.identity import describe_process

TAKE = """
import sys, pathlib
from prl.runtime.directory.claims import Claim
print(Claim(pathlib.Path(sys.argv[1])).take(), flush=True)
"""


def take_elsewhere(thing: Path, then: str = "") -> subprocess.Popen[str]:
    """Another process that takes the claim, says whether it got it, and does `then`."""
    process = subprocess.Popen([sys.executable, "-c", f"{TAKE}{then}", str(thing)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.got = process.stdout.readline().strip()  # type: ignore[attr-defined]
    return process


def holder_of(thing: Path, **changes: str) -> None:
    """A claim as a process on another machine has left it."""
    record = describe_process() | {"system": "another boot", "host": "n7", "beat": 0} | changes
    thing.with_name(f"{thing.name}.claim-0").write_text(json.dumps(record))


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """The clock of who looks, to be turned by hand."""
    clock = [1000.0]
    monkeypatch.setattr(claims.time, "monotonic", lambda: clock[0])
    return clock


def test_one_has_it_until_it_lets_go(tmp_path: Path) -> None:
    first, second = Claim(tmp_path / "thing"), Claim(tmp_path / "thing")
    assert (first.take(), second.take(), second.take()) == (True, False, False)
    assert second.holder["pid"] == describe_process()["pid"]
    assert Claim(tmp_path / "another").take()
    first.release()
    assert second.take()
    second.release()
    assert not list(tmp_path.glob("thing.*"))


def test_who_is_killed_is_succeeded_at_once_and_by_one(tmp_path: Path) -> None:
    process = take_elsewhere(tmp_path / "thing", "import time; time.sleep(600)")
    waiting = [Claim(tmp_path / "thing") for _ in range(2)]
    try:
        assert process.got == "True"  # type: ignore[attr-defined]
        assert [claim.take() for claim in waiting] == [False, False]
    finally:
        process.kill()
        process.wait()
    assert [claim.take() for claim in waiting] == [True, False]
    waiting[0].release()
    assert not list(tmp_path.iterdir())


def test_of_a_machine_that_shows_life_it_is_left(tmp_path: Path, now: list[float]) -> None:
    claim = Claim(tmp_path / "thing")
    for beat in range(5):
        holder_of(tmp_path / "thing", beat=str(beat))
        assert not claim.take()
        now[0] += claims.SILENCE_LIMIT_S
    assert claim.holder["host"] == "n7"


def test_of_a_machine_that_died_it_is_taken(tmp_path: Path, now: list[float]) -> None:
    """Whatever its clock says: it counts for how long who waits has seen no change."""
    holder_of(tmp_path / "thing")
    claim = Claim(tmp_path / "thing")
    assert not claim.take()
    now[0] += claims.SILENCE_LIMIT_S - 1
    assert not claim.take()
    now[0] += 2
    assert claim.take()
    late = Claim(tmp_path / "thing")  # it sees the successor, who is alive
    assert not late.take()
    claim.release()
    assert not list(tmp_path.iterdir())


def test_a_claim_cut_short_by_a_full_disk_is_one(tmp_path: Path, now: list[float]) -> None:
    (tmp_path / "thing.claim-0").write_bytes(b"")
    claim = Claim(tmp_path / "thing")
    assert not claim.take()
    now[0] += claims.SILENCE_LIMIT_S + 1
    assert claim.take()
    claim.release()


def test_life_is_shown_while_it_is_held(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(claims, "BEAT_S", 0.01)
    claim = Claim(tmp_path / "thing")
    claim.take()
    path = tmp_path / "thing.claim-0"
    beats: set[bytes] = set()
    while len(beats) < 3:  # by a thread: this loop has no limit but the test's own
        beats.add(path.read_bytes())
    claim.release()
