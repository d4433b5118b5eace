"""What becomes of rollouts while a step waits for them, now and then: where none of them comes to a good end no step
does either, and only this row says why nothing happens.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from prl.metrics.alarms import WAITING
from prl.metrics.writer import MetricsWriter
from prl.orchestrator.rollouts.producer import Producer

EVERY_S = 20.0


@contextlib.asynccontextmanager
async def told_while_waiting(
    producer: Producer, metrics: MetricsWriter, step: int, several: bool
) -> AsyncIterator[None]:
    """A row for each EVERY_S in here with what the rollouts came to that have ended since the last step was full.

    Args:
        several: whether there are several environments, which are counted apart.
    """
    task = asyncio.create_task(_tell(producer, metrics, step, several))
    try:
        yield
    finally:
        task.cancel()


async def _tell(producer: Producer, metrics: MetricsWriter, step: int, several: bool) -> None:
    while True:
        await asyncio.sleep(EVERY_S)
        counts = producer.current.outcome_counts(several)
        metrics.log(step=step, **{WAITING + outcome: count for outcome, count in counts.items()})
        metrics.flush()
