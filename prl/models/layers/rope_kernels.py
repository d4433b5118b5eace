# mypy: allow-untyped-defs, allow-untyped-calls
"""A Triton kernel that turns heads, for passes without gradients: `rope.rotate` is six kernels, and few tokens make the
launches the whole cost.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate_kernel(
    x, cos, sin, out, token_stride, head_stride, heads, DIM: tl.constexpr, TURNING: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, WIDE)
    half: tl.constexpr = TURNING // 2
    turning, inside = columns < TURNING, columns < DIM
    partner = tl.where(columns < half, columns + half, columns - half)
    row = x + token * token_stride + head * head_stride
    own = tl.load(row + columns, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(row + partner, mask=turning, other=0.0).to(tl.float32)
    other = tl.where(columns < half, -other, other)
    c = tl.load(cos + token * TURNING + columns, mask=turning, other=1.0)
    s = tl.load(sin + token * TURNING + columns, mask=turning, other=0.0)
    tl.store(out + (token * heads + head) * DIM + columns, own * c + other * s, mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, H, D], cos and sin [N, 1, R] float32 -> [N, H, D]."""
    tokens, heads, dim = x.shape
    if x.stride(2) != 1:
        x = x.contiguous()
    out = torch.empty(tokens, heads, dim, dtype=x.dtype, device=x.device)
    with torch.cuda.device(x.device):
        _rotate_kernel[(tokens, heads)](
            x, cos.contiguous(), sin.contiguous(), out, x.stride(0), x.stride(1), heads,
            DIM=dim, TURNING=cos.shape[-1], WIDE=triton.next_power_of_2(dim),
        )  # fmt: skip
    return out
