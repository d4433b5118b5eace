"""`python -m prl.bench.fp8 model=qwen3_4b bench.doc_len=16384 [overrides]`: what block-scaled GEMMs cost and buy.

Four parts, on the shapes of the chosen model (`model.fp8` says whether DeepGEMM or the emulation multiplies):

    casts    the Triton kernels against the formulas: differing values; GB/s, what is read and written together
    linears  per operation: error of FP8 and of bfloat16 against float32, and of FP8 against the emulation, each of
             outputs and gradients; milliseconds of forward and backward, and their ratio to bfloat16
    experts  the same for SwiGLU experts as a whole, tokens routed unevenly, for all experts and for a fourth of them
             (as each of four ranks holds under expert parallelism) with as many rows
    losses   `bench.steps` steps (50 unless given) of the trainer with and without, on tokens that can be learned

Linears that read the same input are measured together, as they run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prl.bench.arguments import json_place, overrides_of, user_errors_told
from prl.bench.fp8_losses import compare_losses
from prl.bench.measurement import time_mean
from prl.config import compose
from prl.config.families import FAMILIES
from prl.config.schema import ModelCard, RunConfig
from prl.models.device import pick_device
from prl.models.experts.stacked import Experts
from prl.models.fp8.apply import apply_fp8
from prl.models.fp8.cast import cast, cast_blocks
from prl.models.fp8.dense import Fp8DenseMLP
from prl.models.fp8.experts import Fp8Experts
from prl.models.fp8.gemm import deep_gemm
from prl.models.fp8.linears import Fp8Attention, Fp8Linear, fp8_linears
from prl.trainer.parallelize import build_meta

REPEATS = 10
LOSS_STEPS = 50
ERROR_TOKENS = 4096  # enough for the error, and cheap to multiply in float32
RANKS = 4  # that share the experts in the second measurement of these
Tensors = Sequence[Tensor]
Run = Callable[..., Tensors]  # leaves -> outputs


def linear_shapes(config: RunConfig) -> dict[str, tuple[list[int], int]]:
    """name -> (N of each linear, K) of what `apply_fp8` changes in the model, those with the same input together, each
    shape once.
    """
    model = build_meta(config, None)
    apply_fp8(model, "emulated")
    shapes: dict[tuple[tuple[int, ...], int], str] = {}
    for path, module in model.named_modules():
        together: list[str] = []
        if isinstance(module, Fp8Attention):
            together = ["q_proj", "k_proj", "v_proj"]
        elif isinstance(module, Fp8DenseMLP):
            together = ["gate_proj", "up_proj"]
        alone = [name for name, child in module.named_children() if isinstance(child, Fp8Linear)]
        for names in ([together] if together else []) + [[name] for name in alone if name not in together]:
            linears = [getattr(module, name) for name in names]
            key = tuple(linear.out_features for linear in linears), linears[0].in_features
            kind = path.rsplit(".", 1)[-1]  # self_attn, mlp, shared_experts
            shapes.setdefault(key, f"{kind} {', '.join(name.removesuffix('_proj') for name in names)}")
    return {name: (list(sizes), k) for (sizes, k), name in shapes.items()}


def run_all(run: Run, leaves: Tensors, grads: Tensors) -> list[Tensor]:
    """Outputs, then the gradients of all leaves."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    outputs = run(*leaves)
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, grads)]


def time_passes(run: Run, leaves: Tensors, grads: Tensors) -> tuple[float, float]:
    """Milliseconds of forward, and of forward and backward."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]

    def both() -> None:
        torch.autograd.grad(run(*leaves), leaves, grads)

    return time_mean(lambda: run(*leaves), leaves[0].device, REPEATS), time_mean(both, leaves[0].device, REPEATS)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30))


@dataclass(frozen=True)
class Case:
    """One operation: its leaves, gradients of its outputs, what bfloat16 runs (and float32, for the truth) and what FP8
    runs with a backend.
    """

    leaves: Tensors
    grads: Tensors
    exact: Run
    scaled: Callable[[str], Run]


def compare(name: str, large: Case, small: Case, backend: str) -> dict[str, Any]:
    """Times of the large case, errors of the small one."""
    truth = run_all(small.exact, [t.float() for t in small.leaves], [t.float() for t in small.grads])
    plain, ours, emulated = (
        run_all(run, small.leaves, small.grads)
        for run in (small.exact, small.scaled(backend), small.scaled("emulated"))
    )
    before = time_passes(large.exact, large.leaves, large.grads)
    after = time_passes(large.scaled(backend), large.leaves, large.grads)
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


def measure_linears(
    name: str, sizes: list[int], k: int, tokens: int, place: dict[str, Any], backend: str
) -> dict[str, Any]:
    x, *weights = draw((tokens, k), *((n, k) for n in sizes), **place)
    grads = draw(*((tokens, n) for n in sizes), **place)

    def exact(x: Tensor, *weights: Tensor) -> Tensors:
        return [F.linear(x, weight) for weight in weights]

    def scaled(kind: str) -> Run:
        return lambda x, *weights: fp8_linears(x, list(weights), kind)

    few = min(tokens, ERROR_TOKENS)
    small = Case([x[:few], *weights], [grad[:few] for grad in grads], exact, scaled)
    shape = f"{'+'.join(map(str, sizes))}x{k}"
    return compare(f"{name} {shape}", Case([x, *weights], grads, exact, scaled), small, backend)


def measure_experts(count: int, card: ModelCard, tokens: int, place: dict[str, Any], backend: str) -> dict[str, Any]:
    """`count` experts of the model, each token routed to as many of them as the model's are, some more often."""
    hidden, size, top_k = card.expert_width, card.moe_intermediate_size, card.num_experts_per_tok
    gated = FAMILIES[card.family].gated
    width = 2 * size if gated else size
    first, down = draw((count, width, hidden), (count, hidden, size), **place)
    bias = torch.linspace(1, 0, count, device=place["device"])  # the fullest has about three times the mean

    def case(tokens: int) -> Case:
        x, grad, logits = draw((tokens, hidden), (tokens, hidden), (tokens, count), **place)
        weights, experts = (logits.float() + bias).softmax(-1).topk(min(top_k, count))
        leaves = [x, (first / hidden**0.5).to(x.dtype), (down / size**0.5).to(x.dtype), weights.to(x.dtype)]

        def exact(x: Tensor, first: Tensor, down: Tensor, weights: Tensor) -> Tensors:
            return [run_experts(Experts(count, 0, 0, gated), first, down, x, weights, experts)]

        def scaled(kind: str) -> Run:
            def run(x: Tensor, first: Tensor, down: Tensor, weights: Tensor) -> Tensors:
                module = Fp8Experts(count, 0, 0, gated)
                module.backend = kind  # type: ignore[assignment]
                return [run_experts(module, first, down, x, weights, experts)]

            return run

        return Case(leaves, [grad], exact, scaled)

    few = case(min(tokens, ERROR_TOKENS))
    return compare(f"experts {count}x{width}x{hidden}", case(tokens), few, backend)


def run_experts(module: Experts, first: Tensor, down: Tensor, *args: Tensor) -> Tensor:
    """A module's forward with these weights, its activation compiled as in training."""
    if first.is_cuda:
        module.activate = torch.compile(module.activate)  # type: ignore[method-assign]
    return torch.func.functional_call(module, {f"{module.first}_proj": first, "down_proj": down}, args)


def measure_casts(tokens: int, k: int, place: dict[str, Any]) -> dict[str, Any]:
    """Share of values in which the kernels differ from the formulas, and GB/s by what is cast."""
    (x,) = draw((tokens, k), **place)
    (weight,) = draw((k, k), **place)
    few = x[:ERROR_TOKENS, : min(k, ERROR_TOKENS)].contiguous()
    pairs = [
        *zip(cast([few], True, True), cast([few.cpu()], True, True), strict=True),
        (cast_blocks(few), cast_blocks(few.cpu())),
        (cast_blocks(few, transposed=True), cast_blocks(few.cpu(), transposed=True)),
    ]
    casts: dict[str, tuple[Callable[[], Any], int]] = {
        "rows": (lambda: cast([x], True, False), 3 * x.numel()),
        "columns": (lambda: cast([x], False, True), 3 * x.numel()),
        "both": (lambda: cast([x], True, True), 4 * x.numel()),
        "blocks": (lambda: cast_blocks(weight), 3 * weight.numel()),
        "transposed": (lambda: cast_blocks(weight, transposed=True), 3 * weight.numel()),
    }
    return {
        "differing": [float((a.values.cpu().float() != b.values.float()).float().mean()) for a, b in pairs],
        "scales": [relative(a.scales.cpu(), b.scales) for a, b in pairs],
        "gb_per_s": {name: moved / time_mean(work, x.device, REPEATS) / 1e6 for name, (work, moved) in casts.items()},
    }


def print_row(row: dict[str, Any]) -> None:
    def percents(values: list[float]) -> str:
        return "/".join(f"{100 * value:.2f}" for value in values)

    print(
        f"{row['name']:32} error % {percents(row['error'])}, bf16 {percents(row['error_bfloat16'])}, "
        f"to emulated {percents(row['against_emulated'])}; "
        f"ms forward {row['ms_bfloat16'][0]:.3f} -> {row['ms_fp8'][0]:.3f} ({row['speedup_forward']:.2f}x), "
        f"with backward {row['ms_bfloat16'][1]:.3f} -> {row['ms_fp8'][1]:.3f} ({row['speedup']:.2f}x)",
        flush=True,
    )


def measure_shapes(config: RunConfig, tokens: int) -> dict[str, Any]:
    device = pick_device(config.deployment.device)
    dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
    place = {"device": device, "dtype": dtype}
    backend, card = config.model.fp8, config.model.card
    casts = measure_casts(tokens, card.hidden_size if card.num_experts else card.intermediate_size, place)
    speeds = ", ".join(f"{name} {speed:,.0f}" for name, speed in casts["gb_per_s"].items())
    print(f"casts: differing values {casts['differing']}, scales {casts['scales']}, GB/s: {speeds}")
    rows = []
    for name, (sizes, k) in linear_shapes(config).items():
        rows.append(measure_linears(name, sizes, k, tokens, place, backend))
        print_row(rows[-1])
    for count in dict.fromkeys((card.num_experts, card.num_experts // RANKS)) if card.num_experts else ():
        rows.append(measure_experts(count, card, tokens, place, backend))
        print_row(rows[-1])
    return {"casts": casts, "shapes": rows}


def measure(config: RunConfig, steps: int) -> dict[str, Any]:
    assert config.bench is not None
    if config.model.fp8 == "deep_gemm":
        deep_gemm()
    torch.manual_seed(config.seed)  # of the matrices and of who is routed where
    result = measure_shapes(config, config.seq_len)
    if steps:
        result["losses"] = compare_losses(config, steps)
    return result


def main() -> None:
    overrides = overrides_of(__doc__)
    if not any(o.startswith("model.fp8=") for o in overrides):
        overrides.append("model.fp8=deep_gemm")
    with user_errors_told():
        config = compose(overrides, "bench")
        assert config.bench is not None
        place = json_place(config.bench.output_json)
        given = any(o.startswith("bench.steps=") for o in overrides)
        result = measure(config, config.bench.steps if given else LOSS_STEPS)
    if place is not None:
        place.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
