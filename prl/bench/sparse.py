"""`python -m prl.bench.sparse [TOKENS ...]`: sparse attention over latents against dense attention, both ways.

One causal document of random numbers, in the sizes of GLM-5: 64 heads, latents of 512 and 64 numbers, 2,048 keys a
query chosen by 32 index heads; dense attention has 64 heads 256 wide. On a CPU, which runs the written-out form, in
float32 and with 4 heads, 64 keys and latents of 32 and 16 numbers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from prl.bench.arguments import parser_of
from prl.bench.measurement import time_mean
from prl.config.arguments import a_count
from prl.models.layers.packed_attention import packed_attention
from prl.models.sparse.attention import sparse_attention
from prl.models.sparse.choice import choose_keys

REPEATS = 2


@dataclass(frozen=True)
class Sizes:
    heads: int
    values: int
    turned: int
    index_heads: int
    index_dim: int
    count: int
    dense_dim: int
    device: str
    dtype: torch.dtype


ON_A_GPU = Sizes(64, 512, 64, 32, 128, 2048, 256, "cuda", torch.bfloat16)
ON_A_CPU = Sizes(4, 32, 16, 4, 16, 64, 32, "cpu", torch.float32)


def both_ways(attend: Callable[..., Tensor], inputs: list[Tensor], device: torch.device) -> tuple[float, float]:
    """Milliseconds forward and backward."""
    inputs = [tensor.requires_grad_() for tensor in inputs]
    forward = time_mean(lambda: attend(*inputs), device, REPEATS, 1)
    out = attend(*inputs)
    grad = torch.randn_like(out)
    return forward, time_mean(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True), device, REPEATS, 1)


def measure(tokens: int, sizes: Sizes) -> str:
    """One row of the table."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=sizes.device, dtype=sizes.dtype)

    high = torch.arange(1, tokens + 1, device=sizes.device)
    index = (random(tokens, sizes.index_heads, sizes.index_dim), random(tokens, sizes.index_heads))
    keys = random(tokens, sizes.index_dim)
    low = torch.zeros_like(high)
    device = torch.device(sizes.device)
    choice = time_mean(lambda: choose_keys(*index, keys, low, high, sizes.count, len(keys)), device, 1, 1)
    chosen = choose_keys(*index, keys, low, high, sizes.count, len(keys))
    width = sizes.values + sizes.turned
    sparse = both_ways(
        lambda q, latents: sparse_attention(q, latents, chosen, sizes.values, width**-0.5),
        [random(tokens, sizes.heads, width), random(tokens, width)],
        device,
    )
    products = int((chosen >= 0).sum()) * sizes.heads * (width + sizes.values) * 2
    gc.collect()
    dense_attend = packed_attention([tokens], device)
    dense = both_ways(
        lambda q, k, v: dense_attend(0, q, k, v),
        [random(tokens, sizes.heads, sizes.dense_dim) for _ in range(3)],
        device,
    )
    rates = products / sparse[0] / 1e9, 2.5 * products / sparse[1] / 1e9
    figures = (choice, sparse[0], dense[0], sparse[1], dense[1])
    return f"{tokens:9,}  " + "  ".join(f"{ms:10.3f}" for ms in figures) + "".join(f"  {r:10.3g}" for r in rates)


def main() -> None:
    parser = parser_of("sparse", (__doc__ or "").split("\n\n")[0])
    parser.add_argument("tokens", type=a_count, nargs="*", help="lengths of the document")
    lengths = parser.parse_args().tokens
    sizes = ON_A_GPU if torch.cuda.is_available() else ON_A_CPU
    torch.manual_seed(0)
    print("milliseconds, and TFLOP/s of the products of chosen keys (backward as 2.5 times forward)")
    print("   tokens      choice     forward       dense    backward       dense     forward    backward")
    for tokens in lengths or ([16384, 65536, 131072] if sizes is ON_A_GPU else [512, 1024]):
        print(measure(tokens, sizes), flush=True)


if __name__ == "__main__":
    main()
