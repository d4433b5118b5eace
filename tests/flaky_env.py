"""An environment whose code misbehaves in every way that must cost one rollout only."""

from __future__ import annotations

import time

from prl.envs.protocol import Environment, Task, user


class FlakyEnv(Environment):
    """Three of eight tasks raise, hang or give NaN; the others reward the share of small letters."""

    def tasks(self, split):
        return [Task(f"{split}/{i}", (user(f"{split} {i}"),), {"kind": i % 8}) for i in range(64)]

    def reward(self, task, messages):
        kind = task.info["kind"]
        if kind == 0:
            raise RuntimeError("this reward always raises")
        if kind == 1 and task.id.startswith("train"):
            time.sleep(3600)
        if kind == 2:
            return float("nan")
        reply = messages[-1]["content"]
        return sum(c.islower() for c in reply) / max(len(reply), 1)
