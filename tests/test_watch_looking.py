"""How the page finds runs: not in what others keep, and without keeping a request waiting."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from watch_directory import make_run

from prl.runtime.directory.files import find_directories
from prl.status import find_runs as status_runs
from prl.watch.store import Store


def test_what_package_managers_keep_is_not_walked(tmp_path: Path) -> None:
    run = make_run(tmp_path / "outputs/run", {"seed": "1"})
    for folder in ("venv", "web/node_modules", ".git", "code/__pycache__", "lib/site-packages"):
        make_run(tmp_path / folder / "deep/run", {"seed": "1"})
    (tmp_path / "venv/pyvenv.cfg").touch()
    looked: list[Path] = []
    assert find_directories(tmp_path, lambda path: bool(looked.append(path)) or path == run) == [run]
    assert not any(path.name == "deep" for path in looked)
    assert status_runs(tmp_path) == [run]
    assert status_runs(tmp_path / "venv") == [tmp_path / "venv/deep/run"], "who names it means it"


def test_a_look_that_takes_long_keeps_no_request_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", {"seed": "1"})
    store, walks, begun, go_on = Store(tmp_path), [], threading.Event(), threading.Event()

    def walk(root: Path) -> list[Path]:
        walks.append(threading.current_thread() is threading.main_thread())
        if len(walks) > 1:
            begun.set()
            assert go_on.wait(30)
        return [run, tmp_path / "new"][: len(walks)]

    monkeypatch.setattr("prl.watch.store.find_runs", walk)
    store.look()
    for _ in range(3):
        store.took_s, store.looked_s = 1.0, -1e9  # as if that had been slow, and long ago
        assert [row["name"] for row in store.overview()["runs"]] == ["run"]
    assert begun.wait(30)
    assert walks == [True, False], "one at a time, and not in a request"
    assert store.looking is not None
    go_on.set()
    store.looking.join(30)
    assert [row["name"] for row in store.overview()["runs"]] == ["new", "run"]
    store.took_s, store.looked_s = 5.0, time.monotonic() - 10.0
    store.look()
    assert len(walks) == 2, "a walk of 5 s is not made again after 10 s"
