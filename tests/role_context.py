"""What a role of a run is given, for tests that have it in their own process."""

from __future__ import annotations

from pathlib import Path

from prl.config import compose
from prl.planning import make_plan
from prl.runtime.process.child import Boot, ChildContext
from prl.runtime.process.guards import StopFlag
from prl.runtime.process.keys import RunKeys


def context_of(run_dir: Path, *overrides: str, job: str = "rl", role: str = "trainer/0") -> ChildContext:
    """The context of a role of the run that these overrides make, in a run directory that is made here."""
    for folder in ("metrics", "heartbeats", "logs", "checkpoints"):
        (run_dir / folder).mkdir(parents=True, exist_ok=True)
    plan = make_plan(compose([*overrides, f"cache_dir={run_dir.parent / 'cache'}"], job))
    boot = Boot(
        root_pid=0, entry="", endpoints={"orchestrator": "http://127.0.0.1:9", "rendezvous": "127.0.0.1:9"},
        keys=RunKeys(), shared_memory=str(run_dir / "shared"), listen_fd=None, error_fd=-1, resume_step=0,
        init_model_path=None, wandb_run_id="", restarts=0,
    )  # fmt: skip
    (found,) = (one for one in plan.roles if one.name == role)
    return ChildContext(plan, found, run_dir, boot, StopFlag())
