"""`transfer` for vLLM 0.23, whose worker sets a reload up at /start_weight_update unless it is told that weights are in
its kernels' format. It is told so, and they are loaded as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from prl.inference.vllm.loading import WeightLoader
from prl.transport.sources import WeightSource


@dataclass
class InitInfo(WeightTransferInitInfo):
    """`init_info` of /init_weight_transfer_engine."""

    verify_checksum: bool = True


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """`update_info` of /update_weights, as `prl.transport.weights` publishes it."""

    published: dict[str, Any]


class StreamTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Reads whole Hugging Face tensors, of which vLLM's loaders cut out each worker's shard, or these shards alone.

    An update that fails half-way leaves a mixture: the orchestrator ends the run then.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.verify_checksum = True
        self.source = WeightSource.from_environment()
        # of a model's own dtype, which its config, that is not to be had here, would tell; embeddings are not quantised
        dtype = SimpleNamespace(dtype=next(self.model.parameters()).dtype)
        self.loader = WeightLoader.of(self.model, dtype)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.verify_checksum = init_info.verify_checksum

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo:
        return UpdateInfo(published=update_dict)

    def receive_weights(self, update_info: UpdateInfo, load_weights: Callable[[Any], set[str] | None]) -> None:
        """Raises ValueError when a checksum does not match or a parameter gets nothing, OSError without a source."""
        device = torch.device("cuda", torch.cuda.current_device())
        try:
            staged = self.loader.stage(self.source.check(update_info.published), self.verify_checksum, device)
        except (KeyError, TypeError) as error:
            raise ValueError(f"this update_info is not understood: {type(error).__name__}: {error}") from error
        self.loader.load_staged([staged])

    def shutdown(self) -> None:
        """Nothing is held."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, Tensor]], trainer_args: Any) -> None:
        raise NotImplementedError("the trainer publishes through prl.transport.weights")
