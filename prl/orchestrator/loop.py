"""The orchestrator: tasks to rollouts to batches, new weights to engines, evaluation, its part of the checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from prl.config.errors import AwayError
from prl.config.world import shares_prefixes, takes_turns
from prl.metrics.mfu import document_flops
from prl.metrics.reader import read_rows
from prl.models.text.chat import ChatRenderer
from prl.orchestrator.batching import EncodedStep, encode_step, release
from prl.orchestrator.checkpointing import Checkpointing
from prl.orchestrator.engines.answers import EngineError
from prl.orchestrator.engines.external import ExternalEngines
from prl.orchestrator.engines.lockstep import Lockstep
from prl.orchestrator.engines.pool import EnginePool
from prl.orchestrator.engines.watch import EngineWatch
from prl.orchestrator.evaluations_due import EvaluationsDue
from prl.orchestrator.handout import Handout
from prl.orchestrator.loop_watch import LoopWatch
from prl.orchestrator.neighbours import load_renderer, own_engines
from prl.orchestrator.publications import Publications
from prl.orchestrator.rollouts.env_client import EnvClient
from prl.orchestrator.rollouts.evaluation import Ended, evaluate
from prl.orchestrator.rollouts.failure_log import FailureLog
from prl.orchestrator.rollouts.kept_rollouts import Kept, KeptRollouts
from prl.orchestrator.rollouts.producer import Producer, StepGroups
from prl.orchestrator.rollouts.rollout_log import RolloutLog
from prl.orchestrator.rollouts.runner import RolloutRunner
from prl.orchestrator.rollouts.tasks import TaskSampler
from prl.orchestrator.rollouts.teacher import Teacher
from prl.orchestrator.server import start_server
from prl.orchestrator.step_row import step_row
from prl.orchestrator.waiting import told_while_waiting
from prl.runtime.branching import first_step
from prl.runtime.process.child import ChildContext
from prl.runtime.process.collector import IN_SMALL_PIECES, Collector
from prl.transport.frames import Message
from prl.transport.kinds import HOST_TRANSPORTS

LOOK_S = 0.2
LULL_LOOK_S = 0.002


def main(ctx: ChildContext) -> None:
    """Entry of `orchestrator`."""
    asyncio.run(Orchestrator(ctx).run())


class Orchestrator:
    """The life of a run, between parts that know where things stand: `Handout` for batches, `Publications` for weights,
    `EvaluationsDue`, `Checkpointing`. They know nothing of each other; what one must tell another goes through here.
    """

    def __init__(self, ctx: ChildContext) -> None:
        self.ctx, self.config = ctx, ctx.plan.config
        self.takes_turns = takes_turns(self.config)
        self.shares = shares_prefixes(self.config)
        self.work = document_flops(self.config.model.card, self.config.memory_recipe.lora.rank > 0)
        self.engine_lock = asyncio.Lock()  # evaluation, weight updates and sleep exclude each other
        self.to_sleep_s = 0.0  # the last time, until all engines had given their memory back
        self.publications = Publications(self.engine_lock, self)
        ahead = self.config.algo.max_off_policy_steps
        self.handout = Handout(ctx.resume_step, ahead, self.publications, lambda: self.runner.stats.clock.seconds())
        self.evaluations = EvaluationsDue(self.config.eval)
        self.checkpoints = Checkpointing(ctx)
        self.loop_watch, self.collector = LoopWatch(), Collector()
        self.finished = asyncio.Event()  # the trainer said goodbye
        self.error: Exception | None = None  # of a request handler, or of what goes on in the background
        self.away: Exception | None = None  # for which the run ends once it is saved
        self.background: list[asyncio.Task[None]] = []
        self.rollout_log: RolloutLog | None = None
        self.watch: EngineWatch | None = None
        self.external: ExternalEngines | None = None
        self.teacher: Teacher | None = None

    # --- start and end ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        ctx, config = self.ctx, self.config
        renderer = await asyncio.to_thread(load_renderer, ctx)
        followed = self._find_engines()
        self.envs = {name: EnvClient(name, ctx.endpoints[f"env/{name}"], ctx.keys.env) for name in config.env.mix}
        for env in self.envs.values():
            self._in_background(env.serve())
        self._in_background(self.loop_watch.follow())
        server = await start_server(self, ctx.listen_socket, ctx.keys.train)  # type: ignore[arg-type]
        try:
            if self.external is not None:
                await self._with_beats(self.external.take())
            self._in_background(followed())
            if config.algo.teacher.urls:
                self.teacher = Teacher(config, renderer, self.fail)
                await self._with_beats(self.teacher.prepare())
            await self._with_beats(self._wait_for_others())
            self._prepare(renderer)
            self._restore()
            self.collector.begin(IN_SMALL_PIECES)
            await self.publications.engines_are_up()
            ctx.ready()
            await self._with_beats(self._work())
        finally:
            for task in self.background:
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

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin work that goes on beside the rest until the run ends; an exception of it ends the run."""

        def check(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and isinstance(error := task.exception(), Exception):
                self.fail(error)

        task = asyncio.create_task(work)
        task.add_done_callback(check)
        self.background.append(task)

    async def _wait_for_others(self) -> None:
        timeout_s = self.config.deployment.start_timeout_s
        if self.external is None:  # else those that answer have been leased
            await self.engines.wait_healthy(timeout_s)
        await self.engines.init_weight_transfer({"verify_checksum": self.config.weight_transport.verify_checksum})
        for env in self.envs.values():
            await asyncio.wait_for(env.connected.wait(), timeout_s)

    def _prepare(self, renderer: ChatRenderer) -> None:
        """All neighbours are up: make what runs between them."""
        ctx, config = self.ctx, self.config
        lockstep = Lockstep(self.engines) if config.algo.max_off_policy_steps == 0 else None
        failures = FailureLog(ctx.run_dir)
        self.runner = RolloutRunner(config, self.engines, self.envs, renderer, lockstep, failures)
        if lockstep is None:  # else nothing may depend on timing
            self.watch = EngineWatch(self.engines, self.runner.slots, config.inference)
            self._in_background(self.watch.follow())
        counts = {name: env.counts["train"] for name, env in self.envs.items()}
        weights = {name: source.weight for name, source in config.env.mix.items()}
        sampler = TaskSampler(counts, weights, config.seed)
        self.producer = Producer(config, self.runner, sampler, self.takes_turns, self.teacher)
        self.kept = KeptRollouts(ctx.run_dir, config.logging.rollouts, renderer, config.seed, ctx.resume_step)

    def _restore(self) -> None:
        step = self.ctx.resume_step
        if step:
            self.producer.resume(step, self.checkpoints.load(step))
        self.checkpoints.note(step, self.producer.state())
        rows = read_rows(self.ctx.run_dir, self.ctx.role.name)
        evaluated = {row["step"] for row in rows if "eval/reward" in row}
        self.evaluations.resume(evaluated, first_step(self.ctx.run_dir))
        if self.config.debug.keep_rollouts:
            self.rollout_log = RolloutLog(self.ctx.run_dir / "rollouts.jsonl", step)

    async def _with_beats(self, work: Awaitable[None]) -> None:
        """Run `work` while telling the supervisor that this event loop is alive, and watching for the request to
        stop.
        """
        task = asyncio.ensure_future(work)
        while not task.done():
            self.ctx.beat()
            if self.ctx.stop_requested and not self.handout.is_stopping:
                await self._stop_after_current()
            await asyncio.wait([task], timeout=LOOK_S)
            self._look_at_checkpoints()
            is_away = isinstance(self.error, AwayError | (EngineError if self.external else AwayError))
            if is_away and self.away is None and self.publications.is_up and not self.handout.is_stopping:
                self.away, self.error = self.error, None  # what was trained is saved first, as when somebody stops it
                self.publications.give_up()  # they would wait for the engines
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
        self.evaluations.stop(await self.handout.stop())

    def fail(self, error: Exception) -> None:
        self.error = self.error or error

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
        version = self.runner.version
        evaluates = version >= self.config.max_steps and self.evaluations.follows_at_end(version)
        if self.handout.is_stopping and self.engines.starved:
            self.publications.give_up()  # an evaluation of theirs would wait for weights that do not come
        elif evaluates or self.publications.under_way:  # these evaluate, too
            self.engines.expect_no_weights()
        await self.publications.finish()
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
            kept = self.kept.choose(groups)
            encoded = await self._encode(groups, kept)
            if self.takes_turns:
                async with self.engine_lock:  # an evaluation may still be using them
                    asked = time.perf_counter()
                    await self.engines.sleep()
                    self.to_sleep_s = time.perf_counter() - asked
            self.checkpoints.note(step, self.producer.state(), is_awaited=self._saves(step))
            self.checkpoints.forget(self.publications.served)
            dropped = await self.handout.add(step, encoded)
            self._log_step(groups, encoded, waited_s, since_last_s)
            if self.rollout_log is not None:
                self.rollout_log.write(groups)
            await asyncio.to_thread(self.kept.write, kept)
            await asyncio.to_thread(release, dropped)

    def _saves(self, step: int) -> bool:
        """Whether the trainer saves a checkpoint behind `step`, stop or not."""
        interval = self.config.ckpt.interval
        return bool(interval) and step % interval == 0

    async def _encode(self, groups: StepGroups, kept: Kept) -> EncodedStep:
        meta = {
            "stop": False,
            "publish_again": False,
            "checkpoint": self._saves(groups.step),
            "groups": [group.index for group in groups.groups],
            "kept_documents": kept.documents,
        }
        data_ranks = self.ctx.plan.mesh.data_ranks
        return await asyncio.to_thread(
            encode_step, groups, self.config.seq_len, data_ranks, meta, self.work, self.shares
        )

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
        self.evaluations.done(version)
        await asyncio.to_thread(self.kept.write, kept[0])
        if self.runner.lockstep:  # what is cached now must not depend on whether there was an evaluation (resume)
            await self.engines.everywhere("/reset_prefix_cache")
        await self.producer.hold(False)

    # --- what the trainer asks, and says ------------------------------------------------------------------------------

    async def batch_for(self, step: int, data_rank: int, publications: int, timeout_s: float) -> Message | None:
        return await self.handout.take(step, data_rank, publications, timeout_s)

    async def weights_published(self, publication: int, version: int, update_info: dict[str, Any]) -> None:
        """The trainer has weights to offer. Counts once for each publication."""
        if not self.publications.offer(publication, version, update_info):
            return
        self.evaluations.published(version)
        if (row := self.handout.trained(version)) is not None:
            self.ctx.metrics.log(step=version, policy_version=version - 1, **row)

    async def turn_reached(self, publication: int, timeout_s: float) -> bool:
        return await self.publications.told(publication, timeout_s)

    async def weights_delivered(self, publication: int, timeout_s: float) -> bool | None:
        return await self.publications.delivered(publication, timeout_s)

    async def trainer_checkpointed(self, step: int, in_haste: bool) -> None:
        """The trainer's part is on disk: add ours, and begin to make the checkpoint count.

        Not before evaluations that a run which resumes from it would miss; unless they cannot go on, for they may need
        weights of a trainer that waits for this checkpoint.
        """

        def held() -> bool:
            return self.evaluations.lost_by(step) and any(self.engines.serving)

        self.checkpoints.trainer_saved(step, held, in_haste)

    async def checkpoint_committed(self, step: int, timeout_s: float) -> float | None:
        return await self.checkpoints.committed(step, timeout_s)

    async def trainer_done(self, step: int) -> None:
        self.finished.set()

    # --- what a publication passes through ----------------------------------------------------------------------------

    def wants_weights(self, instead_of_batch: bool) -> bool:
        return self.engines.starved if instead_of_batch else self.engines.wants_weights

    def may_overtake(self) -> bool:
        """Whether an evaluation under way can end only with the weights that come next, and so goes on with them.

        Its engines wait for them, or will, for the version that they had is not held any more.
        """
        held = self.config.weight_transport.type in HOST_TRANSPORTS
        return self.engines.starved or (held and not any(self.engines.serving))

    async def swap(self, version: int, update_info: dict[str, Any], is_first: bool) -> bool:
        """Bring all engines to `version`. Returns whether they have it."""
        async with self._collecting(version):
            taken = await self.engines.update_weights(version, update_info, asleep=self.takes_turns and not is_first)
        if taken:
            self.ctx.metrics.log(step=version, policy_version=version, **self.engines.clock.row())
        if self.runner.lockstep:
            # all that it decoded is over: slots and batches become those of an engine that starts (resume)
            await self.engines.everywhere("/reset_prefix_cache")
        self.runner.version = version
        return taken

    @contextlib.asynccontextmanager
    async def _collecting(self, version: int) -> AsyncIterator[None]:
        """Now and then, look through all that lives while engines load weights and nothing can come from them."""

        async def when_they_load() -> None:
            while not self.engines.updating.locked():
                await asyncio.sleep(LULL_LOOK_S)
            self.collector.everything()

        lull = asyncio.create_task(when_they_load()) if version and self.collector.is_due(version) else None
        try:
            yield
        finally:
            if lull is not None and lull.cancel():  # it was over too soon
                self.collector.everything()

    async def evaluate_if_due(self, version: int) -> None:
        if self.evaluations.follows(version):
            await self._evaluate(version)

    async def begin(self, version: int) -> None:
        await self.producer.set_version(version)

    def over(self, version: int) -> None:
        self.evaluations.over(version)

    # --- metrics ------------------------------------------------------------------------------------------------------

    def _log_step(self, groups: StepGroups, encoded: EncodedStep, waited_s: float, since_last_s: float) -> None:
        held_s, spans = self.loop_watch.take(), self.runner.stats.clock.new_spans()
        row = step_row(self.config.algo, groups, encoded, self.engines, self.runner.stats)
        row |= {"wait_for_rollouts_s": waited_s, "since_last_step_s": since_last_s, "generating_spans": spans}
        row |= {"loop_held_s": held_s[0], "loop_busy_s": held_s[1]}  # the event loop: by one thing at a time, in all
        row |= self.collector.row()
        row |= {"tokens_per_s": groups.completion_tokens / since_last_s}
        row |= {"engines_to_sleep_s": self.to_sleep_s} if self.takes_turns else {}
        row |= groups.row(several=len(self.envs) > 1)
        row |= {} if self.watch is None else self.watch.row()
        self.ctx.metrics.log(step=groups.step, policy_version=groups.step - 1, **row)
