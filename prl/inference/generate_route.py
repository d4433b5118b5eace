"""POST /inference/v1/generate: tokens in, tokens out."""

from __future__ import annotations

from typing import Any

import numpy as np
from aiohttp import web

from prl.inference.bounds import check_bounds
from prl.inference.requests import parse_generate, read_request
from prl.inference.sequences import Request, Sequence
from prl.inference.socket_route import add_socket_route
from prl.inference.worker import EngineWorker
from prl.transport.answers import ROUTING_START, encode_answer
from prl.transport.frames import Message
from prl.transport.kept import KeptTokens, encode_array
from prl.transport.serving import InPieces


def add_generate_route(app: web.Application, worker: EngineWorker, model_name: str, with_socket: bool) -> None:
    """with_socket: also for many requests over one connection (`socket_route`)."""

    async def answer(body: dict[str, Any]) -> tuple[Request, dict[str, Any]]:
        config = worker.engine.config
        request = parse_generate(body, model_name, config.max_model_len)
        sequences = await worker.generate(request)
        reply: dict[str, Any] = {
            "request_id": request.request_id,
            "model": model_name,
            "output_mode": "tokens",
            "usage": usage(request, sequences),
            "choices": [choice(s, config.return_routed_experts) for s in sequences],
        }
        if request.params.prompt_logprobs is not None:
            reply["prompt_logprobs"] = told_of_prompt(request, sequences[0])
        if body.get("return_token_ids"):
            reply["prompt_token_ids"] = request.prompt_ids
        return request, reply

    async def generate(http: web.Request) -> web.Response:
        request, reply = await answer(await read_request(http, worker.engine.config.max_model_len, worker.engine.vocab))
        return web.Response(body=InPieces(encode_answer(reply))) if request.params.frames else web.json_response(reply)

    async def framed(body: dict[str, Any]) -> Message:
        check_bounds(body, worker.engine.vocab)
        return encode_answer((await answer(body))[1])

    app.router.add_post("/inference/v1/generate", generate)
    if with_socket:
        add_socket_route(app, worker, framed)


def usage(request: Request, sequences: list[Sequence]) -> dict[str, Any]:
    """OpenAI's, with what the first completion found in the prefix cache."""
    generated = sum(s.num_generated for s in sequences)
    prompt = len(request.prompt_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sequences[0].cached},
    }


def choice(sequence: Sequence, with_routing: bool) -> dict[str, Any]:
    """One of an answer; with arrays in it for who asks for `frames`."""
    logprobs: dict[str, Any] = {"logprobs": None}
    params = sequence.request.params
    routed = sequence.routed_experts() if with_routing else None
    routed = None if routed is None else routed[params.routing_start :]
    if params.logprobs is not None and params.flat_logprobs:
        logprobs["token_logprobs"] = np.array(sequence.logprobs, np.float32) if params.frames else sequence.logprobs
    elif params.logprobs is not None:
        entries = zip(sequence.completion_ids, sequence.logprobs, strict=True)
        objects: list[dict[str, Any]] = [
            {"token_id": t, "logprob": p, "rank": None, "top_logprobs": []} for t, p in entries
        ]
        logprobs["logprobs"] = {"content": objects}
    return {
        "index": sequence.index,
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.stop_reason,
        "token_ids": np.array(sequence.completion_ids, np.int32) if params.frames else sequence.completion_ids,
        **logprobs,
        "routed_experts": routed if params.frames else encode_routing(routed),
        **({ROUTING_START: params.routing_start} if params.routing_start else {}),
        "weight_versions": sequence.version_spans(),
        **({"kept_tokens": KeptTokens.of_sets(sequence.kept).to_json()} if params.kept_tokens else {}),
    }


def told_of_prompt(request: Request, sequence: Sequence) -> list[dict[str, Any] | None]:
    """As vLLM has it: nothing of the first token, of each other one an object by its id."""
    told = zip(request.prompt_ids[1:], sequence.prompt_logprobs, strict=True)
    return [None, *({str(token): {"logprob": p, "rank": None, "decoded_token": None}} for token, p in told)]


def encode_routing(routed: np.ndarray | None) -> str | None:
    """[num_tokens - 1, L, K] uint8 or uint16 as base64 of .npy bytes, the way vLLM sends it."""
    return None if routed is None else encode_array(routed)
