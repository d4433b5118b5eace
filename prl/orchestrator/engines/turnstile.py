"""How many go on in one turn of the event loop, where hundreds could."""

from __future__ import annotations

import asyncio


class Turnstile:
    """Lets so many through in each turn of the event loop; the others wait for the next ones, in their order.

    Rollouts come in bursts: an evaluation begins 256 at once, whose prompts take 0.12 ms each to render, and held
    everything else up for 30 ms.
    """

    def __init__(self, at_once: int) -> None:
        self.at_once = self.left = at_once

    async def through(self) -> None:
        while self.left == 0:
            await asyncio.sleep(0)
        if self.left == self.at_once:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self.left -= 1

    def _next_turn(self) -> None:
        self.left = self.at_once
