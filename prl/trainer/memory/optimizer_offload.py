"""Optimizer offloading: what only the optimizer step needs lives in host memory.

`OffloadedState` (`optim_cpu_offload=true`) keeps the moments there. In `step()` they pass through the device bucket by
bucket, while one bucket is stepped the next arriving and the one before leaving; the arithmetic, on the device, is that
of the optimizer inside, to the bit.

`HostOptimizer` (`optim_cpu_offload=full`) keeps float32 master weights and gradients there too and steps there
(ZeRO-Offload, arXiv:2101.06840). The device holds the parameters in the compute dtype alone: gradients go to the host
as soon as they are reduced and are added up in float32, and new weights come back after the step.

Both wrap an optimizer and are one: groups and state are those of the model's parameters, and the state consists of host
tensors sharded as the parameters are, so checkpoints are the same as without offloading.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from prl.models.sharding import is_sharded, local_part
from prl.trainer.memory.host_memory import Arena, CopyStream, compute_waits

BUCKET_BYTES = 256 << 20  # of parameters; a larger parameter is a bucket of its own
GRADIENT_BYTES = 512 << 20  # gradients on their way to the host before backward waits


def offload_optimizers(
    optimizers: list[Optimizer], mode: bool | Literal["full"], device: torch.device
) -> list[Optimizer]:
    """`optimizers` as `memory_recipe.optim_cpu_offload` wants them. None of them may have stepped yet, and the model's
    weights are loaded. device: where the model computes.
    """
    if not mode:
        return optimizers
    if mode == "full":
        return [HostOptimizer(optimizer, device) for optimizer in optimizers]
    return [OffloadedState(optimizer, device) for optimizer in optimizers]


def parameters_of(groups: Iterable[dict[str, Any]]) -> list[Tensor]:
    return [param for group in groups for param in group["params"]]


def is_moment(value: Any) -> bool:
    """Whether an optimizer's state entry is as large as its parameter; step counters stay where they are."""
    return isinstance(value, Tensor) and value.dim() > 0


def host_like(tensor: Tensor, pinned: bool) -> Tensor:
    """Uninitialised, sharded as `tensor` is."""
    return torch.empty_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)


class _Wrapper(Optimizer):
    """An optimizer over the same parameter groups as `inner`, whose state is kept in host memory."""

    def __init__(self, inner: Optimizer, device: torch.device) -> None:
        super().__init__(inner.param_groups, inner.defaults)  # the groups are shared: a learning rate is set once
        self.inner, self.device, self.pinned = inner, device, device.type == "cuda"

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into host memory directly: `Optimizer.load_state_dict` would bring all of it to the parameters' device."""
        names = parameters_of(state_dict["param_groups"])
        for name, param in zip(names, parameters_of(self.param_groups), strict=True):
            for key, value in state_dict["state"].get(name, {}).items():
                self.load_value(param, key, value)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def load_value(self, param: Tensor, key: str, value: Any) -> None:
        held = self.state[param].get(key)
        if not isinstance(value, Tensor):
            self.state[param][key] = value
        elif held is None:
            self.state[param][key] = host_like(value, self.pinned).copy_(value) if is_moment(value) else value.clone()
        elif held is not value:
            held.copy_(value)


# --- state only -------------------------------------------------------------------------------------------------------


@dataclass
class Bucket:
    group: dict[str, Any]
    params: list[Tensor]
    arrived: torch.cuda.Event | None = None
    left: torch.cuda.Event | None = None


class OffloadedState(_Wrapper):
    """`inner` with its moments on the host between steps; at most three buckets of them are on the device in one."""

    def __init__(self, inner: Optimizer, device: torch.device, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__(inner, device)
        self.state = inner.state
        self.buckets = [bucket for group in self.param_groups for bucket in _buckets(group, bucket_bytes)]
        self.inward, self.outward = CopyStream(device), CopyStream(device)
        self.peak_moments = 0  # most bytes of moments on the device at once

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """As the inner optimizer's."""
        buckets = [self.with_gradients(bucket) for bucket in self.buckets]
        buckets = [bucket for bucket in buckets if bucket.params]
        self.inward.follow(self.outward)  # what the last step sent out has arrived before it is fetched again
        on_device: deque[tuple[Bucket, list[Tensor]]] = deque()  # behind the one that is stepped: leaving
        for index, bucket in enumerate(buckets):
            if index == 0:
                arriving = self.fetch(bucket)
            moments = arriving
            if index + 1 < len(buckets):
                arriving = self.fetch(buckets[index + 1])
            compute_waits(bucket.arrived)
            self.step_bucket(bucket, moments)
            on_device.append((bucket, self.send(bucket)))
            in_use = [t for _, tensors in on_device for t in tensors] + (arriving if index + 1 < len(buckets) else [])
            self.peak_moments = max(self.peak_moments, sum(local_part(t).nbytes for t in in_use))
            del moments, in_use
            while len(on_device) > (index + 1 < len(buckets)):
                compute_waits(on_device.popleft()[0].left)

    def with_gradients(self, bucket: Bucket) -> Bucket:
        return Bucket(bucket.group, [param for param in bucket.params if param.grad is not None])

    def fetch(self, bucket: Bucket) -> list[Tensor]:
        """Moments on their way to the device; the state refers to them once they are there."""
        held = [value for param in bucket.params for value in self.state.get(param, {}).values() if is_moment(value)]
        moments = [torch.empty_like(value, device=self.device) for value in held]
        self.inward.catch_up()  # the new memory may have been freed by work that the compute stream has yet to do
        for target, source in zip(moments, held, strict=True):
            self.inward.copy(local_part(target), local_part(source))
        bucket.arrived = self.inward.mark()
        return moments

    def step_bucket(self, bucket: Bucket, moments: list[Tensor]) -> None:
        """The inner optimizer's step of these parameters alone."""
        self.host: dict[Tensor, dict[str, Tensor]] = {}
        arrived = iter(moments)
        for param in bucket.params:
            state = self.state.get(param, {})
            self.host[param] = {key: value for key, value in state.items() if is_moment(value)}
            state.update({key: next(arrived) for key in self.host[param]})
        groups, self.inner.param_groups = self.inner.param_groups, [{**bucket.group, "params": bucket.params}]
        try:
            self.inner.step()
        finally:
            self.inner.param_groups = groups

    def send(self, bucket: Bucket) -> list[Tensor]:
        """Moments on their way to the host, to which the state refers from now on. Returns those on the device."""
        self.outward.catch_up()
        moments = []
        for param in bucket.params:
            state = self.state.get(param, {})
            for key, value in state.items():
                if is_moment(value):
                    moments.append(value)
                    host = self.host[param].get(key)
                    state[key] = host if host is not None else host_like(value, self.pinned)
                    self.outward.copy(local_part(state[key]), local_part(value))
        bucket.left = self.outward.mark()
        return moments

    def state_dict(self) -> dict[str, Any]:
        self.outward.synchronize()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.outward.synchronize()
        super().load_state_dict(state_dict)


def _buckets(group: dict[str, Any], limit: int) -> list[Bucket]:
    buckets: list[Bucket] = []
    size = limit
    for param in group["params"]:
        nbytes = _even_bytes(param.detach())
        if size + nbytes > limit:
            buckets.append(Bucket(group, []))
            size = 0
        buckets[-1].params.append(param)
        size += nbytes
    return buckets


def _even_bytes(param: Tensor) -> int:
    """Of a parameter's part on each rank, as if all were as large: ranks that step buckets together cut them alike."""
    parts = 1
    if is_sharded(param):
        parts = math.prod(param.device_mesh.size(i) for i, p in enumerate(param.placements) if not p.is_replicate())
    return -(-param.numel() * param.element_size() // parts)


# --- everything -------------------------------------------------------------------------------------------------------


class Master:
    """One parameter's host side."""

    def __init__(self, param: Tensor, arena: Arena) -> None:
        self.param = param
        shard = local_part(param.detach())
        self.weight = torch.empty_like(param, dtype=torch.float32, device="cpu", requires_grad=False)
        self.local = local_part(self.weight)  # what the optimizer on the host steps
        self.local.copy_(shard)
        self.gradient = torch.empty_like(self.local)
        self.has_gradient = False
        # pinned, in the compute dtype: gradients come through it, and weights go
        self.exchange = arena.take(shard.nbytes).view(shard.dtype).view(shard.shape)
        self.accumulated: Future[None] | None = None

    def accumulate(self) -> None:
        if self.has_gradient:
            self.gradient.add_(self.exchange)
        else:
            self.gradient.copy_(self.exchange)
        self.has_gradient = True


class HostOptimizer(_Wrapper):
    """`inner`, an elementwise optimizer, on the host over float32 copies of the parameters."""

    def __init__(self, inner: Optimizer, device: torch.device) -> None:
        super().__init__(inner, device)
        self.arena = Arena(self.pinned)
        self.copies = CopyStream(device)
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="gradients")
        self.arriving: deque[tuple[Future[None], int]] = deque()
        with torch.no_grad():
            self.masters = {param: Master(param, self.arena) for param in parameters_of(self.param_groups)}
        inner.param_groups = [
            {**group, "params": [self.masters[param].local for param in group["params"]]} for group in self.param_groups
        ]
        for param in self.masters:
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self.collect)

    # --- gradients

    @torch.no_grad()
    def collect(self, param: Tensor) -> None:
        """Send a gradient to the host, where a thread adds it up; the parameter is left without one.

        FSDP calls this (as a post-accumulate hook) on the stream that reduced the gradient.
        """
        master = self.masters[param]
        assert param.grad is not None
        gradient, param.grad = local_part(param.grad), None
        while sum(nbytes for _, nbytes in self.arriving) > GRADIENT_BYTES:
            self.arriving.popleft()[0].result()
        if master.accumulated is not None:
            master.accumulated.result()  # the exchange buffer is free again
        self.copies.catch_up()
        self.copies.copy(master.exchange, gradient)
        arrived = self.copies.mark()

        # holding `gradient` until the copy is over keeps its memory, whatever stream it belongs to
        def accumulate(gradient: Tensor = gradient) -> None:
            if arrived is not None:
                arrived.synchronize()
            master.accumulate()

        master.accumulated = self.worker.submit(accumulate)
        self.arriving.append((master.accumulated, gradient.nbytes))

    def gradients(self) -> list[Tensor]:
        """This rank's accumulated gradients, float32 on the host, to be measured and scaled in place before `step`."""
        for param in self.masters:
            if param.grad is not None:  # set by hand, as the initialisation of checkpoints does
                self.collect(param)
        while self.arriving:
            self.arriving.popleft()[0].result()
        return [master.gradient for master in self.masters.values() if master.has_gradient]

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        self.gradients()
        for master in self.masters.values():
            master.has_gradient = False

    # --- step

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step on the host; returns with the new weights on their way to the device, before whatever comes next."""
        self.gradients()
        for group, mirror in zip(self.param_groups, self.inner.param_groups, strict=True):
            mirror.update({key: value for key, value in group.items() if key != "params"})
        for master in self.masters.values():
            master.local.grad = master.gradient if master.has_gradient else None
        self.inner.step()
        self.copies.catch_up()
        for param, master in self.masters.items():
            if master.has_gradient:
                self.share_state(param, master)
                self.upload(param, master)
        compute_waits(self.copies.mark())

    def share_state(self, param: Tensor, master: Master) -> None:
        """Have the parameter's state be that of its master, sharded in name as well."""
        state = self.inner.state[master.local]
        for key, value in state.items():
            if not is_moment(value):
                self.state[param][key] = value
            elif key not in self.state[param]:
                self.state[param][key] = torch.empty_like(master.weight)
                state[key] = local_part(self.state[param][key]).copy_(value)

    def upload(self, param: Tensor, master: Master) -> None:
        master.exchange.copy_(master.local)
        self.copies.copy(local_part(param.detach()), master.exchange)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for param, master in self.masters.items():
            self.inner.state[master.local] = {
                key: local_part(value) if is_moment(value) else value for key, value in self.state[param].items()
            }


# --- for the loop and the checkpoint ----------------------------------------------------------------------------------


@torch.no_grad()
def local_gradients(model: nn.Module, optimizers: list[Optimizer]) -> list[Tensor]:
    """This rank's gradients, those on the host included."""
    on_host = [grad for opt in optimizers if isinstance(opt, HostOptimizer) for grad in opt.gradients()]
    return on_host + [local_part(param.grad) for param in model.parameters() if param.grad is not None]


def master_weights(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Tensor]:
    """Name -> float32 weight on the host, sharded as the parameter, of all that a `HostOptimizer` steps.

    A checkpoint stores these in place of the model's own weights, and loads into them; setting the model's state from
    what was loaded then brings them to the device in the compute dtype.
    """
    masters = {
        param: master.weight
        for optimizer in optimizers
        if isinstance(optimizer, HostOptimizer)
        for param, master in optimizer.masters.items()
    }
    return {name: masters[param] for name, param in model.named_parameters() if param in masters}
