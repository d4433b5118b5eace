"""The points of a sweep are composed as single runs are: the order of overrides counts in both ways."""

from __future__ import annotations

import os

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prl.config import compose, composing
from prl.config.composer import Composer
from prl.config.errors import UserError
from prl.config.locate import config_groups
from prl.config.schema import RunConfig
from prl.config.search_path import use_directories

VALUES = {  # key -> values; keys that hold others take dicts
    "seed": ["1", "2", "${max_steps}"],
    "max_steps": ["512", "3", "null"],
    "name": ["x", "'${job}'", "null"],
    "optim": ["sgd", "muon", "{lr: 0.5}", "{betas: [0.5,0.6]}", "{schedule: {type: linear}}", "{a: 1}"],
    "optim.lr": ["1e-4", "0.25", "${seed}", "{a: 1}"],
    "optim.betas": ["[0.1,0.2]"],
    "optim.schedule": ["{type: cosine}", "null"],
    "optim.schedule.type": ["linear", "cosine", "constant"],
    "parallelism": ["single", "ep2", "{ep: 2}"],
    "memory": ["tight", "none"],
    "memory_recipe.ac": ["{mode: full}", "null"],
    "memory_recipe.ac.mode": ["selective", "none", "${memory_recipe.ac.mode}"],
    "logging": ["none", "{wandb: {tags: [c]}}"],
    "logging.wandb.tags": ["[a]", "[a,'${name}']", "[]"],
    "sft.max_steps": ["300", "${seed}"],
    "sft.optim": ["{lr: 0.75}", "null"],
    "sft.optim.lr": ["0.125"],
    "inference.vllm.max_num_seqs": ["7"],
    "env": ["countdown", "verifiers", "[reverse_text,countdown]", "{id: x}"],
    "env.id": ["y", "null"],
    "env.mix": ["{reverse_text: {args: {max_chars: 9}}}", "{verifiers: {args: {id: z}}}"],
    "env.mix.reverse_text.args": ["{max_chars: 11}"],
    "env.mix.reverse_text.args.max_chars": ["10", "12", "${seed}"],
    "hydra.verbose": ["true"],
}
SIGNS = ["", "", "++"]  # most lists shall be accepted
ODD = [f"{sign}{key}" for key in VALUES for sign in ("~", "+") if not key.startswith("hydra")]
COMPOSERS = {job: Composer(job) for job in ("rl", "sft")}  # that keep their bases, as over the points of a sweep


def touch(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


@st.composite
def commands(draw: st.DrawFn) -> list[str]:
    """Two or three lines that touch each other, of which one may be odd, and perhaps another in between."""
    whole = draw(st.sampled_from(sorted(VALUES)))
    keys = [key for key in VALUES if touch(key, whole)]
    lines = [draw(line_of(st.sampled_from(keys))) for _ in range(draw(st.integers(2, 3)))]
    if draw(st.integers(0, 5)) == 0:
        odd = draw(st.sampled_from([line for line in ODD if touch(line[1:], whole)] or ["~seed"]))
        lines.insert(
            draw(st.integers(0, 2)), odd if odd[0] == "~" else f"{odd}={draw(st.sampled_from(VALUES[odd[1:]]))}"
        )
    if draw(st.booleans()):
        lines.insert(draw(st.integers(0, 3)), draw(line_of(st.sampled_from(sorted(VALUES)))))
    return lines


@st.composite
def line_of(draw: st.DrawFn, keys: st.SearchStrategy[str]) -> str:
    key = draw(keys)
    value = draw(st.sampled_from(VALUES[key]))
    is_choice = key in config_groups() and not value.startswith("{")
    return f"{'' if is_choice else draw(st.sampled_from(SIGNS))}{key}={value}"


def outcome(make, *arguments) -> RunConfig | str:
    try:
        return make(*arguments)
    except UserError as error:
        return error.render()


def check(lines: list[str], job: str) -> None:
    slow = outcome(compose, lines, job)
    assert outcome(COMPOSERS[job].compose, lines) == slow


@pytest.mark.parametrize(
    ("lines", "job"),
    [
        (["seed=1", "++seed=2"], "rl"),
        (["++seed=2", "seed=1"], "rl"),
        (["env.mix.reverse_text.args.max_chars=10", "env.mix={reverse_text: {args: {max_chars: 5}}}"], "rl"),
        (["optim.lr=1e-4", "optim={lr: 0.5}", "optim.lr=0.25"], "rl"),
        (["optim.lr=1e-4", "optim=sgd"], "rl"),
        (["optim.lr=1e-4", "optim.lr={a: 1}"], "rl"),
        (["seed=1", "~seed"], "rl"),
        (["optim.schedule.type=linear", "optim.schedule=null", "++optim.schedule.warmup_steps=2"], "rl"),
        (["max_steps=5", "~sft.max_steps=300"], "sft"),
        (["env=verifiers", "env.id=x", "+env.mix.verifiers.args.id=y"], "rl"),
    ],
    ids=str,
)
def test_the_order_of_overrides_counts_in_both_ways(lines: list[str], job: str) -> None:
    check(lines, job)


@pytest.mark.slow
@settings(max_examples=40)
@given(lines=commands(), job=st.sampled_from(["rl", "sft"]))
@example(lines=["seed=1", "++seed=2"], job="rl")
def test_a_point_is_what_the_same_run_alone_is(lines: list[str], job: str) -> None:
    check(lines, job)


def test_hydra_is_asked_once_for_the_same_until_a_file_changes(tmp_path, monkeypatch):
    """A command that is refused wants the same several times, for its explanation."""
    asked = []

    def counted(*names, **given):
        asked.append(given["overrides"])
        return hydra_compose(*names, **given)

    hydra_compose = composing.hydra_compose
    monkeypatch.setattr(composing, "hydra_compose", counted)
    file = tmp_path / "overlay/mine.yaml"
    file.parent.mkdir()
    file.write_text("# @package _global_\nseed: 3\n")
    use_directories(str(tmp_path), [])
    try:
        composing.compose_yaml(["+overlay=mine"]).seed = 99  # what was given is the caller's
        assert composing.compose_yaml(["+overlay=mine"]).seed == 3
        assert asked.count(["+overlay=mine"]) == 1
        for seed in range(composing.MOST_ANSWERS):  # others: what is wanted again and again is kept
            composing.compose_yaml([f"seed={seed}"])
            composing.compose_yaml(["+overlay=mine"])
        assert asked.count(["+overlay=mine"]) == 1
        assert len(composing._answers) == composing.MOST_ANSWERS
        monkeypatch.chdir(tmp_path)
        assert composing.compose_yaml(["+overlay=mine"]).hydra.runtime.cwd == str(tmp_path)
        file.write_text("# @package _global_\nseed: 4\n")
        os.utime(file, ns=(1, 1))  # the clock of a filesystem may be coarse
        assert composing.compose_yaml(["+overlay=mine"]).seed == 4
        assert asked.count(["+overlay=mine"]) == 3
    finally:
        use_directories(None, [])
