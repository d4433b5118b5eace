"""Parameters that may be spread over the ranks of a mesh (DTensor), for code that also runs where nothing is.

`torch.distributed.tensor` takes a second to import, and an engine never has one: where it was not imported, no tensor
is a DTensor.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def gather_into(gathered: Tensor, mine: Tensor, group: dist.ProcessGroup | None, async_op: bool = False) -> Any:
    """Everyone's `mine`, one behind the other, by the name that torch has for it: another since 2.13."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(gathered, mine, group=group, async_op=async_op)


def is_sharded(tensor: Tensor) -> TypeIs[DTensor]:
    """Whether it is a DTensor, be it on a mesh of one rank."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local_part(param: Tensor) -> Tensor:
    """What this rank holds: of a tensor that is not sharded, all of it."""
    return param.to_local() if is_sharded(param) else param


def place_of(param: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of what this rank holds, and where in the whole tensor it begins."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return tuple(shape), tuple(offset)
