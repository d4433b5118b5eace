"""Environments: tasks, rewards by hand, demonstrations, and the messages of what cannot be loaded."""

import json
import random
from fractions import Fraction
from itertools import chain

import pytest

from prl.config.errors import UserError
from prl.envs.countdown import Countdown, evaluate
from prl.envs.loading import load_env
from prl.envs.protocol import Environment, Task, assistant, user
from prl.envs.splits import draw_tasks, split_of

GENERATED = {
    "reverse_text": {},
    "alphabet_sort": {"num_tasks": 400},
    "alphabet_sort short": {"turns": 1, "words_per_turn": 2, "num_tasks": 400},
    "countdown": {"num_tasks": 400},
    "countdown small": {"numbers": 2, "largest": 6, "num_tasks": 400},
}


def make(name: str) -> Environment:
    return load_env(name.split()[0], GENERATED[name])


def problem(task: Task) -> str:
    """What makes two tasks the same problem."""
    info = {key: sorted(chain(*value)) if key == "turns" else value for key, value in task.info.items()}
    info.pop("solution", None)
    info.pop("answers", None)
    if "numbers" in info:
        info["numbers"] = sorted(info["numbers"])
        return json.dumps(info)
    return json.dumps([info, "turns" not in info and task.prompt])


@pytest.mark.parametrize("name", GENERATED)
def test_splits_are_disjoint_and_the_same_every_time(name):
    train, held_out = make(name).tasks("train"), make(name).tasks("held_out")
    assert train == make(name).tasks("train")
    assert held_out == make(name).tasks("held_out")
    assert len(train) > len(held_out) > 10
    assert not {problem(t) for t in train} & {problem(t) for t in held_out}
    ids = [t.id for t in (*train, *held_out)]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", GENERATED)
def test_demonstrations_score_one(name):
    env = make(name)
    for split in ("train", "held_out"):
        tasks = env.tasks(split)
        for task in random.Random(0).sample(tasks, min(100, len(tasks))):
            assert env.reward(task, env.demonstration(task)) == 1.0


def test_a_seed_gives_other_tasks_but_the_same_split():
    zero, one = (load_env("countdown", {"num_tasks": 300, "seed": s}) for s in (0, 1))
    assert zero.tasks("train") != one.tasks("train")
    assert not {problem(t) for t in zero.tasks("train")} & {problem(t) for t in one.tasks("held_out")}


def test_arguments_that_leave_no_problems_are_an_error():
    one = Task("", (user("1"),))
    assert len(draw_tasks(lambda rng: ("one", one), 8, split_of("one"), seed=0)) > 0
    other = "train" if split_of("one") == "held_out" else "held_out"
    with pytest.raises(UserError, match="too few different problems"):
        draw_tasks(lambda rng: ("one", one), 8, other, seed=0)


def test_reverse_text_reward_by_hand():
    env = load_env("reverse_text", {})
    task = Task("t", (user("abcd"),), {"answer": "dcba"})
    for reply, expected in {"dcba": 1.0, "": 0.0, "xyz": 0.0, "dc": 4 / 6, "dcbx": 6 / 8}.items():
        assert env.reward(task, [user("abcd"), assistant(reply)]) == pytest.approx(expected)


def test_reverse_text_tasks_are_excerpts_within_the_limits_and_typos_only_demonstrated():
    env = load_env("reverse_text", {"min_chars": 8, "max_chars": 12, "typo_rate": 0.5})
    tasks = env.tasks("train")
    assert all(8 <= len(t.prompt[0]["content"]) <= 12 for t in tasks)
    assert all(t.info["answer"] == t.prompt[0]["content"][::-1] for t in tasks)
    demonstrated = [env.demonstration(t) for t in tasks[:50]]
    assert 0.2 < sum(env.reward(t, d) for t, d in zip(tasks, demonstrated, strict=False)) / 50 < 0.9
    assert demonstrated == [env.demonstration(t) for t in tasks[:50]]


def test_alphabet_sort_reward_by_hand():
    env = load_env("alphabet_sort", {})
    task = Task("t", (user("b d"),), {"turns": [["b", "d"], ["a", "c"]], "answers": [["b", "d"], ["a", "b", "c", "d"]]})

    def score(*replies):
        talk = [m for reply in replies for m in (user("words"), assistant(reply))]
        return env.reward(task, talk)

    assert score("b d", "a b c d") == 1.0
    assert score("b d") == 0.5  # cut short: scored over all turns
    assert score("d b", "a b c d") == 0.5
    assert score("b d", "b a c d") == 0.75
    assert score("b d", "a b c d e f g h") == 0.75  # longer than asked for
    assert score() == 0.0


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("(2+3)*4", 1.0), (" 4 * (2 + 3)\n", 1.0), ("(3+2)/1*4", 0.0), ("2+3*4", 0.1), ("4", 0.1), ("5*4", 0.0),
        ("2+3+4+4", 0.0), ("", 0.0), ("20", 0.0), ("(2+3)*", 0.0), ("2/(3-3)", 0.0), ("(2+3)*4=20", 0.0),
    ],
)  # fmt: skip
def test_countdown_reward_by_hand(reply, expected):
    task = Task("t", (user("2 3 4=20"),), {"numbers": [2, 3, 4], "target": 20, "solution": "(2+3)*4"})
    assert Countdown().reward(task, [user("2 3 4=20"), assistant(reply)]) == expected


def test_countdown_counts_fractions_exactly():
    assert evaluate("8/(3-8/3)", [8, 8, 3, 3]) == Fraction(24)


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')", "numbers", "2**3", "-2", "2.0+3", "True+2", "'2'", "[2][0]", "2 if 3 else 4",
        "(lambda: 2)()", "2//3", "2%3", "2<<3", "2 and 3", "2+2", "f'{2}'", "2;3", "\x00", "\ud800", "2+" * 99 + "2",
        "9" * 5000, "(" * 150, "-" * 190 + "2", "2\n3", "yield 2", "x:=2",
    ],
)  # fmt: skip
def test_the_evaluator_refuses_all_but_arithmetic_on_the_given_numbers(expression):
    with pytest.raises((ValueError, SyntaxError)):
        print(evaluate(expression, [2, 3]))
    task = Task("t", (user(""),), {"numbers": [2, 3], "target": 2, "solution": ""})
    assert Countdown().reward(task, [assistant(expression)]) == 0.0


class NotAnEnvironment:
    pass


@pytest.mark.parametrize(
    ("env_id", "args", "message"),
    [
        ("revers_text", {}, "did you mean 'reverse_text'"),
        ("zzz", {}, "built in are reverse_text"),
        ("no_such_module:Env", {}, "cannot be imported.*no_such_module"),
        *((name, {}, "there is no environment") for name in (":X", "a:", ".a:X", "a b:X", "a:X.y", "a:b:c")),
        ("prl.envs.countdown:Nothing", {}, "cannot be imported.*Nothing"),
        ("countdown", {"numberz": 3}, "refuses its arguments.*numberz"),
        ("countdown", {"numbers": 1}, "refuses its arguments.*at least 2 numbers"),
        ("reverse_text", {"min_chars": 5, "max_chars": 4}, "refuses its arguments"),
        ("alphabet_sort", {"turns": 0}, "refuses its arguments"),
        (f"{__name__}:NotAnEnvironment", {}, "is not a prl.envs.protocol.Environment"),
        ("os:abort", {}, "is not a prl.envs.protocol.Environment.*not a class"),
        ("prl.envs.protocol:Environment", {}, "refuses its arguments.*abstract"),
    ],
)
def test_what_cannot_be_loaded_is_explained(env_id, args, message):
    with pytest.raises(UserError, match=f"(?s){message}"):
        load_env(env_id, args)


# --- hf_math ----------------------------------------------------------------------------------------------------------

HF_REASON = 'needs pip install -e ".[math]"'


@pytest.fixture
def math_file(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason=HF_REASON)
    pytest.importorskip("math_verify", reason=HF_REASON)
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "problems.jsonl"
    rows = [{"problem": f"What is {i} + 1/2?", "answer": f"\\frac{{{2 * i + 1}}}{{2}}"} for i in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def hf_math(path, **args):
    return load_env("hf_math", {"dataset": "json", "load_args": {"data_files": str(path)}, **args})


def test_hf_math_verifies_equivalent_answers(math_file):
    env = hf_math(math_file)
    train, held_out = env.tasks("train"), env.tasks("held_out")
    assert (len(train), len(held_out)) == (19, 1)
    assert train[3].prompt[0]["content"].startswith("What is 3 + 1/2?\n\nReason step by step")
    replies = {"so \\boxed{\\frac{7}{2}}": 1.0, "\\boxed{3.5}": 1.0, "\\boxed{7}": 0.0, "no idea": 0.0, "": 0.0}
    for reply, expected in replies.items():
        assert env.reward(train[3], [*train[3].prompt, assistant(reply)]) == expected, reply


def test_hf_math_names_what_is_missing(math_file):
    with pytest.raises(UserError, match=r"(?s)no column solution.*its columns are problem, answer"):
        hf_math(math_file, answer_key="solution").tasks("train")
    with pytest.raises(UserError, match="could not be loaded"):
        hf_math(math_file.with_name("absent.jsonl")).tasks("train")
    with pytest.raises(UserError, match="could not be loaded"):
        hf_math(math_file, split="nonsense").tasks("train")
