"""vLLM's answers in frames, with an engine that records routing, which vLLM does on GPUs: its handler is a stand-in
here (`test_vllm.py` has the real one, without routing).
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from prl.inference.vllm.flat_logprobs import answer_flat
from prl.transport.answers import decode_answer
from prl.transport.frames import PIECE

PROMPT, TOKENS = 5, 3


class Choice(BaseModel):
    index: int
    token_ids: list[int]
    logprobs: Any = None
    routed_experts: str | None = None


class Response(BaseModel):
    choices: list[Choice]


class Handler:
    """As vLLM's `ServingTokens`, of which the last step is wrapped: routing as text."""

    def __init__(self, layers: int = 2) -> None:
        self.routed = np.arange((PROMPT + TOKENS - 1) * layers, dtype=np.uint8).reshape(-1, layers, 1)

    async def serve_tokens_full_generator(self, request: Any, results: Any) -> Response:
        async for result in results:
            last = result
        text = [None if o.routed_experts is None else "as text" for o in last.outputs]
        return Response(
            choices=[
                Choice(index=o.index, token_ids=o.token_ids, routed_experts=t)
                for o, t in zip(last.outputs, text, strict=True)
            ]
        )

    async def results(self) -> Any:
        flat = SimpleNamespace(logprobs=[-0.5, -0.25, float("nan")], start_indices=[0, 1, 2], end_indices=[1, 2, 3])
        output = SimpleNamespace(index=0, token_ids=[7, 8, 9], logprobs=flat, routed_experts=self.routed)
        yield SimpleNamespace(outputs=[output])


class Request(SimpleNamespace):
    def model_copy(self, update: dict[str, Any]) -> Request:
        return Request(**(vars(self) | update))


def ask(extra: dict[str, Any] | None, handler: Handler | None = None, pieces: list[int] | None = None) -> Any:
    """The choice that is answered, decoded if it came in frames."""
    handler = handler or Handler()
    answer_flat(handler)
    params = SimpleNamespace(extra_args=extra, logprobs=0, flat_logprobs=True)

    async def call() -> Any:
        request = Request(sampling_params=params, token_ids=list(range(PROMPT)))
        answer = await handler.serve_tokens_full_generator(request, handler.results())
        if isinstance(answer, BaseModel):
            return answer.model_dump()["choices"][0]
        parts = [bytes(part) async for part in answer]
        if pieces is not None:
            pieces.extend(map(len, parts))
        return decode_answer(b"".join(parts))["choices"][0]

    return asyncio.run(call())


@pytest.mark.parametrize("start", [None, 0, 4])
def test_routing_comes_as_bytes_from_where_it_is_asked_for(start: int | None) -> None:
    choice = ask({"frames": True} | ({} if start is None else {"routing_start": start}))
    assert np.array_equal(choice["routed_experts"], Handler().routed[start or 0 :])
    assert choice.get("routing_start", 0) == (start or 0)
    assert choice["token_ids"].tolist() == [7, 8, 9]
    assert choice["token_logprobs"].tolist() == [-0.5, -0.25, -9999.0]


def test_who_does_not_ask_for_frames_gets_json() -> None:
    choice = ask(None)
    assert (choice["token_ids"], choice["routed_experts"]) == ([7, 8, 9], "as text")
    assert choice["token_logprobs"] == [-0.5, -0.25, -9999.0]


@pytest.mark.parametrize("start", ["x", -3, None, [1]])
def test_of_nonsense_all_is_sent(start: Any) -> None:
    assert len(ask({"frames": True, "routing_start": start})["routed_experts"]) == PROMPT + TOKENS - 1


def test_a_large_answer_leaves_in_pieces() -> None:
    pieces: list[int] = []
    choice = ask({"frames": True}, Handler(layers=100_000), pieces)
    assert choice["routed_experts"].shape == (PROMPT + TOKENS - 1, 100_000, 1)
    assert len(pieces) > 3
    assert max(pieces) == PIECE
