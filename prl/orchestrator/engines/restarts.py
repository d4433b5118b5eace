"""Which engines the supervisor has started again, as status.json says, and their way back into the pool."""

from __future__ import annotations

import asyncio
from pathlib import Path

from prl.orchestrator.engines.pool import EnginePool
from prl.runtime.directory.status_file import read_status

INTERVAL_S = 0.2


async def follow_restarts(run_dir: Path, names: list[str], pool: EnginePool, timeout_s: float) -> None:
    """For ever. `names`: of the roles, in the order of the pool.

    Raises EngineError when a replica is not back in the pool timeout_s after its restart.
    """
    seen = [0] * len(names)
    returning: set[asyncio.Task[None]] = set()
    try:
        while True:
            roles = (await asyncio.to_thread(read_status, run_dir)).get("roles", {})
            for index, name in enumerate(names):
                restarts = roles.get(name, {}).get("restarts", 0)
                if restarts > seen[index]:
                    pool.lose(index, restarts - seen[index])
                    seen[index] = restarts
                    returning.add(asyncio.create_task(pool.readmit(index, timeout_s)))
            for task in [task for task in returning if task.done()]:
                returning.discard(task)
                task.result()
            await asyncio.sleep(INTERVAL_S)
    finally:
        for task in returning:
            task.cancel()
