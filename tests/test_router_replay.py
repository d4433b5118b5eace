"""Router replay on the same tokens: with the choices of the engine replayed, rounding alone is left."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from families import ROUTED, family_card
from runs import UNEVALUATED, rows, run
from tiny import moe_card, random_model

from prl.bench.router_replay import Sampled, report, score
from prl.config.schema import InferenceConfig
from prl.inference.engine import TorchEngine
from prl.inference.sampling import SamplingParams
from prl.inference.sequences import Request
from prl.models.adapters.lora import cast_parameters
from prl.models.layers.decoder import Decoder


def sampled_by(model: Decoder) -> list[Sampled]:
    config = InferenceConfig(max_num_seqs=16, max_model_len=128, return_routed_experts=True)
    engine = TorchEngine(model, config, eos_token_ids=())
    sequences = []
    for i in range(24):
        params = SamplingParams(seed=i, max_tokens=12 + i, ignore_eos=True)
        sequences += engine.prepare(Request(str(i), list(range(i, 2 * i + 4)), params, arrival=i))
    engine.submit(sequences)
    while engine.busy:
        engine.step()
    return [Sampled(s.token_ids, s.num_prompt, s.logprobs, s.routed_experts()) for s in sequences]


@pytest.fixture(scope="module")
def bfloat16_model() -> Decoder:
    return random_model(moe_card(num_experts=16, num_hidden_layers=4)).to(torch.bfloat16).requires_grad_(False).eval()


def test_float32_leaves_nothing_to_replay() -> None:
    model = random_model(moe_card()).requires_grad_(False).eval()
    result = report(model, sampled_by(model))
    assert result["rerouted"] == 0
    assert max(result["largest KL without"], result["largest KL with"]) < 1e-6


def test_in_bfloat16_the_choices_of_the_engine_leave_less_mismatch(bfloat16_model: Decoder) -> None:
    result = report(bfloat16_model, sampled_by(bfloat16_model))
    assert result["rerouted"] > 0.01
    assert result["factor"] > 5
    assert result["KL without, rerouted"] > result["KL without, others"]


def test_more_experts_than_a_byte_holds_and_a_layer_without_any() -> None:
    """Indices are those of all layers, as vLLM has them, so that layer 2 is not taken for layer 1."""
    card = moe_card(num_experts=300, num_hidden_layers=3, mlp_only_layers=(0,), intermediate_size=48)
    model = random_model(card).requires_grad_(False).eval()
    sampled = sampled_by(model)
    assert {(s.routed.dtype, *s.routed.shape[1:]) for s in sampled} == {(np.dtype(np.uint16), 3, 2)}
    assert max(int(s.routed.max()) for s in sampled) > 255
    assert not any(s.routed[:, 0].any() for s in sampled)
    result = report(model, sampled)
    assert result["rerouted"] == 0
    assert result["largest KL with"] < 1e-6


@pytest.mark.parametrize("name", ROUTED)
def test_every_family_replays_the_choices_of_its_engine(name: str) -> None:
    """In bfloat16, where engine and trainer choose otherwise now and then; latents are absorbed in the one alone."""
    model = random_model(family_card(name, num_experts=64)).requires_grad_(False).eval()
    cast_parameters(model, torch.bfloat16, requires_grad=False)
    sampled = sampled_by(model)
    _, used = score(model, sampled, replay=True)
    given = torch.from_numpy(np.concatenate([s.routed[s.num_prompt - 1 :] for s in sampled]).astype(np.int64))
    layers = list(model.card.sparse_layers)
    torch.testing.assert_close(used.long()[:, layers], given[:, layers])
    result = report(model, sampled)
    if model.card.index_topk:  # of the same form in both: nothing is rounded otherwise, and no choice is another
        assert result["KL with"] == result["KL without"] < 1e-6
        for s in sampled:
            s.routed = np.roll(s.routed, 1, axis=0)
        assert report(model, sampled)["KL with"] > 1e-3, "choices of other tokens were not replayed"
    else:
        assert result["rerouted"] > 0.01
        assert result["KL with, rerouted"] < result["KL without, rerouted"] / 3


@pytest.mark.slow
def test_a_run_replays_them_over_context_parallel_ranks(tmp_path: Path) -> None:
    card = ["num_experts=300", "mlp_only_layers=[0]", "intermediate_size=96", "num_hidden_layers=3", "init_seed=1"]
    model = [f"model.{'' if key.startswith('init') else 'card.'}{key}" for key in card]
    choices = ["algo=sync", "parallelism=cp2", "inference.return_routed_experts=true", "max_steps=1"]
    where = [f"cache_dir={tmp_path}/cache", f"output_dir={tmp_path}/run"]
    done = run([*UNEVALUATED, *model, *choices, *where], tmp_path)
    assert done.code == 0, done.output
    (row,) = rows(tmp_path / "run", "trainer.0")
    assert row["mismatch_kl_max"] < 1e-6
    assert 1 < row["expert_load_max_over_mean"] < 300


def test_choices_of_other_tokens_are_seen(bfloat16_model: Decoder) -> None:
    """One row off, as a misaligned engine would be."""
    sampled = sampled_by(bfloat16_model)
    right = report(bfloat16_model, sampled)["KL with"]
    for s in sampled:
        s.routed = np.roll(s.routed, 1, axis=0)
    assert report(bfloat16_model, sampled)["KL with"] > 10 * right


def test_replayed_experts_are_those_given(bfloat16_model: Decoder) -> None:
    sampled = sampled_by(bfloat16_model)
    _, used = score(bfloat16_model, sampled, replay=True)
    expected = np.concatenate([s.routed[s.num_prompt - 1 :] for s in sampled])
    np.testing.assert_array_equal(used.numpy(), expected)


@pytest.mark.slow
def test_the_command_prints_the_table(tmp_path: Path) -> None:
    done = run([f"cache_dir={tmp_path}", "model.dtype=bfloat16"], tmp_path, "prl.bench.router_replay")
    assert done.code == 0, done.output
    assert "factor" in done.output
