"""Weights into vLLM by files, shared memory or TCP: a transfer engine of ours, behind vLLM's own routes.

vLLM creates one in each of its workers. /update_weights makes sure of what is offered; it is loaded at
/finish_weight_update, tensor by tensor, so that an update that fails before has changed nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.platforms import current_platform

from prl.inference.vllm.loading import Staged, WeightLoader
from prl.transport.sources import WeightSource


@dataclass
class InitInfo(WeightTransferInitInfo):
    """`init_info` of /init_weight_transfer_engine."""

    verify_checksum: bool = True


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """`update_info` of /update_weights, as `prl.transport.weights` publishes it."""

    published: dict[str, Any]


class HostTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Reads whole Hugging Face tensors, of which vLLM's loaders cut out each worker's shard, or these shards alone."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.verify_checksum = True
        self.source = WeightSource.from_environment()
        self.staged: list[Staged] = []
        self.loader = WeightLoader.of(self.model, self.model_config)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.verify_checksum = init_info.verify_checksum

    def start_weight_update(self) -> None:
        self.staged = []

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo:
        return UpdateInfo(update_dict)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Nothing is in flight afterwards, so nothing is waited for (vLLM's own waits for a GPU, also on a CPU)."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Raises ValueError when a checksum does not match, OSError when the source is not there."""
        try:
            published = self.source.check(update_info.published)
            self.staged.append(self.loader.stage(published, self.verify_checksum, self.device))
        except (KeyError, TypeError) as error:
            raise ValueError(f"this update_info is not understood: {type(error).__name__}: {error}") from error

    def finish_weight_update(self) -> None:
        """Load all that was offered. Raises ValueError when it leaves a parameter as it was."""
        if not self.staged:
            raise ValueError("/finish_weight_update before any /update_weights")
        staged, self.staged = self.staged, []
        self.loader.load_staged(staged)
        if not current_platform.is_cpu():
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        self.staged = []
