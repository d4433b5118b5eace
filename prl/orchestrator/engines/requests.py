"""What engines are asked, as vLLM's routes have it: bodies of requests to sample, and the steps of an update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prl.config.errors import PassingError
from prl.config.schema import SamplingConfig
from prl.orchestrator.engines.answers import EngineError
from prl.transport.answers import FRAMES, ROUTING_START
from prl.transport.weights_lora import LORA, load_steps

# running requests keep their KV: vLLM would drop it with the caches, and compute it anew under the next weights
PAUSE = "/pause?mode=keep&clear_cache=false"
GENERATE = "/inference/v1/generate"


def generate_body(
    prompt_ids: list[int],
    max_tokens: int,
    seed: int,
    salt: str,
    sampling: SamplingConfig,
    request_id: str,
    telling: dict[str, Any],
    routing_start: int,
) -> dict[str, Any]:
    """Of GENERATE; the arguments are those of `EnginePool.generate`."""
    extra = {FRAMES: True} | ({ROUTING_START: routing_start} if routing_start else {})
    return {
        "request_id": request_id,
        "token_ids": prompt_ids,
        "cache_salt": salt,
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_tokens": max_tokens,
            "seed": seed,
            "stop_token_ids": list(sampling.stop_token_ids),
            "logprobs": 0,
            "flat_logprobs": True,
            "detokenize": False,
            **telling,
            "extra_args": extra | telling.get("extra_args", {}),
        },
    }


def update_steps(version: int, update_info: dict[str, Any]) -> list[tuple[str, dict[str, Any] | None]]:
    """Routes and bodies of an update, until /resume."""
    if update_info.get("type") == LORA:
        return [(PAUSE, None), *load_steps(version, update_info)]
    return [
        (PAUSE, None),
        # to 0.23, which would set up a reload: our transfer engine loads by itself
        ("/start_weight_update", {"is_checkpoint_format": False}),
        ("/update_weights", {"update_info": update_info}),
        ("/finish_weight_update", {"weight_version": str(version)}),
    ]


@contextlib.contextmanager
def files_missed(update_info: dict[str, Any]) -> Iterator[None]:
    """An update of weights that lie in files: PassingError instead of EngineError where it failed for they are gone."""
    try:
        yield
    except EngineError as error:
        path = update_info.get("path")
        if update_info.get("type") not in ("filesystem", LORA) or path is None or Path(path).exists():
            raise
        raise PassingError(
            f"The weights of version {update_info.get('version')} are gone before engines had them.",
            where=str(path),
            why="engines fetch each version from there, and somebody has removed it",
            fix="leave weights/ to the run while it runs; the same command resumes",
        ) from error
