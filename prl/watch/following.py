"""Files of JSON lines that grow: what was read once is not read again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prl.runtime.directory.files import open_regular

CHUNK = 32 << 20  # bytes read at once


@dataclass(frozen=True)
class Line:
    """Where a line lies, to be read again when somebody asks for all of it."""

    path: Path
    offset: int
    data: bytes


class Lines:
    """Follows one file. `was_replaced` says that it is another one than before, or a shorter one (a run resumed)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.inode = 0
        self.error = ""  # why it cannot be read, though it is there

    def was_replaced(self) -> bool:
        try:
            found = os.stat(self.path)
        except OSError:
            return self.offset > 0
        replaced = self.offset > 0 and (found.st_ino != self.inode or found.st_size < self.offset)
        self.inode = found.st_ino
        return replaced

    def new(self) -> Iterator[Line]:
        """Whole lines that were appended since the last call."""
        self.error = ""
        try:
            with open_regular(self.path) as file:
                while True:
                    file.seek(self.offset)
                    data = file.read(CHUNK)
                    end = data.rfind(b"\n") + 1
                    if not end and len(data) == CHUNK:  # one line longer than a chunk
                        file.seek(self.offset)
                        data = file.readline()
                        end = len(data) if data.endswith(b"\n") else 0
                    if not end:
                        return
                    begin = 0
                    while begin < end:
                        stop = data.index(b"\n", begin) + 1
                        yield Line(self.path, self.offset, data[begin : stop - 1])
                        self.offset += stop - begin
                        begin = stop
        except FileNotFoundError:
            return
        except OSError as error:
            self.error = error.strerror or str(error)


def read_line(path: Path, offset: int) -> bytes:
    """One line again. Raises OSError where its file is gone."""
    with open_regular(path) as file:
        file.seek(offset)
        return file.readline()
