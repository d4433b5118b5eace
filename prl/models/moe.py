"""Mixture of experts: routing, stacked experts, and the record of which expert saw which token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RoutingRecorder:
    """Collects the top-k expert indices of a forward pass, or replays given ones (R3, arXiv:2510.11370).

    `experts[layer]` is [N, K] int64. With `given` [N, L, K], the router's choice is replaced layer by layer; the mixing
    weights are still computed from the current router logits, so gradients flow to the router.
    """

    def __init__(self, given: Tensor | None = None) -> None:
        self.experts: dict[int, Tensor] = {}
        self.given = given

    def record(self, layer_idx: int, experts: Tensor) -> None:
        self.experts[layer_idx] = experts

    def replay(self, layer_idx: int) -> Tensor | None:
        return None if self.given is None else self.given[:, layer_idx].long()

    def stacked(self) -> Tensor:
        """[N, L, K] uint8 (at most 256 experts) of the layers seen, in layer order."""
        return torch.stack([self.experts[i] for i in sorted(self.experts)], dim=1).to(torch.uint8)


def route(logits: Tensor, top_k: int, norm_topk_prob: bool, replayed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Router logits [N, E] -> mixing weights [N, K] in the logits' dtype, expert indices [N, K] int64."""
    probs = logits.float().softmax(dim=-1)
    if replayed is None:
        weights, experts = probs.topk(top_k, dim=-1)
    else:
        weights, experts = probs.gather(-1, replayed), replayed
    if norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), experts


class Experts(nn.Module):
    """E SwiGLU experts, stacked: gate_up_proj [E, 2I, H], down_proj [E, H, I]."""

    def __init__(self, num_experts: int, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, intermediate))

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [N, H], weights [N, K], experts [N, K] -> [N, H].

        Assignments are sorted by expert, so each expert's tokens are one contiguous slice; results return to their
        token by a gather, not by atomics, so the sum's order (and its rounding) is fixed.
        """
        num_tokens, top_k = experts.shape
        flat = experts.flatten()
        order = flat.argsort(stable=True)  # [N*K], assignment ids grouped by expert
        counts = torch.bincount(flat, minlength=self.gate_up_proj.shape[0])
        y = self.grouped_swiglu(x[order // top_k], counts)  # [N*K, H] in expert order
        y = y * weights.flatten()[order, None]
        back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        return y[back].view(num_tokens, top_k, -1).sum(dim=1)

    def grouped_swiglu(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [M, H] sorted by expert, counts [E] -> [M, H]."""
        if x.is_cuda and x.dtype == torch.bfloat16:
            ends = counts.cumsum(0).to(torch.int32)
            gate, up = F.grouped_mm(x, self.gate_up_proj.transpose(1, 2), offs=ends).chunk(2, dim=-1)
            return F.grouped_mm(F.silu(gate) * up, self.down_proj.transpose(1, 2), offs=ends)
        out = []
        for slice_, gate_up, down in zip(
            x.split(counts.tolist()), self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True
        ):
            gate, up = F.linear(slice_, gate_up).chunk(2, dim=-1)
            out.append(F.linear(F.silu(gate) * up, down))
        return torch.cat(out)
