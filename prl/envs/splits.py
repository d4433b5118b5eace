"""Train and held-out splits of generated tasks, without overlap."""

from __future__ import annotations

import random
from collections.abc import Callable
from hashlib import sha256

from prl.config.errors import UserError
from prl.envs.protocol import Split, Task

HELD_OUT_SHARE = 8  # one in so many keys is held out
MAX_DRAWS_PER_TASK = 200


def split_of(key: str) -> Split:
    """A problem's split, decided by its content alone: the same problem is never in both."""
    return "held_out" if sha256(key.encode()).digest()[0] % HELD_OUT_SHARE == 0 else "train"


Draw = Callable[[random.Random], tuple[str, Task]]


def draw_tasks(draw: Draw, num_tasks: int, split: Split, seed: int) -> list[Task]:
    """num_tasks tasks ("held_out": an eighth of that, at least one), drawn until they belong to `split`.

    Args:
        draw: gives a problem's key (equal for what counts as the same problem) and its task; the task's id is set here.

    Raises UserError when the problems are so few that the split has none.
    """
    rng = random.Random(f"{seed}/{split}")
    count = num_tasks if split == "train" else max(1, num_tasks // HELD_OUT_SHARE)
    tasks: list[Task] = []
    for _ in range(count * MAX_DRAWS_PER_TASK):
        if len(tasks) == count:
            break
        key, task = draw(rng)
        if split_of(key) == split:
            tasks.append(Task(f"{split}/{len(tasks)}", task.prompt, task.info))
    if not tasks:
        raise UserError(
            f"with these arguments the environment has too few different problems for a split {split!r}",
            where="env.mix.<name>.args",
            fix="allow more or larger numbers, words or turns",
        )
    return tasks
