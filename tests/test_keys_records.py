"""Keys of names, places, the console and wandb, each by what can be seen of it afterwards."""

import logging

import pytest
from role_context import context_of
from runtime_tree import Start, start

from prl.config import compose
from prl.config.errors import ConfigError, UserError
from prl.metrics.wandb_mirror import run_settings
from prl.models.text.tokenizer import load_tokenizer
from prl.planning import make_plan
from prl.planning.run_plan import plan_to_json
from prl.runtime.process.child import Boot, _run
from prl.runtime.process.guards import StopFlag
from prl.runtime.process.keys import RunKeys
from prl.trainer.parallelize import build_meta

__all__ = ["start"]


def talk(ctx):
    """The entry of a role that logs at every level."""
    for level in (logging.DEBUG, logging.INFO, logging.WARNING):
        logging.getLogger("prl").log(level, "said at %d", level)


@pytest.mark.parametrize(("level", "expected"), [("debug", [10, 20, 30]), ("info", [20, 30]), ("warning", [30])])
def test_roles_log_from_the_level_on(level, expected, tmp_path, monkeypatch, capsys):
    ctx = context_of(tmp_path / "run", f"logging.level={level}")
    (tmp_path / "run" / "plan.json").write_text(plan_to_json(ctx.plan))
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    before = root.level
    boot = Boot(0, f"{__name__}:talk", {}, RunKeys(), "", None, -1, 0, None, "", 0)
    try:
        _run(tmp_path / "run", "trainer/0", boot, StopFlag())
    finally:
        root.setLevel(before)
    lines = [line for line in capsys.readouterr().err.splitlines() if "said at" in line]
    assert [int(line.rsplit(" ", 1)[1]) for line in lines] == expected


@pytest.mark.slow
def test_a_run_is_called_by_its_name_and_says_what_it_is_told_to(start: Start, tmp_path):
    shown = start("logging.progress=plain", "name=mine", "output_dir=null", "max_steps=2", name="a")
    silent = start("logging.progress=none", "max_steps=2", name="b")
    code, output = shown.wait()
    assert code == 0, output
    assert "step 2/2" in output
    assert len(list((tmp_path / "outputs").glob("mine-*"))) == 1
    code, output = silent.wait()
    assert code == 0, output
    assert "step 2/2" not in output
    assert (tmp_path / "b" / "plan.json").is_file(), "output_dir"


def test_wandb_runs_are_put_where_told():
    def settings(*overrides, **fields):
        return run_settings(make_plan(compose(list(overrides)).model_copy(update=fields)), "an-id")

    usual = settings()
    given = {"project": "other", "entity": "team", "group": "together"}
    told = settings(*(f"logging.wandb.{key}={value}" for key, value in given.items()), "logging.wandb.tags=[a,b]")
    assert {key: told[key] for key in given} == given
    assert told["tags"] == ["a", "b"]
    assert all(usual[key] != told[key] for key in (*given, "tags"))
    assert (settings("name=mine")["group"], settings("name=mine", "sweep=rates")["group"]) == ("mine", "rates")
    mine = "logging.wandb.name=mine"
    assert (settings(mine)["name"], settings(mine, swept={"seed": "3"})["name"]) == ("mine", "mine seed=3")
    assert settings("algo=sync")["name"] == "algo=sync env=reverse_text model=tiny_qwen3_moe", "choices"
    assert settings(swept={"seed": "3"})["name"] == "seed=3"


@pytest.mark.parametrize("key", ["choices", "swept"])
def test_what_a_run_records_is_not_to_be_set(key):
    with pytest.raises(ConfigError, match=f"{key} is not for you to set"):
        compose([f"++{key}={{a: b}}"])


READ = ["bench.target=inference", "bench.random_weights=false"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["bench.target=inference", "model.path=/a/checkpoint"],  # drawn in place all the same
        ["bench.target=inference"],
        READ,
        ["bench.random_weights=false"],
        ["bench.target=stack"],
    ],
)
def test_the_seed_of_random_weights_counts_where_they_are_drawn_with_it(overrides):
    assert compose([*overrides, "model.init_seed=3"], "bench").model.init_seed == 3


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["bench.baseline_checkpointing=false"], "bench.baseline_checkpointing has no effect"),
        (["bench.target=inference", "bench.profile=true"], "bench.profile has no effect"),
        (["bench.target=stack", "bench.random_weights=false"], "bench.random_weights has no effect"),
        (
            ["model=tiny_qwen3_moe", "bench.experts=even", "model.router_bias_update_rate=0.1"],
            "model.router_bias_update_rate has no effect",
        ),
        (["model.init_seed=3"], "model.init_seed has no effect"),
        ([*READ, "model.path=/a/checkpoint", "model.init_seed=3"], "model.init_seed has no effect"),
    ],
)
def test_keys_of_another_benchmark_are_refused(overrides, words):
    with pytest.raises(ConfigError, match=words):
        compose(overrides, "bench")


def test_a_benchmark_without_its_keys_is_refused():
    with pytest.raises(ConfigError, match="nothing to measure"):
        compose(["job=bench"])


def test_tokenizers_are_where_told(tmp_path):
    from tiny import byte_tokenizer

    byte_tokenizer(tmp_path / "own").save_pretrained(tmp_path / "own")
    config = compose([f"model.tokenizer={tmp_path / 'own'}"])
    assert load_tokenizer(config.model, tmp_path / "none beside the weights").eos_token_id == 256


def test_impl_and_family_choose_whose_code_runs():
    names = [type(build_meta(compose([f"model.impl={impl}"]), None)).__name__ for impl in ("custom", "hf")]
    assert names[0] == "Qwen3" != names[1]
    other = compose(["model=tiny_qwen3", "model.card.family=other", "inference=vllm", "model.path=/a/checkpoint"])
    with pytest.raises(UserError, match="A model of another family needs its config"):
        build_meta(other, None)
