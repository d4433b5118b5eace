"""`python -m prl.trainer.writer PARENT MEMORY SOCKET`: writes the checkpoints of one trainer rank, until that is gone.

MEMORY and SOCKET are inherited. It ends with its parent, and leaves all signals of a stop to it.
"""

from __future__ import annotations

import faulthandler
import sys

from prl.runtime.process.guards import StopFlag, die_with_parent


def main() -> None:
    parent, memory, socket = map(int, sys.argv[1:])
    die_with_parent(parent)
    StopFlag().install()
    faulthandler.enable()
    from prl.trainer.writer.serving import serve  # takes seconds to import

    serve(memory, socket)


if __name__ == "__main__":
    main()
