"""Environments of the package `verifiers` behind `env=verifiers`: its own, and some made of its classes."""

import asyncio
import json
import signal
import sys

import pytest
import verifiers as vf
from env_serving import said, serving
from inference_server import TOKEN, running_server
from runs import SMALL, rows, run
from verifiers.types import ClientConfig
from vf_letters import small_letters

from prl.config import ConfigError, compose
from prl.config.errors import UserError
from prl.envs.loading import load_env
from prl.envs.protocol import Score
from prl.orchestrator.rollouts.env_client import RolloutFailed

REASONING_GYM = {"id": "verifiers:ReasoningGymEnv", "args": {"gym": "spell_backward", "num_train_examples": 12}}


def rollout(env, *texts, index=0, split="train"):
    """One rollout in which the policy says `texts`; returns task, score and what it was asked each time."""
    asked, replies = [], iter(texts)

    async def answer(messages, keep, tools):
        asked.append((keep, messages))
        reply = next(replies)
        return said(*reply) if isinstance(reply, tuple) else said(reply) if reply is not None else None

    async def scenario():
        async with serving(env) as (_, client, _main):
            return await client.run(split, index, answer)

    task, score = asyncio.run(scenario())
    return task, score, asked


@pytest.fixture(scope="module")
def spell_backward():
    return load_env("verifiers", REASONING_GYM)


def test_an_environment_of_the_package_scores_by_its_own_rubric(spell_backward):
    assert (len(spell_backward.tasks("train")), len(spell_backward.tasks("held_out"))) == (12, 100)
    row = spell_backward.tasks("train")[3].info["input"]
    word = row["question"].rsplit(" ", 1)[1]
    answer = f"<think>letter by letter</think>\n<answer>{word[::-1]}</answer>"
    task, score, [(keep, messages)] = rollout(spell_backward, answer, index=3)
    assert (task, score.reward) == ("train/3", 1.0)
    assert score.metrics["check_answer_reward_func"] == 1.0
    assert 0 < score.metrics["format_reward_func"] <= 1
    assert keep == 0
    assert [m["role"] for m in messages] == ["system", "user"]
    assert word in messages[1]["content"]
    assert rollout(spell_backward, f"<answer>{word}</answer>", index=3)[1].reward < 1


@pytest.fixture(scope="module")
def words():
    return load_env("verifiers", {"id": "vf_letters:load_words"})


def test_turns_go_to_the_orchestrator_as_what_is_new(words):
    task, score, asked = rollout(words, "ab", "cd", index=1)
    assert asked == [
        (0, [{"role": "system", "content": "Letters."}, {"role": "user", "content": "letters 1"}]),
        (3, [{"role": "user", "content": "more"}]),
    ]
    assert (task, score.reward, score.metrics["num_turns"]) == ("train/1", 1.0, 2.0)


def test_a_rewritten_history_is_named_as_such():
    env = load_env("verifiers", {"id": "vf_letters:load_words", "args": {"forgetful": True}})
    _, _, asked = rollout(env, "ab", "cd")
    assert [keep for keep, _ in asked] == [0, 1]
    assert asked[1][1] == [{"role": "user", "content": "you said 2 characters"}]


def test_tools_are_offered_called_and_answered():
    env = load_env("verifiers", {"id": "vf_letters:load_tools"})
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
    _, score, asked = rollout(env, f"I will add.\n{call}", "<tool_call>no JSON</tool_call> seven")
    assert asked[1] == (2, [{"role": "tool", "content": "7"}])  # what was sampled stays in front of it as sampled
    assert score.metrics["total_tool_calls"] == score.metrics["add_calls"] == 1.0
    assert score.metrics["num_turns"] == 2.0
    assert score.reward == pytest.approx(23 / 36)  # small letters of all that the last turn says


def test_a_chat_that_ends_is_scored_on_what_was_said(words):
    assert rollout(words, "ab", None)[1].metrics["num_turns"] == 1.0


def test_a_reply_cut_short_and_an_empty_one_are_no_errors():
    env = load_env("verifiers", {"id": "vf_letters"})
    assert rollout(env, ("aB", "length"))[1] == Score(0.5, {"small_letters": 0.5, "length": 2.0, "num_turns": 1.0})
    assert rollout(env, "")[1].reward == 0.0


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("reward", "ZeroDivisionError: rewards divide by zero"),
        ("setup", "SandboxError.*no sandbox left"),
        ("turn", "LookupError: no such turn"),
        ("nan", "the reward is nan"),
        ("sampling", "asks for temperature=0.3; sampling is set by inference.sampling"),
        ("image", "a message holds image_url; only text is supported"),
    ],
)
def test_what_goes_wrong_inside_fails_the_rollout_in_its_own_words(fault, words):
    env = load_env("verifiers", {"id": "vf_letters:load_faulty", "args": {"fault": fault}})
    with pytest.raises(RolloutFailed, match=words):
        rollout(env, "ab", "cd")


def test_without_data_for_evaluation_some_of_the_training_data_is_held_out():
    env = load_env("verifiers", {"id": "vf_letters", "args": {"num_rows": 10}, "held_out_fraction": 0.2})
    ids = {split: [t.info["input"]["answer"] for t in env.tasks(split)] for split in ("train", "held_out")}
    assert ids == {"train": [str(i) for i in range(8)], "held_out": ["8", "9"]}


@pytest.mark.parametrize(
    ("id", "args", "words"),
    [
        ("no-such-env", {}, "Could not import 'no-such-env'"),
        ("vf_letters:missing", {}, "has no attribute 'missing'"),
        ("vf_letters", {"rows": 3}, "unexpected keyword argument 'rows'"),
        ("json:loads", {"s": "1"}, "no verifiers.Environment"),
        ("vf_letters:load_group", {}, "needs rewards of whole groups"),
        ("vf_letters:load_eval_only", {}, "no data to train on"),
    ],
)
def test_what_cannot_be_used_is_said_before_the_run(id, args, words):
    with pytest.raises(UserError, match=words):
        load_env("verifiers", {"id": id, "args": args})


@pytest.mark.parametrize("layout", ["my_env.py", "my-env/my_env.py", "my_env/__init__.py"])
def test_ids_may_be_paths(tmp_path, monkeypatch, layout):
    source = tmp_path / layout
    source.parent.mkdir(exist_ok=True)
    source.write_text("from vf_letters import load_environment")
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_env", raising=False)
    monkeypatch.chdir(tmp_path)
    env = load_env("verifiers", {"id": f"./{layout.split('/')[0]}", "args": {"num_rows": 4}})
    assert len(env.tasks("train")) == 3
    assert sys.modules["my_env"].__file__ == str(source)


def test_how_the_process_stops_stays_its_own_decision():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    load_env("verifiers", {"id": "vf_letters"})
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_without_the_package_the_install_is_named(monkeypatch):
    monkeypatch.setattr("prl.envs.verifiers_env.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package verifiers") as caught:
        load_env("verifiers", {"id": "x"})
    assert "[verifiers]" in caught.value.render()


def test_the_command_line_names_environment_and_arguments():
    config = compose(["env=[reverse_text,verifiers]", "env.id=vf_letters", "env.args.num_rows=7", "env.args.x=[a,b]"])
    assert config.env.mix["verifiers"].args == {
        "id": "vf_letters", "args": {"num_rows": 7, "x": ["a", "b"]}, "held_out_fraction": 0.05
    }  # fmt: skip
    assert set(config.env.mix) == {"reverse_text", "verifiers"}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["env=verifiers"], "env=verifiers needs env.id"),
        (["env.id=vf_letters"], "No environment takes env.id"),
        (["env.args.gym=x"], "No environment takes env.id"),
    ],
)
def test_ids_and_their_environment_go_together(overrides, words):
    with pytest.raises(ConfigError, match=words):
        compose(overrides)


@pytest.mark.slow
def test_a_run_trains_on_environments_of_the_package(tmp_path):
    """The built-in engine, an environment made of the package's classes and one of its own in one mix."""
    gym = "{id: verifiers, args: {id: 'verifiers:ReasoningGymEnv', args: {gym: spell_backward, system_prompt: ''}}}"
    args = [
        *(option for option in SMALL if not option.startswith("env.")), "max_steps=3", "algo.max_off_policy_steps=0",
        "env=verifiers", "env.id=vf_letters", "env.args.num_rows=50", f"+env.mix.gym={gym}", "eval.num_tasks=2",
        "algo.filter_zero_signal=false", "debug.keep_rollouts=true",
        f"cache_dir={tmp_path}/cache", f"output_dir={tmp_path}/run",
    ]  # fmt: skip
    done = run(args, tmp_path)
    assert done.code == 0, done.output
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert {line["env"] for line in lines} == {"verifiers", "gym"}
    letters = [line for line in lines if line["env"] == "verifiers"]
    for line in letters:
        assert line["reward"] == pytest.approx(small_letters(line["messages"]))
        assert line["metrics"] == {
            "small_letters": line["reward"], "length": len(line["messages"][-1]["content"]), "num_turns": 1.0
        }  # fmt: skip
    assert len({line["reward"] for line in letters}) > 4
    for row in rows(tmp_path / "run", "trainer.0"):  # other tokens than those sampled would not agree
        assert 0 < row["mismatch_kl_mean"] < 1e-9
    steps = [row for row in rows(tmp_path / "run", "orchestrator") if "reward/verifiers" in row]
    assert steps[0]["env/verifiers/small_letters"] == pytest.approx(steps[0]["reward/verifiers"])
    assert "env/gym/check_answer_reward_func" in {key for step in steps for key in step}


def test_verifiers_own_client_is_served(tmp_path, monkeypatch):
    """Evaluation without us, by HTTP: token ids and log-probabilities arrive, a prompt too long is recognised."""
    monkeypatch.setenv("PRL_TEST_KEY", TOKEN)
    env = vf.load_environment("vf_letters")
    body = {"return_token_ids": True, "seed": 1, "min_tokens": 8}  # one whose answer has something to show
    asked = {"max_tokens": 8, "logprobs": True, "extra_body": body}
    with running_server(["inference.max_model_len=48"], tmp_path, job="rl") as server:
        config = ClientConfig(api_key_var="PRL_TEST_KEY", api_base_url=f"http://127.0.0.1:{server.port}/v1")

        def evaluate(row):
            model = "tiny_qwen3_moe"
            return asyncio.run(env.run_rollout(row, config, model, asked, state_columns=["trajectory"]))

        row = env.get_dataset()[0]
        (step,) = evaluate(row)["trajectory"]
        long = evaluate({**row, "prompt": [{"role": "user", "content": "x" * 100}]})
    assert step["tokens"]["prompt_ids"] == [258, *b"letters 0", 256, 259]
    assert 0 < len(step["tokens"]["completion_ids"]) == len(step["tokens"]["completion_logprobs"]) <= 8
    assert (long["stop_condition"], long["error"]) == ("prompt_too_long", None)
