"""OpenAI's chat completions, with token ids on request, and the list of models."""

from __future__ import annotations

import time
import uuid
from typing import Any

from aiohttp import web

from prl.inference.generate_route import parse_sampling, usage
from prl.inference.sequences import Request, Sequence
from prl.inference.worker import EngineWorker
from prl.models.chat import ChatRenderer

_SAMPLING = ("n", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "stop_token_ids", "ignore_eos")


def add_chat_routes(app: web.Application, worker: EngineWorker, renderer: ChatRenderer, model_name: str) -> None:
    async def models(http: web.Request) -> web.Response:
        entry = {"id": model_name, "object": "model", "owned_by": "prl", "max_model_len": worker.engine.config.max_model_len}
        return web.json_response({"object": "list", "data": [entry]})

    async def chat(http: web.Request) -> web.Response:
        body = await http.json()
        for key in ("stream", "tools", "stop", "response_format"):
            if body.get(key):
                raise ValueError(f"{key} is not supported by the built-in engine; use inference=vllm")
        prompt_ids = renderer.encode(renderer.text(body["messages"], add_generation_prompt=True))
        room = worker.engine.config.max_model_len - len(prompt_ids)
        sampling = {key: body[key] for key in _SAMPLING if body.get(key) is not None}
        sampling["max_tokens"] = body.get("max_completion_tokens") or body.get("max_tokens") or max(room, 1)
        sampling["logprobs"] = 0 if body.get("logprobs") else None
        request = Request(
            request_id=str(body.get("request_id") or f"chatcmpl-{uuid.uuid4().hex}"),
            prompt_ids=prompt_ids,
            params=parse_sampling(sampling),
            cache_salt=str(body.get("cache_salt") or ""),
            priority=int(body.get("priority") or 0),
        )
        sequences = await worker.generate(request)
        with_ids = bool(body.get("return_token_ids"))
        reply: dict[str, Any] = {
            "id": request.request_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model_name,
            "choices": [_choice(s, renderer, with_ids) for s in sequences],
            "usage": usage(request, sequences),
        }
        if with_ids:
            reply["prompt_token_ids"] = prompt_ids
        return web.json_response(reply)

    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", chat)


def _choice(sequence: Sequence, renderer: ChatRenderer, with_ids: bool) -> dict[str, Any]:
    ids = sequence.completion_ids
    choice: dict[str, Any] = {
        "index": sequence.index,
        "message": {"role": "assistant", "content": renderer.decode(ids, skip_special_tokens=True)},
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.stop_reason,
        "logprobs": None,
        "weight_versions": sequence.version_spans(),
    }
    if sequence.request.params.logprobs is not None:
        pieces = [renderer.decode([token], skip_special_tokens=False) for token in ids]
        choice["logprobs"] = {
            "content": [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in zip(pieces, sequence.logprobs, strict=True)
            ]
        }
    if with_ids:
        choice["token_ids"] = ids
    return choice
