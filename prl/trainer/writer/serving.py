"""The loop of the writing process: it is asked, by (name of a function of `Writing`, its arguments), and answers with
what that returns or with the exception. Ranks talk to each other through their trainers (`process.py`), so that nothing
listens here.
"""

from __future__ import annotations

import contextlib
from multiprocessing.connection import Connection

from prl.trainer.writer.failures import portable
from prl.trainer.writer.writing import Writing


def serve(memory: int, socket: int) -> None:
    """Until the trainer's end of the socket is gone."""
    writing, asked = Writing(memory), Connection(socket)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            name, arguments = asked.recv()
            try:
                answer = getattr(writing, name)(*arguments)
            except Exception as error:
                answer = portable(error)
            asked.send(answer)
