"""Processes that a test starts as people would in terminals of their own, and whatever they leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime_tree import TESTS, read_bytes, wait_for

LIMIT_S = 240.0
TAG = "PRL_TEST_TERMINALS"


class Terminals:
    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path, self.tag = tmp_path, uuid.uuid4().hex
        self.processes: list[subprocess.Popen[str]] = []
        self.logs: list[Path] = []

    def open(self, *command: str, **environment: str) -> int:
        """Returns the terminal's number. The command is what follows `python`."""
        log = self.tmp_path / f"terminal{len(self.logs)}.log"
        paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
        words = [sys.executable, *command]
        with log.open("w") as file:
            process = subprocess.Popen(
                words,
                env=os.environ | {"PYTHONPATH": paths, TAG: self.tag} | environment,
                cwd=TESTS.parent,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
        self.processes.append(process)
        self.logs.append(log)
        return len(self.logs) - 1

    def says(self, terminal: int) -> str:
        return self.logs[terminal].read_text()

    def await_word(self, terminal: int, word: str) -> None:
        process = self.processes[terminal]
        wait_for(lambda: word in self.says(terminal) or process.poll() is not None)
        assert word in self.says(terminal), self.says(terminal)

    def code(self, terminal: int) -> int:
        return self.processes[terminal].wait(LIMIT_S)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        wanted = f"{TAG}={self.tag}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            if wanted in read_bytes(path):
                os.kill(int(path.parent.name), signal.SIGKILL)


@contextmanager
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    opened = Terminals(tmp_path)
    try:
        yield opened
    finally:
        opened.close()
