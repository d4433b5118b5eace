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
    """The checkpoints of one run, as far as they are the orchestrator's.

    A step is
        noted      when its batch is ready: what resumes behind it is held in memory (`note`);
        awaited    the same, if the trainer will save it: whatever is published meanwhile, it is held until then;
        saved      when the trainer's half is on disk and ours beside it (`trainer_saved`). Older ones that were awaited
                   are made up for by it: a trainer may skip one;
        committed  in a thread, once nothing holds it back; once, however often the trainer says that its half is there;
        forgotten  when it is older than what is served and than all that is awaited (`forget`).
    """

    def __init__(self, ctx: ChildContext) -> None:
        config = ctx.plan.config
        self.ctx = ctx
        self.states: dict[int, dict[str, Any]] = {}  # step -> what resumes behind it
        self.awaited: set[int] = set()
        self.committer = Committer(ctx.run_dir, config.ckpt.keep, parts_of("rl"), config.deployment.hang_timeout_s)

    def load(self, step: int) -> dict[str, Any]:
        """The state that was saved with the checkpoint of `step`."""
        return json.loads((step_dir(self.ctx.run_dir, step) / ORCHESTRATOR / STATE).read_text())

    def note(self, step: int, state: dict[str, Any], is_awaited: bool = False) -> None:
        """Hold what resumes behind `step`: a stop may save any step that is in training."""
        self.states[step] = state
        if is_awaited:
            self.awaited.add(step)

    def forget(self, served: int) -> None:
        """Engines serve a version: the step in training, which a stop saves, is never older."""
        oldest = min(self.awaited | {served})
        self.states = {step: state for step, state in self.states.items() if step >= oldest}

    def trainer_saved(self, step: int, held: Callable[[], bool], in_haste: bool) -> None:
        """The trainer's half is on disk: add ours; commit both once they are not `held`.

        Raises UserError when the disk is full.
        """
        self.committer.start(step, in_haste, lambda: self._stage(step, self.states[step]), held)
        self.awaited = {later for later in self.awaited if later > step}

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
