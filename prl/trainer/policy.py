"""The trained model with its optimizers: one optimizer step on packed micro-batches. Shared by RL and SFT."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from prl.config.schema import OptimConfig, RunConfig
from prl.models.attention import activate_attention, packed_attention
from prl.models.moe import RoutingRecorder
from prl.trainer.head import logprob_head
from prl.trainer.optim import build_optimizers, clip_gradients, lr_factor, set_lr
from prl.trainer.parallelize import build_model
from prl.trainer.world import World
from prl.transport.batch import MicroBatch


@dataclass
class TokenStats:
    """Per trained token of one micro-batch, [M] each."""

    rows: Tensor  # index of the token in its micro-batch
    logp: Tensor  # carries the gradient
    entropy: Tensor


class Policy:
    """Model, optimizers and schedule of one run."""

    def __init__(
        self, config: RunConfig, optim: OptimConfig, max_steps: int, model_path: Path | None, world: World
    ) -> None:
        self.config, self.optim, self.max_steps, self.world = config, optim, max_steps, world
        activate_attention(config.model.attn)
        self.model = build_model(config, model_path, world)
        self.optimizers = build_optimizers(self.model, optim)
        self.lr = 0.0

    def forward(self, micro: MicroBatch, temperature: float = 1.0) -> TokenStats:
        """Log-probability and entropy of every token in the loss mask."""
        device = self.world.device
        rows = torch.from_numpy(micro.loss_mask).nonzero().squeeze(-1).to(device)
        input_ids = torch.tensor(micro.input_ids, device=device)
        positions = torch.tensor(micro.positions, device=device)
        head = logprob_head(
            rows - 1, input_ids[rows], temperature, self.config.memory_recipe.fused_lm_head_token_chunk_size
        )
        recorder = None
        if micro.routed_experts is not None:
            recorder = RoutingRecorder(given=torch.tensor(micro.routed_experts, device=device))
        attend = packed_attention(micro.doc_lens.tolist(), device, self.config.model.attn)
        logp, entropy = self.model(input_ids, positions, attend, head=head, recorder=recorder)
        return TokenStats(rows, logp, entropy)

    def optimizer_step(self, step: int) -> tuple[float, float]:
        """Clip, apply at the scheduled learning rate, clear. Returns (gradient norm before clipping, seconds)."""
        start = time.perf_counter()
        self.lr = self.optim.lr * lr_factor(step, self.max_steps, self.optim.schedule)
        set_lr(self.optimizers, self.lr)
        grad_norm = clip_gradients(self.model, self.optim.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return grad_norm, time.perf_counter() - start


def seed_everything(seed: int, deterministic: bool) -> None:
    import random

    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak bytes allocated on a GPU since the last reset; on CPU the peak resident set of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
