"""The trained model with its optimizers: one optimizer step on packed micro-batches. Shared by RL and SFT."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from prl.config.schema import OptimConfig, RunConfig
from prl.config.world import context_style, takes_turns
from prl.metrics.mfu import packed_flops
from prl.models.checkpoints.reading import load_checkpoint
from prl.models.experts.routing import RoutingRecorder
from prl.models.layers.attention import Attend, LatentAttend
from prl.models.layers.documents import attend_documents
from prl.models.layers.packed_attention import activate_attention
from prl.planning.engine_memory import bytes_when_awake
from prl.trainer.busy import BusyClock
from prl.trainer.compilation import CompileClock
from prl.trainer.context.parallel import ContextGroup, context_attention, sum_over_context
from prl.trainer.expert_balance import ExpertBalance
from prl.trainer.head.head import logprob_head
from prl.trainer.indexer_training import IndexerTraining
from prl.trainer.inputs import RowInputs
from prl.trainer.memory.optimizer_offload import local_gradients, master_weights, offload_optimizers
from prl.trainer.moments import Moment, now
from prl.trainer.optim import GradientNorm, build_optimizers, lr_factor, prepare, scale_gradients, set_lr
from prl.trainer.parallelize import build_model, torch_dtype
from prl.trainer.replicas import ReplicaGradients, are_replicas
from prl.trainer.world import World, sum_over_world
from prl.transport.batch import MicroBatch


@dataclass
class TokenStats:
    """Per trained token of one micro-batch, [M] each."""

    rows: Tensor  # index of the token in its micro-batch
    logp: Tensor  # carries the gradient
    entropy: Tensor


@dataclass(frozen=True)
class OptimStep:
    """What an optimizer step did."""

    grad_norm: float  # before clipping
    backward_done: Moment
    applied: bool  # false: loss or norm were not finite, so weights and moments are those of before


def no_loss() -> float:
    """Of a step that is taken whatever its loss is."""
    return 0.0


class Policy:
    """Model, optimizers and schedule of one run."""

    def __init__(
        self, config: RunConfig, optim: OptimConfig, max_steps: int, model_path: Path | None, world: World
    ) -> None:
        self.config, self.optim, self.max_steps, self.world = config, optim, max_steps, world
        activate_attention(config.model.attn)
        self.compile_clock = CompileClock() if config.memory_recipe.compile else None
        self.model = build_model(config, model_path, world)
        self.balance = ExpertBalance(self.model, world, config.model.router_bias_update_rate)
        self.indexers = IndexerTraining(self.model, config.model.indexer_loss_coef, world.device)
        self.busy = BusyClock(self.model, world)
        self.figures: dict[str, float] = {}  # of the last optimizer step, for its metrics row
        self.optimizers = offload_optimizers(
            build_optimizers(self.model, optim), config.memory_recipe.optim_cpu_offload, world.device
        )
        masters = master_weights(self.model, self.optimizers)
        if masters and model_path is not None and not config.memory_recipe.lora.rank:
            # in float32, which the model was too narrow for; what is frozen has no masters
            load_checkpoint(self.model, model_path, dict(self.model.named_parameters()) | masters)
        self.context = context_group(config, world)
        self.replicas: ReplicaGradients | None = None
        if are_replicas(self.model):
            self.replicas = ReplicaGradients(self.model, torch_dtype(config.parallelism.reduce_dtype))
        self.lr = 0.0
        self.flops_formula = ""  # of what `flops` returned last

    def forward(
        self, micro: MicroBatch, temperature: float = 1.0, loss_tokens: int = 0, last: bool = False
    ) -> TokenStats:
        """Log-probability and entropy of every token in the loss mask, of which the whole step has `loss_tokens` over
        all ranks (0: nothing but a look). last: no micro-batch of the step follows, and its gradients may travel.

        With context parallelism each rank runs its share of the tokens, and all ranks of the group get all results.
        """
        device = self.world.device
        self.busy.begin_lap()
        if self.replicas is not None and last and torch.is_grad_enabled():
            self.replicas.expect_last()
        card, impl = self.config.model.card, self.config.model.attn
        row = RowInputs.build(micro, card.num_hidden_layers, self.context, device)
        self.balance.expect(bool(micro.loss_mask.any()), row.times)
        if self.context is None:
            attend: Attend | LatentAttend = attend_documents(card, row.doc_lens, device, impl, row.prefixes)
        else:
            attend = context_attention(card, row.doc_lens, self.context, device, impl, row.prefixes)
        self.indexers.begin(attend, row.slots, loss_tokens)
        parts = self.run_model(row, attend, temperature)
        if self.context is None:
            return TokenStats(row.rows, *parts)
        assert row.mine is not None, "ranks of a group make some of the logits each"
        mine = torch.stack([part.new_zeros(len(row.rows)).index_put((row.mine,), part) for part in parts])
        return TokenStats(row.rows, *sum_over_context(mine, self.context))

    def run_model(self, row: RowInputs, attend: Attend | LatentAttend, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probability of the targets [m], and the entropy there, both within what each was drawn from."""
        chunk, repeated = self.config.memory_recipe.fused_lm_head_token_chunk_size, row.prefixes is not None
        head = logprob_head(row.slots, row.targets, temperature, chunk, row.kept, repeated)
        recorder = None if row.routed is None else RoutingRecorder(given=row.routed)
        return self.model(row.input_ids, row.positions, attend, head=head, recorder=recorder)

    def compile_times(self) -> dict[str, float]:
        """For a row of metrics: what torch.compile took since the last one; nothing where nothing is compiled."""
        return {} if self.compile_clock is None else {"compile_s": self.compile_clock.take()}

    def flops(self, micro: MicroBatch) -> float:
        """Model FLOPs of forward and backward over a whole micro-batch, by `flops_formula`."""
        frozen = self.config.memory_recipe.lora.rank > 0
        card, shared = self.config.model.card, () if micro.shared_lens is None else micro.shared_lens.tolist()
        flops, self.flops_formula = packed_flops(card, micro.doc_lens.tolist(), frozen)
        return flops - packed_flops(card, shared, frozen)[0]  # what is run once counts once

    def optimizer_step(self, step: int, loss: Callable[[], float] = no_loss) -> OptimStep:
        """Clip, apply at the scheduled learning rate, clear.

        Nothing but the gradients changes, on any rank, if `loss` (the same on all ranks) or the norm is not finite.
        loss: asked once the device knows all that the norm takes, which it is not to wait for the host for.
        """
        backward_done = now(self.world.device)
        self.lr = self.optim.lr * lr_factor(step, self.max_steps, self.optim.schedule)
        set_lr(self.optimizers, self.lr)
        if self.replicas is not None:
            self.replicas.finish()
        norm = GradientNorm(
            local_gradients(self.model, self.optimizers),
            self.optim.max_grad_norm,
            self.world.dense.get_group("fsdp"),
        )
        prepare(self.optimizers)
        finite = math.isfinite(loss())
        grad_norm, factor = norm.wait()
        applied = self._all_agree(finite and math.isfinite(grad_norm))
        for optimizer in self.optimizers:
            if applied:
                scale_gradients(optimizer, factor)
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.figures = self.balance.step(moves=applied) | self.indexers.step() | self.busy.step()
        return OptimStep(grad_norm, backward_done, applied)

    def _all_agree(self, finite: bool) -> bool:
        """Within an island all ranks have one norm; replicas of it, whose sums may differ by rounding, must ask."""
        if self.world.dense["dp_replicate"].size() == 1:
            return finite
        return sum_over_world(torch.tensor([0.0 if finite else 1.0], dtype=torch.float64)).item() == 0


def context_group(config: RunConfig, world: World) -> ContextGroup | None:
    if world.cp == 1:
        return None
    mesh = world.data["cp"]
    return ContextGroup(mesh.get_group(), mesh.get_local_rank(), mesh.size(), context_style(config))


def seed_everything(seed: int, deterministic: bool) -> None:
    import random

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def device_memory_bytes(device: torch.device) -> dict[str, int]:
    """What all processes together hold of a GPU before a step: colocated, what sleeping engines have not given back."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {"device_memory_bytes": total - free}


def make_room(config: RunConfig, device: torch.device) -> None:
    """Before an engine wakes on this GPU: give back what PyTorch only keeps, if the engine would not fit otherwise.

    Not before each waking, for the next step takes 0.2 s longer (30 GiB on an H200).
    """
    if device.type == "cuda" and takes_turns(config) and config.inference.sleep_level > 0:
        free, total = torch.cuda.mem_get_info(device)
        if free < bytes_when_awake(config, total):
            torch.cuda.empty_cache()


def peak_memory_bytes(device: torch.device) -> int:
    """Peak bytes allocated on a GPU since the last reset; on CPU the peak resident set of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
