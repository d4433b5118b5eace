"""The orchestrator: tasks to rollouts to batches, new weights to engines, evaluation, its part of the checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Literal

from prl.config.errors import AwayError
from prl.config.world import takes_turns
from prl.metrics.mfu import document_flops
from prl.metrics.reader import read_rows
from prl.orchestrator.batching import EncodedStep, encode_step, release
from prl.orchestrator.checkpointing import Checkpointing
from prl.orchestrator.engine_answers import EngineError
from prl.orchestrator.engine_watch import EngineWatch
from prl.orchestrator.engines import EnginePool
from prl.orchestrator.env_client import EnvClient
from prl.orchestrator.evaluation import Ended, evaluate
from prl.orchestrator.external import ExternalEngines
from prl.orchestrator.failure_log import FailureLog
from prl.orchestrator.kept_rollouts import Kept, KeptRollouts
from prl.orchestrator.lockstep import Lockstep
from prl.orchestrator.loop_watch import LoopWatch
from prl.orchestrator.neighbours import load_renderer, own_engines
from prl.orchestrator.producer import Producer, StepGroups
from prl.orchestrator.rollout_log import RolloutLog
from prl.orchestrator.runner import RolloutRunner
from prl.orchestrator.server import BadRequest, start_server
from prl.orchestrator.step_row import step_row
from prl.orchestrator.tasks import TaskSampler
from prl.orchestrator.teacher import Teacher
from prl.orchestrator.waiting import told_while_waiting
from prl.runtime.process.child import ChildContext
from prl.transport.batch import TrainBatch
from prl.transport.frames import Message
from prl.transport.kinds import HOST_TRANSPORTS, NO_PUBLICATION

LOOK_S = 0.2


def main(ctx: ChildContext) -> None:
    """Entry of `orchestrator`."""
    asyncio.run(Orchestrator(ctx).run())


class Orchestrator:
    def __init__(self, ctx: ChildContext) -> None:
        self.ctx, self.config = ctx, ctx.plan.config
        self.takes_turns = takes_turns(self.config)
        self.work = document_flops(self.config.model.card, self.config.memory_recipe.lora.rank > 0)
        self.step_ready, self.loop_watch = asyncio.Condition(), LoopWatch()
        # by step; the newest two, so that a slow rank still finds its own
        self.batches: dict[int, EncodedStep] = {}
        self.snapshots: dict[int, dict[str, Any]] = {}  # producer state after each handed-out step
        self.checkpoints = Checkpointing(ctx)
        self.unsaved: set[int] = set()  # steps to checkpoint whose trainer part is not on disk yet
        self.last_fetched = ctx.resume_step  # newest step that any rank has fetched
        self.stop_at: int | None = None  # first step that nobody will train
        self.finished = asyncio.Event()  # the trainer said goodbye
        self.prepared = asyncio.Event()  # neighbours are up, and everything below exists
        self.served = -1  # policy version that all engines serve; -1: none yet
        # newest publication that engines are done with, and whether they serve it; NO_PUBLICATION: they are up
        self.delivery = NO_PUBLICATION - 1, False
        self.offered = NO_PUBLICATION  # newest publication that the trainer told of
        self.turn = NO_PUBLICATION  # newest publication that engines were told of
        self.delivered = asyncio.Condition()  # of both
        self.again: set[int] = set()  # publications behind which the trainer publishes the same version once more
        self.error: Exception | None = None  # of a request handler
        self.away: Exception | None = None  # for which the run ends once it is saved
        self.engine_lock = asyncio.Lock()  # evaluation, weight updates and sleep exclude each other
        self.updates: set[asyncio.Task[None]] = set()  # publications on their way into the engines
        self.evaluated: set[int] = set()  # versions, in earlier attempts too
        self.to_evaluate: set[int] = set()  # versions published whose evaluation is not over
        self.rollout_log: RolloutLog | None = None
        self.watch: EngineWatch | None = None
        self.external: ExternalEngines | None = None
        self.teacher: Teacher | None = None
        # step -> when the trainer took it, generation seconds until then
        self.handed: dict[int, tuple[float, float]] = {}
        self.ready_since: dict[int, float] = {}  # step -> when its batch was ready

    async def run(self) -> None:
        ctx, config = self.ctx, self.config
        renderer = await asyncio.to_thread(load_renderer, ctx)
        followed = self._find_engines()
        self.envs = {name: EnvClient(name, ctx.endpoints[f"env/{name}"], ctx.keys.env) for name in config.env.mix}
        background = [self._in_background(env.serve()) for env in self.envs.values()]
        background.append(self._in_background(self.loop_watch.follow()))
        server = await start_server(self, ctx.listen_socket, ctx.keys.train)  # type: ignore[arg-type]
        try:
            if self.external is not None:
                await self._with_beats(self.external.take())
            background.append(self._in_background(followed()))
            if config.algo.teacher.urls:
                self.teacher = Teacher(config, renderer, self.fail)
                await self._with_beats(self.teacher.prepare())
            await self._with_beats(self._wait_for_others())
            lockstep = Lockstep(self.engines) if config.algo.max_off_policy_steps == 0 else None
            failures = FailureLog(ctx.run_dir)
            self.runner = RolloutRunner(config, self.engines, self.envs, renderer, lockstep, failures)
            if lockstep is None:  # else nothing may depend on timing
                self.watch = EngineWatch(self.engines, self.runner.slots, config.inference)
                background.append(self._in_background(self.watch.follow()))
            counts = {name: env.counts["train"] for name, env in self.envs.items()}
            weights = {name: source.weight for name, source in config.env.mix.items()}
            sampler = TaskSampler(counts, weights, config.seed)
            self.producer = Producer(config, self.runner, sampler, self.takes_turns, self.teacher)
            self.kept = KeptRollouts(ctx.run_dir, config.logging.rollouts, renderer, config.seed, ctx.resume_step)
            self._restore()
            self.prepared.set()
            async with self.delivered:
                self.delivery = NO_PUBLICATION, False
                self.delivered.notify_all()
            ctx.ready()
            await self._with_beats(self._work())
        finally:
            for task in background:
                task.cancel()
            if self.external is not None:
                await self.external.release()
            for pool in (self.engines, self.teacher):
                if pool is not None:
                    await pool.close()
            await server.cleanup()

    def _find_engines(self) -> Callable[[], Coroutine[Any, Any, None]]:
        """Sets the pool. Returns what follows its engines' restarts, for ever."""
        ctx, config = self.ctx, self.config
        if config.inference.urls:
            self.external = ExternalEngines(ctx)
            self.engines: EnginePool = self.external.pool
            return self.external.follow
        self.engines, followed = own_engines(ctx)
        return followed

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin work that goes on beside the rest until it is cancelled; an exception of it ends the run."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._check)
        return task

    def _check(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self.fail(error)

    async def _wait_for_others(self) -> None:
        timeout_s = self.config.deployment.start_timeout_s
        if self.external is None:  # else those that answer have been leased
            await self.engines.wait_healthy(timeout_s)
        await self.engines.init_weight_transfer({"verify_checksum": self.config.weight_transport.verify_checksum})
        for env in self.envs.values():
            await asyncio.wait_for(env.connected.wait(), timeout_s)

    def _restore(self) -> None:
        step = self.ctx.resume_step
        if step:
            self.producer.resume(step, self.checkpoints.load(step))
        self.snapshots[step] = self.producer.state()
        rows = read_rows(self.ctx.run_dir, self.ctx.role.name)
        self.evaluated = {row["step"] for row in rows if "eval/reward" in row}
        if self.config.debug.keep_rollouts:
            self.rollout_log = RolloutLog(self.ctx.run_dir / "rollouts.jsonl", step)

    async def _with_beats(self, work: Awaitable[None]) -> None:
        """Run `work` while telling the supervisor that this event loop is alive, and watching for the request to
        stop.
        """
        task = asyncio.ensure_future(work)
        while not task.done():
            self.ctx.beat()
            if self.ctx.stop_requested and self.stop_at is None:
                await self._stop_after_current()
            await asyncio.wait([task], timeout=0.2)
            self._look_at_checkpoints()
            is_away = isinstance(self.error, AwayError | (EngineError if self.external else AwayError))
            if is_away and self.away is None and self.prepared.is_set() and self.stop_at is None:
                self.away, self.error = self.error, None  # what was trained is saved first, as when somebody stops it
                for update in self.updates:  # they would wait for the engines
                    update.cancel()
                await self._stop_after_current()
            if self.error is not None:
                task.cancel()
                raise self.away or self.error
        task.result()
        if self.away is not None:
            raise self.away

    def _look_at_checkpoints(self) -> None:
        try:
            self.checkpoints.look()
        except Exception as error:
            self.fail(error)

    async def _stop_after_current(self) -> None:
        async with self.step_ready:
            self.stop_at = self.last_fetched + 1  # ranks that lag behind still get what another one already has
            self.step_ready.notify_all()

    # --- the main work ------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        feeding = asyncio.create_task(self._feed())
        goodbye = asyncio.create_task(self.finished.wait())
        done, _ = await asyncio.wait([feeding, goodbye], return_when=asyncio.FIRST_COMPLETED)
        if feeding in done:
            feeding.result()
            await goodbye
        feeding.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await feeding
        evaluates = self.runner.version >= self.config.max_steps and self._evaluates_at_end()
        if self.stop_at is not None and self.engines.starved:
            for update in self.updates:  # an evaluation of theirs would wait for weights that do not come
                update.cancel()
        elif evaluates or self.updates:  # these evaluate, too
            self.engines.expect_no_weights()
        if self.updates:
            await asyncio.wait(self.updates)  # `_check_update` sees what went wrong
        await self.producer.stop()
        if evaluates:
            async with self.engine_lock:
                await self._evaluate(self.runner.version)

    async def _feed(self) -> None:
        """Collect batch after batch until max_steps."""
        before = time.perf_counter()
        for step in range(self.ctx.resume_step + 1, self.config.max_steps + 1):
            started = time.perf_counter()
            async with told_while_waiting(self.producer, self.ctx.metrics, step, len(self.config.env.mix) > 1):
                groups = await self.producer.next_step()
            now = time.perf_counter()
            waited_s, since_last_s, before = now - started, now - before, now
            interval = self.config.ckpt.interval
            meta = {
                "stop": False,
                "publish_again": False,
                "checkpoint": bool(interval) and step % interval == 0,
                "groups": [group.index for group in groups.groups],
                "kept_documents": (kept := self.kept.choose(groups)).documents,
            }
            data_ranks = self.ctx.plan.mesh.data_ranks
            encoded = await asyncio.to_thread(encode_step, groups, self.config.seq_len, data_ranks, meta, self.work)
            if self.takes_turns:
                async with self.engine_lock:  # an evaluation may still be using them
                    await self.engines.sleep()
            async with self.step_ready:
                self.snapshots[step] = self.producer.state()
                self.batches[step] = encoded
                self.ready_since[step] = time.perf_counter()
                oldest = step - self.config.algo.max_off_policy_steps - 1
                outdated = [self.batches.pop(old) for old in list(self.batches) if old < oldest]
                # a stop saves the step in training, which is never older than the version that the engines serve
                for old in [s for s in self.snapshots if s < min(self.unsaved | {self.served})]:
                    del self.snapshots[old]
                if meta["checkpoint"]:
                    self.unsaved.add(step)
                self.step_ready.notify_all()
            self._log_step(groups, encoded, waited_s, since_last_s)
            if self.rollout_log is not None:
                self.rollout_log.write(groups)
            await asyncio.to_thread(self.kept.write, kept)
            await asyncio.to_thread(release, outdated)

    def _due(self, version: int) -> bool:
        interval = self.config.eval.interval
        return bool(interval) and version > 0 and version % interval == 0

    async def _evaluate(self, version: int) -> None:
        """Evaluate `version` by what is served now, holding engine_lock; rollouts that run go on beside it, new ones
        wait. Only where an engine died and could get no older weights is that a later version, as the row says.
        """
        await self.producer.hold(True)
        counts = {name: env.counts["held_out"] for name, env in self.envs.items()}
        started = time.perf_counter()
        kept: list[Kept] = []

        def look(ended: Ended) -> None:
            kept.append(self.kept.choose_held_out(version, ended))

        row = await evaluate(self.runner, self.config.eval, self.config.inference.sampling, counts, version, look)
        seconds, served = time.perf_counter() - started, self.runner.version
        self.ctx.metrics.log(step=version, policy_version=served, eval_s=seconds, **row)
        self.ctx.metrics.flush()  # or end here, to be evaluated by the run that resumes
        self.evaluated.add(version)
        await asyncio.to_thread(self.kept.write, kept[0])
        if self.runner.lockstep:  # what is cached now must not depend on whether there was an evaluation (resume)
            await self.engines.everywhere("/reset_prefix_cache")
        await self.producer.hold(False)

    # --- what the trainer asks ----------------------------------------------------------------------------------------

    async def batch_for(self, step: int, data_rank: int, publications: int, timeout_s: float) -> Message | None:
        """The batch of a step for one data rank, or word to publish again or to stop, which all ranks get at the same
        point: behind as many `publications`. None when there is nothing to do within timeout_s.
        """
        deadline = time.monotonic() + timeout_s
        async with self.step_ready:
            while (order := self._order_for(step, publications)) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.step_ready.wait(), min(left, LOOK_S))  # engines come back unannounced
            if order == "batch":
                messages = self.batches[step].messages
                if data_rank >= len(messages):
                    raise BadRequest(f"there are {len(messages)} data ranks, so none is {data_rank}")
                self.last_fetched = max(self.last_fetched, step)
                if data_rank == 0:
                    self.handed[step] = (time.perf_counter(), self.runner.stats.clock.seconds())
                return messages[data_rank]
        meta = {"stop": order == "stop", "publish_again": order == "again", "checkpoint": False}
        return TrainBatch(step, [], 0, 0, meta).to_message()

    def _order_for(self, step: int, publications: int) -> Literal["again", "stop", "batch"] | None:
        """What a rank is to do that waits for the batch of `step`.

        While it would only wait, it publishes its version again for engines that came back without weights. With a
        batch at hand it does so only if nothing is generated meanwhile: the next version follows.
        """
        if publications in self.again:
            return "again"
        if self.stop_at is not None and step >= self.stop_at:
            return "stop"
        is_ready = step in self.batches
        wanted = self.engines.starved if is_ready else self.engines.wants_weights
        if wanted and self.delivery[0] == publications and self.last_fetched < step:
            self.again.add(publications)
            return "again"
        return "batch" if is_ready else None

    async def weights_published(self, publication: int, version: int, update_info: dict[str, Any]) -> None:
        """The trainer has weights to offer: bring all engines to them in the background. Once for each publication."""
        if publication <= self.offered:
            return
        self.offered = publication
        if version in self.handed:
            self._log_overlap(version)
        if self._evaluates(version):
            self.to_evaluate.add(version)
        update = asyncio.create_task(self._update_engines(publication, version, update_info))
        self.updates.add(update)
        update.add_done_callback(self._check_update)

    def _check_update(self, update: asyncio.Task[None]) -> None:
        self.updates.discard(update)
        self._check(update)

    async def _update_engines(self, publication: int, version: int, update_info: dict[str, Any]) -> None:
        """Swap the weights everywhere, evaluate if it is time, let the rollouts of this version begin."""
        await self.prepared.wait()  # the trainer may be up first
        turn = asyncio.create_task(self.engine_lock.acquire())
        try:
            while not turn.done() and not self._is_needed():
                await asyncio.wait([turn], timeout=LOOK_S)
            async with self.delivered:
                self.turn = publication
                self.delivered.notify_all()
            is_new = version != self.served
            asleep = self.takes_turns and self.served >= 0
            taken = await self.engines.update_weights(version, update_info, asleep=asleep)
            if taken:
                timed = self.engines.update_s
                row = {f"weight_update/{route}_s": seconds for route, seconds in timed.items()}
                self.ctx.metrics.log(step=version, policy_version=version, weight_update_s=sum(timed.values()), **row)
            if self.runner.lockstep:
                # all that it decoded is over: slots and batches become those of an engine that starts (resume)
                await self.engines.everywhere("/reset_prefix_cache")
            self.runner.version = version
            async with self.delivered:
                self.served, self.delivery = version, (publication, taken)
                self.delivered.notify_all()
            await turn
            if is_new and self._evaluates(version):  # even if it was overtaken, while engines were started again
                await self._evaluate(version)
            if is_new and version == self.served:
                await self.producer.set_version(version)
        finally:
            if not self._evaluates(version):  # else another update may be evaluating it
                self.to_evaluate.discard(version)
            turn.cancel()
            if turn.done() and not turn.cancelled():
                self.engine_lock.release()

    def _is_needed(self) -> bool:
        """Whether an evaluation under way can end only with the weights that come next, and so goes on with them.

        Its engines wait for them, or will, for the version that they had is not held any more.
        """
        held = self.config.weight_transport.type in HOST_TRANSPORTS
        return self.engines.starved or (held and not any(self.engines.serving))

    def _evaluates(self, version: int) -> bool:
        """Whether an evaluation follows when the engines have got `version`."""
        if version in self.evaluated or not self.config.eval.interval:
            return False
        if version == 0:
            return self.config.eval.at_start
        # a stop leaves it to the run that resumes, if that begins with this version
        return self._due(version) and (self.stop_at is None or version < self.stop_at - 1)

    def _evaluates_at_end(self) -> bool:
        """Whether the final policy is evaluated when all else is over; where it is due anyway, its update does it."""
        version, wanted = self.runner.version, self.config.eval
        return bool(wanted.interval) and wanted.at_end and not self._due(version) and version not in self.evaluated

    async def weights_delivered(self, publication: int, timeout_s: float) -> bool | None:
        """Wait until engines are done with it: whether they serve it. None when it takes longer than timeout_s."""

        is_done = await self._comes_true(lambda: self.delivery[0] >= publication, timeout_s)
        return self.delivery[1] if is_done else None

    async def turn_reached(self, publication: int, timeout_s: float) -> bool:
        """Wait until engines are told of it: behind an evaluation. False when it takes longer than timeout_s."""
        return await self._comes_true(lambda: self.turn >= publication, timeout_s)

    async def _comes_true(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        async with self.delivered:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.delivered.wait_for(condition), timeout_s)
            return condition()

    async def trainer_checkpointed(self, step: int, in_haste: bool) -> None:
        """The trainer's part is on disk: add ours, and begin to make the checkpoint count."""
        held = partial(self._would_lose_evaluation, step)
        self.checkpoints.start(step, self.snapshots, held, in_haste)
        self.unsaved = {later for later in self.unsaved if later > step}  # one that was skipped is made up for by this

    def _would_lose_evaluation(self, step: int) -> bool:
        """Whether a run that resumes from `step` would miss an evaluation of an older version which is under way.

        Not while it cannot go on, for it may need weights of a trainer that waits for this checkpoint; and a stop does
        not wait for it either.
        """
        unfinished = any(version < step for version in tuple(self.to_evaluate))
        return unfinished and self.stop_at is None and any(self.engines.serving)

    async def checkpoint_committed(self, step: int, timeout_s: float) -> float | None:
        return await self.checkpoints.committed(step, timeout_s)

    async def trainer_done(self, step: int) -> None:
        self.finished.set()

    def fail(self, error: Exception) -> None:
        self.error = self.error or error

    def _log_overlap(self, step: int) -> None:
        """How much of the time in which the trainer worked on `step` the engines were generating, and who waited
        for whom.
        """
        taken, generated = self.handed.pop(step)
        busy_s = time.perf_counter() - taken
        self.ctx.metrics.log(
            step=step,
            policy_version=step - 1,
            overlap=(self.runner.stats.clock.seconds() - generated) / busy_s,
            trainer_busy_s=busy_s,
            wait_for_trainer_s=taken - self.ready_since.pop(step),
        )

    # --- metrics ------------------------------------------------------------------------------------------------------

    def _log_step(self, groups: StepGroups, encoded: EncodedStep, waited_s: float, since_last_s: float) -> None:
        held_s, spans = self.loop_watch.take(), self.runner.stats.clock.new_spans()
        row = step_row(self.config.algo, groups, encoded, self.engines, self.runner.stats)
        row |= {"wait_for_rollouts_s": waited_s, "since_last_step_s": since_last_s, "generating_spans": spans}
        row |= {"loop_held_s": held_s[0], "loop_busy_s": held_s[1]}  # the event loop: by one thing at a time, in all
        row |= {"tokens_per_s": groups.completion_tokens / since_last_s}
        row |= groups.row(several=len(self.envs) > 1)
        row |= {} if self.watch is None else self.watch.row()
        self.ctx.metrics.log(step=groups.step, policy_version=groups.step - 1, **row)
