"""Programs that are asked something, each for a limited time and all of them before one moment.

Whatever may hang (a driver, a network file system, an import) is asked in a process of its own, and left alone when it
does not even end when killed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prl.config.errors import UserError
from prl.runtime.process.python_path import python_command, python_path

LIMIT = "PRL_DOCTOR_LIMIT_S"  # the variable that sets how long all of it may take, for machines that are slow or busy
LIMIT_S = 90.0  # each program has half of it: a cold disk makes the first import of torch or vLLM take 20 s
REAP_S = 0.5
LOOK_S = 0.1  # how often who waits for an answer looks whether it is still wanted
LINE_WIDTH = 300  # characters kept of a last line


@dataclass(frozen=True)
class Answer:
    """`code` is None where there was none in time, and 127 where there is no such program."""

    code: int | None
    out: str = ""
    err: str = ""
    limit_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def last_line(self) -> str:
        """Why it failed, in its own words."""
        if self.code is None:
            within = f"within {self.limit_s:.3g} s" if self.limit_s > 0 else "before all time was over"
            return f"no answer {within}; {LIMIT}={4 * LIMIT_S:.0f} in the environment waits longer"
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        if self.code < 0 and self.code != -signal.SIGKILL:
            lines.append(f"ended by {signal.Signals(-self.code).name}")
        return (lines[-1] if lines else f"exit code {self.code}")[:LINE_WIDTH]

    def parsed(self) -> dict[str, Any] | None:
        """The JSON object of the last line of its output, where it ended well."""
        try:
            content = json.loads(self.out.strip().splitlines()[-1]) if self.ok else None
        except (ValueError, IndexError):
            return None
        return content if isinstance(content, dict) else None


class Asker:
    """Asks programs. Its time runs from the moment when it is made.

    limit_s: for all of them together; None: as the environment says. Raises UserError for what is no number there.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        limit_s = limit_from(os.environ) if limit_s is None else limit_s
        self.probe_limit_s = limit_s / 2
        self.deadline = time.monotonic() + limit_s
        self.stopped = threading.Event()

    def stop(self) -> None:
        """Nobody wants to know any more: what is asked is ended, in whatever thread, and nothing more is asked."""
        self.stopped.set()

    def ask(self, *command: str, env: Mapping[str, str] | None = None) -> Answer:
        limit_s = min(self.probe_limit_s, self.deadline - time.monotonic())
        if limit_s <= 0 or self.stopped.is_set():
            return Answer(None, limit_s=0)
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        except OSError as error:
            return Answer(127, err=f"{command[0]}: {error.strerror}")
        until = time.monotonic() + limit_s
        while (left := until - time.monotonic()) > 0 and not self.stopped.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                out, err = process.communicate(timeout=min(LOOK_S, left))
                return Answer(process.returncode, out, err)
        _abandon(process)
        return Answer(None, limit_s=limit_s)

    def ask_python(self, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> Answer:
        """A module of ours, run as the processes of a run are."""
        return self.ask(*python_command(module, *arguments), env={"PYTHONPATH": python_path(), **(env or {})})

    def ask_together(self, commands: Sequence[Sequence[str]], env: Mapping[str, str]) -> list[Answer]:
        """Programs that wait for each other."""
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(len(commands)) as pool:
            return list(pool.map(lambda command: self.ask(*command, env=env), commands))


def limit_from(environment: Mapping[str, str]) -> float:
    """Seconds. Raises UserError."""
    said = environment.get(LIMIT, str(LIMIT_S))
    try:
        limit_s = float(said)
    except ValueError:
        limit_s = math.nan
    if not 0 < limit_s < math.inf:
        fix = f"{LIMIT}={LIMIT_S:.0f}"
        raise UserError(f"{LIMIT}={said} is no time.", where=LIMIT, why="it is a number of seconds", fix=fix)
    return limit_s


def _abandon(process: subprocess.Popen[str]) -> None:
    """End it with all that it started: told first, so that it removes what it has written, then killed. One that waits
    for a disk or a driver for ever cannot be waited for.
    """
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(REAP_S)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(REAP_S)
