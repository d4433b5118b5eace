"""Documents that begin alike, on a GPU: the kernels that attend to shared tokens, and that the host runs ahead."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from families import family_card
from test_shared_prefixes import groups, row_of
from tiny import random_model
from torch import Tensor
from torch.nn.attention import restore_flash_attention_impl
from trainer_ranks import Job, build_policy

from prl.models.checkpoints.writing import hf_tensors, save_checkpoint
from prl.models.layers.packed_attention import activate_attention, packed_attention
from prl.models.layers.prefix_attention import PrefixAttention, PrefixPlan
from prl.models.layers.shared_prefixes import SharedPrefixes
from prl.planning.run_plan import MeshPlan
from prl.trainer.loops.rl_step import backward_rl
from prl.trainer.world import build_world

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LONG = {
    "short answers to one prompt": ([700, 420, 900, 500], [0, 400, 400, 400]),
    "branches of branches": ([900, 900, 600, 900, 40], [0, 700, 400, 500, 8]),
    "one that is another's beginning": ([300, 900, 900], [0, 300, 900]),
    "long answers to a short prompt, whole": ([2600, 2500, 300, 2300], [0, 200, 100, 0]),
    "long answers to a long prompt": ([4200, 4100, 4097, 700], [0, 4000, 4000, 600]),
}


@pytest.fixture(params=["flash_attention_2", "flash_attention_3", "flash_attention_4"])
def kernels(request):
    """What varlen attention runs."""
    package = {"flash_attention_3": "flash_attn_interface", "flash_attention_4": "flash_attn.cute.interface"}
    if request.param in package:
        pytest.importorskip(package[request.param])
    activate_attention(request.param)
    yield request.param
    restore_flash_attention_impl(_raise_warn=False)


@GPU
@pytest.mark.parametrize("widths", [(128, 128), (192, 128), (64, 64)])
@pytest.mark.parametrize("cudnn", [True, False])
@pytest.mark.parametrize("case", LONG)
def test_kernels_attend_to_shared_tokens(case, cudnn, widths, kernels):
    """Outputs and gradients in bfloat16 are as near to those of whole documents in float32 as those of whole ones in
    bfloat16 are; the sums of gradients are the same bits at every run.
    """
    doc_lens, shared = LONG[case]
    prefixes, device = SharedPrefixes(doc_lens, shared), torch.device("cuda")
    place, count = prefixes.place.cuda(), len(prefixes.run)
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((8, widths[0]), (4, widths[0]), (4, widths[1]))
    rows = [torch.randn(count, h, d, generator=generator, device=device, dtype=torch.bfloat16) for h, d in shapes]
    weights = torch.randn(count, 8, widths[1], generator=generator, device=device)
    own = np.concatenate([np.arange(n) >= c for n, c in zip(doc_lens, shared, strict=True)])
    own = torch.from_numpy(own).cuda()

    def outcome(attend, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in rows]
        out = attend(*inputs)
        return [x.float() for x in (out, *torch.autograd.grad((out * weights.to(out.dtype)).sum(), inputs))]

    def documents(*parts: Tensor) -> Tensor:
        return packed_attention(doc_lens, device)(0, *(x[place] for x in parts))[own]

    exact, usual = outcome(documents, torch.float32), outcome(documents)
    plan = PrefixPlan(prefixes, device, cudnn)
    assert bool(plan.whole) == (cudnn and case.startswith("long answers"))
    found = outcome(lambda *x: PrefixAttention.apply(*x, plan))
    for one, other, wanted in zip(found, usual, exact, strict=True):
        assert (one - wanted).norm() <= 1.2 * (other - wanted).norm() + 1e-3 * wanted.norm()
    read = torch.randn(len(plan.order), 4, widths[1], generator=generator, device=device, dtype=torch.bfloat16)
    sums = plan.to_rows([read])
    assert torch.equal(sums, plan.to_rows([read]))
    order = plan.order.argsort(stable=True)  # of the rows that were read, in which sum each is
    owner = torch.repeat_interleave(torch.arange(count, device=device), plan.begins.diff())[order]
    wanted = torch.zeros(count, 4, widths[1], device=device, dtype=torch.float64).index_add_(0, owner, read.double())
    assert torch.allclose(sums.double(), wanted, rtol=1e-2, atol=1e-6)


@GPU
@pytest.mark.parametrize("share", [False, True])
def test_the_host_does_not_wait_for_the_device_within_a_micro_batch(tmp_path, share):
    """Of a dense model, once its kernels are compiled."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = build_world(MeshPlan(dp_replicate=1, dp_shard=1, cp=1, ep=1), torch.device("cuda", 0))
        save_checkpoint(hf_tensors(random_model(family_card("qwen3"))), tmp_path, family_card("qwen3"))
        job = Job(str(tmp_path), family="qwen3", overrides=["model.dtype=bfloat16", "memory=tight"])
        policy, row = build_policy(job, world), row_of(groups(), share)
        for mode in ("default", "error"):
            torch.cuda.set_sync_debug_mode(mode)
            stats = policy.forward(row, loss_tokens=int(row.loss_mask.sum()))
            backward_rl(policy.config.algo, row, stats, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        dist.destroy_process_group()
