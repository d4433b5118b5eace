"""How unevenly data ranks are busy. Each waits for the others within every layer, so their steps take equally long,
whatever is in their rows; what a rank computes between exchanges is its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from prl.models.layers.decoder import Decoder, DecoderLayer
from prl.models.layers.mlp import SparseMLP
from prl.trainer.moments import Moment, now, seconds
from prl.trainer.world import World, sum_over_world


class BusyClock:
    """Times the forward passes of a sharded `model`'s layers where they exchange nothing: whole layers, or under expert
    parallelism attention, router and experts. With context parallelism attention exchanges inside, with those who share
    the row: they are one data rank, as busy as the busiest of them. It tells nothing of one data rank alone, nor of
    models of transformers.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self.world = world
        self.laps: list[list[tuple[Moment, Moment]]] = []  # of each micro-batch, what was computed from when to when
        self.tells = world.data_ranks > 1 and isinstance(model, Decoder)
        if self.tells and isinstance(model, Decoder):
            for layer in model.layers:
                assert isinstance(layer, DecoderLayer)
                for module, name in pieces(layer, world.experts is not None):
                    setattr(module, name, self.timed(getattr(module, name)))

    def begin_lap(self) -> None:
        """Before the forward pass of a micro-batch that is trained."""
        if self.tells and torch.is_grad_enabled():
            self.laps.append([])

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*inputs: Any, **options: Any) -> Any:
            if not self.laps or not torch.is_grad_enabled():
                return function(*inputs, **options)
            start = now(self.world.device)
            result = function(*inputs, **options)
            self.laps[-1].append((start, now(self.world.device)))
            return result

        return call

    def step(self) -> dict[str, float]:
        """After an optimizer step, with which the device is done: what the laps since the last one took, each its
        busiest data rank's seconds, over what they would with all equally busy; 1 is even. A collective of the world.
        """
        if not self.laps:
            return {}
        table = torch.zeros(self.world.size, len(self.laps), dtype=torch.float64)
        owners = torch.zeros(self.world.size, 1, dtype=torch.float64)
        owners[self.world.rank] = self.world.data_rank
        for lap, timings in enumerate(self.laps):
            table[self.world.rank, lap] = sum(seconds(*timing) for timing in timings)
        self.laps = []
        table = sum_over_world(torch.cat((table, owners), 1))
        return {"busy_imbalance": unevenness(of_data_ranks(table[:, :-1], table[:, -1].long()))}


def pieces(layer: DecoderLayer, exchanges: bool) -> list[tuple[nn.Module, str]]:
    """Functions of a layer in which nothing is exchanged; exchanges: tokens of experts are, between them."""
    if not exchanges or not layer.has_mlp or not isinstance(layer.mlp, SparseMLP):
        return [(layer, "forward")]
    parts: list[tuple[nn.Module, str]] = [(layer.mlp, "route"), (layer.mlp.experts, "grouped_mlp")]
    if layer.mlp.shared_experts is not None:
        parts.append((layer.mlp.shared_experts, "forward"))
    return [(layer, "attention_block"), *parts] if layer.mixes_tokens else parts


def of_data_ranks(table: Tensor, owners: Tensor) -> Tensor:
    """table [ranks, laps] of seconds, owners [ranks]: the data rank of each -> [data ranks, laps], of its busiest."""
    busiest = table.new_zeros(int(owners.max()) + 1, table.shape[1])
    return busiest.scatter_reduce_(0, owners[:, None].expand_as(table), table, "amax")


def unevenness(table: Tensor) -> float:
    """table [data ranks, laps] of seconds."""
    total = float(table.sum())
    return float(table.amax(0).sum()) * len(table) / total if total else 1.0
