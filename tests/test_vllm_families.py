"""Whole runs of every family that vLLM serves on CPUs, vLLM being the engine: it says what the trainer says, before and
after each update.

The checkpoints have norms, biases and corrections of random numbers, and matrices large enough for all of them to
matter. What the bar was seen to catch: an update that is lost, matrices of latent attention that are left as they were,
rms_norm_eps 1e-5 for 1e-6, vLLM's own rotary operator for latent attention (prl/inference/vllm/README.md has figures).
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
from runs import rows, run
from vllm_server import trainer_logprobs

from prl.config import compose
from prl.config.schema import ModelCard
from prl.models.checkpoints.reading import load_model
from prl.models.checkpoints.writing import hf_tensors, save_checkpoint
from prl.models.families.build import build_decoder
from prl.models.text.tokenizer import save_byte_tokenizer
from prl.trainer.losses import mismatch_kl

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

BAR = 1e-9  # of the mean mismatch KL of a step in float32; 1e-13 is seen
SMALL = ["inference=vllm", "debug.num_threads=1", "inference.max_num_seqs=8", "deployment.device=cpu", "max_steps=3",
         "algo=sync", "algo.batch_size=16", "algo.group_size=4", "algo.filter_zero_signal=false", "optim.lr=0.01",
         "inference.sampling.max_tokens=12", "env.mix.reverse_text.args.max_chars=10",
         "eval=none", "ckpt=none", "warm_start=none", "logging.wandb.mode=disabled"]  # fmt: skip
CONTEXT = "original_max_position_embeddings: 64"
LLAMA3 = f"{{rope_type: llama3, factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, {CONTEXT}}}"
YARN = f"{{rope_type: yarn, factor: 4.0, beta_fast: 32.0, beta_slow: 1.0, mscale: 1.0, mscale_all_dim: 1.0, {CONTEXT}}}"
# the size of latents that vLLM's latent attention on CPUs is for
LATENT = ["model.card.kv_lora_rank=512", "model.card.qk_rope_head_dim=64", "model.card.head_dim=96"]
FAMILIES = {
    "llama": ["model=tiny_llama", "model.card.attention_bias=true", f"model.card.rope_scaling={LLAMA3}"],
    "qwen3_moe": ["model=tiny_qwen3_moe"],
    "glm4_moe": ["model=tiny_glm4_moe", "model.card.use_qk_norm=true"],
    "deepseek_v3": ["model=tiny_deepseek_v3", *LATENT, f"model.card.rope_scaling={YARN}"],
    "glm4_moe_lite": ["model=tiny_glm4_moe_lite", *LATENT],
}


def checkpoint(card: ModelCard, path: Path) -> Path:
    """Of random numbers all over."""
    model, generator = build_decoder(card), torch.Generator().manual_seed(1)
    model.init_weights(generator, std=0.08)
    with torch.no_grad():
        for vector in [p for p in model.parameters() if p.ndim == 1] + list(model.checkpoint_buffers().values()):
            vector.add_(torch.randn(vector.shape, generator=generator), alpha=0.3)
    save_checkpoint(hf_tensors(model), path, card)
    save_byte_tokenizer(path)
    return path


def kl_of_the_last_update(run_dir: Path, card: ModelCard, start: Path) -> float:
    """What the mismatch KL would be, had the last update been lost."""
    found = []
    for version in sorted((run_dir / "weights").iterdir())[-2:]:
        shutil.copy(start / "config.json", version)
        model = load_model(version, card, torch.float32, torch.device("cpu"))
        tokens = torch.randint(0, 256, (64,), generator=torch.Generator().manual_seed(0))
        logprobs = trainer_logprobs(model, tokens.tolist())
        found.append(logprobs[torch.arange(63), tokens[1:]])
    return float(mismatch_kl(*found).mean())


def check(overrides: list[str], tmp_path: Path) -> list[float]:
    """Three synchronous steps; the mismatch KL of each."""
    card = compose(overrides).model.card
    start = checkpoint(card, tmp_path / "checkpoint")
    done = run([*overrides, *SMALL, f"model.path={start}", f"output_dir={tmp_path}/run"], tmp_path)
    assert done.code == 0, done.output
    steps = [row for row in rows(tmp_path / "run", "trainer.0") if "mismatch_kl_mean" in row]
    mismatch = [row["mismatch_kl_mean"] for row in steps]
    lost = kl_of_the_last_update(tmp_path / "run", card, start)
    print(card.family, mismatch, "an update lost:", lost)
    assert len(mismatch) == 3
    assert lost > 1e4 * BAR
    return mismatch


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_trainer_agree_at_every_step(family: str, tmp_path: Path) -> None:
    assert max(check(FAMILIES[family], tmp_path)) < BAR


@pytest.mark.exhaustive
def test_latents_of_another_size_are_expanded(tmp_path: Path) -> None:
    """vLLM's latent attention on CPUs refuses them."""
    assert max(check(["model=tiny_deepseek_v3"], tmp_path)) < BAR


@pytest.mark.parametrize("model", ["tiny_minimax_m2", "tiny_nemotron_h", "tiny_deepseek_v32", "tiny_glm_moe_dsa"])
def test_what_vllm_has_for_gpus_only_is_refused_before_anything_starts(model: str, tmp_path: Path) -> None:
    done = run(
        ["inference=vllm", f"model={model}", f"cache_dir={tmp_path}/cache", f"output_dir={tmp_path}/run"], tmp_path
    )
    assert done.code == 2, done.output
    assert f"vLLM cannot run {model} on CPUs" in done.output
    assert "inference=torch" in done.output
    assert list(tmp_path.iterdir()) == []
