"""What the event loop was held by, and for how long."""

import asyncio
import time

import pytest

from prl.orchestrator.loop_watch import LoopWatch


def compute(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@pytest.mark.parametrize(("hold", "computes"), [(time.sleep, False), (compute, True)], ids=["waiting", "computing"])
def test_the_longest_hold_is_noted_and_taken_once(hold, computes):
    async def scenario():
        watch = LoopWatch()
        following = asyncio.create_task(watch.follow())
        await asyncio.sleep(0.02)
        watch.take()
        hold(0.2)
        await asyncio.sleep(0.02)
        first, second = watch.take(), watch.take()
        following.cancel()
        return first, second

    (held_s, busy_s), second = asyncio.run(scenario())
    assert held_s > 0.18
    assert (busy_s > 0.18) == computes
    assert second == (0.0, 0.0)
