"""Keys that the orchestrator reads, each by what it does with them: real configurations, neighbours that stand in."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest
from fake_engine import pool_of
from role_context import context_of
from test_orchestrator_producer import rollout_of
from test_orchestrator_tasks import ScriptedRunner
from tiny import byte_tokenizer

from prl.config import compose
from prl.config.errors import UserError
from prl.config.schema import ConcurrencyConfig, EvalConfig, SamplingConfig
from prl.envs.protocol import Score
from prl.models.text.chat import ChatRenderer
from prl.orchestrator import neighbours
from prl.orchestrator.engines.concurrency import Limiter
from prl.orchestrator.engines.watch import EngineWatch
from prl.orchestrator.evaluations_due import EvaluationsDue
from prl.orchestrator.loop import Orchestrator
from prl.orchestrator.rollouts.evaluation import evaluate
from prl.orchestrator.rollouts.kept_rollouts import Kept
from prl.orchestrator.rollouts.producer import Producer, StepGroups
from prl.orchestrator.rollouts.rollout import Group
from prl.orchestrator.rollouts.runner import RolloutRunner
from prl.orchestrator.rollouts.tasks import TaskChoice, TaskSampler
from prl.transport.batch import TrainBatch
from prl.transport.weights import make_publisher


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return ChatRenderer(byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


# --- batches ----------------------------------------------------------------------------------------------------------


class Groups:
    """Groups that end at once: rewards 0, 1, 2, ..., and the last rollout is as long as it may be."""

    version = 0

    def __init__(self):
        self.sizes = []

    def start_group(self, index, choice, size):
        self.sizes.append(size)

        async def run():
            lengths = [4] * (size - 1) + [64]
            rollouts = [rollout_of("a", float(i), [0], length=n) for i, n in enumerate(lengths)]
            rollouts[-1].truncated = True
            return Group(index, choice.env, size, rollouts)

        return asyncio.create_task(run())


def first_step(*overrides):
    """(sizes of the groups begun, advantages of the first group, groups of the step)"""

    async def scenario():
        runner = Groups()
        config = compose(["warm_start=none", "algo.batch_size=8", "algo.group_size=4", *overrides])
        producer = Producer(config, runner, TaskSampler({"a": 20}, {"a": 1.0}, seed=0), taking_turns=True)
        step = await asyncio.wait_for(producer.next_step(), 60)
        await producer.stop()
        return set(runner.sizes), [r.advantage for r in step.groups[0].finished], len(step.groups)

    return asyncio.run(scenario())


def test_a_batch_is_of_so_many_groups_of_so_many_rollouts():
    assert first_step()[::2] == ({4}, 2)
    assert first_step("algo.batch_size=16")[::2] == ({4}, 4)
    assert first_step("algo.group_size=2")[::2] == ({2}, 4)


def test_advantages_are_those_asked_for():
    said = {
        "advantage=group_mean": [-1.5, -0.5, 0.5, 1.5],
        "advantage=rloo": [-2.0, -2 / 3, 2 / 3, 2.0],
        "length_rule=dapo_filter": [-1.5, -0.5, 0.5, 0.0],
        "length_rule=dapo_overlong algo.overlong_buffer=16": [-1.25, -0.25, 0.75, 0.75],
    }
    for keys, expected in said.items():
        assert first_step(*f"algo.{keys}".split())[1] == pytest.approx(expected), keys


@pytest.fixture
def orchestrator(tmp_path):
    def make(*overrides):
        made = Orchestrator(context_of(tmp_path / "run", "warm_start=none", *overrides, role="orchestrator"))
        made.runner = SimpleNamespace(version=0)
        made.kept = SimpleNamespace(choose=lambda step: Kept(step.step, "train"), write=lambda kept: None)
        made._log_step = lambda *args: None
        return made

    return make


def fed(orchestrator):
    """The batches of a run whose rollouts are of 3 + 40 tokens each."""

    async def next_step():
        step = StepGroups(1, [])
        step.groups = [Group(0, "a", 2, [rollout_of("a", 1.0, [0], length=40) for _ in range(2)])]
        for rollout in step.groups[0].finished:
            rollout.advantage = 1.0
        return step

    orchestrator.producer = SimpleNamespace(next_step=next_step, state=dict)
    asyncio.run(orchestrator._feed())
    made = orchestrator.handout.batches.items()
    return {step: [TrainBatch.from_bytes(bytes(one)) for one in batch.encoded.messages] for step, batch in made}


def test_rows_hold_seq_len_tokens(orchestrator):
    for rows, seq_len in ((1, 320), (2, 64)):
        made = orchestrator("max_steps=1", "inference.max_model_len=64", "inference.sampling.max_tokens=32",
                            f"seq_len={seq_len}", "memory_recipe.share_prefixes=false")  # fmt: skip
        (batch,) = fed(made)[1]
        assert len(batch.micro_batches) == rows


def test_what_a_group_has_in_common_is_run_once_if_told_so(orchestrator):
    for told, run in (([], False), (["memory_recipe.share_prefixes=false"], True)):
        made = orchestrator("max_steps=1", *told)
        (batch,) = fed(made)[1]
        assert all((row.run_tokens == row.num_tokens) is run for row in batch.micro_batches)


def test_evaluations_are_where_eval_says():
    def when(*overrides):
        due = EvaluationsDue(compose(["warm_start=none", *overrides]).eval)
        return [version for version in range(6) if due.follows(version)] + ["end"] * due.follows_at_end(5)

    assert when("eval.interval=2") == [0, 2, 4, "end"]
    assert when("eval.interval=3") == [0, 3, "end"]
    assert when("eval.interval=2", "eval.at_start=false") == [2, 4, "end"]
    assert when("eval.interval=2", "eval.at_end=false") == [0, 2, 4]
    assert when("eval.interval=0") == []


def test_requests_go_to_the_router_whose_url_is_given(orchestrator, monkeypatch):
    class Seen(Exception):
        pass

    def pool(urls, config, keys, kinds, router, processes, **options):
        raise Seen(router)

    monkeypatch.setattr(neighbours, "EnginePool", pool)
    for url in ("http://one:1", "http://other:2"):
        made = orchestrator("inference.router.type=url", f"inference.router.url={url}")
        made._load_renderer = lambda: None
        made.ctx.endpoints = {role.name: "http://127.0.0.1:9" for role in made.ctx.plan.roles}
        with pytest.raises(Seen, match=url):
            asyncio.run(made.run())


def test_engines_are_told_whether_to_verify(orchestrator):
    for said in (True, False):
        made, heard = orchestrator(f"weight_transport.verify_checksum={str(said).lower()}"), []

        async def wait(timeout_s):
            assert timeout_s == 300

        async def tell(info, heard=heard):
            heard.append(info)

        made.engines, made.envs = SimpleNamespace(wait_healthy=wait, init_weight_transfer=tell), {}
        asyncio.run(made._wait_for_others())
        assert heard == [{"verify_checksum": said}]


def test_evaluations_take_num_tasks_and_k_and_pass_at_the_threshold():
    def row(**keys):
        runner = ScriptedRunner({"a": [[0.5, 0.5]] * 9})
        found = asyncio.run(evaluate(runner, EvalConfig(**keys), SamplingConfig(), {"a": 9}, version=1))
        return len(runner.names), found[f"eval/a/pass@{keys.get('k', 1)}"]

    assert row(num_tasks=3) == (3, 0.0)
    assert row(num_tasks=5, k=2) == (10, 0.0)
    assert row(num_tasks=3, pass_threshold=0.5) == (3, 1.0)


# --- rollouts ---------------------------------------------------------------------------------------------------------


class Talk:
    """An environment that asks until it gets no more answers."""

    connected = asyncio.Event()
    connected.set()

    def __init__(self):
        self.answers = 0

    async def run(self, split, index, answer):
        messages = [{"role": "user", "content": "hi"}]
        while await answer(messages, None, []) is not None:
            self.answers += 1
            messages = [{"role": "user", "content": "on"}]
        return "task", Score(1.0, {})


def test_training_samples_as_inference_sampling_says(renderer):
    keys = {"temperature": 0.6, "top_p": 0.7, "top_k": 11, "min_p": 0.05, "max_tokens": 9, "stop_token_ids": [65, 66]}

    async def bodies(*overrides):
        config = compose(["warm_start=none", "env.max_turns=1", *overrides])
        async with pool_of(1) as (pool, (engine,)):
            runner = RolloutRunner(config, pool, {"a": Talk()}, renderer, None)
            with contextlib.suppress(UserError):  # the engine here does not say which tokens truncation has left
                await runner.start_group(0, TaskChoice("a", 0), 1)
            return engine.bodies[0]["sampling_params"]

    usual, other = (
        asyncio.run(bodies(*given)) for given in ([], [f"inference.sampling.{k}={v}" for k, v in keys.items()])
    )
    for key, value in keys.items():
        assert other[key] == (pytest.approx(value) if isinstance(value, float) else value)
        assert usual[key] != other[key]


def test_conversations_end_after_max_turns(renderer):
    async def turns(most):
        config = compose(["warm_start=none", f"env.max_turns={most}"])
        async with pool_of(1, max_model_len=512) as (pool, _):
            env = Talk()
            await RolloutRunner(config, pool, {"a": env}, renderer, None).start_group(0, TaskChoice("a", 0), 1)
            return env.answers

    assert [asyncio.run(turns(most)) for most in (1, 3)] == [1, 3]


def test_no_more_rollouts_run_at_once_than_told(renderer):
    async def at_once(most):
        config = compose(["warm_start=none", "env.max_turns=1", f"inference.max_concurrent_rollouts={most}"])
        async with pool_of(1) as (pool, (engine,)):
            engine.go.clear()
            group = RolloutRunner(config, pool, {"a": Talk()}, renderer, None).start_group(0, TaskChoice("a", 0), 6)
            while len(engine.bodies) < most:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            seen = len(engine.bodies)
            engine.go.set()
            await group
            return seen

    assert [asyncio.run(asyncio.wait_for(at_once(most), 120)) for most in (2, 5)] == [2, 5]


def test_engines_are_looked_at_every_interval():
    async def looks(*intervals_s):
        """Of each, until the first has made twenty."""
        counts = [0] * len(intervals_s)
        async with pool_of(1) as (pool, _):

            def following(index):
                update = {"concurrency": ConcurrencyConfig(interval_s=intervals_s[index])}
                watch = EngineWatch(pool, Limiter(1), pool.config.model_copy(update=update))

                async def look():
                    counts[index] += 1

                watch.look = look
                return asyncio.create_task(watch.follow())

            tasks = [following(index) for index in range(len(intervals_s))]
            while counts[0] < 20:
                await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
        return counts

    often, seldom, never = asyncio.run(asyncio.wait_for(looks(0.02, 0.2, 1000.0), 120))
    assert often > seldom > 0
    assert never == 0


def test_weights_travel_as_weight_transport_says(tmp_path):
    def publisher(*keys):
        transport = compose([f"weight_transport{key}" for key in keys]).weight_transport
        return make_publisher(transport, tmp_path / "weights", tmp_path / "segment", "127.0.0.1")

    kinds = [type(publisher(f"={kind}")).__name__ for kind in ("filesystem", "shared_memory", "tcp")]
    assert len(set(kinds)) == 3
    assert [publisher("=filesystem", f".keep={keep}").keep for keep in (2, 5)] == [2, 5]
    assert publisher("=tcp", ".timeout_s=7").server.timeout_s == 7
