"""The process that leads `prl.eval`: the held-out tasks once, their metrics, and the table of results."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Coroutine
from typing import Any

import numpy as np

from prl.config.schema import RunConfig
from prl.orchestrator.engines.answers import EngineError
from prl.orchestrator.engines.pool import EnginePool
from prl.orchestrator.engines.served import gave_nothing, served_engines
from prl.orchestrator.intervals import ABOUT, interval_over_tasks
from prl.orchestrator.neighbours import load_renderer, own_engines
from prl.orchestrator.rollouts.env_client import EnvClient
from prl.orchestrator.rollouts.evaluation import Ended, TaskScore, evaluate, task_scores
from prl.orchestrator.rollouts.failure_log import FailureLog
from prl.orchestrator.rollouts.kept_rollouts import KeptRollouts
from prl.orchestrator.rollouts.runner import EnvironmentBroken, NothingWorks, RolloutRunner
from prl.runtime.directory.evaluation import RESULT, read_source
from prl.runtime.directory.files import replace_file
from prl.runtime.process.child import ChildContext

BEAT_S = 0.2


def main(ctx: ChildContext) -> None:
    """Entry of `orchestrator` in the job eval."""
    asyncio.run(Evaluator(ctx).run())


class Evaluator:
    def __init__(self, ctx: ChildContext) -> None:
        self.ctx, self.config = ctx, ctx.plan.config
        self.error: BaseException | None = None  # of what goes on beside

    async def run(self) -> None:
        """Returns early, with nothing written, when it is asked to stop."""
        ctx, config = self.ctx, self.config
        renderer = await asyncio.to_thread(load_renderer, ctx)
        work: list[asyncio.Task[None]] = []
        engines: EnginePool
        if config.inference.urls:
            engines = served_engines(config.inference, renderer)
        else:
            engines, followed = own_engines(ctx)
            work.append(self._in_background(followed()))
        envs = {name: EnvClient(name, ctx.endpoints[f"env/{name}"], ctx.keys.env) for name in config.env.mix}
        work += [self._in_background(env.serve()) for env in envs.values()]
        if config.inference.urls:  # it waits for others now, and says itself which of them gave no answer
            ctx.ready()
        try:
            await self._with_beats(self._wait_for(engines, envs))
            if ctx.stop_requested:
                return
            runner = RolloutRunner(config, engines, envs, renderer, None, FailureLog(ctx.run_dir))
            runner.version = 0  # engines serve what they were started with
            kept = KeptRollouts(ctx.run_dir, config.logging.rollouts, renderer, config.seed, 0)
            if not config.inference.urls:
                ctx.ready()
            await self._with_beats(self._evaluate(runner, kept, envs))
        finally:
            for task in work:
                task.cancel()
            await engines.close()

    async def _wait_for(self, engines: EnginePool, envs: dict[str, EnvClient]) -> None:
        timeout_s = self.config.deployment.start_timeout_s
        await engines.wait_healthy(timeout_s)
        for env in envs.values():
            await asyncio.wait_for(env.connected.wait(), timeout_s)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """An exception of it ends the run."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._check)
        return task

    def _check(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.error = self.error or task.exception()

    async def _with_beats(self, work: Coroutine[Any, Any, None]) -> None:
        """Until it is done, or given up because a stop was asked for."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done() and not self.ctx.stop_requested:
                self.ctx.beat()
                await asyncio.wait([task], timeout=BEAT_S)
                if self.error is not None:
                    raise self.error
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        if not task.cancelled():
            task.result()

    async def _evaluate(self, runner: RolloutRunner, keeper: KeptRollouts, envs: dict[str, EnvClient]) -> None:
        ctx, config = self.ctx, self.config
        counts = {name: env.counts["held_out"] for name, env in envs.items()}
        source = read_source(ctx.run_dir)
        step = source.get("step", 0)  # seeds requests, as in the run's own evaluation of that step
        started = time.perf_counter()
        found: list[Ended] = []

        def look(ended: Ended) -> None:
            found.append(ended)

        try:
            row = await evaluate(runner, config.eval, config.inference.sampling, counts, step, look)
        except (EngineError, NothingWorks) as error:
            if isinstance(error, EnvironmentBroken) or not config.inference.urls:
                raise
            raise gave_nothing(config.inference, str(error)) from error
        ended = found[0]
        kept = keeper.choose_held_out(step, ended)
        await asyncio.to_thread(keeper.write, kept)
        served = getattr(runner.engines, "served", None)
        policy = source or named_policy(config) | ({"served": served} if served else {})
        result: dict[str, Any] = {"policy": policy, "step": step, "reward": row["eval/reward"]}
        result["failed_rollouts"] = row["eval/failed_rollouts"]
        result["rollouts"] = sum(len(of_task) for of_task in ended.values())
        result["environments"] = {env: summarise(task_scores(ended, env, config.eval), config.eval.k) for env in counts}
        for env, told in result["environments"].items():
            for name, figure in told["figures"].items():
                if figure["interval"] is not None:
                    row[f"eval/{env}/{name}_low"], row[f"eval/{env}/{name}_high"] = figure["interval"]
        replace_file(ctx.run_dir / RESULT, json.dumps(result | {"about": ABOUT}, indent=1) + "\n")
        ctx.metrics.log(step=step, policy_version=step, eval_s=time.perf_counter() - started, **row)
        ctx.metrics.flush()


def summarise(scores: list[TaskScore], k: int) -> dict[str, Any]:
    """Of one environment: how many tasks and samples, avg@k and pass@k with their intervals, rewards by task."""
    values = {f"avg@{k}": [task.average for task in scores], f"pass@{k}": [task.passes for task in scores]}
    figures = {
        name: {"mean": float(np.mean(of_tasks)), "interval": interval_over_tasks(of_tasks)}
        for name, of_tasks in values.items()
        if of_tasks
    }
    return {
        "tasks": len(scores),
        "samples": sum(len(task.rewards) for task in scores),
        "figures": figures,
        "by_task": {task.task: task.rewards for task in scores},
    }


def named_policy(config: RunConfig) -> dict[str, Any]:
    """Of a policy that comes from no run: where it is served, or lies; its name alone for random weights."""
    if config.inference.urls:
        return {"urls": list(config.inference.urls)}
    return {"model": config.model.name, "path": config.model.path}
