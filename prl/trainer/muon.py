"""Muon (arXiv:2502.16982) over sharded matrices: those of one shape together, each whole on one rank only.

`torch.optim.Muon` under FSDP gathers a matrix on every rank for each of its products. Here each rank sends its rows of
a matrix to the rank that owns it in this step, which orthogonalises all that it owns of one shape in batched products
and sends the rows of the update back: two all-to-alls, and no product twice (as in Dion, arXiv:2504.05295, and in
Moonlight's distributed form). While one stack is orthogonalised the next arrives. What travels and is multiplied is
bfloat16 on GPUs, 4 bytes a number, and float32 on CPUs, where all layouts then train alike. Replicas without FSDP
(`replicas.py`) have all rows already: an owner sends its updates to all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from prl.models.sharding import gather_into, local_part

STACK_BYTES = 256 << 20  # of matrices that a rank holds whole at a time; a larger matrix is a stack of its own


class Muon(torch.optim.Muon):
    """As `torch.optim.Muon`, state and groups too, for DTensors whose rows are sharded over one dimension of their mesh
    (FSDP, HSDP), and for plain matrices, which all ranks of the world hold alike. All ranks must step the same matrices
    in the same order.

    ValueError where a matrix is sharded otherwise.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        arriving: Stack | None = None
        leaving: Stack | None = None
        for stack in chain(self.stacks(), (None,)):  # three at a time, so that no more are in memory
            if stack is not None:
                stack.send()
            if arriving is not None:
                arriving.orthogonalise()
            if leaving is not None:
                leaving.apply()
            arriving, leaving = stack, arriving
        if leaving is not None:
            leaving.apply()

    def stacks(self) -> Iterator[Stack]:
        """All matrices that have gradients, dealt over the ranks so that each has about as much to multiply."""
        load: dict[dist.ProcessGroup | None, list[float]] = {}
        for group in self.param_groups:
            alike = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    ranks = owners_of(param)
                    alike[ranks, param.shape, param.dtype].append(param)
            for (ranks, shape, _), params in alike.items():
                world = 1 if ranks is None else ranks.size()
                work = load.setdefault(ranks, [0.0] * world)
                cut = isinstance(params[0], DTensor)
                # rows to the full: what a rank lacks of its last rows is sent as zeros, which change no product
                rows = -(-shape[0] // world) if cut else shape[0]
                nbytes = precision(params[0].device).itemsize * (world if cut else 1) * rows * shape[1]
                each = max(1, STACK_BYTES // nbytes) * world if cut else max(world, STACK_BYTES // nbytes)
                for first in range(0, len(params), each):
                    some = params[first : first + each]
                    owned = [0] * world
                    for rank, _ in zip(_in_turn(work), some, strict=False):
                        owned[rank] += 1
                    for rank, count in enumerate(owned):
                        work[rank] += count * min(shape) ** 2 * max(shape)
                    kind = Stack if cut or ranks is None else ReplicatedStack
                    yield kind(some, [self.momentum(p) for p in some], group, ranks, owned, rows)

    def momentum(self, param: Tensor) -> Tensor:
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        momentum: Tensor = state["momentum_buffer"]
        return momentum


def _in_turn(work: list[float]) -> Iterator[int]:
    """Ranks, those with the least work first, over and over."""
    ranks = sorted(range(len(work)), key=lambda rank: work[rank])
    while True:
        yield from ranks


def owners_of(param: Tensor) -> dist.ProcessGroup | None:
    """The ranks that share the work on a matrix: those over which its rows are sharded, or, of a plain one, all. None
    where each does it by itself.
    """
    if not isinstance(param, DTensor):
        several = dist.is_initialized() and dist.get_world_size() > 1
        return dist.group.WORLD if several else None
    sharded = [i for i, placement in enumerate(param.placements) if not placement.is_replicate()]
    sharded = [i for i in sharded if param.device_mesh.size(i) > 1]
    if not sharded:
        return None
    if len(sharded) > 1 or param.placements[sharded[0]] != Shard(0):
        raise ValueError(f"Muon needs whole rows on one dimension of the mesh, not {param.placements}")
    return param.device_mesh.get_group(sharded[0])


@dataclass
class Stack:
    """Matrices [M, N] of one shape: rank r of `ranks` owns the next owned[r] of them. rows: of a matrix on a rank."""

    params: list[Tensor]
    momenta: list[Tensor]
    group: dict[str, Any]
    ranks: dist.ProcessGroup | None
    owned: list[int]
    rows: int
    here: list[Tensor] = field(init=False)  # this rank's rows, where the update is added
    buffer: Tensor = field(init=False)  # what was sent, or came
    travel: dist.Work | None = None

    def send(self) -> None:
        """Momentum, and this rank's rows of the update on their way to those who own the matrices."""
        gradients = [local_part(param.grad) for param in self.params]  # type: ignore[arg-type]
        momenta = [local_part(momentum) for momentum in self.momenta]
        self.here = [local_part(param) for param in self.params]
        momentum, width = self.group["momentum"], self.params[0].shape[1]
        torch._foreach_lerp_(momenta, gradients, 1 - momentum)
        updates = torch._foreach_lerp(gradients, momenta, momentum) if self.group["nesterov"] else momenta
        held = self.here[0].shape[0]
        updates = list(updates)[self.wanted]
        staged = self.here[0].new_empty(len(updates), self.rows, width, dtype=precision(self.here[0].device))
        if updates:
            torch._foreach_copy_(list(staged[:, :held].unbind()), updates)
        staged[:, held:].zero_()
        self.buffer = staged
        self.exchange(staged, width)

    @property
    def wanted(self) -> slice:
        """Matrices whose rows here somebody orthogonalises."""
        return slice(None)

    def exchange(self, staged: Tensor, width: int) -> None:
        if self.ranks is not None:
            mine = self.owned[self.ranks.rank()]
            self.buffer = staged.new_empty(len(self.owned) * mine, self.rows, width)
            self.travel = dist.all_to_all_single(
                self.buffer, staged, [mine] * len(self.owned), self.owned, group=self.ranks, async_op=True
            )

    def orthogonalise(self) -> None:
        """The matrices that this rank owns; then their rows are on their way back."""
        matrices = self.buffer
        if self.ranks is not None:
            _wait(self.travel)
            world, mine, width = len(self.owned), self.owned[self.ranks.rank()], self.buffer.shape[-1]
            by_source = self.buffer.view(world, mine, self.rows, width)
            matrices = by_source.transpose(0, 1).reshape(mine, world * self.rows, width)
        group = self.group
        matrices = newton_schulz(matrices, group["ns_coefficients"], group["ns_steps"], group["eps"])
        self.buffer = matrices
        if self.ranks is not None:
            back = matrices.view(mine, world, self.rows, width).transpose(0, 1).flatten(0, 1).contiguous()
            self.buffer = back.new_empty(len(self.params), *back.shape[1:])
            self.travel = dist.all_to_all_single(
                self.buffer, back, self.owned, [mine] * world, group=self.ranks, async_op=True
            )

    def apply(self) -> None:
        """Decay and update of this rank's rows."""
        _wait(self.travel)
        lr, decay = self.group["lr"], self.group["weight_decay"]
        if decay:
            torch._foreach_mul_(self.here, 1 - lr * decay)
        updates = [update[: len(rows)] for rows, update in zip(self.here, self.arrived(), strict=True)]
        torch._foreach_add_(self.here, updates, alpha=-adjusted(lr, self.group["adjust_lr_fn"], self.params[0].shape))

    def arrived(self) -> Iterable[Tensor]:
        """The updates, in the order of the parameters."""
        return self.buffer


class ReplicatedStack(Stack):
    """All ranks hold all rows."""

    @property
    def wanted(self) -> slice:
        assert self.ranks is not None
        first = sum(self.owned[: self.ranks.rank()])
        return slice(first, first + self.owned[self.ranks.rank()])

    def exchange(self, staged: Tensor, width: int) -> None:
        pass

    def orthogonalise(self) -> None:
        """Those that this rank owns; then all are on their way to everybody, from each rank as many as from any."""
        group, most = self.group, max(self.owned)
        made = newton_schulz(self.buffer, group["ns_coefficients"], group["ns_steps"], group["eps"])
        sent = made.new_empty(most, *made.shape[1:])
        sent[: len(made)] = made
        self.buffer = made.new_empty(len(self.owned) * most, *made.shape[1:])
        self.travel = gather_into(self.buffer, sent, self.ranks, async_op=True)

    def arrived(self) -> Iterable[Tensor]:
        of_ranks = self.buffer.view(len(self.owned), -1, *self.buffer.shape[1:])
        return chain.from_iterable(made[:count] for made, count in zip(of_ranks, self.owned, strict=True))


def precision(device: torch.device) -> torch.dtype:
    """Of the products. Their rounding in bfloat16 is a hundredth of an update, and differs between layouts."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _wait(travel: dist.Work | None) -> None:
    if travel is not None:
        travel.wait()


def adjusted(lr: float, how: str | None, shape: torch.Size) -> float:
    """The rate of an orthogonal update of this shape. "match_rms_adamw": its root mean square is then 0.2 times the
    rate, as AdamW's is about (arXiv:2502.16982).
    """
    if how == "match_rms_adamw":
        return lr * 0.2 * math.sqrt(max(shape))
    return lr * math.sqrt(max(1.0, shape[0] / shape[1]))


def newton_schulz(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float = 1e-7) -> Tensor:
    """About U V^T of each matrix U S V^T, by a quintic iteration that brings singular values near 1 (Jordan et al.,
    https://kellerjordan.github.io/posts/muon/).

    matrices [k, M, N], overwritten or returned. Products are taken on the shorter side.
    """
    if matrices.numel() == 0:
        return matrices
    a, b, c = coefficients
    norm = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = matrices.div_(norm.clamp(min=eps))
    wide = x.shape[1] <= x.shape[2]
    for _ in range(steps):
        gram = x @ x.mT if wide else x.mT @ x
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a) if wide else torch.baddbmm(x, x, polynomial, beta=a)
    return x
