"""Tiny roles for the tests of the process tree. What each does is scripted in the environment variable ROLE_SCRIPT.

ROLE_SCRIPT: JSON, role name -> {key: value}; see `play`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from runtime_tree import fill_bytes

from prl.config.errors import UserError
from prl.metrics.reader import read_rows
from prl.runtime.directory.checkpoints import commit, parts_of, raise_if_full, staging_dir
from prl.runtime.directory.status_file import read_status
from prl.runtime.process.child import ChildContext

ROLES = ("inference", "orchestrator", "trainer", "sft", "env")
ENTRIES = {role: f"runtime_roles:{'serve' if role in ('inference', 'env') else 'work'}" for role in ROLES}
MAPPED: list[SharedMemory] = []
SETSID_GRANDCHILD = "import os, time; os.setsid(); time.sleep(600)"


def script(ctx: ChildContext) -> dict:
    return json.loads(os.environ.get("ROLE_SCRIPT", "{}")).get(ctx.role.name, {})


def serve(ctx: ChildContext) -> None:
    """Up until told to stop."""
    play(ctx, script(ctx))
    ctx.ready()
    acts = script(ctx)
    while not ctx.stop_requested:
        ctx.beat()
        if acts.get("leave_at_stop") and read_status(ctx.run_dir).get("state") == "stopping":
            raise RuntimeError("told to leave by somebody else")
        fail(ctx, acts)
        time.sleep(0.02)


def work(ctx: ChildContext) -> None:
    """Steps of `step_s` seconds up to max_steps, or to `stay_at` until it is told to stop; the orchestrator (in SFT
    trainer/0) checkpoints every other one.
    """
    acts = script(ctx)
    play(ctx, acts)
    ctx.ready()
    saves = ctx.role.name == ("trainer/0" if ctx.plan.config.job == "sft" else "orchestrator")
    step = ctx.resume_step
    while acts.get("once_running") and read_status(ctx.run_dir).get("state") != "running":
        ctx.beat()
        time.sleep(0.02)
    while step < ctx.plan.config.max_steps:
        stop = ctx.run_dir / "stop"  # stands for the orchestrator's word to the trainers
        if ctx.stop_requested and saves:
            stop.touch()
        if stop.exists():
            break
        ctx.beat()
        time.sleep(acts.get("step_s", 0.01))
        if step == acts.get("stay_at"):
            continue
        if acts.get("follows") and step >= len(read_rows(ctx.run_dir, "orchestrator")):
            continue  # as a real trainer, whose batch is reported before it is trained
        step += 1
        ctx.metrics.log(step=step, reward=step / 10, staleness_mean=0.5, tokens_per_s=100.0, loss=1 / step)
        fail(ctx, acts, step)
        if saves and step % 2 == 0:
            save(ctx, step)
    if saves and step % 2:
        save(ctx, step)
    if ctx.plan.config.job == "sft":
        (ctx.run_dir / "export").mkdir(exist_ok=True)
        (ctx.run_dir / "export" / "weights").write_text(f"made by {os.getpid()}")


def save(ctx: ChildContext, step: int) -> None:
    if save_s := script(ctx).get("save_s"):
        ctx.saving(True)
        time.sleep(save_s)
    try:
        for part in parts_of(ctx.plan.config.job):
            (staging_dir(ctx.run_dir, step) / part).mkdir()
            (staging_dir(ctx.run_dir, step) / part / "state").write_text(f"state of step {step}")
    except OSError as error:
        raise_if_full(error, ctx.run_dir, step)
        raise
    commit(ctx.run_dir, step, ctx.plan.config.ckpt.keep, parts_of(ctx.plan.config.job))


def play(ctx: ChildContext, acts: dict) -> None:
    """What happens at the start of a role."""
    if acts.get("print_boot"):
        held = [key for key in dataclasses.astuple(ctx.keys) if key]
        print(f"BOOT {ctx.shared_memory} {','.join(held)}", flush=True)
    if acts.get("print_model"):
        print(f"MODEL {ctx.init_model_path}", flush=True)
    if acts.get("print_environment"):
        print("ENV", json.dumps(dict(os.environ)), flush=True)
    if "user_error" in acts:
        raise UserError(acts["user_error"], where="somewhere", fix="something")
    if "raise_at_start" in acts:
        raise RuntimeError(acts["raise_at_start"])
    if acts.get("tell_port"):
        assert ctx.listen_socket is not None
        print(f"LISTENS {ctx.listen_socket.getsockname()[1]} RESTARTS {ctx.restarts}", flush=True)
    if acts.get("stuck_when_restarted") and ctx.restarts:
        time.sleep(600)
    if acts.get("stuck_at_start"):
        time.sleep(600)
    if name := acts.get("segment_beside"):  # as vLLM's queues: what tracks it is killed with the rest
        mapped = [SharedMemory(name), SharedMemory(create=True, size=4096)]
        resource_tracker.unregister(f"/{name}", "shared_memory")  # it is another's: our tracker is not to unlink it
        MAPPED.extend([*mapped, semaphore := multiprocessing.get_context("spawn").Semaphore()])
        (ctx.run_dir / "segment").write_text(f"{mapped[1].name} sem.{semaphore._semlock.name[1:]}")  # type: ignore[attr-defined]
    if acts.get("grandchild"):
        keep_grandchild(ctx, {})
    if acts.get("unmarked_grandchild"):  # as after setproctitle: the environment says nothing
        keep_grandchild(ctx, {"PRL_RUN_MARKER": ""})


def keep_grandchild(ctx: ChildContext, environment: dict[str, str]) -> None:
    process = subprocess.Popen([sys.executable, "-c", SETSID_GRANDCHILD], env=os.environ | environment)
    (ctx.run_dir / "grandchild").write_text(str(process.pid))


def fail(ctx: ChildContext, acts: dict, step: int = 0) -> None:
    """What happens in the main loop, from step `at` on; once per run unless `always`."""
    done = ctx.run_dir / f"failed-{ctx.role.name.replace('/', '.')}"
    if step < acts.get("at", 0) or (done.exists() and not acts.get("always")):
        return
    if "kill" in acts:
        done.touch()
        os.kill(os.getpid(), signal.Signals[acts["kill"]])
    if "raise" in acts:
        done.touch()
        raise RuntimeError(acts["raise"])
    if "memory_error" in acts:
        raise MemoryError("no memory left")
    if acts.get("fill_disk"):
        fill_bytes(ctx.run_dir)
    if acts.get("hang"):
        hang_here()
    if acts.get("deaf"):  # alive, but never stops
        while True:
            ctx.beat()
            time.sleep(0.02)


def hang_here() -> None:
    ctypes.CDLL(None).sleep(600)  # a C call: no Python code runs


def main() -> None:
    """`python runtime_roles.py CONFIG.json`: a root of its own, for tests that kill it."""
    from prl.config.schema import RunConfig
    from prl.runtime.launch import run

    config = RunConfig.model_validate_json(Path(sys.argv[1]).read_text())
    try:
        sys.exit(run(config, ENTRIES))
    except UserError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
