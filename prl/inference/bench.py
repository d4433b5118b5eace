"""`python -m prl.inference.bench [overrides]`: tokens/s of the built-in engine on groups of rollouts, without HTTP."""

from __future__ import annotations

import sys
import time

import torch

from prl.config import compose
from prl.config.console import shield_console
from prl.config.errors import UserError
from prl.config.schema import RunConfig
from prl.inference.engine import TorchEngine
from prl.inference.sampling import SamplingParams
from prl.inference.sequences import Request
from prl.inference.server import load_engine
from prl.models.device import pick_device
from prl.models.families.build import build_decoder

PROMPT_TOKENS, COMPLETION_TOKENS, GROUP = 16, 48, 8
ROUNDS = 5


def build_engine(config: RunConfig, random_weights: bool) -> TorchEngine:
    """The run's engine; with random weights, drawn where they are needed, no checkpoint is opened."""
    if not random_weights:
        return load_engine(config, None)[0]
    name = config.model.dtype if config.inference.dtype == "auto" else config.inference.dtype
    device = pick_device(config.deployment.device)
    with torch.device("meta"):
        model = build_decoder(config.model.card)
    model = model.to(torch.bfloat16 if name == "bfloat16" else torch.float32).to_empty(device=device)
    model.init_weights(torch.Generator(device).manual_seed(config.model.init_seed))
    return TorchEngine(model.requires_grad_(False).eval(), config.inference, eos_token_ids=())


def batch_sizes(slots: int) -> list[int]:
    """Numbers of concurrent sequences worth measuring, up to twice what fits at a time."""
    return sorted({1, GROUP, max(slots // 4, 1), slots, 2 * slots})


def submit(engine: TorchEngine, sequences: int) -> None:
    """Prompts with GROUP completions each, as the orchestrator sends them."""
    for i in range(sequences):
        prompt = [(i // GROUP * 7 + j) % engine.vocab for j in range(PROMPT_TOKENS)]
        params = SamplingParams(seed=i, max_tokens=COMPLETION_TOKENS, ignore_eos=True)
        engine.submit(engine.prepare(Request(str(i), prompt, params, arrival=i)))


def measure(engine: TorchEngine, sequences: int) -> float:
    """Generated tokens per second until all are done."""
    engine.reset_prefix_cache()
    submit(engine, sequences)
    before, started = engine.stats.generation_tokens, time.perf_counter()
    while engine.busy:
        engine.step()
    return (engine.stats.generation_tokens - before) / (time.perf_counter() - started)


def main() -> None:
    shield_console()
    try:
        config = compose(sys.argv[1:], config_name="inference")
    except UserError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(2)
    torch.set_num_threads(config.debug.num_threads or 1)
    engine = build_engine(config, random_weights=False)
    slots = config.inference.max_num_seqs
    print(f"{config.model.name} on {engine.device}, {torch.get_num_threads()} threads, {slots} slots")
    measure(engine, slots)  # warms up
    for sequences in batch_sizes(slots):
        rates = sorted(measure(engine, sequences) for _ in range(ROUNDS))
        print(
            f"{sequences:5d} sequences of {PROMPT_TOKENS}+{COMPLETION_TOKENS} tokens: "
            f"{rates[ROUNDS // 2]:7,.0f} tokens/s (median of {ROUNDS}; {rates[0]:,.0f} to {rates[-1]:,.0f})"
        )


if __name__ == "__main__":
    main()
