"""The built-in engine alone, without HTTP."""

from __future__ import annotations

from typing import Any

import torch

from prl.bench.measurement import MemoryWatch, spread
from prl.config.schema import RunConfig
from prl.inference.bench import COMPLETION_TOKENS, PROMPT_TOKENS, batch_sizes, build_engine, measure


def measure_engine(config: RunConfig) -> dict[str, Any]:
    """Generated tokens/s for several numbers of concurrent sequences; `bench.steps` measurements of each."""
    assert config.bench is not None
    torch.set_num_threads(config.debug.num_threads or torch.get_num_threads())
    engine = build_engine(config, config.bench.random_weights)
    memory = MemoryWatch(engine.device)
    slots = config.inference.max_num_seqs
    for _ in range(config.bench.warmup_steps):
        measure(engine, slots)
    memory.end_warmup()
    rates = [
        {
            "sequences": sequences,
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": COMPLETION_TOKENS,
            "tokens_per_s": spread([measure(engine, sequences) for _ in range(config.bench.steps)]),
        }
        for sequences in batch_sizes(slots)
    ]
    return {"rates": rates, **memory.summary()}
