"""`prl.plan --recipes`: what it shows is sensible, can be typed, and is what it says."""

import subprocess
import sys
from itertools import pairwise

import pytest

from prl.config import compose
from prl.forecast.choices import LESS, candidates, choices, render, words_of
from prl.forecast.hardware import load_hardware
from prl.forecast.memory import GIB, peak_memory
from prl.forecast.setting import Setting

BENCH = ["deployment=colocated", "model.path=null", "model.tokenizer=byte", "optim=adamw"]


def found_of(*words: str, gib: float | None = None):
    config = compose([*BENCH, *words], "bench")
    hardware = load_hardware()
    if gib is not None:
        hardware = hardware.model_copy(update={"memory_gib": gib})
    return config, hardware, choices(hardware, config)


@pytest.mark.parametrize(
    "model",
    [
        ["model=qwen3_4b"],
        ["model=qwen3_30b_a3b", "parallelism=fsdp", "parallelism.dp_shard=8"],
        ["model=qwen3_30b_a3b", "parallelism=ep8_cp2", "deployment.num_train_gpus=8"],
        ["model=glm_5_1", "model.card.num_hidden_layers=4", "model.card.num_experts=16"],
        ["model=nemotron_3_super", "model.card.num_hidden_layers=6", "model.card.hybrid_override_pattern=MEMEM*",
         "model.card.num_experts=64"],
        ["model=qwen3_4b", "memory=lora"],
        ["model=qwen3_4b", "optim=muon"],
    ],
    ids=["dense", "experts", "experts and context", "sparse attention", "states", "lora", "muon"],
)  # fmt: skip
def test_each_is_slower_and_smaller_than_the_one_before_and_can_be_typed(model) -> None:
    config, _, found = found_of(*model, "bench.doc_len=16384")
    assert len(found) > 3
    for before, after in pairwise(found):
        assert before.seconds <= after.seconds
        assert after.peak_gib < before.peak_gib * LESS
    base = [] if "memory=lora" in model else ["memory=none"]
    for recipe in found:
        typed = compose([*BENCH, *model, "bench.doc_len=16384", *base, *recipe.words], "bench")
        assert words_of(typed.memory_recipe) == recipe.words
        assert typed.memory_recipe.lora == config.memory_recipe.lora
        peak = peak_memory(Setting(load_hardware(), typed, (16384,)))
        assert recipe.peak_gib == pytest.approx(peak.total / GIB)


def test_the_fastest_that_fits_recomputes_nothing_where_there_is_room() -> None:
    config, hardware, found = found_of("model=qwen3_4b", "bench.doc_len=16384")
    assert found[0].fits
    assert found[0].words == (
        "memory_recipe.fused_lm_head_token_chunk_size=auto", "memory_recipe.compile=true"
    )  # fmt: skip
    assert render(found, config, hardware).endswith(" ".join(("memory=none", *found[0].words)))
    _, _, smaller = found_of("model=qwen3_4b", "bench.doc_len=16384", gib=79.0)
    chosen = next(recipe for recipe in smaller if recipe.fits)
    assert smaller.index(chosen) > 0
    assert chosen.peak_gib < 79 * 0.97
    assert any("ac.mode" in word for word in chosen.words)


def test_where_nothing_fits_it_says_what_else_there_is() -> None:
    config, hardware, found = found_of("model=qwen3_4b", "bench.doc_len=16384", gib=4.0)
    assert not any(recipe.fits for recipe in found)
    assert "none of them fits: more ranks" in render(found, config, hardware)


def test_host_memory_that_slurm_does_not_give_is_too_large() -> None:
    words = ["model=qwen3_4b", "warm_start=none", "optim=adamw", "seq_len=16384", "ckpt=none"]
    found = [choices(load_hardware(), compose([*words, *more])) for more in ([], ["slurm.mem=20G"])]
    assert all(one.fits for one in found[0])
    assert {one.fits for one in found[1] if one.host_gib < 20} == {True}
    assert {one.fits for one in found[1] if one.host_gib > 20} == {False}


def test_what_rules_refuse_is_not_tried() -> None:
    config = compose([*BENCH, "model=qwen3_4b", "optim=muon"], "bench")
    assert not any(one.memory_recipe.optim_cpu_offload == "full" for one, _ in candidates(config))
    assert any(one.memory_recipe.optim_cpu_offload is True for one, _ in candidates(config))


def plan(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "prl.plan", *words], capture_output=True, text=True, timeout=120)


def test_on_the_command_line() -> None:
    told = plan("--recipes", "--gpu-gib=24", "-cn", "sft", "model=qwen3_0_6b", "seq_len=16384", "optim=adamw")
    assert told.returncode == 0, told.stderr
    lines = told.stdout.splitlines()
    assert lines[0].startswith("a rank on a GPU of 24 GiB")
    assert "too large" in told.stdout
    assert lines[-1].startswith("the fastest that fits:  memory=none memory_recipe.")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--recipes", "--json"], "Memory recipes are printed alone."),
        (["--recipes", "--forecast"], "Memory recipes are printed alone."),
        (["--recipes", "-cn", "eval", "eval.run=x"], ""),
        (["--gpu-gib=80"], "--gpu-gib belongs to --recipes"),
        (["--recipes", "--gpu-gib=0"], "--gpu-gib"),
        (["--recipes", "--gpu-gib=much"], "--gpu-gib"),
    ],
)
def test_what_cannot_be_told_is_refused(words, said) -> None:
    told = plan(*words)
    assert told.returncode == 2, told.stdout
    assert said in told.stderr
    assert "Traceback" not in told.stderr
