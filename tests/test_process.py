"""A child process as the supervisor has it, with small programs in place of roles."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from runtime_tree import wait_for

from prl.runtime.process import child_process
from prl.runtime.process.child import Boot
from prl.runtime.process.guards import STOP_SIGNAL
from prl.runtime.process.keys import RunKeys

LISTENS_LATE = """
import sys, time
from pathlib import Path
from prl.runtime.process.guards import StopFlag
place = Path(sys.argv[1])
(place / "up").touch()
while not (place / "go").exists():
    time.sleep(0.01)
stop = StopFlag()
stop.install()
sys.exit(0 if stop.is_set else 9)
"""


@pytest.mark.parametrize("number", [STOP_SIGNAL, signal.SIGTERM], ids=["the supervisor's", "a scheduler's"])
def test_signals_wait_until_a_child_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Told to stop before it could know what that is; a scheduler's SIGTERM is never for it."""
    monkeypatch.setattr(
        child_process, "python_command", lambda module, *words: [sys.executable, "-c", LISTENS_LATE, words[0]]
    )
    reaper = SimpleNamespace(tell=lambda line: None)
    child = child_process.ChildProcess(tmp_path, "orchestrator", None, reaper)  # type: ignore[arg-type]
    boot = Boot(os.getpid(), "a:b", {}, RunKeys(), "", None, -1, 0, None, "", 0)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    child.start(boot, {"PYTHONPATH": str(Path(__file__).parents[1])})
    try:
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before, "here they are heard as ever"
        wait_for(lambda: (tmp_path / "up").exists())
        child.popen.send_signal(number)
        (tmp_path / "go").touch()
        assert child.wait(60)
        assert child.exit_code == (0 if number == STOP_SIGNAL else 9)
    finally:
        child.kill()
