"""OpenAI's chat completions, with token ids on request, and the list of models."""

from __future__ import annotations

import time
import uuid
from typing import Any

from aiohttp import web

from prl.inference.chat_stream import logprob_content, stream_chat
from prl.inference.generate_route import usage
from prl.inference.requests import make_request, read_request, refuse
from prl.inference.sequences import Sequence
from prl.inference.worker import EngineWorker
from prl.models.text.chat import ChatRenderer, Message

_SWITCHES = ("stream", "logprobs", "return_token_ids")
_UNSUPPORTED = ("tools", "response_format", "top_logprobs", "echo", "continue_final_message", "chat_template")
# everything else in the body is a sampling parameter
_NOT_SAMPLING = {
    *_UNSUPPORTED,
    *("messages", "model", "max_completion_tokens", "logprobs", "request_id", "cache_salt", "priority", "user"),
    *("return_token_ids", "stream", "stream_options", "tool_choice", "metadata", "store"),
}


def add_chat_routes(app: web.Application, worker: EngineWorker, model_name: str) -> None:
    async def models(http: web.Request) -> web.Response:
        length = worker.engine.config.max_model_len
        entry = {"id": model_name, "object": "model", "owned_by": "prl", "max_model_len": length}
        return web.json_response({"object": "list", "data": [entry]})

    async def chat(http: web.Request) -> web.StreamResponse:
        renderer, engine = worker.renderer, worker.engine
        body = await read_request(http, engine.config.max_model_len, engine.vocab)
        check_switches(body)
        prompt_ids = render(renderer, parse_messages(body))
        body["request_id"] = body.get("request_id") or f"chatcmpl-{uuid.uuid4().hex}"
        request = make_request(body, prompt_ids, chat_sampling(body), model_name, engine.config.max_model_len)
        if body.get("stream"):
            return await stream_chat(http, worker, request, model_name, body)
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


def check_switches(body: dict[str, Any]) -> None:
    """Raises ValueError for what is neither true nor false: "false" would be true."""
    for name in _SWITCHES:
        if not isinstance(body.get(name), bool | None):
            raise ValueError(f"{name} must be true or false")


def parse_messages(body: dict[str, Any]) -> list[Message]:
    """OpenAI's messages, contents made of text parts joined. Raises ValueError."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list with at least one message")
    parsed = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError("a message must be an object with a role")
        content = message.get("content")
        if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
            content = "".join(str(part.get("text", "")) for part in content)
        if not isinstance(content, str):
            raise ValueError("a message's content must be a string or a list of text parts")
        parsed.append({**message, "content": content})
    return parsed


def render(renderer: ChatRenderer, messages: list[Message]) -> list[int]:
    """The prompt's tokens. Raises ValueError when the chat template does not take the messages."""
    try:
        text = renderer.text(messages, add_generation_prompt=True)
    except Exception as error:  # a template is a program, and messages are its only input
        raise ValueError(f"the chat template refuses these messages: {type(error).__name__}: {error}") from error
    try:
        text.encode()
        return renderer.encode(text)
    except UnicodeEncodeError as error:
        raise ValueError("these messages hold a lone surrogate, which is no character") from error
    except Exception as error:
        raise ValueError(f"these messages are no text of the tokenizer: {type(error).__name__}: {error}") from error


def chat_sampling(body: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters of a chat request under their names in sampling_params. Raises ValueError."""
    if body.get("response_format") == {"type": "text"}:
        body = {**body, "response_format": None}
    refuse(body, _UNSUPPORTED)
    sampling = {key: value for key, value in body.items() if key not in _NOT_SAMPLING}
    if body.get("max_completion_tokens") is not None:
        sampling["max_tokens"] = body["max_completion_tokens"]
    sampling["logprobs"] = 0 if body.get("logprobs") else None
    return sampling


def _choice(sequence: Sequence, renderer: ChatRenderer, with_ids: bool) -> dict[str, Any]:
    ids = sequence.completion_ids
    choice: dict[str, Any] = {
        "index": sequence.index,
        "message": {"role": "assistant", "content": renderer.decode(ids, skip_special_tokens=True)},
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.stop_reason,
        "logprobs": logprob_content(renderer, sequence, 0, len(ids)),
        "weight_versions": sequence.version_spans(),
    }
    if with_ids:
        choice["token_ids"] = ids
    return choice
