"""Where the weights of an engine are while it sleeps: in host memory (level 1), or nowhere (level 2)."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

log = logging.getLogger("prl.inference")


class SleepingWeights:
    """Of a model on a GPU the host's memory is taken at the first sleep, pinned, and kept: copies go at the rate of the
    link, and no page is taken anew at each sleep.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.kept: list[Tensor] = []
        self.are_dropped = False

    def leave(self, keep: bool) -> None:
        """Give the device's memory back. Weights that were dropped stay so."""
        self.are_dropped |= not keep
        if self.are_dropped:
            self.model.to("meta")
            self.kept = []
        elif self.device.type == "cuda":
            there = self._tensors()
            self.kept = self.kept or _on_host(there)
            for kept, tensor in zip(self.kept, there, strict=True):
                kept.copy_(tensor.detach(), non_blocking=True)
            torch.cuda.synchronize(self.device)
            for kept, tensor in zip(self.kept, there, strict=True):
                tensor.data = kept

    def come_back(self) -> None:
        """To the device; those that were dropped are undefined there."""
        if self.are_dropped:
            self.model.to_empty(device=self.device)
            self.are_dropped = False
        elif self.device.type == "cuda":
            for tensor in self._tensors():
                tensor.data = tensor.detach().to(self.device, non_blocking=True)
            torch.cuda.synchronize(self.device)

    def _tensors(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]


def _on_host(tensors: list[Tensor]) -> list[Tensor]:
    """Room for each."""
    try:
        return [torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True) for x in tensors]
    except RuntimeError as error:  # more than may be locked
        log.warning("no pinned host memory for weights that sleep (%s): slower without", error)
        return [torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in tensors]
