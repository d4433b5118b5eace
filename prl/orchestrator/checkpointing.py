"""The orchestrator's half of the checkpoints, and the commit of both."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from prl.runtime.directory.checkpoints import ORCHESTRATOR, parts_of, raise_if_full, staging_dir, step_dir
from prl.runtime.directory.commits import Committer
from prl.runtime.process.child import ChildContext

STATE = "state.json"
POLL_S = 0.05


class Checkpointing:
    """Checkpoints of one run. A step is committed once, however often the trainer says that its half is there."""

    def __init__(self, ctx: ChildContext) -> None:
        config = ctx.plan.config
        self.ctx = ctx
        self.committer = Committer(ctx.run_dir, config.ckpt.keep, parts_of("rl"), config.deployment.hang_timeout_s)

    def load(self, step: int) -> dict[str, Any]:
        """The state that was saved with the checkpoint of `step`."""
        return json.loads((step_dir(self.ctx.run_dir, step) / ORCHESTRATOR / STATE).read_text())

    def start(self, step: int, states: dict[int, dict[str, Any]], held: Callable[[], bool], in_haste: bool) -> None:
        """Add the state of `step`; commit it once it is not `held`. Raises UserError when the disk is full."""
        self.committer.start(step, in_haste, lambda: self._stage(step, states[step]), held)

    def _stage(self, step: int, state: dict[str, Any]) -> None:
        part = staging_dir(self.ctx.run_dir, step) / ORCHESTRATOR
        try:
            part.mkdir(parents=True, exist_ok=True)
            (part / STATE).write_text(json.dumps(state))
        except OSError as error:
            raise_if_full(error, self.ctx.run_dir, step)
            raise

    async def committed(self, step: int, timeout_s: float) -> float | None:
        """Wait until the checkpoint of `step` is complete: how long that took. None when it is not within timeout_s."""
        deadline = time.monotonic() + timeout_s
        while (took_s := self.committer.took(step)) is None and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        return took_s

    def look(self) -> None:
        """Tell the supervisor whether a stop must wait. Raises what a commit has raised."""
        self.ctx.saving(not self.committer.is_done())
