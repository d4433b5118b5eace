"""FlashMLA's sparse forward pass, which the CUDA wheels of vLLM bring along: twice as fast as the one here on Hopper,
and without a backward pass.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

HEADS, VALUES, WIDTH = (64, 128), 512, 576  # what it is built for
CHOSEN = 128  # keys of a query come in multiples of this


def fits(q: Tensor, values: int) -> bool:
    """Whether it is there, and does these sizes."""
    sizes = q.shape[1] in HEADS and q.shape[2] == WIDTH and values == VALUES
    return sizes and q.dtype == torch.bfloat16 and _is_loaded(q.device)


def forward(q: Tensor, latents: Tensor, chosen: Tensor, values: int, scale: float) -> tuple[Tensor, Tensor]:
    """As `attention_kernels.forward`."""
    chosen = F.pad(chosen, (0, -chosen.shape[1] % CHOSEN), value=-1)  # of short documents there are fewer
    out, _, lse = torch.ops._flashmla_C.sparse_prefill_fwd(
        q, latents[:, None], chosen[:, None], scale, values, None, None, None
    )
    return out, lse


@functools.cache
def _is_loaded(device: torch.device) -> bool:
    if torch.cuda.get_device_capability(device)[0] != 9:
        return False
    spec = importlib.util.find_spec("vllm")
    places = [Path(place) / "_flashmla_C.abi3.so" for place in (spec.submodule_search_locations or [] if spec else [])]
    for place in places:
        if place.exists():
            try:
                torch.ops.load_library(str(place))  # not by import: vLLM's package is not needed for it
            except OSError:
                return False  # built for another torch
            return hasattr(torch.ops._flashmla_C, "sparse_prefill_fwd")
    return False
