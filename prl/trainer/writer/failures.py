"""What went wrong when a checkpoint was written, in a form that passes between processes."""

from __future__ import annotations

import errno
import os
import pickle

import torch.distributed.checkpoint as dcp

from prl.runtime.directory.files import is_full_disk


class WriterDied(RuntimeError):
    """The process that writes is gone."""


# torch's zip writer drops errno: a short write shows as one of the last two
_FULL_DISK_SIGNS = ("No space left on device", "Disk quota exceeded", "file write failed", "unexpected pos")


def no_space(error: BaseException | None) -> bool:
    """Whether a full disk stands anywhere behind an exception, also inside DCP's per-rank failures and C++ writers."""
    while error is not None:
        if is_full_disk(error) or any(sign in str(error) for sign in _FULL_DISK_SIGNS):
            return True
        failures = error.failures if isinstance(error, dcp.api.CheckpointException) else {}
        if any(no_space(wrapped[0]) for wrapped in failures.values()):
            return True
        error = error.__cause__ or error.__context__
    return False


def first_failure(error: BaseException) -> tuple[str, BaseException]:
    """Of all ranks' the lowest one's, and " on rank N"."""
    if not isinstance(error, dcp.api.CheckpointException) or not error.failures:
        return "", error
    rank = min(error.failures)
    return f" on rank {rank}", error.failures[rank][0]


def portable(error: Exception) -> Exception:
    """One that pickles. What stands behind an exception is lost on the way, so a full disk is said outright."""
    if no_space(error):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
