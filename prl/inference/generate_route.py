"""POST /inference/v1/generate: tokens in, tokens out."""

from __future__ import annotations

import base64
import io
import uuid
from typing import Any

import numpy as np
from aiohttp import web

from prl.inference.sampling import SamplingParams
from prl.inference.sequences import Request, Sequence
from prl.inference.worker import EngineWorker

_KNOWN = {"n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "ignore_eos", "logprobs"}
# accepted because they change nothing here: no text is produced
_NEUTRAL = {"detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind", "include_stop_str_in_output"}


def add_generate_route(app: web.Application, worker: EngineWorker, model_name: str) -> None:
    async def generate(http: web.Request) -> web.Response:
        body = await http.json()
        request = parse_request(body)
        sequences = await worker.generate(request)
        return web.json_response(
            {
                "request_id": request.request_id,
                "model": model_name,
                "output_mode": "tokens",
                "usage": usage(request, sequences),
                "choices": [choice(s, worker.engine.config.return_routed_experts) for s in sequences],
            }
        )

    app.router.add_post("/inference/v1/generate", generate)


def parse_request(body: dict[str, Any]) -> Request:
    """Raises ValueError naming whatever this engine does not honour."""
    if body.get("stream"):
        raise ValueError("stream=true is not supported by the built-in engine; use inference=vllm")
    token_ids = body.get("token_ids")
    if not isinstance(token_ids, list) or not all(isinstance(t, int) for t in token_ids):
        raise ValueError("token_ids must be a list of integers")
    return Request(
        request_id=str(body.get("request_id") or uuid.uuid4().hex),
        prompt_ids=token_ids,
        params=parse_sampling(body.get("sampling_params") or {}),
        cache_salt=str(body.get("cache_salt") or ""),
        priority=int(body.get("priority") or 0),
    )


def parse_sampling(raw: dict[str, Any]) -> SamplingParams:
    """vLLM's sampling_params; a parameter that would be ignored is an error."""
    stop_ids = tuple(int(t) for t in raw.get("stop_token_ids") or ())
    given = {key: value for key, value in raw.items() if value is not None and key != "stop_token_ids"}
    unknown = sorted(key for key, value in given.items() if key not in _KNOWN | _NEUTRAL and value not in (0, 0.0, 1.0, [], False, ""))
    if unknown:
        raise ValueError(f"sampling_params that the built-in engine does not have: {', '.join(unknown)}")
    return SamplingParams(**{key: value for key, value in given.items() if key in _KNOWN}, stop_token_ids=stop_ids)


def usage(request: Request, sequences: list[Sequence]) -> dict[str, int]:
    generated = sum(s.num_generated for s in sequences)
    prompt = len(request.prompt_ids)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def choice(sequence: Sequence, with_routing: bool) -> dict[str, Any]:
    logprobs = None
    if sequence.request.params.logprobs is not None:
        entries = zip(sequence.completion_ids, sequence.logprobs, strict=True)
        logprobs = {"content": [{"token_id": t, "logprob": p, "rank": None, "top_logprobs": []} for t, p in entries]}
    return {
        "index": sequence.index,
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.stop_reason,
        "token_ids": sequence.completion_ids,
        "logprobs": logprobs,
        "routed_experts": encode_routing(sequence.routed_experts()) if with_routing else None,
        "weight_versions": sequence.version_spans(),
    }


def encode_routing(routed: np.ndarray | None) -> str | None:
    """[num_tokens - 1, L, K] uint8 as base64 of .npy bytes, the way vLLM sends it."""
    if routed is None:
        return None
    buffer = io.BytesIO()
    np.save(buffer, routed, allow_pickle=False)
    return base64.b64encode(buffer.getvalue()).decode()
