"""Rotary position embedding (arXiv:2104.09864) and its stretching to longer contexts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from prl.config.schema import ModelCard
from prl.config.schema_model import BETA_FAST, BETA_SLOW, RopeScaling
from prl.models.by_hand import RotationByHand, by_hand, is_by_hand

Rotation = Callable[[Tensor, Tensor, Tensor], Tensor]  # x [N, H, R], cos and sin -> x, turned


def rotary_tables(positions: Tensor, card: ModelCard) -> tuple[Tensor, Tensor]:
    """cos and sin, [N, 1, R] float32, for positions [N] and the R dimensions of a head that turn; halves are laid out
    as in Hugging Face's rotate_half.
    """
    frequencies, scale = rotary_frequencies(card, positions.device)
    angles = positions.float()[:, None] * frequencies  # [N, R/2]
    angles = torch.cat([angles, angles], dim=-1)[:, None, :]
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)


def rotary_frequencies(card: ModelCard, device: torch.device) -> tuple[Tensor, float]:
    """Radians per position [R/2] float32, and what cos and sin are multiplied by."""
    dims = torch.arange(0, card.rotary_dim, 2, device=device, dtype=torch.float32)
    frequencies = card.rope_theta ** -(dims / card.rotary_dim)
    scaling = card.pinned_scaling
    if scaling is None:
        return frequencies, 1.0
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(frequencies, scaling), 1.0
    return _yarn(frequencies, scaling, card), yarn_scale(scaling)


def _old_context(scaling: RopeScaling) -> int:
    assert scaling.original_max_position_embeddings is not None, "the card's own where it does not say another"
    return scaling.original_max_position_embeddings


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow ones divided, fast ones kept, those between blended by their turns within the old context."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert low is not None and high is not None, "the schema wants them"  # noqa: PT018
    turns = _old_context(scaling) * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn(frequencies: Tensor, scaling: RopeScaling, card: ModelCard) -> Tensor:
    """As llama3, but the blend is linear in the dimension (section 3.2 of the paper)."""
    fast, slow = scaling.beta_fast or BETA_FAST, scaling.beta_slow or BETA_SLOW

    def dimension_of(turns: float) -> float:
        ratio = _old_context(scaling) / (turns * 2 * math.pi)
        return card.rotary_dim * math.log(ratio) / (2 * math.log(card.rope_theta))

    first, last = dimension_of(fast), dimension_of(slow)
    if scaling.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, card.rotary_dim - 1)
    steps = torch.arange(len(frequencies), device=frequencies.device, dtype=torch.float32)
    divided = ((steps - first) / max(last - first, 1e-3)).clamp(0, 1)
    return divided * frequencies / scaling.factor + (1 - divided) * frequencies


def yarn_scale(scaling: RopeScaling) -> float:
    """Of cos and sin: the temperature of attention that YaRN wants (section 3.3 of the paper)."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_temperature(scaling.factor, scaling.mscale) / yarn_temperature(
            scaling.factor, scaling.mscale_all_dim
        )
    return yarn_temperature(scaling.factor, 1.0)


def yarn_temperature(factor: float, mscale: float) -> float:
    """Of a context that is `factor` times the old one."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def kernels_turn(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and has_triton()


@functools.cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first R dimensions of heads, R that of the tables: x [N, H, D] -> [N, H, D]."""
    if not cos.shape[-1]:  # of a model without rotary embeddings
        return x
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled() and kernels_turn(x):
        from prl.models.layers import rope_kernels

        return rope_kernels.rotate(x, cos, sin)
    turning = x if cos.shape[-1] == x.shape[-1] else x[..., : cos.shape[-1]]
    if is_by_hand(x):
        turned = by_hand(RotationByHand, turning, cos, sin)
        return turned if turning is x else torch.cat([turned, x[..., cos.shape[-1] :]], dim=-1)
    first, second = turning.chunk(2, dim=-1)
    turned = (turning * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
    return turned if turning is x else torch.cat([turned, x[..., cos.shape[-1] :]], dim=-1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn neighbouring dimensions, 2i with 2i + 1, where `rotate` turns i with i + R/2: x [N, H, R] -> [N, H, R].

    What comes out has the halves one after another: scores are the same as long as queries and keys agree.
    """
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
