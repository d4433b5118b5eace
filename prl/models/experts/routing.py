"""Which experts see which token: the router's choice, its record and its replay."""

from __future__ import annotations

import torch
from torch import Tensor

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
