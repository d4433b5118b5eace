"""Moments of a run at which a test wants to do something: the process that comes there waits until the test has.

MOMENT is "NAME" or "NAME:COUNT" (the COUNT-th time, counted in one process), MOMENT_DIR a folder of the test. Who comes
there first writes `reached` (its pid) and waits for `go`; it does so once, whatever is started again later.
"""

import asyncio
import functools
import inspect
import os
import sys
import time
from pathlib import Path

NAME, _, COUNT = os.environ["MOMENT"].partition(":")
FOLDER = Path(os.path.expandvars(os.environ["MOMENT_DIR"]))  # $SLURM_ARRAY_TASK_ID: one for each element
LIMIT_S = 200.0  # ends hangs only
POLL_S = 0.01
came = [0]


def claim():
    """Whether this is the moment."""
    if NAME == "engine restart" and not was_started_before("".join(sys.argv[1:3])):
        return False
    came[0] += 1
    if came[0] != int(COUNT or 1):
        return False
    try:
        (FOLDER / "taken").touch(exist_ok=False)  # before anybody hears of it: who does may kill this process
    except FileExistsError:
        return False
    (FOLDER / "reached.partial").write_text(str(os.getpid()))
    os.rename(FOLDER / "reached.partial", FOLDER / "reached")
    return True


def was_started_before(name):
    """Whether another process of this name has been here."""
    try:
        with open(FOLDER / ("started" + name.replace("/", "-")), "x"):
            return False
    except FileExistsError:
        return True


def may_go_on(deadline):
    return (FOLDER / "go").exists() or time.monotonic() > deadline


def stop_here():
    if claim():
        deadline = time.monotonic() + LIMIT_S
        while not may_go_on(deadline):
            time.sleep(POLL_S)


async def stop_here_async():
    if claim():
        deadline = time.monotonic() + LIMIT_S
        while not may_go_on(deadline):
            await asyncio.sleep(POLL_S)


def before(function):
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def wrapped(*args, **kwargs):
            await stop_here_async()
            return await function(*args, **kwargs)
    else:

        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            stop_here()
            return function(*args, **kwargs)

    return wrapped


def after(function):
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def wrapped(*args, **kwargs):
            result = await function(*args, **kwargs)
            await stop_here_async()
            return result
    else:

        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            result = function(*args, **kwargs)
            stop_here()
            return result

    return wrapped


def before_held_out(function):
    @functools.wraps(function)
    def wrapped(self, choice, split, *args, **kwargs):
        if split == "held_out":
            stop_here()
        return function(self, choice, split, *args, **kwargs)

    return wrapped


def before_generating(function):
    @functools.wraps(function)
    def wrapped(self, path, *args):
        if path == "/inference/v1/generate":
            stop_here()
        return function(self, path, *args)

    return wrapped


MOMENTS = {  # name -> (module, attribute by its dotted path, wrapper)
    "evaluation": ("prl.orchestrator.loop", "evaluate", before),
    "evaluated": ("prl.orchestrator.loop", "evaluate", after),
    "rollout of an evaluation": ("prl.orchestrator.rollouts.runner", "RolloutRunner.start_rollout", before_held_out),
    "staging": ("prl.trainer.checkpoint", "TrainerCheckpointer.save", before),
    "staged": ("prl.trainer.checkpoint", "TrainerCheckpointer.save", after),
    "commit": ("prl.runtime.directory.commits", "commit", before),
    "manifest": ("prl.runtime.directory.checkpoints", "_write_manifest", before),
    "before rename": ("prl.runtime.directory.checkpoints", "_write_manifest", after),
    "committed": ("prl.runtime.directory.commits", "commit", after),
    "publication": ("prl.trainer.loops.rl_loop", "RLTrainer.publish", before),
    "published": ("prl.trainer.loops.rl_loop", "RLTrainer.publish", after),
    "update": ("prl.orchestrator.engines.pool", "EnginePool.update_weights", before),
    "updated": ("prl.orchestrator.engines.pool", "EnginePool.update_weights", after),
    "optimizer step": ("prl.trainer.policy", "Policy.optimizer_step", before),
    "stepped": ("prl.trainer.policy", "Policy.optimizer_step", after),
    "metrics": ("prl.metrics.writer", "MetricsWriter.log", before),
    "batch": ("prl.orchestrator.loop", "Orchestrator.batch_for", before),
    "engine start": ("prl.inference.server", "main", before),
    "engine restart": ("prl.inference.server", "main", before),
    "request": ("prl.inference.worker", "EngineWorker.generate", before),
    "request to vLLM": ("prl.inference.vllm.guarding", "Guard._check_body", before_generating),
    "end": ("prl.trainer.loops.rl_loop", "RLTrainer.end", before),
}


def patch(attribute, wrapper):
    def apply(module):
        *owners, name = attribute.split(".")
        owner = functools.reduce(getattr, owners, module)
        setattr(owner, name, wrapper(getattr(owner, name)))

    return apply


module, attribute, wrapper = MOMENTS[NAME]
PATCHES = {module: patch(attribute, wrapper)}
