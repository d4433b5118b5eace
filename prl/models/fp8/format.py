"""Block-scaled e4m3: its constants, and a pair of values and scales."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from prl.config import block_fp8

BLOCK = block_fp8.BLOCK
E4M3_MAX = 448.0
SMALLEST = 1e-30  # largest magnitude that a block is taken to have at least: a block of zeros needs a scale, too


class Scaled(NamedTuple):
    """values in e4m3 and the float32 scales that they were divided by."""

    values: Tensor
    scales: Tensor
