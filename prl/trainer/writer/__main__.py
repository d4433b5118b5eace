"""`python -m prl.trainer.writer PARENT MEMORY SOCKET`: writes the checkpoints of one trainer rank, until that is gone.

MEMORY and SOCKET are inherited. It is asked, by (name of a function below, its arguments), and answers with what that
returns or with the exception; ranks talk to each other through their trainers (see `process.py`), so that nothing
listens here. It ends with its parent, and leaves all signals of a stop to it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys

from prl.runtime.process.guards import StopFlag, die_with_parent


def main() -> None:
    parent, memory, socket = map(int, sys.argv[1:])
    die_with_parent(parent)
    StopFlag().install()
    faulthandler.enable()
    from multiprocessing.connection import Connection  # what follows takes seconds to import

    from prl.trainer.writer.failures import portable
    from prl.trainer.writer.writing import Writing

    writing, asked = Writing(memory), Connection(socket)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            name, arguments = asked.recv()
            try:
                answer = getattr(writing, name)(*arguments)
            except Exception as error:
                answer = portable(error)
            asked.send(answer)


if __name__ == "__main__":
    main()
