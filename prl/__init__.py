"""prl: a Hydra-driven research sweep harness for reinforcement learning of language models."""

from __future__ import annotations

import os
import sys
from types import TracebackType

__version__ = "0.1.0"


def _say_interrupted() -> None:
    """Ctrl-C while modules are still imported, or wherever a command does not care, is told in a word: no traceback.
    All other errors are shown as before. Installed for `python -m prl.NAME` alone, which comes here first.
    """
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if kind is not KeyboardInterrupt:
            before(kind, error, trace)
        elif sys.stderr is not None:
            print("interrupted", file=sys.stderr, flush=True)

    def leave(unraisable: sys.UnraisableHookArgs) -> None:
        """Python drops what is raised in a callback or destructor, the locks of imports among them, and would go on."""
        if unraisable.exc_type is not KeyboardInterrupt:
            before_unraisable(unraisable)
            return
        show(KeyboardInterrupt, KeyboardInterrupt(), None)
        os._exit(130)

    before_unraisable = sys.unraisablehook
    sys.excepthook, sys.unraisablehook = show, leave


if getattr(sys, "argv", [])[:1] == ["-m"] and any(
    word.removeprefix("-m").partition(".")[0] == __name__ for word in sys.orig_argv[1:]
):
    _say_interrupted()
