"""`python -m prl.inference.bench [overrides]`: tokens/s of the built-in engine on groups of rollouts, without HTTP."""

from __future__ import annotations

import sys
import time

import torch

from prl.config import compose
from prl.inference.engine import TorchEngine
from prl.inference.sampling import SamplingParams
from prl.inference.sequences import Request
from prl.inference.server import load_engine

PROMPT_TOKENS, COMPLETION_TOKENS, GROUP = 16, 48, 8


def submit_groups(engine: TorchEngine, groups: int) -> None:
    """`groups` prompts with GROUP completions each, as the orchestrator sends them."""
    for group in range(groups):
        prompt = [(group * 7 + i) % engine.vocab for i in range(PROMPT_TOKENS)]
        for member in range(GROUP):
            params = SamplingParams(seed=group * GROUP + member, max_tokens=COMPLETION_TOKENS, ignore_eos=True)
            engine.submit(engine.prepare(Request(f"{group}-{member}", prompt, params, arrival=group * GROUP + member)))


def measure(engine: TorchEngine, groups: int) -> float:
    """Generated tokens per second until all are done."""
    engine.reset_prefix_cache()
    submit_groups(engine, groups)
    before, started = engine.stats.generation_tokens, time.perf_counter()
    while engine.busy:
        engine.step()
    return (engine.stats.generation_tokens - before) / (time.perf_counter() - started)


def main() -> None:
    config = compose(sys.argv[1:], config_name="inference")
    torch.set_num_threads(config.debug.num_threads or 1)
    engine, _ = load_engine(config, None)
    slots = config.inference.max_num_seqs
    print(f"{config.model.name} on {engine.device}, {torch.get_num_threads()} threads, {slots} slots")
    measure(engine, max(slots // GROUP, 1))  # warms up
    for sequences in sorted({GROUP, max(slots // 4, GROUP), slots, 2 * slots}):
        rate = max(measure(engine, sequences // GROUP) for _ in range(3))
        print(f"{sequences:5d} sequences of {PROMPT_TOKENS}+{COMPLETION_TOKENS} tokens: {rate:9,.0f} tokens/s")


if __name__ == "__main__":
    main()
