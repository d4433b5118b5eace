"""Between a checkpoint's names and the parameters of transformers' models, for `model.impl=hf`.

transformers 5 stacks what checkpoints store apart (experts, one by one) and renames modules. It knows the way back,
which it takes when it saves. Rows numbered throughout the model and sent that way tell which rows of which parameter
each tensor of a checkpoint is, so that reading and writing stay ours: tensor by tensor, and each rank its own part.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from prl.config.errors import UserError
from prl.models.names.region import Region

# Of the numbered rows: a second number tells a row from an entry of a vector where transformers (5.19 does) squeezes
# what it takes apart, and shows that the columns stayed where they were.
WIDTH = 2


def checkpoint_regions(lm: PreTrainedModel) -> dict[str, Region]:
    """Name of each tensor in a checkpoint of `lm` -> where it lies in the model. Buffers that are saved are among them.

    Raises UserError for a family whose checkpoints hold other numbers than the model, or the same in another order.
    """
    rows: dict[str, Tensor] = {}
    starts: list[int] = []
    total = 0
    for name, tensor in saved_tensors(lm):
        shape = (*tensor.shape[:-1], WIDTH) if tensor.dim() > 1 else tuple(tensor.shape)
        starts.append(total)
        rows[name] = torch.arange(total, total + prod(shape), dtype=torch.int64).view(shape)
        total += prod(shape)
    names, regions = list(rows), {}
    for saved, numbers in revert_weight_conversion(lm, dict(rows)).items():
        name = names[bisect_right(starts, int(numbers.flatten()[0])) - 1]
        region = region_of(name, rows[name], numbers)
        if region is None:
            raise UserError(
                f"Checkpoints of {lm.config.model_type} cannot be read into the model tensor by tensor.",
                where=f"model.impl=hf, {name}, in checkpoints {saved}",
                why="transformers converts it by more than stacking and joining rows",
                fix="a custom implementation in prl/models, or a model of another family",
            )
        regions[saved] = region
    return regions


def saved_tensors(lm: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters, tied ones once, and the buffers that belong to checkpoints."""
    yield from lm.named_parameters()
    kept = lm.state_dict().keys()
    yield from ((name, buffer) for name, buffer in lm.named_buffers() if name in kept)


def region_of(name: str, whole: Tensor, part: Tensor) -> Region | None:
    """Which rows of the parameter `part` is, both given by their numbers; None when these are not in one piece."""
    first, count = int(part.flatten()[0]), part.numel()
    in_order = torch.equal(part.flatten(), torch.arange(first, first + count, dtype=part.dtype))
    if part.shape == whole.shape:
        return Region(name) if in_order else None
    first, count = (first - int(whole.flatten()[0])) // WIDTH, count // WIDTH
    if not in_order or whole.dim() == 1 or part.shape != (count, WIDTH):
        return None
    if whole.dim() == 2:
        return Region(name, rows=(first, first + count))
    expert, start = divmod(first, whole.shape[1])
    if whole.dim() != 3 or start + count > whole.shape[1]:
        return None
    return Region(name, expert, None if count == whole.shape[1] else (start, start + count))
