"""Mixture of experts: routing, stacked experts, the record of which expert saw which token, and the load on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from prl.config.schema import ModelCard
from prl.models.experts.dispatch import ExpertCompute, LocalDispatch

# dispatch(x [N, H], weights [N, K], experts [N, K], num_experts, compute) -> [N, H]
Dispatch = Callable[[Tensor, Tensor, Tensor, int, ExpertCompute], Tensor]


class RoutingRecorder:
    """Collects the top-k expert indices of a forward pass, or replays given ones (R3, arXiv:2510.11370).

    `experts[layer]` is [N, K] int64. With `given` [N, L, K], the router's choice is replaced layer by layer; the mixing
    weights are still computed from the current router logits, so gradients flow to the router. L counts all layers of
    the model, as vLLM's answers do; those without experts hold zeros that nobody reads.
    """

    def __init__(self, given: Tensor | None = None) -> None:
        self.experts: dict[int, Tensor] = {}
        self.given = given

    def record(self, layer_idx: int, experts: Tensor) -> None:
        self.experts[layer_idx] = experts

    def replay(self, layer_idx: int) -> Tensor | None:
        return None if self.given is None else self.given[:, layer_idx].long()

    def stacked(self, card: ModelCard) -> Tensor:
        """[N, L, K] in `expert_dtype`."""
        nothing = torch.zeros_like(next(iter(self.experts.values())))
        layers = [self.experts.get(layer, nothing) for layer in range(card.num_hidden_layers)]
        return torch.stack(layers, dim=1).to(expert_dtype(card.num_experts))


def expert_dtype(num_experts: int) -> torch.dtype:
    """The narrowest that holds every expert's index."""
    return torch.uint8 if num_experts <= 256 else torch.uint16


def route(
    logits: Tensor,
    top_k: int,
    norm_topk_prob: bool,
    replayed: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Router logits [N, E] -> mixing weights [N, K] in the logits' dtype, expert indices [N, K] int64.

    `bias` [E] float32 is added to the probabilities for the choice alone (arXiv:2408.15664); the mixing weights know
    nothing of it. `replayed` [N, K] is a choice already made.
    """
    probs = logits.float().softmax(dim=-1)
    if replayed is None:
        replayed = (probs if bias is None else probs + bias).topk(top_k, dim=-1).indices
    weights, experts = probs.gather(-1, replayed), replayed
    if norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), experts


class ExpertLoad:
    """Tokens per expert of each layer, `counts` [L, E] int64, added up on the device until it is cleared.

    A forward pass counts when its backward comes by: once however often activation checkpointing repeats the forward,
    and never in evaluation. The host does not wait.
    """

    def __init__(self, num_layers: int, num_experts: int, device: torch.device) -> None:
        self.counts = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
        self.valid: Tensor | None = None  # [N] bool: tokens of the coming forward pass that count; None: all
        self.counting = True  # whether the coming forward pass counts at all

    def watch(self, layer_idx: int, y: Tensor, experts: Tensor) -> Tensor:
        """y [N, H], the layer's output for tokens routed to experts [N, K], unchanged."""
        if not (self.counting and y.requires_grad):
            return y
        ones = torch.ones_like(experts) if self.valid is None else self.valid.to(experts.dtype)[:, None]
        counts = torch.zeros_like(self.counts[layer_idx])
        counts.scatter_add_(0, experts.flatten(), ones.expand_as(experts).flatten())
        return CountInBackward.apply(y, counts, self.counts[layer_idx])


class CountInBackward(torch.autograd.Function):
    """y as it is; its backward adds `counts` [E] to `total` [E]."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, counts: Tensor, total: Tensor) -> Tensor:
        ctx.counts, ctx.total = counts, total  # not saved tensors, which checkpointing would recompute
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.total.add_(ctx.counts)
        return grads[0], None, None


class Experts(nn.Module):
    """SwiGLU experts, stacked: gate_up_proj [E, 2I, H], down_proj [E, H, I].

    Under expert parallelism the parameters are DTensors over the expert group, and `dispatch` brings the tokens.
    """

    def __init__(self, num_experts: int, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, intermediate))
        self.dispatch: Dispatch = LocalDispatch()

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [N, H], weights [N, K], experts [N, K] -> [N, H]."""
        return self.dispatch(x, weights, experts, self.num_experts, self.grouped_swiglu)

    def grouped_swiglu(self, x: Tensor, counts: Tensor, scale: Tensor) -> Tensor:
        """x [M, H] sorted by the experts held here, counts [E_local], scale [M] -> [M, H], each row times its scale."""
        gate_up, down = local_part(self.gate_up_proj), local_part(self.down_proj)
        return grouped_linear(self.activate(grouped_linear(x, gate_up, counts), scale), down, counts)

    def activate(self, gate_up: Tensor, scale: Tensor) -> Tensor:
        """SwiGLU (arXiv:2002.05202) times scale [M]: [M, 2I] -> [M, I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up * scale[:, None]


def local_part(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x [M, K] in slices of counts [E] rows, weight [E, N, K] -> [M, N]: slice e times weight[e]^T."""
    if x.is_cuda and x.dtype == torch.bfloat16 and x.shape[0] > 0:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
    # float32, and a rank that no token chose: empty slices still give every weight its (zero) gradient
    slices = x.split(counts.tolist())
    return torch.cat([F.linear(rows, w) for rows, w in zip(slices, weight.unbind(), strict=True)])
