"""Ctrl-C at the wrong moment: a word, and no traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import environment

from prl import cancel, cli, status
from prl.config.console import INTERRUPTED

# what a module of ours raises while it is imported; the package is imported before it, as by `python -m prl.NAME`
WHILE_IMPORTING = """
import runpy, sys
class Dropped:
    def __del__(self):
        raise KeyboardInterrupt
def interrupt(event, arguments):
    if event == "import" and arguments[0] == "prl.entry":
        raise {error}
sys.orig_argv, sys.argv = ["python", "-m", {module!r}], ["-m"]
sys.addaudithook(interrupt)
runpy.run_module({module!r}, run_name="__main__")
"""


def end_of(module: str, error: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WHILE_IMPORTING.format(module=module, error=error)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)


def test_ctrl_c_while_modules_are_imported_is_told_in_a_word() -> None:
    done = end_of("prl.rl", "KeyboardInterrupt")
    assert done.stderr == "interrupted\n"
    assert done.returncode in (INTERRUPTED, -signal.SIGINT), "130 for a shell, either way"


def test_one_that_comes_while_something_is_given_up_is_not_dropped() -> None:
    done = end_of("prl.rl", "ValueError(Dropped() and 'not reached')")
    assert (done.stderr, done.returncode) == ("interrupted\n", INTERRUPTED)


def test_all_other_errors_are_shown_as_ever() -> None:
    assert "ValueError: no such thing" in end_of("prl.rl", "ValueError('no such thing')").stderr


def test_nobody_else_gets_our_excepthook() -> None:
    code = "import sys; before = sys.excepthook; import prl; print(sys.excepthook is before)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert done.stdout == "True\n"


@pytest.mark.parametrize(
    ("main", "where"),
    [
        (status.main, "prl.status.show"),
        (cancel.main, "prl.cancel.refuse_no_run"),
        (cli.main, "prl.status.main"),
    ],
)
def test_a_command_that_is_interrupted_says_so(main, where, tmp_path: Path, monkeypatch, capsys) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupt)
    monkeypatch.setattr("sys.argv", ["prl", *(["status"] if main is cli.main else []), str(tmp_path)])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == INTERRUPTED
    assert capsys.readouterr().err.endswith("interrupted\n")
