"""The forecast of a step: its parts add up, its rates matter, and it is as near to what was measured as it says."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from prl.config.composing import compose
from prl.config.errors import UserError
from prl.config.locate import config_groups
from prl.forecast import validation
from prl.forecast.attention import attention_parts
from prl.forecast.cost import total
from prl.forecast.forecast import forecast
from prl.forecast.hardware import load_hardware
from prl.forecast.layers import layers_in_order, layers_of, root_weights
from prl.forecast.memory import GIB, moments, peak_memory, units_of, whole_gradients
from prl.forecast.parts import moved_rows, parts_of_a_token
from prl.forecast.recipe import apply_recipe
from prl.forecast.report import render
from prl.forecast.rollout import Fleet, cache_bytes, fleet_of, number_bytes, rollouts_of, room_for_cache
from prl.forecast.setting import Setting
from prl.forecast.sharding import Group, dense_group, expert_group
from prl.forecast.training import micro_batch
from prl.forecast.workload import lognormal, workload_of
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


@pytest.mark.parametrize(
    ("overrides", "per_weight"),
    [
        ([], 2),
        (["memory_recipe.ac.mode=full"], 0),
        (["memory_recipe.ac.mode=full", "memory_recipe.ac.freq=2"], 1),
        (["memory_recipe.ac.mode=selective", "memory_recipe.ac.targets=[attn_proj,mlp]"], None),  # o_proj waits
        (["memory=lora"], 0),
        (["memory_recipe.optim_cpu_offload=full"], 0),
        (["model.dtype=float32"], 0),
        (["memory_recipe.ac_offloading.enabled=true"], 0),
        (["parallelism.dp_shard=2", "deployment.num_train_gpus=2"], 0),
    ],
)
def test_cast_weights_wait_where_one_rank_holds_all_and_repeats_nothing(overrides, per_weight) -> None:
    s = bench("model=qwen3_4b", *overrides)
    when, parts = next(moments(s, has_gradients=False))
    layers = sum(layer.dense * count for count, layer in layers_of(s))
    output = 36 * 2560 * 4096
    wanted = 2 * output if per_weight is None else per_weight * layers
    assert (when, parts["cast weights"]) == ("the head's backward", wanted)


def test_logits_of_the_last_chunks_are_computed_once() -> None:
    def repeated(chunk: str, before: bool = False) -> float:
        s = bench("model=qwen3_4b", f"memory_recipe.fused_lm_head_token_chunk_size={chunk}")
        return micro_batch(replace(s, before=before)).repeated.total

    assert repeated("auto") == repeated("disabled") == 0  # 16,384 tokens are two of its chunks
    assert repeated("4096") == pytest.approx(0.75 * repeated("4096", before=True))


def test_scanning_again_saves_memory_and_costs_time() -> None:
    """16 KB a token and layer, twice: what comes out of the scan, and of the norm."""
    hybrid = ("model=nemotron_3_super", "model.card.num_hidden_layers=4", "model.card.hybrid_override_pattern=MMMM",
              "model.card.num_experts=0", "model.card.num_experts_per_tok=0",
              "memory_recipe.ac.mode=selective")  # fmt: skip
    with_scan, without = (
        bench(*hybrid, f"memory_recipe.ac.targets=[{targets}]") for targets in ("norm,attn_proj,scan", "norm,attn_proj")
    )
    saved = peak_memory(without).total - peak_memory(with_scan).total
    assert saved == pytest.approx(4 * 2 * 16384 * sum(without.lengths), rel=0.2)
    assert micro_batch(with_scan).seconds > micro_batch(without).seconds


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
        (["--forecast", "--commands"], "why:"),
        (["--hardware=h200_ib400"], "belong to --forecast"),
        (["--completion-tokens=0"], "belong to --forecast"),
        (["--forecast", "--completion-tokens=100000"], "cannot have 100000 tokens"),
        (["--forecast", "-cn", "inference"], "no trainer's step"),
    ],
    ids=["with commands", "why", "without", "of nothing", "too long", "no trainer"],
)
def test_what_is_refused(words: list[str], told: str) -> None:
    done = plan(*words)
    assert (done.returncode, told in done.stderr) == (2, True), done.stderr


def test_alternatives_refuse_as_a_forecast_does() -> None:
    words = ["-m", "prl.forecast.alternatives", "warm_start=none", "--completion-tokens=100000"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert (done.returncode, "cannot have 100000" in done.stderr, done.stdout) == (2, True, "")
    assert "Traceback" not in done.stderr


def test_a_run_that_has_no_alternative_is_told_so() -> None:
    done = subprocess.run([sys.executable, "-m", "prl.forecast.alternatives"], capture_output=True, text=True)
    assert (done.returncode, "Nothing to compare" in done.stdout) == (0, True), done.stderr


# --- what single keys change ------------------------------------------------------------------------------------------

NODES = ["warm_start=none", "deployment=multi_node", "deployment.num_train_nodes=2", "deployment.num_infer_nodes=1",
         "inference=vllm", "inference.tp=4", "weight_transport=nccl", "parallelism=fsdp",
         "parallelism.dp_shard=auto", "optim=adamw"]  # fmt: skip


def on_nodes(*overrides: str) -> Setting:
    return Setting(load_hardware(), compose([*NODES, *overrides]), (1024,))


@pytest.mark.parametrize(
    "layout",
    [["parallelism.dp_shard=4"], ["parallelism.dp_shard=4", "parallelism.ep=2"], ["parallelism=hsdp2"]],
    ids=["FSDP", "EP", "HSDP"],
)
def test_reductions_in_bfloat16_send_half(layout: list[str]) -> None:
    words = ["model=qwen3_30b_a3b", "deployment.num_train_gpus=4", *layout]
    wide, narrow = (bench(*words, f"parallelism.reduce_dtype={dtype}") for dtype in ("float32", "bfloat16"))
    done = [micro_batch(s) for s in (wide, narrow)]
    before, after = (total((d.forward, d.repeated, d.backward, d.exposed, d.hidden)).traffic for d in done)
    reductions = [key for key in before if "reductions" in key[0]]
    assert any(key[0].startswith("HSDP") for key in reductions) is ("hsdp2" in layout[0])
    for key, nbytes in before.items():
        assert after[key] == pytest.approx(nbytes / 2 if key in reductions else nbytes), key
    layer = layers_of(wide)[0][1]
    assert sum(whole_gradients(narrow, layer)) == pytest.approx(sum(whole_gradients(wide, layer)) * 4 / 6)


def test_experts_that_are_whole_on_their_rank_are_reduced_in_float32_or_not_by_fsdp() -> None:
    """Activation offloading leaves them to FSDP."""
    run = ["model=qwen3_30b_a3b", "deployment.num_train_gpus=4", "parallelism.dp_shard=4", "parallelism.ep=4",
           "parallelism.reduce_dtype=bfloat16"]  # fmt: skip
    for offloads, experts in (("false", 0), ("true", 6)):
        s = bench(*run, f"memory_recipe.ac_offloading.enabled={offloads}")
        layer = layers_of(s)[0][1]
        assert sum(whole_gradients(s, layer)) == layer.dense * 4 + layer.experts / 4 * experts
        assert len(units_of(s, layers_in_order(s))) == (48 if experts else 12)  # four layers without their experts


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize(("groups", "chosen"), [(1, 1), (4, 2), (4, 3)])
def test_a_token_reaches_as_many_parts_as_all_choices_say(parts: int, groups: int, chosen: int) -> None:
    card = compose(["model=tiny_qwen3_moe"]).model.card.model_copy(
        update={"num_experts": 8, "num_experts_per_tok": 2, "n_group": groups, "topk_group": chosen}
    )
    seen = [
        len({expert * parts // 8 for expert in drawn})
        for kept in combinations(range(groups), chosen)
        for drawn in combinations([expert for expert in range(8) if expert * groups // 8 in kept], 2)
    ]
    assert parts_of_a_token(card, parts) == pytest.approx(sum(seen) / len(seen))


@pytest.mark.parametrize(
    ("backend", "between", "inside"), [("torch", 107, 92), ("hierarchical", 32, 186), ("deepep", 32, 186)]
)
def test_rows_go_to_nodes_as_they_were_counted(backend: str, between: float, inside: float) -> None:
    """KiB a token of Qwen3-235B over two nodes, in prl/trainer/README.md."""
    words = ["model=qwen3_235b_a22b", "parallelism.ep=16", f"parallelism.ep_comm_backend={backend}"]
    s = on_nodes(*words, "model.dtype=bfloat16", "deployment.device=cuda")
    cost = moved_rows(s, s.card.hidden_size * 2) * 4  # there and back, forward and backward
    found = {link: nbytes / 1024 for (_, link), nbytes in cost.traffic.items()}
    assert found == pytest.approx({"NIC": between, "NVLink": inside}, rel=0.02)
    alone = [
        s.hardware.seconds(name, 1024 * found[link]) for name, link in (("nic", "NIC"), ("nvlink_all_to_all", "NVLink"))
    ]
    assert cost.total == pytest.approx(sum(alone) if backend == "hierarchical" else max(alone))


def test_nodes_end_where_the_deployment_says() -> None:
    s = on_nodes("model=qwen3_30b_a3b", "parallelism.ep=2", "deployment.gpus_per_node=4")
    assert (dense_group(s), expert_group(s)) == (Group(8, 4), Group(4, 2))
    assert s.exchange("all", 8e9, 8).traffic == {("all", "NVLink"): 3e9, ("all", "NIC"): 4e9}
    assert dense_group(on_nodes("model=qwen3_30b_a3b", "deployment.gpus_per_node=16")) == Group(32, 8)


@pytest.mark.parametrize(
    ("recipe", "gradients"),
    [("optim_cpu_offload=full", 512 << 20), ("fsdp_cpu_offload=true", 0), ("optim_cpu_offload=true", None)],
)
def test_gradients_that_the_host_steps_are_not_on_the_device(recipe: str, gradients: int | None) -> None:
    words = ["model=qwen3_4b", "memory_recipe.ac.mode=full", "memory_recipe.fused_lm_head_token_chunk_size=1024"]
    s = bench(*words, f"memory_recipe.{recipe}")
    whole = parameter_count(s.card) * 4
    for laps in (1, 2):
        for moment, parts in moments(s, laps > 1):
            held = parts.get("gradients", 0)
            assert held <= (whole if gradients is None else gradients) * 1.001, moment
            assert gradients is None or not parts.get("moments")
    assert peak_memory(s, 2).parts.get("gradients", 0) == pytest.approx(
        whole if gradients is None else gradients, rel=1e-3
    )


@pytest.mark.parametrize(
    ("job", "overrides", "lengths", "told"),
    [
        ("rl", [], {"prompt": 0}, "Prompts cannot have 0 tokens"),
        ("rl", [], {"prompt": -5}, "Prompts cannot have -5 tokens"),
        ("rl", [], {"prompt": 256}, "leave 1 to 255"),
        ("rl", ["inference.sampling.max_tokens=2"], {"mean": 3}, "--completion-tokens=1$"),
        ("sft", [], {"prompt": 100}, "A step of sft has no rollouts"),
        ("bench", [], {"mean": 0}, "A step of bench has no rollouts"),
        ("bench", ["bench.target=stack"], {}, "where: bench.target=stack(.|\n)*do:    bench.target=trainer_rl"),
        ("bench", ["bench.lengths=variable"], {}, "bench.lengths=fixed"),
    ],
    ids=["no prompt", "below", "no room", "fix", "sft", "bench", "stack", "variable"],
)
def test_what_there_is_no_workload_of(job: str, overrides: list[str], lengths: dict[str, int], told: str) -> None:
    with pytest.raises(UserError, match=told):
        workload_of(compose(["warm_start=none", *overrides] if job == "rl" else overrides, job), **lengths)


def test_prompts_leave_a_short_context_its_completions() -> None:
    words = ["warm_start=none", "seq_len=512", "inference.max_model_len=256", "inference.sampling.max_tokens=64"]
    work = workload_of(compose(words))
    assert (work.prompt, set(work.completions)) == (192, {64})


def test_a_benchmarks_row_is_filled_with_its_documents() -> None:
    work = workload_of(compose(["bench.doc_len=1024", "seq_len=4096"], "bench"))
    assert work.laps == ((1024,) * 4,)


def test_an_engine_beside_the_trainer_keeps_its_memory() -> None:
    words = ["warm_start=none", "model=qwen3_4b", "optim=adamw", "memory=none", "deployment=colocated_overlapped",
             "deployment.device=cuda", "inference=vllm"]  # fmt: skip
    hardware = load_hardware()
    told = forecast(hardware, make_plan(compose(words)))
    assert told.memory_gib == pytest.approx(0.6 * hardware.memory_gib)
    less = hardware.model_copy(update={"memory_gib": told.peak.total / GIB / 0.8})
    assert any(text.startswith("the trainer") for text in forecast(less, told.plan).too_large)


@pytest.mark.parametrize(
    ("quantization", "nbytes", "told"), [("null", 2, False), ("fp8_per_block", 1, False), ("awq", 2, True)]
)
def test_bytes_of_an_engines_weights(quantization: str, nbytes: int, told: bool) -> None:
    config = compose(["warm_start=none", "inference=vllm", "deployment.device=cuda",
                      f"inference.quantization={quantization}"])  # fmt: skip
    assert number_bytes(config) == nbytes
    assumed = forecast(load_hardware(), make_plan(config)).assumptions
    assert any("inference.quantization=awq" in text for text in assumed) is told


def test_a_forecast_of_sft_says_nothing_of_rollouts_and_that_its_rows_are_short() -> None:
    text = render(forecast(load_hardware(), make_plan(compose([], "sft"))))
    assert "rollouts within" not in text
    assert "sends in a step" not in text
    assert "bound by the host" in text
    config = compose(["bench.doc_len=16384"], "bench")
    assert "bound by the host" not in render(forecast(load_hardware(), make_plan(config)))


def test_an_engine_needs_room_for_one_sequence() -> None:
    plan = make_plan(compose(["warm_start=none", "model=qwen3_4b", "optim=adamw"]))
    hardware, work = load_hardware(), workload_of(plan.config)
    fleet = fleet_of(plan, ("both",))
    assert fleet is not None
    s = Setting(hardware, plan.config, work.laps[0])
    cache = cache_bytes(s, fleet, work.prompt + sum(work.completions) / len(work.completions) / 2)
    for part, fits in ((0.5, False), (1.5, True)):
        spare = room_for_cache(s, fleet) - part * cache
        rollouts = rollouts_of(
            hardware.model_copy(update={"memory_gib": hardware.memory_gib - spare / GIB}), plan, work
        )
        assert rollouts is not None
        assert rollouts.fits is fits


def test_layers_that_share_a_choice_hold_and_gather_no_index_keys() -> None:
    s = bench("model=glm_5_2", "deployment.num_train_gpus=2", "parallelism=cp2", "parallelism.cp_style=gather")
    own, layers = len(set(s.card.choosing_layers)), s.card.num_hidden_layers
    assert own < layers
    assert cache_bytes(s, Fleet(1, 1, 1), 1000) == (layers * 576 + own * s.card.index_head_dim) * 2 * 1000
    sent = [
        total(p.forward for p in attention_parts(s, chooses)).traffic["CP, gathered latents", "NVLink"]
        for chooses in (True, False)
    ]
    assert sent[1] / sent[0] == pytest.approx(576 / (576 + s.card.index_head_dim))


def test_experts_in_fp8_keep_no_cast_weights() -> None:
    """They are quantised as they are; attention's are cast first, as without FP8."""
    told = ["model=qwen3_30b_a3b", "memory=balanced", "memory_recipe.compile=true"]
    settings = [bench(*told, *more) for more in ((), ("model.fp8=emulated",))]
    cast = [apply_recipe(s, layers_of(s)[0][1]).cast for s in settings]
    layer = layers_of(settings[0])[0][1]
    assert cast[0] - cast[1] == layer.experts > 0
    assert cast[1] > 0


def test_engines_are_sent_what_they_hold_unless_they_quantise() -> None:
    """Latent attention and blocks of FP8 take their parts as other layers do."""

    def seconds(*overrides: str) -> float:
        point = compose(["+experiment=math_glm_5", "algo.batch_size=256", *overrides])
        return forecast(load_hardware(), make_plan(point)).timing.costs["publication"].total

    parts, blocks = seconds(), seconds("inference.quantization=fp8_block")
    assert blocks == pytest.approx(parts / 2)
    assert seconds("inference.quantization=fp8") > 10 * parts
