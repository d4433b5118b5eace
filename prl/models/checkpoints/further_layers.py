"""Layers of a checkpoint that predict further tokens (multi-token prediction, MTP: arXiv:2412.19437, section 2.2).

They are kept aside: no model here has them, and no training changes them. Exports have them from the files that
training started from, tensor by tensor, so that an engine can still speculate with them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prl.config.cards import FURTHER, text_config
from prl.config.config_json import read_config_json
from prl.config.errors import UserError
from prl.models.checkpoints.dequantising import Dequantised
from prl.models.checkpoints.reading import open_tensors
from prl.models.layers.decoder import Decoder

ABOUT = ("mtp_", "use_mtp")  # how further keys about them begin
log = logging.getLogger("prl")


@dataclass(frozen=True)
class FurtherLayers:
    """Those of one checkpoint, none if it has none."""

    slices: Mapping[str, Any] = field(default_factory=dict)  # by their own names
    config: Mapping[str, Any] = field(default_factory=dict)  # what config.json of a checkpoint with them says of them

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """One at a time, as the files have them; what these have quantised, in `dtype`."""
        for name, part in self.slices.items():
            tensor = part[:] if part.get_shape() else part[...]
            yield name, tensor.to(dtype) if isinstance(part, Dequantised) else tensor


@contextmanager
def further_layers(model: Decoder, source: Path) -> Iterator[FurtherLayers]:
    """Those in the checkpoint at `source`, to be read from within. Files that are gone or damaged are told in a
    warning, and then there are none: an export does not fail for them.
    """
    with ExitStack() as stack:
        try:
            config = text_config(read_config_json(source))
            tensors = stack.enter_context(open_tensors(source))
        except (UserError, ValueError, OSError) as error:
            log.warning("the export is without the layers that predict further tokens, if there were any: %s", error)
            yield FurtherLayers()
            return
        own = {model.own_name(name): part for name, part in tensors.items()}
        slices = {name: part for name, part in own.items() if name is not None and model.is_further(name)}
        yield FurtherLayers(slices, _said(config, list(slices)))


def _said(config: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Keys of config.json that agree with the files: counts are 0 where these have no such layers."""
    if not names:
        return {key: 0 for key in FURTHER if config.get(key)}
    said = {key: value for key, value in config.items() if key in FURTHER or key.startswith(ABOUT)}
    layers = {match[1] for name in names if (match := re.search(r"\blayers\.(\d+)\.", name))}
    return said if any(said.get(key) for key in FURTHER) else {**said, FURTHER[0]: max(len(layers), 1)}
