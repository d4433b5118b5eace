"""Optimizers, learning-rate schedules and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from prl.config.schema import OptimConfig, ScheduleConfig
from prl.models.device import HostCopy
from prl.models.sharding import local_part
from prl.trainer.memory.optimizer_offload import HostOptimizer, parameters_of
from prl.trainer.muon import Muon

if TYPE_CHECKING:
    from prl.trainer import adamw_kernel


def build_optimizers(model: nn.Module, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """One optimizer, or two for Muon: it orthogonalises the 2-D hidden matrices (`muon.py`), AdamW has the rest.

    The rest is what Muon is not meant for: embeddings, LM head, norms, routers, and stacked experts (3-D). Muon's
    update is scaled to AdamW's RMS ("match_rms_adamw", arXiv:2502.16982), so one learning rate serves both.
    """
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if config.type == "sgd":
        # one by one: no list may hold DTensors of several meshes, and groups by mesh would bind a checkpoint to them
        every = list(params.values())
        return [torch.optim.SGD(every, config.lr, config.momentum, weight_decay=config.weight_decay, foreach=False)]
    embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding))  # whatever the family calls them
    tables = {id(m._parameters["weight"]) for m in embeddings}
    hidden = {
        n: p for n, p in params.items() if config.type == "muon" and is_hidden_matrix(n, p) and id(p) not in tables
    }
    rest = [p for n, p in params.items() if n not in hidden]  # one group, whatever the meshes: checkpoints go anywhere
    optimizers: list[torch.optim.Optimizer] = []
    if hidden:
        muon = Muon(
            by_mesh(hidden.values()),
            config.lr,
            config.weight_decay,
            momentum=config.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        optimizers.append(muon)
    if rest:  # nothing is left where adapters of linears are all that is trained
        adamw = ShardedAdamW(
            rest, config.lr, config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
        )
        optimizers.append(adamw)
    return optimizers


class Collected(NamedTuple):
    """Of a group: what the kernel steps, and lists of parameters, gradients, both moments and steps of all others."""

    regular: adamw_kernel.Parameters | None
    others: list[list[Tensor]]


class ShardedAdamW(torch.optim.AdamW):
    """Steps what each rank holds. Element by element it is the same, and DTensor need not ask on the host, operand by
    operand, how it lies: 6.6 and 3.1 ms for 300 small parameters on two cores. State and checkpoints are DTensors.

    factor: of the gradients in the next step, and only there.
    """

    factor = 1.0
    collected: list[Collected] | None = None  # for the next step

    @torch.no_grad()
    def prepare(self) -> None:
        """Do what the next step wants of the host now, while the device still makes the gradients, which are known.
        The first step, which makes moments, leaves none if it is not taken.
        """
        if self.state:
            self.collected = [self.collect(group) for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """On GPUs by `adamw_kernel.py`, but for the odd parameter that it does not take."""
        factor, self.factor = self.factor, 1.0
        collected, self.collected = self.collected or map(self.collect, self.param_groups), None
        for group, (regular, others) in zip(self.param_groups, collected, strict=True):
            if regular is not None:
                regular.step(group["lr"], group["eps"], group["weight_decay"], factor)
            step_fused(others, group, factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.collected = None
        super().zero_grad(set_to_none)

    def collect(self, group: dict[str, Any]) -> Collected:
        lists: list[list[Tensor]] = [[] for _ in range(5)]
        params, grads, means, squares, steps = lists
        self._init_group(group, params, grads, means, squares, [], steps)
        if not params or not params[0].is_cuda:
            return Collected(None, lists)
        from prl.trainer import adamw_kernel

        fits = [adamw_kernel.is_regular(*row) for row in zip(params, grads, means, squares, strict=True)]
        *four, taken = ([t for t, fit in zip(each, fits, strict=True) if fit] for each in lists)
        others = [[t for t, fit in zip(each, fits, strict=True) if not fit] for each in lists]
        return Collected(adamw_kernel.Parameters(four, taken, group["betas"]) if taken else None, others)

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Fill `lists` with parameters, gradients and states of `group`."""
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [local_part(tensor) for tensor in tensors]
        return has_complex


def step_fused(lists: list[list[Tensor]], group: dict[str, Any], factor: float) -> None:
    """PyTorch's fused step of parameters, gradients, both moments and steps taken."""
    params, grads, means, squares, steps = lists
    if not params:
        return
    if factor != 1:
        torch._foreach_mul_(grads, factor)
    beta1, beta2 = group["betas"]
    adamw(
        params,
        grads,
        means,
        squares,
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def by_mesh(params: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Parameter groups, one per device mesh: an optimizer's fused step takes no lists of mixed meshes."""
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for param in params:
        groups.setdefault(param.device_mesh if isinstance(param, DTensor) else None, []).append(param)
    return [{"params": group} for group in groups.values()]


def is_hidden_matrix(name: str, param: Tensor) -> bool:
    """Matrices between hidden states. Not what only decides (routers, indexers): moving all of a router's rows alike
    changes no choice, and orthogonalising would blow up just that direction.
    """
    others = ("embed_tokens", "embed_out", "lm_head", "mlp.gate.", ".router.", ".indexer.")
    return param.dim() == 2 and not any(part in name for part in others)


def lr_factor(step: int, max_steps: int, schedule: ScheduleConfig) -> float:
    """Multiplier of optim.lr at a 1-based step.

    Linear warm-up from 0 over warmup_steps; then constant, linear or cosine decay to min_lr_ratio, or
    warm-up-stable-decay (wsd, arXiv:2404.06395): constant, then linear decay over the last decay_steps.
    """
    if step <= schedule.warmup_steps:
        return step / schedule.warmup_steps
    if schedule.type == "constant":
        return 1.0
    after = step - schedule.warmup_steps
    length = schedule.decay_steps or max_steps - schedule.warmup_steps
    if schedule.type == "wsd":
        after = step - (max_steps - schedule.decay_steps)
        length = max(schedule.decay_steps, 1)
    progress = min(max(after / max(length, 1), 0.0), 1.0)
    left = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.type == "cosine" else 1 - progress
    return schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * left


def set_lr(optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr


class GradientNorm:
    """Global L2 norm of all gradients over all ranks, and the factor that brings it down to max_norm (0: 1, as where it
    is not exceeded). The device is asked for them at once; `wait` returns both.

    gradients: this rank's shards, whatever mesh their parameters lie on (experts have their own). island: the ranks of
    one FSDP island, on which every shard lies once, so one sum over them covers everything; replicas hold the same.
    """

    @torch.no_grad()
    def __init__(self, gradients: list[Tensor], max_norm: float, island: dist.ProcessGroup) -> None:
        total = torch.stack(torch._foreach_norm(gradients)).square().sum()
        if dist.get_world_size(island) > 1:
            dist.all_reduce(total, group=island)
        total = total.sqrt()
        factor = max_norm / (total + 1e-6) if max_norm > 0 else torch.ones_like(total)
        self.both = HostCopy(torch.stack([total, factor]))

    def wait(self) -> tuple[float, float]:
        norm, factor = self.both.wait().tolist()
        return norm, min(factor, 1.0) if math.isfinite(norm) else 1.0


def prepare(optimizers: list[torch.optim.Optimizer]) -> None:
    """For the steps to come, whose gradients are there or on their way."""
    for optimizer in optimizers:
        if isinstance(optimizer, ShardedAdamW):
            optimizer.prepare()


@torch.no_grad()
def scale_gradients(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Those that its next step reads."""
    if isinstance(optimizer, ShardedAdamW):
        optimizer.factor = factor
    elif factor != 1:  # most steps of a run exceed no limit: what stays as it is, is neither read nor written
        on_host = optimizer.gradients() if isinstance(optimizer, HostOptimizer) else []
        params = parameters_of(optimizer.param_groups)
        gradients = on_host + [local_part(param.grad) for param in params if param.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)
