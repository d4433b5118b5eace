"""Load of the experts: its statistics, and its balancing without an auxiliary loss (arXiv:2408.15664).

The router's choice gets a bias per expert, which after every optimizer step moves by `update_rate` towards the mean
load; mixing weights never see it, so no gradient of a second loss disturbs the first. The bias is a buffer of each
sparse layer and part of the trainer's checkpoint. Families that are trained so (`Family.corrected`) have it in their
Hugging Face checkpoints; those of the others have no place for it: an exported model chooses experts without it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from prl.models.experts.load import ExpertLoad
from prl.models.layers.mlp import SparseMLP
from prl.trainer.world import World


class ExpertBalance:
    """Counts the tokens of every expert of a materialised `model`; with an `update_rate` above 0 it adds the biases
    and keeps them moving. A dense model has no load, and its rows no figures.
    """

    def __init__(self, model: nn.Module, world: World, update_rate: float = 0.0) -> None:
        self.layers = {mlp.layer_idx: mlp for mlp in model.modules() if isinstance(mlp, SparseMLP)}
        self.update_rate = update_rate
        num_experts = max((mlp.experts.num_experts for mlp in self.layers.values()), default=0)
        self.load = ExpertLoad(max(self.layers, default=-1) + 1, num_experts, world.device)
        for mlp in self.layers.values():
            mlp.load = self.load
            if update_rate > 0 and mlp.router_bias is None:
                mlp.router_bias = torch.zeros(num_experts, device=world.device)

    def expect(self, trains: bool, times: Tensor | None = None) -> None:
        """What the next forward pass counts: nothing of a micro-batch that trains nothing, else each token so many
        `times` [N] int64: as often as there are documents for which it is run, or not at all where it is padding.
        """
        self.load.counting, self.load.times = trains, times

    @torch.no_grad()
    def step(self, moves: bool = True) -> dict[str, float]:
        """After an optimizer step: figures of all ranks' tokens since the last one, and the biases' move, if it moves
        anything.

        expert_load_max_over_mean: tokens of a layer's most loaded expert over the layer's mean, averaged over layers (1
        is perfect balance); expert_load_max_over_mean_worst: the same of the worst layer. A collective over the world.
        """
        if not self.layers:
            return {}
        if dist.get_world_size() > 1:
            dist.all_reduce(self.load.counts)
        load = self.load.counts[list(self.layers)].double()  # [L, E]
        mean = load.mean(dim=1, keepdim=True)
        if moves and self.update_rate > 0:
            for mlp, move in zip(self.layers.values(), (mean - load).sign(), strict=True):
                assert mlp.router_bias is not None
                mlp.router_bias.add_(move, alpha=self.update_rate)
        self.load.counts.zero_()
        ratio = load.amax(dim=1) / mean.squeeze(1).clamp(min=1e-9)
        average, worst = torch.stack([ratio.mean(), ratio.max()]).tolist()
        return {"expert_load_max_over_mean": average, "expert_load_max_over_mean_worst": worst}
