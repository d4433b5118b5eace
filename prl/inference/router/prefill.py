"""One request as two: its prompt for a prefill engine, the rest for a decode engine (vLLM's kv_transfer_params)."""

from __future__ import annotations

from typing import Any

from prl.planning.vllm_arguments import PREFILL_ONLY
from prl.transport.answers import unframed

# what asks for more than the KV of the prompt
_LENGTHS = ("max_tokens", "max_completion_tokens")
_DROPPED = ("stream_options", "n", "best_of", "logprobs", "top_logprobs", "prompt_logprobs")


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """The same request for one token, which nobody will read."""
    short = {name: value for name, value in body.items() if name not in _DROPPED}
    short |= {"kv_transfer_params": PREFILL_ONLY, "stream": False}
    if isinstance(body.get("sampling_params"), dict):  # /inference/v1/generate
        short["sampling_params"] = unframed(body["sampling_params"]) | {"max_tokens": 1, "min_tokens": 0}
    else:
        short |= {name: 1 for name in _LENGTHS if name in body} or {"max_tokens": 1}
        short["min_tokens"] = 0
    return short


def decode_body(body: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The request itself, with the place of its prompt's KV as the prefill engine gave it."""
    return body | {"kv_transfer_params": found}
