"""Chat completions as they grow: OpenAI's server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from aiohttp import web

from prl.inference.errors import error_body
from prl.inference.generate_route import usage
from prl.inference.sequences import Request, Sequence
from prl.inference.worker import EngineUnavailable, EngineWorker, SequenceFailed
from prl.models.text.chat import ChatRenderer

POLL_S = 0.02  # between looks at what the engine has appended; small models make tokens faster than that
UNFINISHED = "\ufffd"  # what a character decodes to while bytes of it are missing


class Tail:
    """What of one sequence has not been sent yet."""

    def __init__(self, sequence: Sequence, renderer: ChatRenderer, with_ids: bool) -> None:
        self.sequence, self.renderer, self.with_ids = sequence, renderer, with_ids
        self.tokens = self.chars = 0  # sent so far
        self.ended = False

    def next_choice(self) -> dict[str, Any] | None:
        """A chunk's entry for all that is new, None when nothing is. The engine's thread may append meanwhile."""
        sequence = self.sequence
        reason = sequence.finish_reason  # before the tokens: once it is set, none follow
        if reason == "error":  # it ends with an event of its own, once the step is through
            return None
        count = len(sequence.versions)  # appended last, so that all lists hold so many
        if self.ended or (count <= self.tokens and reason is None):  # fewer: a step is done again
            return None
        ids = sequence.completion_ids[:count]
        text = self.renderer.decode(ids, skip_special_tokens=True)
        if reason is None:
            text = text.rstrip(UNFINISHED)
        first, content = self.tokens, text[self.chars :]
        self.tokens, self.chars, self.ended = count, max(len(text), self.chars), reason is not None
        choice: dict[str, Any] = {
            "index": sequence.index,
            "delta": {"content": content},
            "logprobs": logprob_content(self.renderer, sequence, first, count),
            "finish_reason": reason,
        }
        if reason is not None:
            choice |= {"stop_reason": sequence.stop_reason, "weight_versions": sequence.version_spans()}
        if self.with_ids:
            choice["token_ids"] = ids[first:]
        return choice


def logprob_content(renderer: ChatRenderer, sequence: Sequence, first: int, end: int) -> dict[str, Any] | None:
    """OpenAI's logprobs of a stretch of the completion's tokens; None when they were not asked for."""
    if sequence.request.params.logprobs is None:
        return None
    tokens = zip(sequence.completion_ids[first:end], sequence.logprobs[first:end], strict=True)
    pieces = [(renderer.decode([token], skip_special_tokens=False), logprob) for token, logprob in tokens]
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in pieces
        ]
    }


async def stream_chat(
    http: web.Request, worker: EngineWorker, request: Request, model_name: str, body: dict[str, Any]
) -> web.StreamResponse:
    """Answer with events until all completions have ended. What fails before the first is raised, as without stream.

    Raises ValueError for stream_options that are none.
    """
    with_usage = _wants_usage(body)
    sequences = worker.engine.prepare(request)
    generation = asyncio.ensure_future(worker.generate(request, sequences))
    await asyncio.wait([generation], timeout=POLL_S)
    if generation.done():
        generation.result()
    frame = {"id": request.request_id, "object": "chat.completion.chunk", "created": int(time.time())}
    frame["model"] = model_name
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    try:
        await response.prepare(http)
        with_ids = bool(body.get("return_token_ids"))
        start = {"prompt_token_ids": request.prompt_ids} if with_ids else {}
        for sequence in sequences:
            choice = {"index": sequence.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            await _send(response, {**frame, **start, "choices": [choice]})
        tails = [Tail(sequence, worker.renderer, with_ids) for sequence in sequences]
        while not all(tail.ended for tail in tails):
            for choice in filter(None, [tail.next_choice() for tail in tails]):
                await _send(response, {**frame, "choices": [choice]})
            await asyncio.wait([generation], timeout=POLL_S)
            if generation.done():
                generation.result()
        await generation
        if with_usage:
            await _send(response, {**frame, "choices": [], "usage": usage(request, sequences)})
        await response.write(b"data: [DONE]\n\n")
    except (EngineUnavailable, SequenceFailed) as error:  # the status is out: the error is an event
        await _send(response, error_body(500 if isinstance(error, SequenceFailed) else 503, str(error)))
    finally:
        generation.cancel()
    return response


def _wants_usage(body: dict[str, Any]) -> bool:
    """Raises ValueError."""
    options = body.get("stream_options")
    wanted = options.get("include_usage", False) if isinstance(options, dict) else False
    if not isinstance(options, dict | None) or not isinstance(wanted, bool | None):
        raise ValueError("stream_options must be an object, and its include_usage true or false")
    return bool(wanted)


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())
