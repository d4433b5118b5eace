"""The loop of a sweep on this machine, with small processes in place of agents."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from runtime_tree import wait_for

from launch import local
from launch.code_copy import FrozenCode
from launch.session import Session
from launch.settings import LauncherSettings
from prl.runtime.process.signals import StopSignals

COUNTS_SIGNALS = """
import signal, sys, time
from pathlib import Path
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
Path(sys.argv[1], "ready").touch()
came, end = 0, time.monotonic() + 60
while came < 2 and time.monotonic() < end:
    time.sleep(0.1)  # what comes meanwhile is one signal
    came += signal.sigtimedwait([signal.SIGINT], 0) is not None
sys.exit(0 if came == 2 else 9)
"""


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run `run_points` over points whose agents are this Python program, which is given its point's directory."""

    def run(program: str, names: list[str], at_a_time: int, timeout_min: float | None = None) -> Session:
        def command(module: str, path: str, *rest: str) -> list[str]:
            return [sys.executable, "-c", program, path]

        monkeypatch.setattr(local, "freeze_code", lambda *given: FrozenCode(tmp_path, {}))
        monkeypatch.setattr(local, "python_command", command)
        points = [SimpleNamespace(path=tmp_path / name, config=None) for name in names]
        for point in points:
            point.path.mkdir(exist_ok=True)
        session = Session(lambda config: 0)
        local.run_points(session, points, [None] * at_a_time, LauncherSettings(timeout_min=timeout_min))
        return session

    return run


def test_two_signals_at_once_reach_each_point_as_two(agents, tmp_path, monkeypatch, capsys):
    class Impatient(StopSignals):
        """As if both had come between two looks of the loop."""

        def __enter__(self):
            threading.Thread(target=self.come).start()
            return self

        def come(self):
            wait_for(lambda: len(list(tmp_path.glob("*/ready"))) == 2)
            self.first, self.count = signal.SIGINT, 2

    monkeypatch.setattr(local, "StopSignals", Impatient)
    monkeypatch.setattr(
        local, "POLL_S", 2.0
    )  # between the two: the kernel keeps one of those that a process has not seen
    with pytest.raises(SystemExit) as ended:
        agents(COUNTS_SIGNALS, ["a", "b"], 2)
    assert ended.value.code == 130
    assert sorted(capsys.readouterr().out.splitlines()[-2:]) == ["a: done", "b: done"]


def test_no_point_starts_after_one_that_was_interrupted_before_it_could_look_for_signals(agents, capsys):
    with pytest.raises(SystemExit) as ended:
        agents("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", ["a", "b", "c"], 1)
    assert ended.value.code == 143
    assert capsys.readouterr().out == "a: stopped\nnot started: 2; the same command starts them\n"


def test_a_point_that_takes_longer_than_it_may_is_stopped_and_the_others_go_on(agents, tmp_path, capsys):
    slow_if_a = "import sys, time; time.sleep(60 if sys.argv[1].endswith('a') else 0)"
    session = agents(slow_if_a, ["a", "b"], 1, timeout_min=0.1)
    assert capsys.readouterr().out == "a: stopped after 0.1 minutes\na: stopped\nb: done\n"
    assert session.failed == {str(tmp_path / "a"): 143}


def test_a_point_that_cannot_start_is_one_that_failed_and_the_others_go_on(agents, tmp_path, capsys):
    (tmp_path / "b" / "console.log").mkdir(parents=True)
    session = agents("import time; time.sleep(0.5)", ["a", "b", "c"], 2)
    assert session.failed == {str(tmp_path / "b"): 2}
    told = capsys.readouterr()
    assert f"{tmp_path}/b/console.log is a directory" in told.err
    assert "a: done" in told.out
    assert "c: done" in told.out
