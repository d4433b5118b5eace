"""An environment one of whose rollouts blocks the event loop for ever: once, which the folder BLOCKED_IN remembers."""

from __future__ import annotations

import os
import time
from pathlib import Path

from prl.envs.protocol import Environment, Task, user


class BlockingEnv(Environment):
    def tasks(self, split):
        return [Task(f"{split}/{i}", (user(f"{split} {i}"),)) for i in range(8)]

    async def rollout(self, task, chat):
        await chat.reply(*task.prompt)
        mark = Path(os.environ["BLOCKED_IN"]) / "blocked"
        if task.id == "train/3" and not mark.exists():
            mark.touch()
            time.sleep(10_000)

    def reward(self, task, messages):
        return float(len(messages[-1]["content"]) % 2)
