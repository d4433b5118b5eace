"""`python -m prl.bench.fp8 model=qwen3_4b bench.doc_len=16384 [overrides]`: what block-scaled GEMMs cost and buy.

Four parts, on the shapes of the chosen model (`model.fp8` says whether DeepGEMM or the emulation multiplies):

    casts    the Triton kernels against the formulas: differing bytes, GB/s
    GEMMs    per linear: error of FP8 and of bfloat16 against float32, of DeepGEMM against the emulation; milliseconds
             of forward and backward, and their ratio to bfloat16
    experts  the same for grouped experts, tokens routed unevenly
    losses   `bench.steps` steps (50 unless given) of the trainer with and without, on tokens that can be learned
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prl.bench.fp8_losses import compare_losses
from prl.config import compose
from prl.config.errors import UserError
from prl.config.schema import ModelCard, RunConfig
from prl.models.fp8 import fp8_grouped_mm, fp8_linear
from prl.models.fp8_cast import cast_blocks, cast_both, cast_columns, cast_rows
from prl.models.fp8_gemm import deep_gemm
from prl.models.moe import grouped_linear
from prl.trainer.rl_step import wait_for
from prl.trainer.world import pick_device

REPEATS = 10
LOSS_STEPS = 50
ERROR_TOKENS = 4096  # enough for the error, and cheap to multiply in float32
Multiply = Callable[[Tensor, Tensor], Tensor]


def linear_shapes(card: ModelCard) -> dict[str, tuple[int, int]]:
    """name -> (N, K) of the model's dense linears."""
    q, kv = card.num_attention_heads * card.head_dim, card.num_key_value_heads * card.head_dim
    shapes = {"q": (q, card.hidden_size), "k, v": (kv, card.hidden_size), "o": (card.hidden_size, q)}
    if not card.num_experts:
        shapes["gate, up"] = (card.intermediate_size, card.hidden_size)
        shapes["down"] = (card.hidden_size, card.intermediate_size)
    return shapes


def expert_shapes(card: ModelCard) -> dict[str, tuple[int, int, int]]:
    """name -> (E, N, K) of the model's grouped experts."""
    if not card.num_experts:
        return {}
    experts, size = card.num_experts, card.moe_intermediate_size
    return {
        "experts gate_up": (experts, 2 * size, card.hidden_size),
        "experts down": (experts, card.hidden_size, size),
    }


def run_all(multiply: Multiply, x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    """Output, gradient of x, gradient of the weight."""
    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    y = multiply(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def time_passes(multiply: Multiply, x: Tensor, weight: Tensor, grad: Tensor) -> tuple[float, float]:
    """Milliseconds of forward, and of forward and backward: medians."""
    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]

    def forward() -> Tensor:
        return multiply(*leaves)

    def both() -> None:
        torch.autograd.grad(multiply(*leaves), leaves, grad)

    return time_median(forward, x.device), time_median(both, x.device)


def time_median(work: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds, after three runs to warm up."""
    times = []
    for repeat in range(REPEATS + 3):
        wait_for(device)
        start_s = time.perf_counter()
        work()
        wait_for(device)
        if repeat >= 3:
            times.append(time.perf_counter() - start_s)
    return sorted(times)[len(times) // 2] * 1e3


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30))


@dataclass(frozen=True)
class Case:
    """One product: x, weight, gradient of the output; how to multiply exactly, and with a kind of scaled GEMM."""

    data: tuple[Tensor, Tensor, Tensor]
    exact: Multiply
    scaled: Callable[[str], Multiply]


def compare(name: str, large: Case, small: Case, backend: str) -> dict[str, Any]:
    """Times of the large case, errors of the small one."""
    truth = run_all(small.exact, *(t.float() for t in small.data))
    plain, ours, emulated = (
        run_all(multiply, *small.data) for multiply in (small.exact, small.scaled(backend), small.scaled("emulated"))
    )
    before, after = time_passes(large.exact, *large.data), time_passes(large.scaled(backend), *large.data)
    return {
        "name": name,
        "error": [relative(o, t) for o, t in zip(ours, truth, strict=True)],
        "error_bfloat16": [relative(p, t) for p, t in zip(plain, truth, strict=True)],
        "against_emulated": [relative(o, e) for o, e in zip(ours, emulated, strict=True)],
        "ms_bfloat16": before,
        "ms_fp8": after,
        "speedup_forward": before[0] / after[0],
        "speedup": before[1] / after[1],
    }


def draw(*shapes: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape, device=device, dtype=dtype) for shape in shapes)


def measure_linear(name: str, n: int, k: int, tokens: int, place: dict[str, Any], backend: str) -> dict[str, Any]:
    def scaled(kind: str) -> Multiply:
        return lambda x, weight: fp8_linear(x, weight, kind)

    few = min(tokens, ERROR_TOKENS)
    x, weight, grad = draw((tokens, k), (n, k), (tokens, n), **place)
    large = Case((x, weight, grad), F.linear, scaled)
    return compare(f"{name} {n}x{k}", large, Case((x[:few], weight, grad[:few]), F.linear, scaled), backend)


def measure_experts(
    name: str, shape: tuple[int, int, int], rows: int, place: dict[str, Any], backend: str
) -> dict[str, Any]:
    """shape: (E, N, K); rows: tokens times experts per token, dealt out unevenly."""
    experts, n, k = shape
    x, weight, grad = draw((rows, k), shape, (rows, n), **place)

    def case(count: int) -> Case:
        counts = deal(count, experts).to(x.device)

        def scaled(kind: str) -> Multiply:
            return lambda x, weight: fp8_grouped_mm(x, weight, counts, kind)  # type: ignore[arg-type]

        return Case((x[:count], weight, grad[:count]), lambda x, weight: grouped_linear(x, weight, counts), scaled)

    return compare(f"{name} {experts}x{n}x{k}", case(rows), case(min(rows, ERROR_TOKENS)), backend)


def deal(rows: int, experts: int) -> Tensor:
    """Counts [E] that sum to rows; the fullest expert has about three times the mean, the last none."""
    weights = torch.linspace(3, 0, experts) ** 2
    counts = (weights / weights.sum() * rows).long()
    counts[0] += rows - counts.sum()
    return counts


def measure_casts(tokens: int, k: int, place: dict[str, Any]) -> dict[str, Any]:
    """Share of bytes in which the kernels differ from the formulas, and GB/s read and written."""
    (x,) = draw((tokens, k), **place)
    (weight,) = draw((k, k), **place)
    pairs = [
        (cast_rows(x), cast_rows(x.cpu())),
        (cast_columns(x), cast_columns(x.cpu())),
        (cast_blocks(weight), cast_blocks(weight.cpu())),
        (cast_blocks(weight, transposed=True), cast_blocks(weight.cpu(), transposed=True)),
    ]
    differ = [float((a.values.cpu().float() != b.values.float()).float().mean()) for a, b in pairs]
    scales = [relative(a.scales.cpu(), b.scales) for a, b in pairs]
    milliseconds = time_median(lambda: cast_both(x), x.device)
    moved = x.numel() * (2 + 1 + 1)
    return {"differing": differ, "scales": scales, "ms": milliseconds, "gb_per_s": moved / milliseconds / 1e6}


def print_row(row: dict[str, Any]) -> None:
    def percents(values: list[float]) -> str:
        return "/".join(f"{100 * value:.2f}" for value in values)

    print(
        f"{row['name']:32} error % (y/dx/dw) {percents(row['error'])}, bf16 {percents(row['error_bfloat16'])}, "
        f"to emulated {percents(row['against_emulated'])}; "
        f"ms forward {row['ms_bfloat16'][0]:.3f} -> {row['ms_fp8'][0]:.3f} ({row['speedup_forward']:.2f}x), "
        f"with backward {row['ms_bfloat16'][1]:.3f} -> {row['ms_fp8'][1]:.3f} ({row['speedup']:.2f}x)",
        flush=True,
    )


def measure_shapes(config: RunConfig, tokens: int) -> dict[str, Any]:
    device = pick_device(config.deployment.device, 0)
    dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
    place = {"device": device, "dtype": dtype}
    backend, card = config.model.fp8, config.model.card
    casts = measure_casts(min(tokens, ERROR_TOKENS), card.hidden_size, place)
    print(f"casts: differing values {casts['differing']}, scales {casts['scales']}, {casts['gb_per_s']:,.0f} GB/s")
    rows = []
    for name, (n, k) in linear_shapes(card).items():
        rows.append(measure_linear(name, n, k, tokens, place, backend))
        print_row(rows[-1])
    for name, shape in expert_shapes(card).items():
        rows.append(measure_experts(name, shape, tokens * card.num_experts_per_tok, place, backend))
        print_row(rows[-1])
    return {"casts": casts, "shapes": rows}


def measure(config: RunConfig, steps: int) -> dict[str, Any]:
    assert config.bench is not None
    if config.model.fp8 == "deep_gemm":
        deep_gemm()
    result = measure_shapes(config, config.seq_len)
    if steps:
        result["losses"] = compare_losses(config, steps)
    return result


def main() -> None:
    overrides = sys.argv[1:]
    if not any(o.startswith("model.fp8=") for o in overrides):
        overrides.append("model.fp8=deep_gemm")
    try:
        config = compose(overrides, "bench")
        assert config.bench is not None
        given = any(o.startswith("bench.steps=") for o in overrides)
        result = measure(config, config.bench.steps if given else LOSS_STEPS)
    except UserError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(2)
    if config.bench.output_json is not None:
        Path(config.bench.output_json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
