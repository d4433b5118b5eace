# mypy: allow-untyped-defs, allow-untyped-calls
"""AdamW (arXiv:1711.05101) of all parameters in one Triton kernel, which clips on the way: each gradient is read once
and never written, where a fused step after a multiplication reads it twice and writes it once. Bound by memory, 28
bytes a parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # parameters of one program
ALIGNED = 16  # bytes that addresses, and numbers that sizes are multiples of: what lies so is read in whole words


@triton.jit
def _step(
    addresses, begins, owners, sizes, corrections, lr, rest1, beta2, rest2, eps, decay, factor, BLOCK: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0)
    owner = tl.load(owners + block)
    size = tl.multiple_of(tl.load(sizes + owner), 16)
    offset = (block - tl.load(begins + owner)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < size
    params = tl.multiple_of(tl.load(addresses + owner * 4).to(tl.pointer_type(tl.float32)), 16) + offset
    grads = tl.multiple_of(tl.load(addresses + owner * 4 + 1).to(tl.pointer_type(tl.float32)), 16) + offset
    means = tl.multiple_of(tl.load(addresses + owner * 4 + 2).to(tl.pointer_type(tl.float32)), 16) + offset
    squares = tl.multiple_of(tl.load(addresses + owner * 4 + 3).to(tl.pointer_type(tl.float32)), 16) + offset
    grad = tl.load(grads, mask=inside) * factor
    mean = tl.load(means, mask=inside)
    square = tl.load(squares, mask=inside)
    mean += rest1 * (grad - mean)
    square = beta2 * square + rest2 * grad * grad
    size_of_step = lr / tl.load(corrections + owner * 2)
    scale = tl.sqrt_rn(square) / tl.load(corrections + owner * 2 + 1) + eps
    param = tl.load(params, mask=inside)
    param -= lr * decay * param  # of a factor near 1 nothing but rounding would be left
    param -= size_of_step * mean / scale
    tl.store(params, param, mask=inside)
    tl.store(means, mean, mask=inside)
    tl.store(squares, square, mask=inside)


def is_regular(*tensors: Tensor) -> bool:
    """Whether `step` takes a parameter with its gradient and moments."""
    return all(
        t.is_cuda
        and t.dtype == torch.float32
        and t.is_contiguous()
        and t.numel() % ALIGNED == 0
        and t.data_ptr() % ALIGNED == 0
        for t in tensors
    )


class Parameters:
    """Lists of parameters, gradients (left as they are), first and second moments, `is_regular` each and of one device,
    with how many steps each has taken, scalars there: the table of where they lie, and whatever else of a step does not
    depend on the gradients, are on their way to the device from now on.
    """

    def __init__(self, lists: Sequence[Sequence[Tensor]], steps: Sequence[Tensor], betas: tuple[float, float]) -> None:
        self.lists, self.steps, self.betas = lists, steps, betas  # so that all stay where they are
        device = lists[0][0].device
        addresses = [[t.data_ptr() for t in row] for row in zip(*lists, strict=True)]
        self.addresses = torch.tensor(addresses, dtype=torch.int64).pin_memory().to(device, non_blocking=True)
        self.begins, self.owners, self.sizes = layout(tuple(param.numel() for param in lists[0]), device)
        taken = torch.stack(list(steps)).double() + 1
        self.corrections = torch.stack([1 - betas[0] ** taken, (1 - betas[1] ** taken).sqrt()], 1).float()

    def step(self, lr: float, eps: float, decay: float, factor: float) -> None:
        """In place, once. factor: of the gradients."""
        beta1, beta2 = self.betas
        if len(self.owners):
            with torch.cuda.device(self.addresses.device):
                _step[(len(self.owners),)](
                    self.addresses,
                    self.begins,
                    self.owners,
                    self.sizes,
                    self.corrections,
                    lr,
                    1 - beta1,
                    beta2,
                    1 - beta2,
                    eps,
                    decay,
                    factor,
                    BLOCK=BLOCK,
                    num_warps=8,
                )
        torch._foreach_add_(list(self.steps), 1)


@functools.lru_cache(maxsize=8)
def layout(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Each parameter's first program [n], each program's parameter [blocks], sizes [n], on the device."""
    numbers = torch.tensor(sizes, device=device)
    blocks = (numbers + BLOCK - 1) // BLOCK
    owners = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32, device=device), blocks)
    return (blocks.cumsum(0) - blocks).int(), owners, numbers
