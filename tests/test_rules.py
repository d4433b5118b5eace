"""Rules as values: templates of messages, rules of several, and that every message can be written."""

from collections.abc import Iterator
from typing import Any

import pytest

from prl.config import compose
from prl.config import rules as tables
from prl.config.rules.rule import TEMPLATES, Refuse, Rule, Several, each_of, first_of
from prl.config.schema import RunConfig
from prl.config.world import world_of

CONFIG = compose(["parallelism=ep2", "memory_recipe.ac.mode=selective", "memory_recipe.ac.targets=[norm,act]"])


def changed(config: RunConfig, **groups: dict[str, Any]) -> RunConfig:
    """Without asking any rule."""
    return config.model_copy(update={key: getattr(config, key).model_copy(update=to) for key, to in groups.items()})


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("a row of {seq_len} tokens", "a row of 256 tokens"),
        ("{seq_len=}, {optim.type=}", "seq_len=256, optim.type=muon"),
        ("{memory_recipe.ac.targets=}, {model.path=}", "memory_recipe.ac.targets=[norm,act], model.path=null"),
        ("{memory_recipe.compile=} {memory_recipe.compile!s}", "memory_recipe.compile=false False"),
        ("{algo.kl_tau=:.0e}, {eval.temperature=!s}", "algo.kl_tau=1e-03, eval.temperature=None"),
        ("{world.ranks} ranks, ep {world.mesh.ep}", "2 ranks, ep 2"),
    ],
)
def test_a_template_names_keys_and_what_follows_from_them(template: str, text: str) -> None:
    config = changed(CONFIG, optim={"type": "muon"}).model_copy(update={"seq_len": 256})
    assert TEMPLATES.vformat(template, (config, world_of(config)), {}) == text


def refusal(what: str, is_broken: bool) -> Refuse:
    return Refuse(lambda c, w: is_broken, what, where="", fix=lambda c, w: f"{{as it is}} {w.ranks}")


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (refusal("a", True), ["a"]),
        (refusal("a", False), []),
        (each_of(refusal("a", True), refusal("b", False), refusal("c", True)), ["a", "c"]),
        (first_of(refusal("a", False), refusal("b", True), refusal("c", True)), ["b"]),
        (first_of(refusal("a", True), given=lambda c, w: w.ranks > 2), []),
        (each_of(refusal("a", True), given=lambda c, w: w.ranks == 2), ["a"]),
    ],
)
def test_who_is_told_what(rule: Rule, told: list[str]) -> None:
    found = list(rule(CONFIG, world_of(CONFIG)))
    assert [violation.what for violation in found] == told
    assert all(violation.fix == "{as it is} 2" for violation in found)


def refusals(rule: object) -> Iterator[Refuse]:
    if isinstance(rule, Refuse):
        yield rule
    for part in rule.rules if isinstance(rule, Several) else ():
        yield from refusals(part)


ALL = {
    f"{name} {number}": refuse
    for module in vars(tables).values()
    if getattr(module, "__name__", "").startswith("prl.config.rules.")
    for name, rule in vars(module).items()
    for number, refuse in enumerate(refusals(rule))
}


def test_rules_of_one_condition_are_found() -> None:
    assert len(ALL) > 50


@pytest.mark.parametrize("refuse", ALL.values(), ids=ALL.keys())
def test_every_message_can_be_written(refuse: Refuse) -> None:
    """A misspelt key in a template would show only to who breaks the rule."""
    config = changed(
        compose([], "bench"),
        deployment={"infer_memory_fraction": 0.4, "nodes_per_fsdp_group": 2},
        inference={"vllm": {"gpu_memory_utilization": 0.3}},
    )
    always = Refuse(lambda c, w: True, refuse.what, refuse.where, refuse.fix, refuse.why)
    (violation,) = always(config, world_of(config))
    texts = (violation.what, violation.where, violation.fix)
    assert all(texts)
    assert not {"{", "}"} & set("".join(texts).replace("env.args={}", ""))
