"""Names of files and directories that a person gives: what no file system takes is refused where it is read."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

NAME_BYTES = 255  # of one component, on all file systems that people have
PATH_BYTES = 4095  # Linux's PATH_MAX without its end
OURS_BYTES = 128  # of a name to which more is added: directories get a time, logs a role
UNFIT = re.compile(r"[/\\\x00-\x1f\x7f]|^[.-]|^$")


def check_length(place: str) -> str:
    """The same. Raises ValueError for a name that is longer than file systems take."""
    whole = os.fsencode(os.path.expanduser(place))
    longest = max(map(len, whole.split(b"/")))
    if longest > NAME_BYTES:
        raise ValueError(f"a name in it has {longest} bytes, and file systems take {NAME_BYTES}")
    if len(whole) > PATH_BYTES:
        raise ValueError(f"it has {len(whole)} bytes, and paths have {PATH_BYTES} at most")
    return place


def is_file_name(name: str) -> bool:
    """Whether it names something in the directory where it is put, and nothing elsewhere or hidden."""
    return not UNFIT.search(name) and len(name.encode(errors="replace")) <= OURS_BYTES and name.isprintable()


def as_file_name(name: str) -> str:
    """The nearest name that is one."""
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", name).strip(".-")[:OURS_BYTES] or "unnamed"


def a_path(place: str) -> Path:
    """For argparse."""
    try:
        path = Path(check_length(place))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not path.is_absolute() and (why := lost_directory(enter=False)):
        raise argparse.ArgumentTypeError(f"{place}: {why}; cd to a directory that exists")
    return path


def lost_directory(enter: bool = True) -> str:
    """Why this process cannot work in its working directory; "" if it can.

    Args:
        enter: whether files in it are wanted, and not only its name.
    """
    try:
        os.getcwd()
    except OSError as error:  # whoever deleted it did not ask who is in it
        return f"the working directory is gone ({error.strerror})"
    return "" if not enter or os.access(".", os.X_OK) else "the working directory may not be entered"
