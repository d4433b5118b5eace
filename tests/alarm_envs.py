"""Reversing text, but something is wrong with the environment: what alarms are there to tell."""

from __future__ import annotations

import asyncio
import random

from prl.envs.reverse_text import ReverseText


class PaysForLength(ReverseText):
    """The more characters, the better."""

    def reward(self, task, messages):
        return min(1.0, len(messages[-1]["content"]) / 100)


class SameForAll(ReverseText):
    def reward(self, task, messages):
        return 0.5


class Raises(ReverseText):
    """In about half of its rollouts."""

    async def rollout(self, task, chat):
        if random.random() < 0.5:
            raise LookupError("no such tool")
        return await super().rollout(task, chat)


class Slow(ReverseText):
    async def rollout(self, task, chat):
        score = await super().rollout(task, chat)
        await asyncio.sleep(8)
        return score


class Uneven(ReverseText):
    """Some rollouts take longer than several steps."""

    async def rollout(self, task, chat):
        score = await super().rollout(task, chat)
        if int(task.id.split("/")[1]) % 2:
            await asyncio.sleep(6)
        return score
