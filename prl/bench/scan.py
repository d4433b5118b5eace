"""`python -m prl.bench.scan [TOKENS ...]`: the scan of state-space layers both ways, written out and as kernels.

One document of random numbers in the sizes of Nemotron 3 Super: 128 heads of 64, states of 128 numbers, 8 groups.
Beside the times stands what they would be if the device did nothing but read what comes in and write what goes out,
once, at the rate at which it copies. On a CPU, which has the written-out form alone, in float32 with 8 heads of 16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from prl.bench.arguments import parser_of
from prl.bench.measurement import time_mean
from prl.config.arguments import a_count
from prl.models.state_space.scan import scan, written_out

REPEATS = 3


@dataclass(frozen=True)
class Sizes:
    heads: int
    size: int
    groups: int
    state: int
    device: str
    dtype: torch.dtype


ON_A_GPU = Sizes(128, 64, 8, 128, "cuda", torch.bfloat16)
ON_A_CPU = Sizes(8, 16, 2, 16, "cpu", torch.float32)


def random_inputs(tokens: int, sizes: Sizes) -> list[Tensor]:
    """x, dt, a, b, c, d of `scan.scan`, of one row."""

    def random(*shape: int, dtype: torch.dtype = sizes.dtype) -> Tensor:
        return torch.randn(shape, device=sizes.device, dtype=dtype)

    steps = torch.nn.functional.softplus(random(1, tokens, sizes.heads, dtype=torch.float32) - 3)
    rates = -torch.empty(sizes.heads, device=sizes.device).uniform_(1, 16)
    b, c = (random(1, tokens, sizes.groups, sizes.state) * sizes.state**-0.5 for _ in range(2))
    x = random(1, tokens, sizes.heads, sizes.size)
    return [t.requires_grad_() for t in (x, steps, rates, b, c, random(sizes.heads, dtype=torch.float32))]


def copy_rate(device: torch.device) -> float:
    """Bytes read and written in a second by a copy."""
    source = torch.empty(1 << (30 if device.type == "cuda" else 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / (time_mean(lambda: target.copy_(source), device, 10) / 1e3)


def both_ways(run: Callable[..., tuple[Tensor, Tensor]], inputs: list[Tensor], grad: Tensor) -> tuple[float, float]:
    """Milliseconds forward and backward."""
    device = grad.device
    forward = time_mean(lambda: run(*inputs), device, REPEATS, 1)
    y, _ = run(*inputs)
    return forward, time_mean(lambda: torch.autograd.grad(y, inputs, grad, retain_graph=True), device, REPEATS, 1)


def measure(tokens: int, sizes: Sizes, rate: float) -> str:
    """One row of the table."""
    inputs = random_inputs(tokens, sizes)
    grad = torch.randn_like(inputs[0])
    state = torch.zeros(1, sizes.heads, sizes.size, sizes.state, device=sizes.device)
    document = torch.zeros(1, tokens, dtype=torch.int32, device=sizes.device)
    kernels = both_ways(scan, inputs, grad)
    plain = both_ways(lambda x, dt, a, b, c, d: written_out(x, dt, a, b, c, d, state, document), inputs, grad)
    comes_in, x = sum(t.numel() * t.element_size() for t in inputs), grad.numel() * grad.element_size()
    least = ((comes_in + x) / rate * 1e3, (2 * comes_in + x) / rate * 1e3)
    return f"{tokens:9,}  " + "  ".join(f"{ms:10.3g}" for ms in (*kernels, *plain, *least))


def main() -> None:
    parser = parser_of("scan", (__doc__ or "").split("\n\n")[0])
    parser.add_argument("tokens", type=a_count, nargs="*", help="lengths of the document")
    lengths = parser.parse_args().tokens
    sizes = ON_A_GPU if torch.cuda.is_available() else ON_A_CPU
    torch.manual_seed(0)
    rate = copy_rate(torch.device(sizes.device))
    print(f"milliseconds; a copy moves {rate / 1e12:.3g} TB/s")
    print("   tokens     forward    backward  written out: both ways   least: both ways")
    for tokens in lengths or ([16384, 65536, 131072] if sizes is ON_A_GPU else [512, 2048]):
        print(measure(tokens, sizes, rate), flush=True)


if __name__ == "__main__":
    main()
