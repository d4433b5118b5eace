"""Trainer and built-in engine agree: what the engine sampled, through the trainer's own forward pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tiny import END, moe_card, moe_checkpoint, random_model
from trainer_ranks import Job, build_policy

from prl.config.schema import InferenceConfig
from prl.inference.engine import TorchEngine
from prl.inference.isolation import MAX_FAILED_STEPS, BrokenWeights
from prl.inference.sampling import SamplingParams
from prl.inference.sequences import Request, Sequence
from prl.models.checkpoints.reading import load_model
from prl.models.checkpoints.writing import hf_tensors
from prl.planning.run_plan import MeshPlan
from prl.trainer.losses import mismatch_kl
from prl.trainer.policy import Policy
from prl.trainer.world import build_world
from prl.transport.documents import Document
from prl.transport.packing import build_micro_batch

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return moe_checkpoint(tmp_path_factory.mktemp("model"), std=0.2)


@pytest.fixture(scope="module")
def policy(model_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield build_policy(Job(str(model_path)), build_world(MeshPlan(dp_replicate=1, dp_shard=1, cp=1, ep=1), CPU))
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def make_engine(model_path, **changes) -> TorchEngine:
    config = InferenceConfig(**{"max_num_seqs": 8, "max_model_len": 128, **changes})
    return TorchEngine(load_model(model_path, moe_card(), torch.float32, CPU), config, (END,))


def two_turns(engine: TorchEngine, temperature: float) -> list[Sequence]:
    """Groups of rollouts, then a second turn of each: more sequences than slots, prompts that the cache knows."""
    finished = []
    prompts = [list(range(5 + 3 * i)) for i in range(6)]
    for turn in range(2):
        sequences = []
        for i, ids in enumerate(prompts):
            params = SamplingParams(n=3, temperature=temperature, max_tokens=8 + i, seed=10 * turn + i, ignore_eos=True)
            sequences += engine.prepare(Request(f"{turn}-{i}", ids, params, arrival=i))
        engine.submit(sequences)
        while engine.busy:
            engine.step()
        finished += sequences
        prompts = [[*s.token_ids, *range(100, 105)] for s in sequences[::3]]
    return finished


def trained_kl(policy: Policy, sequences: list[Sequence], temperature: float) -> torch.Tensor:
    """Mismatch KL of every sampled token, all sequences packed into one row: [M] float64."""
    documents = []
    for s in sequences:
        prompt, sampled, length = s.num_prompt, s.num_generated, len(s.token_ids)
        routed = s.routed_experts()
        if routed is not None:  # the last token was never forwarded; its routing influences nothing
            routed = [routed, np.zeros((1, *routed.shape[1:]), dtype=np.uint8)]
        mask, logp = [False] * prompt + [True] * sampled, [0.0] * prompt + s.logprobs
        documents.append(Document(s.token_ids, mask, logp, [0.0] * length, [0] * length, routed))
    micro = build_micro_batch(documents)
    with torch.no_grad():
        stats = policy.forward(micro, temperature)
    return mismatch_kl(stats.logp, torch.from_numpy(micro.logp_infer)[stats.rows])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("routing", [False, True], ids=["own routing", "replayed routing"])
def test_mismatch_is_below_1e_6_in_float32(policy, model_path, temperature: float, routing: bool) -> None:
    engine = make_engine(model_path, return_routed_experts=routing)
    kl = trained_kl(policy, two_turns(engine, temperature), temperature)
    assert len(kl) == 2 * 3 * sum(8 + i for i in range(6))
    assert engine.stats.prefix_hits > 0  # of groups and, without recorded routing, of earlier turns
    assert kl.mean() < 1e-6
    assert kl.max() < 1e-6


def test_mismatch_sees_other_weights_and_other_temperatures(policy, model_path) -> None:
    engine = make_engine(model_path)
    sequences = two_turns(engine, 0.7)
    assert trained_kl(policy, sequences, 1.0).mean() > 1e-3
    engine.load(hf_tensors(random_model(moe_card(), seed=1)), "1")
    assert trained_kl(policy, two_turns(engine, 1.0), 1.0).mean() > 1e-3


def test_weights_that_give_no_numbers_end_the_engine_by_their_name(model_path):
    engine = make_engine(model_path)
    with torch.no_grad():
        next(engine.model.parameters()).fill_(float("nan"))
    failed = []
    for i in range(MAX_FAILED_STEPS):
        engine.submit(engine.prepare(Request(f"{i}", [1, 2, 3], SamplingParams(max_tokens=4), arrival=i)))
        if i < MAX_FAILED_STEPS - 1:
            failed += engine.step()
    assert ["not finite" in sequence.error for sequence in failed] == [True] * (MAX_FAILED_STEPS - 1)
    with pytest.raises(BrokenWeights, match="under weight version 0"):
        engine.step()
