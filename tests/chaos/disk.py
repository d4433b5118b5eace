"""A disk of its own for a run, small enough to be filled. Needs the right to mount."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import TracebackType

SIZE = "96m"


def may_mount() -> bool:
    return os.geteuid() == 0 and subprocess.run(["mountpoint", "-q", "/"], check=False).returncode == 0


class SmallDisk:
    """A tmpfs at `path` while the context lasts, if it is wanted."""

    def __init__(self, path: Path, wanted: bool) -> None:
        self.path, self.wanted = path, wanted

    def __enter__(self) -> SmallDisk:
        if self.wanted:
            self.path.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(self.path)], check=True)
        return self

    def fill(self) -> None:
        with (self.path / "ballast").open("wb", buffering=0) as file:
            block = 1 << 20
            while block:
                try:
                    file.write(bytes(block))
                except OSError:
                    block //= 2

    def free(self) -> None:
        if self.wanted:
            (self.path / "ballast").unlink(missing_ok=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.wanted:
            subprocess.run(["umount", "-l", str(self.path)], check=False)
