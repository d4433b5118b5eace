"""`python -m prl.bench.attention [TOKENS ...] [--heads N --kv-heads N --widths KEYS VALUES]`: every `model.attn`.

Each kernel that is installed, in one run: how far outputs and gradients of packed documents are from those in float32,
and how fast one causal document is, forward and backward. Random numbers in bfloat16; without a GPU in float32, of few
heads.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor
from torch.nn.attention import restore_flash_attention_impl

from prl.bench.arguments import parser_of
from prl.bench.measurement import time_mean
from prl.config.arguments import a_count
from prl.config.errors import UserError
from prl.models.layers.packed_attention import AttentionImpl, activate_attention, packed_attention

DOCUMENTS = [700, 420, 3000, 900, 40]  # of the comparison: short ones, a long one, one below a kernel's tile
REPEATS = 5
BACKWARD = 2.5  # products of backward, in those of forward (arXiv:2205.14135)


@dataclass(frozen=True)
class Sizes:
    """Heads of queries and of keys, and how wide a head's keys and values are."""

    heads: int
    kv_heads: int
    keys: int
    values: int

    def random(self, tokens: int, device: torch.device) -> list[Tensor]:
        """Queries, keys and values."""
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        shapes = (self.heads, self.keys), (self.kv_heads, self.keys), (self.kv_heads, self.values)
        return [torch.randn(tokens, *shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]

    def flops(self, tokens: int) -> float:
        """Of a causal document, forward."""
        return float(self.heads * (self.keys + self.values) * tokens**2)


def both_ways(attend: Callable[..., Tensor], inputs: list[Tensor], weights: Tensor) -> list[Tensor]:
    """Output, and gradients of queries, keys and values, in float32."""
    out = attend(0, *inputs)
    return [x.detach().float() for x in (out, *torch.autograd.grad(out, inputs, weights.to(out.dtype)))]


def errors(impl: AttentionImpl, sizes: Sizes, device: torch.device) -> list[float]:
    """Norms of the differences from float32, in those of what they should be: of output, dq, dk, dv."""
    torch.manual_seed(0)
    inputs = sizes.random(sum(DOCUMENTS), device)
    weights = torch.randn(sum(DOCUMENTS), sizes.heads, sizes.values, device=device)
    wide = [x.detach().float().requires_grad_() for x in inputs]
    exact = both_ways(packed_attention(DOCUMENTS, device, "sdpa"), wide, weights)
    found = both_ways(packed_attention(DOCUMENTS, device, impl), inputs, weights)
    return [float((one - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True)]


def times(impl: AttentionImpl, tokens: int, sizes: Sizes, device: torch.device) -> tuple[float, float]:
    """Milliseconds forward and backward of one document."""
    attend = packed_attention([tokens], device, impl)
    inputs = sizes.random(tokens, device)
    forward = time_mean(lambda: attend(0, *inputs), device, REPEATS)
    out = attend(0, *inputs)
    grad = torch.randn_like(out)
    return forward, time_mean(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True), device, REPEATS)


def rows(impl: AttentionImpl, lengths: list[int], sizes: Sizes, device: torch.device) -> list[str]:
    """Of the table."""
    try:
        activate_attention(impl)
    except UserError as error:
        return [f"{impl:<18} not here: {error.fix}"]
    try:
        found = "  ".join(f"{error:8.1e}" for error in errors(impl, sizes, device))
        told = [f"{impl:<18} {found}  (from float32: output, dq, dk, dv)"]
        for tokens in lengths:
            gc.collect()
            forward, backward = times(impl, tokens, sizes, device)
            work = sizes.flops(tokens) / 1e9
            told.append(
                f"{impl:<18} {tokens:9,}  {forward:10.3f}  {backward:10.3f}"
                f"  {work / forward:10.3g}  {BACKWARD * work / backward:10.3g}"
            )
        return told
    finally:
        restore_flash_attention_impl(_raise_warn=False)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = parser_of("attention", (__doc__ or "").split("\n\n")[1])
    parser.add_argument("tokens", type=a_count, nargs="*", help="lengths of the document")
    parser.add_argument("--heads", type=a_count, default=16 if on_gpu else 4, help="of queries")
    parser.add_argument("--kv-heads", type=a_count, default=8 if on_gpu else 2, help="of keys and values")
    widths = [128, 128] if on_gpu else [32, 32]
    parser.add_argument("--widths", type=a_count, nargs=2, default=widths, help="of a head's keys and values")
    asked = parser.parse_args()
    if asked.heads % asked.kv_heads:
        parser.error(f"--heads {asked.heads} --kv-heads {asked.kv_heads}: as many heads share each of keys and values")
    sizes = Sizes(asked.heads, asked.kv_heads, *asked.widths)
    device = torch.device("cuda" if on_gpu else "cpu")
    print(f"{sizes}: milliseconds, and TFLOP/s of a causal document's products (backward as {BACKWARD} times forward)")
    print(f"{'model.attn':<18}    tokens     forward    backward     forward    backward")
    kinds: tuple[AttentionImpl, ...] = get_args(AttentionImpl) if on_gpu else ("auto",)
    for impl in kinds:
        for row in rows(impl, asked.tokens or ([16384, 65536] if on_gpu else [512, 1024]), sizes, device):
            print(row, flush=True)


if __name__ == "__main__":
    main()
