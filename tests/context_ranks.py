"""Context parallelism in real processes, for its tests: `python context_ranks.py DIR RANK SIZE DEVICE`.

DIR holds cases.json (a list of `Case` fields). A case of fewer ranks than the world runs in every group of neighbours
of that size at once. Rank r writes results_<r>.pt, or error_<r>.txt.
"""

from __future__ import annotations

import json
import sys
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from rank_processes import run_script, serve_rank
from tiny import VOCAB, moe_card, random_model
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from prl.models.layers.attention import Attend
from prl.models.layers.packed_attention import packed_attention
from prl.trainer.context import ring_attention
from prl.trainer.context.parallel import ContextGroup, context_attention, shard_row, sum_over_context
from prl.trainer.head.head import logprob_head

TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    style: Literal["ulysses", "ring"]
    cp: int
    doc_lens: tuple[int, ...]
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    value_dim: int = 8
    dtype: str = "float32"

    @property
    def tokens(self) -> int:
        return sum(self.doc_lens)


def attention_inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the output, for the whole row; the same everywhere."""
    generator = torch.Generator().manual_seed(case.tokens + case.q_heads)
    shapes = (
        (case.q_heads, case.head_dim),
        (case.kv_heads, case.head_dim),
        (case.kv_heads, case.value_dim),
        (case.q_heads, case.value_dim),
    )
    q, k, v, dout = (torch.randn(case.tokens, *shape, generator=generator) for shape in shapes)
    return tuple(t.to(getattr(torch, case.dtype)) for t in (q, k, v, dout))


def run_attention(case: Case, attend: Attend, tensors: tuple[Tensor, ...], recompute: bool = False) -> list[Tensor]:
    """Output and gradients of q, k, v; with `recompute`, the forward runs again in backward."""
    q, k, v = (t.clone().requires_grad_() for t in tensors[:3])
    out = checkpoint(attend, 0, q, k, v, use_reentrant=False) if recompute else attend(0, q, k, v)
    out.backward(tensors[3])
    return [out.detach(), q.grad, k.grad, v.grad]


def attend_in_shards(case: Case, context: ContextGroup, device: torch.device) -> dict[str, Any]:
    shard = shard_row(list(case.doc_lens), context, device)
    local = [t.to(device)[shard.index] for t in attention_inputs(case)]
    local[3] = local[3] * shard.valid[:, None, None]  # padding takes no part in a loss
    attend = context_attention(moe_card(), list(case.doc_lens), context, device)
    parts = run_attention(case, attend, tuple(local), recompute=case.kv_heads == 1)
    return {"index": shard.index.cpu(), "valid": shard.valid.cpu(), "parts": [part.cpu() for part in parts]}


def train_model(case: Case, context: ContextGroup | None, device: torch.device) -> dict[str, Any]:
    """Loss, log-probabilities and parameter gradients of a tiny MoE, over one packed row."""
    model = random_model(moe_card(num_attention_heads=case.q_heads, num_key_value_heads=case.kv_heads)).to(device)
    ids = torch.randint(VOCAB, (case.tokens,), generator=torch.Generator().manual_seed(1)).to(device)
    positions = torch.cat([torch.arange(n) for n in case.doc_lens]).to(device)
    following = ids.roll(-1)  # the first token of a document is as good a target as any
    if context is None:
        head = logprob_head(torch.arange(case.tokens, device=device), following, 1.0, "disabled")
        logp, _ = model(ids, positions, packed_attention(list(case.doc_lens), device), head=head)
    else:
        shard = shard_row(list(case.doc_lens), context, device)
        mine = shard.index[shard.valid]
        head = logprob_head(shard.valid.nonzero().squeeze(1), following[mine], 1.0, "disabled")
        attend = context_attention(model.card, list(case.doc_lens), context, device)
        local, _ = model(ids[shard.index], positions[shard.index], attend, head=head)
        logp = sum_over_context(local.new_zeros(case.tokens).index_put((mine,), local), context)
    loss = -(logp * logp.detach().exp()).mean()
    loss.backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    if context is not None:
        for grad in grads.values():
            dist.all_reduce(grad, group=context.group)
    return {"loss": loss.item(), "logp": logp.detach().cpu(), "grads": {n: g.cpu() for n, g in grads.items()}}


class KeyCounter:
    """Counts the buffers of keys and values that are alive whenever another begins to travel."""

    def __init__(self) -> None:
        self.original, self.alive, self.most = ring_attention.pass_on, [], 0

    def pass_on(self, tensor: Tensor, context: ContextGroup, tag: int) -> Any:
        passing = self.original(tensor, context, tag)
        if tag == ring_attention.KV_TAG:
            self.alive = [ref for ref in self.alive if ref() is not None and ref() is not tensor]
            self.alive += [weakref.ref(passing.sent), weakref.ref(passing.received)]
            self.most = max(self.most, len(self.alive))
        return passing


def sum_gradients(context: ContextGroup, device: torch.device) -> dict[str, Any]:
    """Every rank computes (sum over ranks of rank * w_rank) squared; returns value and gradient of its own w."""
    w = torch.tensor([3.0, -1.0], device=device, requires_grad=True)
    total = sum_over_context(w * (context.rank + 1), context)
    total.square().sum().backward()
    return {"total": total.detach().cpu(), "grad": w.grad.cpu()}


def run_case(case: Case, groups: dict[int, dist.ProcessGroup], device: torch.device) -> dict[str, Any]:
    group = groups[case.cp]
    context = ContextGroup(group, dist.get_rank(group), case.cp, case.style)
    counter = KeyCounter()
    ring_attention.pass_on = counter.pass_on
    result = attend_in_shards(case, context, device)
    ring_attention.pass_on = counter.original
    return {**result, "model": train_model(case, context, device), "most_keys": counter.most} | {
        "sum": sum_gradients(context, device)
    }


def neighbours(size: int, rank: int, sizes: set[int]) -> dict[int, dist.ProcessGroup]:
    """This rank's group of each size; all ranks create all groups."""
    mine = {}
    for cp in sorted(sizes):
        for start in range(0, size, cp):
            group = dist.new_group(list(range(start, start + cp)))
            if start <= rank < start + cp:
                mine[cp] = group
    return mine


def run_ranks(directory: Path, size: int, cases: list[Case], device: str = "cpu") -> list[list[dict[str, Any]]]:
    """Results by rank, then by case."""
    directory.mkdir(parents=True)
    (directory / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    run_script(__file__, directory, size, device, limit_s=500)
    return [torch.load(directory / f"results_{rank}.pt", weights_only=True) for rank in range(size)]


def main() -> None:
    device = torch.device("cpu")

    def find_device() -> torch.device | None:
        nonlocal device
        if sys.argv[4] == "cpu":
            return None
        device = torch.device("cuda", int(sys.argv[2]))
        torch.cuda.set_device(device)
        return device

    def work(directory: Path, rank: int, size: int) -> None:
        fields = json.loads((directory / "cases.json").read_text())
        cases = [Case(**{**f, "doc_lens": tuple(f["doc_lens"])}) for f in fields]
        groups = neighbours(size, rank, {case.cp for case in cases})
        torch.save([run_case(case, groups, device) for case in cases], directory / f"results_{rank}.pt")

    serve_rank(work, find_device)


if __name__ == "__main__":
    main()
