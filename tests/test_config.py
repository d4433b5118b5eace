"""Composition and validation: every choice, the `memory` alias, the schema against the YAML."""

from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from prl.config import ConfigError, UserError, compose
from prl.config.availability import NotAvailableError
from prl.config.composing import compose_yaml, problems, task_overrides
from prl.config.keys import schema_keys
from prl.config.locate import added_groups, conf_dir, config_groups
from prl.config.point import point_label
from prl.config.schema import RunConfig
from prl.config.sweep import compose_points

NEEDS = {
    "algo=distill": ["algo.teacher.urls=['http://h:1']"],
    "data=jsonl": ["sft.data.source=x.jsonl"],
    "data=hf": ["sft.data.source=owner/name"],
    "env=verifiers": ["env.id=x"],
    "model=auto": [f"model.path={Path(__file__).parent / 'card_only'}"],
    "weight_transport=ipc": ["deployment=colocated"],
    "weight_transport=lora": ["inference=vllm", "memory=lora"],
}
GROUPS = {group: choices for group, choices in config_groups().items() if group not in added_groups()}
CHOICES = [(group, choice) for group, choices in GROUPS.items() for choice in choices]


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=[f"{g}={c}" for g, c in CHOICES])
def test_every_choice_composes_and_validates(group: str, choice: str) -> None:
    """A choice whose thing is not built yet may only fail for that reason."""
    override = f"{group}={choice}"
    job = "sft" if group == "data" else "rl"
    config, waiting = compose_available([override, *NEEDS.get(override, [])], job)
    assert all(isinstance(violation, NotAvailableError) for violation in waiting), [v.render() for v in waiting]
    if config is not None:
        assert config.choices["memory_recipe" if group == "memory" else group] == choice


def compose_available(overrides: list[str], job: str) -> tuple[RunConfig | None, list[UserError]]:
    try:
        return compose(overrides, job), []
    except ConfigError as error:
        return None, error.violations


@pytest.mark.parametrize("path", sorted(conf_dir().rglob("*.yaml")), ids=lambda p: str(p.relative_to(conf_dir())))
def test_every_yaml_says_what_it_is_for(path: Path) -> None:
    comments = [line for line in path.read_text().splitlines()[:2] if line.startswith("# ") and "@package" not in line]
    assert comments, f"{path} starts without a comment"
    assert len(comments[0]) > 20


def dotted(cfg: DictConfig, prefix: str = "") -> set[str]:
    keys = set()
    for key in map(str, cfg):
        keys.add(prefix + key)
        if OmegaConf.is_dict(cfg._get_node(key)) and cfg[key] is not None:
            keys |= dotted(cfg[key], f"{prefix}{key}.")
    return keys


def test_yaml_of_rl_has_every_key_of_the_schema() -> None:
    """So that a plain override works for each of them, without `+`."""
    cfg = compose_yaml([], "rl")
    missing = {key for key in schema_keys() if not key.startswith(("sft.", "bench."))} - dotted(cfg)
    assert missing == set()


def test_yaml_of_sft_has_every_key_of_its_groups() -> None:
    others = ("env", "algo", "inference", "eval", "weight_transport", "warm_start")
    wanted = {key for key in schema_keys() if key.split(".")[0] not in others}
    wanted = {key for key in wanted if not key.startswith(("sft.optim.", "bench."))}
    assert wanted - dotted(compose_yaml([], "sft")) == set()


def test_yaml_of_bench_has_every_key_of_the_schema() -> None:
    others = ("sft.", "warm_start.")
    missing = {key for key in schema_keys() if not key.startswith(others)} - dotted(compose_yaml([], "bench"))
    assert missing == set()


def test_a_bench_row_holds_its_documents() -> None:
    assert compose(["bench.doc_len=96"], "bench").seq_len == 96
    assert compose(["bench.doc_len=[32,64,8]"], "bench").seq_len == 104
    assert compose(["bench.doc_len=32", "seq_len=128"], "bench").seq_len == 128


@pytest.mark.parametrize("override", ["memory=tight", "memory_recipe=tight"])
def test_memory_names_the_memory_recipe(override: str) -> None:
    config = compose([override])
    assert config.memory_recipe.ac.mode == "full"
    assert config.choices["memory_recipe"] == "tight"
    assert "memory" not in config.choices


def test_env_list_mixes_choices() -> None:
    config = compose(["env=[reverse_text,countdown]", "env.mix.countdown.weight=3"])
    assert {name: source.weight for name, source in config.env.mix.items()} == {"reverse_text": 1.0, "countdown": 3.0}
    assert config.choices["env"] == "reverse_text+countdown"


@pytest.mark.parametrize(
    ("as_dict", "dotted_key"),
    [
        ("optim={lr: 0.001}", "optim.lr=0.001"),
        ("eval={interval: 3}", "eval.interval=3"),
        ("algo={batch_size: 32}", "algo.batch_size=32"),
        ("memory_recipe={ac: {mode: selective}}", "memory_recipe.ac.mode=selective"),
        ("env={mix: {reverse_text: {args: {max_chars: 7}}}}", "env.mix.reverse_text.args.max_chars=7"),
        ("optim={}", "seed=0"),
    ],
)
def test_a_dict_for_a_group_sets_keys_in_it(as_dict: str, dotted_key: str) -> None:
    assert compose([as_dict]) == compose([dotted_key])
    assert [problems([line], "rl") for line in (as_dict, f"{as_dict},{as_dict.partition('=')[2]}")] == [[], []]


def test_dicts_for_a_group_are_an_axis() -> None:
    points = compose_points(["optim={lr: 0.001},{lr: 0.01},sgd"], "rl")
    assert points == [compose(["optim.lr=0.001"]), compose(["optim.lr=0.01"]), compose(["optim=sgd"])]


def test_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        compose([]).seed = 1  # type: ignore[misc]


def test_sft_settings_follow_the_run() -> None:
    config = compose(["max_steps=7", "optim=sgd", "seq_len=64"], "sft")
    assert config.sft is not None
    assert (config.sft.max_steps, config.sft.optim.type, config.sft.seq_len) == (7, "sgd", 64)


def test_point_label_can_be_pasted_as_an_override() -> None:
    swept = {"env": "[reverse_text,countdown]", "optim.lr": "0.001", "memory": "tight"}
    config = compose([]).model_copy(update={"swept": swept})
    label = point_label(config)
    assert label.startswith("env-reverse_text+countdown_lr-0.001_memory-tight-")
    assert compose([f"output_dir=outputs/{label}"]).output_dir == f"outputs/{label}"


def test_overrides_are_read_as_typed():
    """Hydra's own list of them puts in values, or fails, where one says ${...}."""
    node = OmegaConf.create({"overrides": {"task": ["seed=${max_steps}", "name=${nope}"]}, "max_steps": 7})
    assert task_overrides(node) == ["seed=${max_steps}", "name=${nope}"]


def test_the_home_directory_may_be_said_as_shells_say_it(monkeypatch):
    monkeypatch.setenv("HOME", "/a/home")
    model = compose(["model.path='~/models/x'", "model.tokenizer='~/tokenizer'"]).model
    assert (model.path, model.tokenizer) == ("/a/home/models/x", "/a/home/tokenizer")
