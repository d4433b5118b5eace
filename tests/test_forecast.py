"""The forecast of a step: its parts add up, its rates matter, and it is as near to what was measured as it says."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from prl.config.composing import compose
from prl.config.errors import UserError
from prl.config.locate import config_groups
from prl.forecast import validation
from prl.forecast.forecast import forecast
from prl.forecast.hardware import load_hardware
from prl.forecast.layers import layers_of, root_weights
from prl.forecast.memory import peak_memory
from prl.forecast.setting import Setting
from prl.forecast.training import micro_batch
from prl.forecast.workload import lognormal
from prl.planning import make_plan
from prl.planning.model_size import parameter_count

ROOM = Path(validation.__file__).parent
CARDS = [name for name in config_groups()["model"] if name != "auto"]
BENCH = ["deployment=colocated", "model.path=null", "model.tokenizer=byte"]


@pytest.mark.parametrize("name", CARDS)
def test_layers_have_the_parameters_of_their_card(name: str) -> None:
    config = compose([f"model={name}", "warm_start=none"])
    layers = layers_of(Setting(load_hardware(), config, (128,)))
    counted = sum(count * (layer.dense + layer.experts) for count, layer in layers) + root_weights(config.model.card)
    assert counted == pytest.approx(parameter_count(config.model.card), rel=1e-3)


@pytest.mark.slow
def test_it_is_as_near_to_the_measured_rows_as_the_readme_says() -> None:
    """Held-out rows among them; the interval's factor is theirs."""
    hardware = load_hardware()
    compared = validation.compare(hardware)
    assert len(compared) >= 75
    assert sum(c.row.fit for c in compared) <= 10
    assert validation.held_out_error(compared) < hardware.constants.error / 2
    readme = (ROOM / "README.md").read_text()
    for line in [*validation.table(compared), *validation.summary(compared)]:
        assert line in readme
    held_out = [c for c in compared if not c.row.fit]
    mean, deviation = validation.spread(c.speed_ratio for c in held_out)
    assert abs(math.log(mean)) < 0.02
    assert deviation < 1.06
    mean, deviation = validation.spread(c.peak_ratio for c in held_out if c.peak_ratio is not None)
    assert abs(math.log(mean)) < 0.03
    assert deviation < 1.1


@pytest.mark.slow
def test_the_constants_are_those_that_the_fit_finds() -> None:
    hardware = load_hardware()
    found = validation.fit(hardware, [row for row in validation.measured_rows() if row.fit])
    for name in (*validation.FITTED, "reserve_gib"):
        assert getattr(found, name) == pytest.approx(getattr(hardware.constants, name), rel=0.1), name


ALLOWED = r"prl\.(config|planning|forecast)\b|prl\.metrics\.mfu$|prl\.transport\.packing$"


def test_it_imports_what_its_readme_lets_it_and_no_torch() -> None:
    for module in ROOM.glob("*.py"):
        for name in re.findall(r"^\s*(?:from|import) (prl[\w.]*)", module.read_text(), re.MULTILINE):
            assert re.match(ALLOWED, name), f"{module.name} imports {name}"
    code = (
        "import sys; from prl.forecast.forecast import forecast; from prl.forecast.hardware import load_hardware\n"
        "from prl.config.composing import compose; from prl.planning import make_plan\n"
        "forecast(load_hardware(), make_plan(compose(['warm_start=none']))); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_rate_says_where_it_is_from() -> None:
    """And what is said to be measured names a README that is there."""
    for name, rate in load_hardware().rates.items():
        assert (rate.value is None) == bool(rate.by), name
        for path in re.findall(r"prl/[\w/]*README\.md", rate.source):
            assert (ROOM.parents[1] / path).is_file(), name
        assert rate.kind != "measured" or re.search(r"README|same", rate.source), name


def test_a_rate_is_interpolated_between_lengths_and_kept_beyond() -> None:
    rate = load_hardware().rates["attention_forward"]
    assert rate.at("fa4/128", 1024) == rate.at("fa4/128", 16384) == 685e12
    assert rate.at("fa4/128", 32768) == pytest.approx((685e12 + 633e12) / 2)
    assert rate.at("fa4/128", 1 << 20) == 633e12


def bench(*overrides: str, length: int = 16384) -> Setting:
    return Setting(load_hardware(), compose([*BENCH, f"bench.doc_len={length}", *overrides], "bench"), (length,))


def test_a_slower_rate_never_makes_a_step_shorter() -> None:
    hardware = load_hardware()
    config = compose(["model=glm_5_1", "warm_start=none", "parallelism=ep8", "parallelism.cp=8", "seq_len=131072",
                      "deployment=multi_node", "deployment.num_train_nodes=16", "deployment.num_infer_nodes=2",
                      "inference=vllm", "inference.tp=8", "inference.expert_parallel=true", "optim=adamw",
                      "inference.max_model_len=131072", "weight_transport=nccl", "memory=tight",
                      "inference.sampling.max_tokens=8192"])  # fmt: skip
    told = forecast(hardware, make_plan(config), mean=2048)
    slopes = [slope for s in told.sensitivity.values() for slope in (s.step, s.trainer, s.rollouts)]
    assert max(slopes) <= 1e-6, told.sensitivity
    assert sum(s.trainer for s in told.sensitivity.values()) == pytest.approx(-1, abs=0.01), (
        "seconds are work over rates"
    )
    assert told.interval[0] < told.timing.step_s < told.interval[1]
    assert told.timing.trainer_s == pytest.approx(sum(cost.total for cost in told.timing.costs.values()))
    links = {link for _, link in told.traffic}
    assert links == {"NVLink", "NIC", "host link"}


@pytest.mark.parametrize(
    ("more", "less"),
    [
        (["memory_recipe.ac.mode=full"], ["memory=none"]),
        (["parallelism.dp_shard=4", "deployment.num_train_gpus=4", "parallelism.ep=4"], ["memory=none"]),
        (["memory=none"], ["memory_recipe.compile=true"]),
    ],
    ids=["recomputation", "expert parallelism", "eager"],
)
def test_what_costs_time(more: list[str], less: list[str]) -> None:
    model = ["model=qwen3_30b_a3b", "model.card.num_hidden_layers=4"]
    assert micro_batch(bench(*model, *more)).seconds > micro_batch(bench(*model, *less)).seconds


@pytest.mark.parametrize(
    ("less", "more"),
    [
        (["memory_recipe.ac.mode=full"], ["memory_recipe.ac.mode=selective"]),
        (["memory_recipe.ac.mode=selective"], ["memory=none"]),
        (["memory_recipe.fused_lm_head_token_chunk_size=1024"], ["memory=none"]),
        (["memory_recipe.optim_cpu_offload=true"], ["memory=none"]),
        (["memory_recipe.ac_offloading.enabled=true"], ["memory=none"]),
        (["parallelism.dp_shard=4", "deployment.num_train_gpus=4"], ["memory=none"]),
        (["optim=muon"], ["optim=adamw"]),
    ],
    ids=["full", "selective", "head", "moments", "activations", "sharding", "muon"],
)
def test_what_saves_memory(less: list[str], more: list[str]) -> None:
    assert peak_memory(bench("model=qwen3_4b", *less)).total < peak_memory(bench("model=qwen3_4b", *more)).total


def test_what_does_not_fit_is_told() -> None:
    told = plan("--forecast", "model=kimi_k2", "warm_start=none", "optim=adamw")
    assert re.search(r"^too large +the trainer: a rank holds [\d,.]+ of 139.8 GiB$", told.stdout, re.MULTILINE)
    assert re.search(r"^too large +engines: weights of [\d,.]+ GiB a GPU leave no room", told.stdout, re.MULTILINE)
    assert "too large" not in plan("--forecast", "warm_start=none").stdout


def test_completions_have_the_mean_that_was_asked_for() -> None:
    lengths = lognormal(2000, 8192, 256)
    assert sum(lengths) / 256 == pytest.approx(2000, rel=0.01)
    assert max(lengths) <= 8192
    assert min(lengths) < 400


def test_a_card_that_is_not_there() -> None:
    with pytest.raises(UserError, match="--hardware=h200_ib400"):
        load_hardware("h200_ib40")


def plan(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "prl.plan", *words], capture_output=True, text=True)


def test_it_is_printed_as_tables_and_as_json() -> None:
    point = ["--forecast", "model=qwen3_4b", "warm_start=none", "inference.max_model_len=2048", "seq_len=2048",
             "inference.sampling.max_tokens=1024", "--completion-tokens=300"]  # fmt: skip
    text = plan(*point)
    assert text.returncode == 0, text.stderr
    assert re.search(r"^step .* \(.* to .*\); rollouts run beside training; bound by ", text.stdout, re.MULTILINE)
    told = json.loads(plan("--json", *point).stdout)
    low, high = told["interval_s"]
    assert low < told["step_s"] < high
    assert told["tokens_per_step"] == pytest.approx(256 * (512 + 300), rel=0.01)
    assert sum(told["peak"]["parts"].values()) == pytest.approx(told["peak"]["bytes"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--forecast", "--commands"], "printed alone"),
        (["--hardware=h200_ib400"], "belong to --forecast"),
        (["--forecast", "--completion-tokens=100000"], "cannot have 100000 tokens"),
        (["--forecast", "-cn", "inference"], "no trainer's step"),
    ],
    ids=["with commands", "without", "too long", "no trainer"],
)
def test_what_is_refused(words: list[str], told: str) -> None:
    done = plan(*words)
    assert (done.returncode, told in done.stderr) == (2, True), done.stderr
