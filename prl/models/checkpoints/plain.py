"""A checkpoint as a model here holds it: no quantised numbers, and the names of the text model by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from prl.models.checkpoints.dequantising import Dequantised
from prl.models.checkpoints.further_layers import further_layers
from prl.models.checkpoints.reading import open_tensors
from prl.models.checkpoints.writing import SHARD_BYTES, copy_tokenizer, save_checkpoint
from prl.models.layers.decoder import Decoder


def write_plain(
    model: Decoder,
    source: Path,
    target: Path,
    dtype: torch.dtype,
    beat: Callable[[], None] = lambda: None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the checkpoint at `source` to `target`, tensor by tensor; layers that predict further tokens are in it.

    Args:
        model: on the meta device: its names are wanted.
        dtype: of what was quantised; everything else stays as it is.
        beat: called between tensors.

    Raises:
        UserError, ValueError: as `open_tensors`.
    """

    def tensors() -> Iterator[tuple[str, Tensor]]:
        with open_tensors(source) as parts:
            for name, part in parts.items():
                own = model.own_name(name)
                if own is not None:
                    beat()
                    tensor = part[:] if part.get_shape() else part[...]
                    yield own, tensor.to(dtype) if isinstance(part, Dequantised) else tensor

    with further_layers(model, source) as further:
        more = further.config
    save_checkpoint(tensors(), target, model.card, shard_bytes, more)
    copy_tokenizer(source, target, more)
