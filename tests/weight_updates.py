"""What tests of weight transport share."""

from __future__ import annotations

from typing import Any

import torch
from inference_server import Client

from prl.models.checkpoints.writing import hf_tensors
from prl.models.families.build import build_decoder
from prl.transport.boxes import Table
from prl.transport.shelves import Keeper
from prl.transport.weights import NamedTensors, Publisher


def published(publisher: Publisher | Keeper, version: int, named: NamedTensors) -> dict[str, Any]:
    """The update_info of a version that was published, by a trainer of one rank."""
    announced: list[dict[str, Any]] = []
    if isinstance(publisher, Keeper):
        named = [(name, tensor.detach()) for name, tensor in named]
        table = Table.of(named)
        publisher.hold(table, table.whole())
        publisher.publish(version, (tensor for _, tensor in named), announced.append)
    else:
        publisher.publish(version, named, announced.append)
    (info,) = announced
    return info


def weights(client: Client, seed: int) -> list[tuple[str, torch.Tensor]]:
    model = build_decoder(client.ctx.plan.config.model.card)
    model.init_weights(torch.Generator().manual_seed(seed))
    return list(hf_tensors(model))


def update(client: Client, info: dict, version: str) -> None:
    assert client.post("/start_weight_update").status == 200
    assert client.post("/update_weights", {"update_info": info}).status == 200
    assert client.post("/finish_weight_update", {"weight_version": version}).status == 200
