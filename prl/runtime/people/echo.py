"""Lines of the children's logs on the root's console, filtered by local rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from prl.planning.run_plan import RolePlan

READ_BYTES = 1 << 16  # of one log at a time


class LogEcho:
    """What is appended to the logs of the chosen processes, from now on. Logs of other nodes lie in the same folder."""

    def __init__(self, roles: Iterable[tuple[RolePlan, Path]], local_ranks: tuple[int, ...]) -> None:
        chosen = [(role, log) for role, log in roles if role.local_rank in local_ranks]
        self.logs = {role.name: log for role, log in chosen}
        self.offsets = {name: log.stat().st_size if log.exists() else 0 for name, log in self.logs.items()}

    def poll(self) -> Iterator[str]:
        """New whole lines, each with the name of its process before it."""
        for name, log in self.logs.items():
            with contextlib.suppress(OSError), log.open("rb") as file:  # it may not be there yet
                file.seek(self.offsets[name])
                data = file.read(READ_BYTES)
                whole = data[: data.rfind(b"\n") + 1] if len(data) < READ_BYTES else data
                self.offsets[name] += len(whole)
                for line in whole.decode(errors="replace").splitlines():
                    yield f"[{name}] {line}"
