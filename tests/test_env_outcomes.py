"""What an environment does wrong costs one rollout: counted by its outcome, named, kept for reading; nothing hangs."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import numpy as np
import pytest
from env_serving import said, serving
from fake_engine import pool_of
from odd_env import EXPECTED, OddEnv
from runs import UNEVALUATED, environment, rows, run
from tiny import byte_tokenizer

from prl.config import compose
from prl.config.errors import UserError
from prl.envs.checks import Nonsense, check_messages, check_number, check_reward, check_tasks, check_tools
from prl.envs.protocol import Score, Task, user
from prl.models.text.chat import ChatRenderer
from prl.orchestrator.rollouts.env_client import EnvClient
from prl.orchestrator.rollouts.failure_log import KEPT, MAX_BYTES, FailureLog
from prl.orchestrator.rollouts.rollout import EnvironmentGone, FailedRollout, Rollout, RolloutFailed
from prl.orchestrator.rollouts.runner import MAX_FAILURES_IN_A_ROW, EnvironmentBroken, NothingWorks, RolloutRunner
from prl.orchestrator.rollouts.tasks import TaskChoice
from prl.runtime.directory.files import read_objects

ODD = [
    *(arg for arg in UNEVALUATED if not arg.startswith("env.mix")),
    *("~env", "env.reward_timeout_s=3", "env.rollout_timeout_s=12", "ckpt=none"),
]


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_survives_every_misbehaviour_and_says_what_it_was(tmp_path):
    """Each costs a rollout, of training and of evaluation; the others of its group train."""
    mix = "+env.mix={odd: {id: 'odd_env:OddEnv', args: {forks: true}}}"
    sizes = ["max_steps=4", "algo.max_off_policy_steps=0", "env.on_timeout=zero", "eval.interval=4"]
    where = [f"cache_dir={tmp_path}/cache", f"output_dir={tmp_path}/run", "debug.keep_rollouts=true"]
    done = run([*ODD, "eval=default", "eval.k=1", "eval.num_tasks=40", mix, *sizes, *where], tmp_path)
    assert done.code == 0, done.output

    steps = [row for row in rows(tmp_path / "run", "orchestrator") if "outcome/policy" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    counted = Counter()
    for row in steps:
        counted.update({name: row[f"outcome/{name}"] for name in ("policy", "environment", "grader", "timeout")})
        assert row["outcome/infrastructure"] == 0
    kept = read_objects(tmp_path / "run/failures.jsonl")
    trained = [row for row in kept if row["split"] == "train"]
    assert counted["environment"] + counted["grader"] + counted["timeout"] == len(trained)
    assert counted["policy"] >= 3 * 32 - 1
    tasks = ["good"] * 4 + list(EXPECTED)
    for split in ("train", "held_out"):
        of_kind = {tasks[row["task"]]: row for row in kept if row["split"] == split}
        assert of_kind.keys() == EXPECTED.keys(), split
        for kind, (outcome, says) in EXPECTED.items():
            assert of_kind[kind]["outcome"] == outcome, kind
            assert says in of_kind[kind]["error"], kind
    assert "odd_env.py" in next(row for row in kept if "LookupError" in row["error"])["trace"]
    late = next(row for row in trained if row["outcome"] == "timeout")
    assert [message["role"] for message in late["messages"]] == ["user", "assistant"]

    log = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_text().splitlines()]
    assert 0.0 in [row["reward"] for row in log if row["task"] == f"train/{late['task']}"], "on_timeout=zero trains it"
    evaluation = [row for row in rows(tmp_path / "run", "orchestrator") if "eval/reward" in row]
    expected = Counter(outcome for outcome, _ in EXPECTED.values())
    assert evaluation[0]["eval/outcome/environment"] == expected["environment"]
    assert evaluation[0]["eval/outcome/grader"] == expected["grader"]
    assert evaluation[0]["eval/outcome/timeout"] == 1
    assert evaluation[0]["eval/failed_rollouts"] == expected["environment"] + expected["grader"]


@pytest.mark.slow
def test_an_environment_that_always_fails_ends_the_run_as_its_own_class(tmp_path):
    mix = "+env.mix={odd: {id: 'odd_env:OddEnv', args: {kinds: [metrics list], always: true}}}"
    where = [f"cache_dir={tmp_path}/cache", f"output_dir={tmp_path}/run"]
    done = run([*ODD, mix, "max_steps=2", *where], tmp_path)
    failure = json.loads((tmp_path / "run/status.json").read_text())["failure"]
    assert done.code == 1, done.output
    assert (failure["class"], failure["role"]) == ("env", "orchestrator")
    for words in (f"({MAX_FAILURES_IN_A_ROW} environment)", "metrics is a list", "failures.jsonl", "mend"):
        assert words in failure["message"]
        assert words in done.output
    assert 0 < len(read_objects(tmp_path / "run/failures.jsonl")) <= KEPT


@pytest.mark.slow
def test_a_rollout_that_blocks_costs_a_restart_of_its_process(tmp_path):
    mix = "+env.mix={blocking: {id: 'blocking_env:BlockingEnv'}}"
    where = [f"cache_dir={tmp_path}/cache", f"output_dir={tmp_path}/run", "max_steps=4"]
    env = environment() | {"BLOCKED_IN": str(tmp_path)}
    done = run([*ODD, "env.rollout_timeout_s=3", mix, *where], tmp_path, env=env)
    assert done.code == 0, done.output
    assert (tmp_path / "blocked").exists()
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert status["roles"]["env/blocking"]["restarts"] == 1
    assert "blocking_env.py" in (tmp_path / "run/logs/env.blocking.0.0.log").read_text()


# --- the environment's process ----------------------------------------------------------------------------------------


async def answer(messages, keep, tools):
    return said("hello")


@pytest.mark.parametrize("kind", [kind for kind, (outcome, _) in EXPECTED.items() if outcome != "timeout"])
def test_each_misbehaviour_is_a_failure_of_its_rollout(kind):
    outcome, says = EXPECTED[kind]

    async def scenario():
        async with serving(OddEnv([kind]), reward_timeout_s=2) as (worker, client, main):
            bad, good = await asyncio.gather(
                *(client.run("train", index, answer) for index in (4, 0)), return_exceptions=True
            )
            assert good == ("train/good 0", Score(1.0, {"length": 5.0}))
            assert not main.done()
            assert not worker.running
            raise bad

    with pytest.raises(RolloutFailed) as caught:
        asyncio.run(asyncio.wait_for(scenario(), 20))
    assert caught.value.outcome == outcome
    assert says in str(caught.value)
    str(caught.value).encode()
    assert caught.value.trace or outcome == "grader"


def test_a_lost_process_is_infrastructure():
    async def scenario():
        async with serving(OddEnv(["never ends"])) as (worker, client, _main):
            waiting = asyncio.create_task(client.run("train", 4, answer))
            while not worker.chats or len(worker.chats["0"].messages) < 2:
                await asyncio.sleep(0.01)
            await worker.socket.close()
            await asyncio.wait_for(waiting, 60)

    with pytest.raises(RolloutFailed, match="went away") as caught:
        asyncio.run(scenario())
    assert caught.value.outcome == "infrastructure"


@pytest.mark.parametrize(
    ("tasks", "says"),
    [
        ([Task("a", (user("x"),)), "b"], r"task 1 of tasks\('train'\).*toy.*it is a str"),
        ([Task("a", ({"role": "user"},))], r"task 0.*its prompt\[0\] has no content"),
        ([Task("a", (user("\ud800"),))], r"task 0.*lone surrogate"),
        ([Task(7, ())], r"task 0.*its id is a int \(7\), not text"),
        ([Task("a", "hello")], r"task 0.*its prompt is a str"),
        ([], "no tasks to train on"),
        (None, r"tasks\('train'\) of environment 'toy' gives None"),
        ((Task("a", ()) for _ in range(3)), "gives a generator"),
        ({"a": Task("a", ())}, "task 0.*KeyError"),
    ],
)
def test_wrong_tasks_are_told_when_the_environment_starts(tasks, says):
    with pytest.raises(UserError, match=f"(?s){says}"):
        check_tasks("toy", "train", tasks)


def test_what_is_right_passes():
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": [1, None]}}}
    messages = [user("näh 🙂"), {"role": "assistant", "content": "", "tool_calls": [call], "name": "é"}]
    assert check_messages(tuple(messages)) == messages
    assert check_tools([call]) == [call]
    assert [check_number(x, "x") for x in (True, 2, np.float32(0.5), np.bool_(False), np.int64(3))] == [1, 2, 0.5, 0, 3]
    assert list(check_tasks("toy", "held_out", [])) == []
    assert check_reward(-1e12) == -1e12
    with pytest.raises(Nonsense, match="the reward is 1e\\+300; beyond"):
        check_reward(1e300)
    assert check_number(1e300, "a metric") == 1e300
    for wrong in (10**400, np.zeros(2), b"1", np.str_("1"), 1j, {}):
        with pytest.raises(Nonsense, match="x is"):
            check_number(wrong, "x")


# --- the orchestrator's side of the websocket -------------------------------------------------------------------------

DONE = {"op": "done", "task": "t", "reward": 1.0, "metrics": {}}
REPLY = {"op": "reply", "keep": 0, "messages": [user("x")], "tools": []}


class Socket:
    """Of a worker that answers to "start" with what it is told to."""

    def __init__(self, client, text):
        self.client, self.text = client, text

    async def send_str(self, message):
        asked = json.loads(message)
        if asked["op"] == "start":
            self.client._receive(self.text.replace("ROLLOUT", asked["rollout"]))


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({**DONE, "reward": "0.5"}, "the reward is a str"),
        ({**DONE, "reward": None}, "the reward is None"),
        ({**DONE, "metrics": [1]}, "metrics is a list"),
        ({**DONE, "metrics": {"m": "abc"}}, r"metrics\['m'\] is a str"),
        ({**DONE, "task": 3}, "task is a int"),
        ({**REPLY, "keep": 7}, "keep is 7"),
        ({**REPLY, "keep": True}, "keep is True"),
        ({**REPLY, "messages": "x"}, "messages is a str"),
        ({**REPLY, "messages": [user("\ud800")]}, "lone surrogate"),
        ({**REPLY, "tools": [{}]}, r"tools\[0\] is a dict"),
        ({"op": "failed", "error": "x", "outcome": "policy", "trace": ""}, "outcome is 'policy'"),
        ({"op": "failed", "error": None}, "error is None"),
    ],
)
def test_a_worker_that_talks_nonsense_fails_its_rollout(message, says):
    async def scenario():
        client = EnvClient("toy", "", "")
        client.connected.set()
        client.socket = Socket(client, json.dumps({**message, "rollout": "ROLLOUT"}))
        await asyncio.wait_for(client.run("train", 0, lambda *_: asyncio.sleep(0)), 60)

    with pytest.raises(RolloutFailed, match=says) as caught:
        asyncio.run(scenario())
    assert caught.value.outcome == "environment"


@pytest.mark.parametrize("text", ["", "[1", "[]", "7", '{"op": "done"}', '{"op": "hello", "counts": [1]}', "[" * 9999])
def test_what_is_no_message_changes_nothing(text):
    client = EnvClient("toy", "", "")
    client._receive(text)
    assert not client.connected.is_set()


# --- rollouts and their outcomes --------------------------------------------------------------------------------------


class Scripted:
    """Stands for an environment's client: a few replies, and then what it is told to do."""

    def __init__(self, end, replies=1, tools=()):
        self.end, self.replies, self.tools = end, replies, list(tools)
        self.connected = asyncio.Event()
        self.connected.set()

    async def run(self, split, index, answer):
        for _ in range(self.replies):
            await answer([user("hi")], None, self.tools)
        return await self.end()


async def never():
    await asyncio.sleep(3600)


async def cancelled():
    raise asyncio.CancelledError


async def broken():
    raise OverflowError("a mistake of ours")


async def no_tokens():
    raise RolloutFailed("it fell", "grader", "trace")


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return ChatRenderer(byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def results_of(renderer, env, tmp_path, splits=("train",), overrides=(), count=1, before=lambda engine, pool: None):
    """What `count` rollouts of each split come to, and the runner."""

    async def scenario():
        config = compose(["warm_start=none", "env.rollout_timeout_s=1", *overrides])
        async with pool_of(1) as (pool, (engine,)):
            before(engine, pool)
            runner = RolloutRunner(config, pool, {"reverse_text": env}, renderer, None, FailureLog(tmp_path))
            runner.version = 3
            choice, sampling = TaskChoice("reverse_text", 5), config.inference.sampling
            names = [(split, f"{split}-{i}") for split in splits for i in range(count)]
            jobs = [runner.start_rollout(choice, split, name, sampling, 7) for split, name in names]
            return await asyncio.wait_for(asyncio.gather(*jobs), 120), runner

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("end", "outcome"),
    [(never, "timeout"), (cancelled, "infrastructure"), (no_tokens, "grader")],
    ids=lambda part: part if isinstance(part, str) else part.__name__,
)
def test_failed_rollouts_are_typed_counted_and_kept(renderer, tmp_path, end, outcome):
    (result,), runner = results_of(renderer, Scripted(end), tmp_path)
    assert isinstance(result, FailedRollout)
    assert result.outcome == outcome
    assert runner.stats.cancelled == (outcome == "timeout")
    assert runner.stats.failures == 1
    (row,) = read_objects(tmp_path / "failures.jsonl")
    about = {"version": 3, "split": "train", "group": 7, "rollout": "train-0", "env": "reverse_text", "task": 5}
    assert row | about | {"outcome": outcome, "error": result.error} == row
    assert [m["role"] for m in row["messages"]] == ["user", "assistant"]


class Leaving(Scripted):
    """Its process goes away behind the second of three replies, so many times."""

    def __init__(self, times):
        super().__init__(None)
        self.times = times

    async def run(self, split, index, answer):
        contents = [(await answer([user("a")], 0, [])).content, (await answer([user("b")], 2, [])).content]
        if self.times:
            self.times -= 1
            raise EnvironmentGone
        self.said = [*contents, (await answer([user("c")], 4, [])).content]
        return "t", Score(1.0, {})


@pytest.mark.parametrize("times", [1, 2])
def test_a_rollout_whose_process_went_away_begins_again_once_with_its_replies(renderer, tmp_path, times):
    engines, env = [], Leaving(times)
    (result,), runner = results_of(
        renderer,
        env,
        tmp_path,
        overrides=["env.rollout_timeout_s=100"],
        before=lambda engine, pool: engines.append(engine),
    )
    assert (runner.stats.retried, env.times) == (1, 0)
    asked = [body["request_id"] for body in engines[0].bodies]
    if times == 1:
        assert (result.turns, result.reward, asked) == (3, 1.0, [f"train-0-{turn:03d}" for turn in range(3)])
        assert [m["content"] for m in result.messages if m["role"] == "assistant"] == env.said
    else:
        assert (result.outcome, len(asked)) == ("infrastructure", 2)


def test_an_engines_nonsense_is_infrastructure(renderer, tmp_path):
    def spoil(engine, pool):
        engine.choice = {"token_ids": [104], "token_logprobs": "none", "finish_reason": "stop", "routed_experts": 3}

    (result,), _ = results_of(renderer, Scripted(never), tmp_path, before=spoil)
    assert result.outcome == "infrastructure"


def test_a_timeout_without_engines_is_no_timeout_of_the_policy(renderer, tmp_path):
    def lose(engine, pool):
        pool.any_serving.clear()

    (result,), runner = results_of(
        renderer, Scripted(never), tmp_path, overrides=["env.on_timeout=zero"], splits=["held_out"], before=lose
    )
    assert (result.outcome, runner.stats.cancelled) == ("infrastructure", 1)


@pytest.mark.parametrize("what", ["messages", "tools"])
def test_what_a_template_refuses_is_the_environments(tmp_path, what):
    tokenizer = byte_tokenizer(tmp_path)
    tokenizer.chat_template = "{% if " + what + " %}{{ raise_exception('not in this order') }}{% endif %}x"
    tools = [{"type": "function", "function": {"name": "f"}}] if what == "tools" else []
    (result,), _ = results_of(ChatRenderer(tokenizer), Scripted(never, tools=tools), tmp_path)
    assert result.outcome == "environment"
    assert f"refuses the {what}: TemplateError: not in this order" in result.error


class Wordy(Scripted):
    async def run(self, split, index, answer):
        assert await answer([user("x" * 5000)], None, self.tools) is None
        return "t", Score(0.0, {})


def test_a_prompt_that_does_not_fit_is_told_as_that(renderer, tmp_path):
    (result,), _ = results_of(renderer, Wordy(never), tmp_path)
    assert "its first prompt leaves no room for one (inference.max_model_len=" in result.error


@pytest.mark.parametrize("replies", [0, 1, 2])
def test_late_rollouts_count_as_zero_where_told_so(renderer, tmp_path, replies):
    """With what was sampled up to then; without any, an evaluation still counts it, and there is nothing to train."""
    (trained, evaluated), runner = results_of(
        renderer, Scripted(never, replies), tmp_path, ["train", "held_out"], ["env.on_timeout=zero"]
    )
    assert isinstance(evaluated, Rollout)
    assert (evaluated.reward, evaluated.outcome) == (0.0, "timeout")
    assert runner.stats.cancelled == 2
    assert len(read_objects(tmp_path / "failures.jsonl")) == 2
    if not replies:
        assert trained == FailedRollout("timeout", "no end after 1.0 s")
        return
    assert (trained.reward, trained.turns, trained.outcome) == (0.0, replies, "timeout")
    assert all(sample.loss_mask[-1] for sample in trained.samples), "a sample ends with what was sampled"
    assert runner.stats.failures == 0


def test_what_is_nobodys_data_ends_the_run_with_its_own_error(renderer, tmp_path):
    with pytest.raises(OverflowError, match="a mistake of ours"):
        results_of(renderer, Scripted(broken), tmp_path)


@pytest.mark.parametrize(
    ("end", "replies", "error", "words"),
    [
        (no_tokens, 0, EnvironmentBroken, r"\(200 grader\); the last one: it fell.*env.mix.reverse_text.id="),
        (cancelled, 0, NothingWorks, r"\(200 infrastructure\)"),
        (never, 0, EnvironmentBroken, r"\(200 timeout\); the last one: no end after 1.0 s\."),
    ],
)
def test_a_long_row_of_failures_names_their_outcomes(renderer, tmp_path, end, replies, error, words, monkeypatch):
    monkeypatch.setattr("prl.orchestrator.rollouts.runner.DEATH_S", 0.1)
    with pytest.raises(NothingWorks, match=words) as caught:
        results_of(renderer, Scripted(end, replies), tmp_path, count=MAX_FAILURES_IN_A_ROW)
    assert type(caught.value) is error
    assert len(read_objects(tmp_path / "failures.jsonl")) == KEPT


def test_a_long_row_from_an_engine_that_is_ending_is_no_end_of_the_orchestrators(renderer, tmp_path, monkeypatch):
    """A dead engine refuses all at once; its process, which knows why, takes a moment to say so."""
    monkeypatch.setattr("prl.orchestrator.rollouts.runner.DEATH_S", 0.5)

    def is_ending(engine, pool):
        asyncio.get_running_loop().call_later(0.3, pool.any_serving.clear)

    results, runner = results_of(
        renderer, Scripted(cancelled), tmp_path, count=MAX_FAILURES_IN_A_ROW + 5, before=is_ending
    )
    assert all(isinstance(result, FailedRollout) for result in results)
    assert runner.stats.failures == MAX_FAILURES_IN_A_ROW + 5


def test_one_of_two_engines_that_dies_and_is_started_again_is_no_end_of_the_orchestrators(
    renderer, tmp_path, monkeypatch
):
    """The other serves all the time; whether it was a death tells the count of those."""
    monkeypatch.setattr("prl.orchestrator.rollouts.runner.DEATH_S", 0.5)

    def restarted(engine, pool):
        pool.restarts += 1
        asyncio.get_running_loop().call_later(0.05, restarted, engine, pool)

    results, runner = results_of(renderer, Scripted(cancelled), tmp_path, count=MAX_FAILURES_IN_A_ROW, before=restarted)
    assert all(isinstance(result, FailedRollout) for result in results)
    assert not runner.stats.failed_in_a_row


def test_a_slow_engine_is_not_the_environments_fault(renderer, tmp_path, monkeypatch):
    monkeypatch.setattr("prl.orchestrator.rollouts.runner.DEATH_S", 0.1)
    with pytest.raises(NothingWorks, match=r"an engine was generating\..*too slow for so many") as caught:
        results_of(
            renderer, Scripted(never), tmp_path, count=MAX_FAILURES_IN_A_ROW, before=lambda engine, _: engine.go.clear()
        )
    assert type(caught.value) is NothingWorks


def test_the_file_of_failures_stays_small(tmp_path):
    failures = FailureLog(tmp_path)
    messages = [user("x" * 100_000)] * 50
    for version in range(1000):
        failures.write({"version": version, "outcome": "grader"}, messages)
    size = (tmp_path / "failures.jsonl").stat().st_size
    assert MAX_BYTES <= size < MAX_BYTES + 100_000
    assert read_objects(tmp_path / "failures.jsonl")[0]["messages_left_out"] == 34
