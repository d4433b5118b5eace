"""Which experts see which token: the router's choice, its record and its replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prl.config.schema import ModelCard


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


@dataclass(frozen=True)
class Choice:
    """How a router chooses experts, and how it weights what they say."""

    top_k: int
    norm_topk_prob: bool = True
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    scale: float = 1.0  # of the mixing weights
    groups: int = 1  # of experts; a group is worth its two best (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)
    kept_groups: int = 1

    @classmethod
    def of(cls, card: ModelCard, scoring: Literal["softmax", "sigmoid"] = "softmax") -> Choice:
        return cls(
            card.num_experts_per_tok,
            card.norm_topk_prob,
            scoring,
            card.routed_scaling_factor,
            card.n_group,
            card.topk_group,
        )


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, H], weight [E, H] -> logits [N, E] in float32 or wider: a product in 16 bits sums in 32 anyway, and is not
    rounded to 16 afterwards.
    """
    return F.linear(x, weight) if x.dtype in (torch.float32, torch.float64) else _WideProduct.apply(x, weight)


class Router(nn.Linear):
    """Its logits are not rounded to x's dtype; with adapters (LoRA) in its place they are."""

    def forward(self, x: Tensor) -> Tensor:
        return router_logits(x, self.weight)


class _WideProduct(torch.autograd.Function):
    """The gradients' products are of x's dtype, as those of any linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        if x.is_cuda:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return x.float() @ weight.float().t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grads[0].to(x.dtype)
        return grad @ weight, grad.t() @ x


def route(
    logits: Tensor, choice: Choice, replayed: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Router logits [N, E] -> mixing weights [N, K] float32, expert indices [N, K] int64.

    `bias` [E] float32 is added to the scores for the choice alone (arXiv:2408.15664); the mixing weights know nothing
    of it. `replayed` [N, K] is a choice already made.
    """
    scores = logits.float().softmax(dim=-1) if choice.scoring == "softmax" else logits.float().sigmoid()
    if replayed is None:
        wanted = scores if bias is None else scores + bias
        if choice.kept_groups < choice.groups:
            wanted = best_groups(wanted, choice)
        replayed = wanted.topk(choice.top_k, dim=-1).indices
    weights = scores.gather(-1, replayed)
    if choice.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    if choice.scale != 1.0:
        weights = weights * choice.scale
    return weights, replayed


def best_groups(wanted: Tensor, choice: Choice) -> Tensor:
    """wanted [N, E] -> the same, with -inf outside of each token's best groups of experts."""
    grouped = wanted.unflatten(-1, (choice.groups, -1))  # [N, G, E / G]
    worth = grouped.topk(2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, worth.topk(choice.kept_groups, dim=-1).indices, True)
    return grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
