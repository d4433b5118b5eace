"""What disks and directories refuse a sweep, in words for people."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from prl.config.errors import UserError
from prl.runtime.directory.files import FULL_DISK, directory_in_the_way, written_of

REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOTDIR, errno.EMFILE, errno.ENFILE)


@contextlib.contextmanager
def telling_places(sweep_dir: Path) -> Iterator[None]:
    """Raise UserError for an OSError that a person can mend; all others pass."""
    try:
        yield
    except OSError as error:
        told = refusal(error, sweep_dir)
        if told is None:
            raise
        raise told from error


def refusal(error: OSError, sweep_dir: Path) -> UserError | None:
    """What a sweep says of it; None for what no place has refused."""
    place, why = written_of(error) or sweep_dir, error.strerror or str(error)
    if error.errno in FULL_DISK:
        return UserError(
            f"The disk is full: {place} could not be written.",
            where=str(sweep_dir),
            why=f"{why}: no space left on the device, or a quota is exceeded",
            fix="free space; the same command goes on",
        )
    if isinstance(error, IsADirectoryError):
        return directory_in_the_way(error)
    if error.errno not in REFUSED:
        return None
    return UserError(
        f"{place} cannot be used: {why}.",
        where=str(sweep_dir),
        fix=f"see to {place}, or name another place (hydra.sweep.dir=...); the same command goes on",
    )
