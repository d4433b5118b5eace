"""Commands whose output may be cut short: `... | head` ends the printing, not the work."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def until_the_reader_leaves() -> Iterator[None]:
    """Leave the block quietly when nobody reads stdout any more; what is printed afterwards goes nowhere."""
    try:
        yield
        sys.stdout.flush()  # here, where it can be caught, and not when Python ends
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
