"""Gradients of stacked experts, added up where they lie: each micro-batch adds its own in one pass. Autograd would
write it in the parameter's dtype, read both and write the sum: 18 bytes a parameter instead of 10.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from prl.models.sharding import is_sharded, local_part


def adds_up(param: Tensor, x: Tensor) -> bool:
    """Whether the backward pass of an operation on x and a wider `param` may call `add_gradient` instead of handing
    autograd what it makes: nobody waits for that by a hook, and x's gradient has the operation run backward at all.
    """
    if param.dtype == x.dtype or not (param.is_leaf and param.requires_grad and x.requires_grad):
        return False
    return torch.is_grad_enabled() and not (param._backward_hooks or param._post_accumulate_grad_hooks)


def add_gradient(param: Tensor, make: Callable[[Tensor | None], Tensor]) -> None:
    """Add to `param.grad` what `make` makes of this rank's part: of the gradient so far, which it may add to in place
    and return, or of None.
    """
    with torch.no_grad():
        if param.grad is not None:
            so_far = local_part(param.grad)
            if (made := make(so_far)) is not so_far:
                so_far.add_(made)
            return
        made = make(None).to(param.dtype)
        if is_sharded(param):
            from torch.distributed.tensor import DTensor

            placed = param.device_mesh, param.placements
            made = DTensor.from_local(made, *placed, run_check=False, shape=param.shape, stride=param.stride())
        param.grad = made
