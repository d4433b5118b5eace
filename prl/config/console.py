"""The console is never a reason to stop: a terminal that was closed, `| head`, a full disk behind `>`.

What cannot be written is dropped, and the work goes on. The first failure points the file to /dev/null, so that
programs started later, and libraries that write by themselves, do not stumble either.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
import time
from typing import Any, NoReturn, TextIO, cast

INTERRUPTED = 130  # exit code, as shells have it: 128 and SIGINT
BLOCKED_S = 2.0  # a terminal that was halted, or a pager that nobody scrolls, holds a run up for so long, and once
PIECE_BYTES = 4096  # a pipe that is ready takes so many without blocking: <limits.h> PIPE_BUF


class ShieldedFile(io.RawIOBase):
    """A file descriptor whose writes succeed, whatever becomes of it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.error: OSError | None = None  # the first one
        self.patient = True  # whether to wait for a reader for ever
        self.blocked = False

    def fileno(self) -> int:
        return self.fd

    def isatty(self) -> bool:
        return os.isatty(self.fd)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        rest = view
        try:
            while rest and self._is_ready():
                rest = rest[os.write(self.fd, rest[:PIECE_BYTES]) :]
        except OSError as error:
            self.error = self.error or error
            self._silence()
        return len(view)

    def _is_ready(self) -> bool:
        """Whether it takes something now. One who blocks for BLOCKED_S is not waited for again until he reads."""
        if self.patient:
            return True
        writable = select.poll()
        writable.register(self.fd, select.POLLOUT)
        deadline = time.monotonic() + (0.0 if self.blocked else BLOCKED_S)
        while True:
            left = deadline - time.monotonic()
            self.blocked = not writable.poll(max(0.0, left) * 1000)
            if not self.blocked or left <= 0:
                return not self.blocked

    def _silence(self) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fd)
        os.close(null)


_shielded: dict[str, ShieldedFile] = {}


def shield_console(works: bool = False) -> None:
    """Make stdout and stderr of this process safe to write to. May be called again.

    Args:
        works: there is work that must not wait for a reader either.
    """
    for fd in (0, 1, 2):
        _open_if_closed(fd)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if name not in _shielded and (stream is None or stream is getattr(sys, f"__{name}__")):
            _shielded[name] = ShieldedFile(fd)
            setattr(sys, name, _text_file(_shielded[name], stream))
        if works and name in _shielded:
            _shielded[name].patient = False


def one_line(text: object) -> str:
    """A name or message for a line of a table: control characters, line breaks among them, and bytes of file names that
    are no UTF-8 are shown as Python writes them.
    """
    shown = str(text)
    return shown if shown.isprintable() else "".join(one if one.isprintable() else ascii(one)[1:-1] for one in shown)


def console_error() -> OSError | None:
    """Why what was printed has not arrived; None if it has."""
    if sys.stdout is not None:
        sys.stdout.flush()
    return _shielded["stdout"].error if "stdout" in _shielded else None


def leave_interrupted() -> NoReturn:
    """The end of a program that was told to end (Ctrl-C); leaves by SystemExit."""
    print("interrupted", file=sys.stderr)
    sys.exit(INTERRUPTED)


def leave_told(code: int = 0) -> None:
    """The end of a program whose output is all that it makes; leaves by SystemExit. A reader who left has seen what he
    wanted; any other reason why the output did not arrive is an error.
    """
    error = console_error()
    if error is not None and error.errno != errno.EPIPE:
        print(f"The output could not be written: {error.strerror}", file=sys.stderr)
        code = code or 1
    sys.exit(code)


def _open_if_closed(fd: int) -> None:
    """Else the next file opened would get its number, and the output of others."""
    try:
        os.fstat(fd)
    except OSError:
        os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one


def _text_file(raw: ShieldedFile, before: TextIO | None) -> TextIO:
    if before is not None:
        try:
            before.flush()
        except OSError as error:
            raw.error = error
            raw._silence()
    encoding = "utf-8" if before is None else before.encoding
    errors = "replace" if before is None or before.errors == "strict" else before.errors
    unbuffered = os.environ.get("PYTHONUNBUFFERED") or raw.fd == 2 or raw.isatty()
    wrapped = io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=encoding, errors=errors, line_buffering=True, write_through=bool(unbuffered)
    )
    return cast(TextIO, wrapped)
