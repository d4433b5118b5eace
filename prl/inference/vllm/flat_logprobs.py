"""Logprobs of /inference/v1/generate as one list of numbers, for who asks with vLLM's `flat_logprobs`.

vLLM makes a pydantic object of each token's logprob, in its server's only event loop: 64 completions of 448 tokens that
end together hold up all else for half a second, a pause before a weight update too. vLLM has no leaner answer yet
(https://github.com/vllm-project/vllm/pull/57442); until then the last step of its handler is wrapped here. Choices then
have `token_logprobs`, one number for each token, in place of `logprobs`.

Who sets `frames` in `extra_args` gets the answer as one binary message (`prl.transport.answers`). With `kept_tokens`
there choices also say what each token was drawn from, as far as the `logprobs` asked for tell: `kept_tokens`, as from
the built-in engine, and `kept_mass`, the least that their probabilities add up to.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from pydantic import BaseModel, create_model

from prl.transport.answers import FRAMES, ROUTING_START, encode_answer
from prl.transport.frames import Message
from prl.transport.kept import LEAST, kept_of_candidates

KEPT = "kept_tokens"


def answer_flat(handler: Any) -> None:
    """Wrap vLLM's handler of the route (`ServingTokens`); requests that do not ask for it are answered as before."""
    answer = handler.serve_tokens_full_generator

    async def flat(request: Any, results: AsyncIterator[Any], *rest: Any) -> Any:
        params = request.sampling_params
        extra = params.extra_args or {}
        told = bool(extra.get(KEPT)) and params.logprobs is not None
        framed = extra.get(FRAMES) is True
        start = _start(extra, request) if framed else 0
        is_flat = params.flat_logprobs and (told or params.logprobs == 0)
        if not is_flat or getattr(request, "output_mode", "tokens") != "tokens":
            return await answer(request, results, *rest)
        last: Any = None
        routed: dict[int, Any] = {}

        async def noted() -> AsyncIterator[Any]:
            nonlocal last
            async for result in results:
                last = result
                for output in result.outputs if framed else ():
                    if output.routed_experts is not None:
                        routed[output.index], output.routed_experts = output.routed_experts[start:], None
                yield result

        silent = copy.copy(params)  # the engine has the request's own
        silent.logprobs = None
        response = await answer(request.model_copy(update={"sampling_params": silent}), noted(), *rest)
        if not hasattr(response, "choices"):
            return response
        if framed:
            return in_pieces(as_frames(response, last.outputs, routed, told, start))
        return with_logprobs(response, last.outputs, told)

    handler.serve_tokens_full_generator = flat


def with_logprobs(response: BaseModel, outputs: list[Any], told: bool = False) -> BaseModel:
    """The response with the logprobs of `outputs`, vLLM's own for each choice; told: and with what was kept."""
    choices: list[BaseModel] = response.choices  # type: ignore[attr-defined]
    flat_response, flat_choice = _types(type(response), type(choices[0]), told)
    flat = [
        flat_choice.model_construct(
            **dict(choice),
            token_logprobs=sampled_logprobs(output.logprobs),
            **(kept_tokens(output.logprobs) if told else {}),
        )
        for choice, output in zip(choices, outputs, strict=True)
    ]
    return flat_response.model_construct(**dict(response) | {"choices": flat})


def as_frames(response: BaseModel, outputs: list[Any], routed: dict[int, Any], told: bool, start: int) -> Message:
    """The same as one message, its numbers as arrays."""
    answer = response.model_dump()
    for choice, output in zip(answer["choices"], outputs, strict=True):
        choice["token_ids"] = np.asarray(output.token_ids, np.int32)
        choice["token_logprobs"] = sampled_numbers(output.logprobs).astype(np.float32)
        choice["routed_experts"] = routed.get(output.index)
        choice |= kept_tokens(output.logprobs) if told else {}
        choice |= {ROUTING_START: start} if start else {}
    return encode_answer(answer)


async def in_pieces(message: Message) -> AsyncIterator[bytes | memoryview]:
    """For vLLM's route, which sends what is no response of its own as a stream."""
    for piece in message.pieces():
        yield piece
        await asyncio.sleep(0)  # a socket that takes all at once would not let others in


def _start(extra: dict[str, Any], request: Any) -> int:
    """How many tokens' experts are left out; of nonsense none."""
    with contextlib.suppress(TypeError, ValueError):
        return min(max(int(extra.get(ROUTING_START) or 0), 0), len(request.token_ids))
    return 0


def sampled_numbers(logprobs: Any) -> np.ndarray:
    """Of vLLM's FlatLogprobs, the first number at each position: the sampled token's."""
    numbers = np.asarray(logprobs.logprobs, np.float64)[logprobs.start_indices]
    return np.maximum(np.nan_to_num(numbers, nan=LEAST), LEAST)


def sampled_logprobs(logprobs: Any) -> list[float]:
    """The same for JSON."""
    return sampled_numbers(logprobs).tolist()


def kept_tokens(logprobs: Any) -> dict[str, Any]:
    """Of vLLM's FlatLogprobs, the fields of a choice that say what each token was drawn from."""
    lengths = np.asarray(logprobs.end_indices, np.int64) - np.asarray(logprobs.start_indices, np.int64)
    numbers = np.nan_to_num(np.asarray(logprobs.logprobs, np.float64), nan=LEAST)
    kept, mass = kept_of_candidates(lengths, np.asarray(logprobs.token_ids, np.int64), numbers)
    return {KEPT: kept.to_json(), "kept_mass": mass}


@functools.cache
def _types(response: type[BaseModel], choice: type[BaseModel], told: bool) -> tuple[type[BaseModel], type[BaseModel]]:
    fields: dict[str, Any] = {"token_logprobs": (list[float], ...)}
    if told:
        fields |= {KEPT: (dict[str, str], ...), "kept_mass": (float, ...)}
    flat = create_model("FlatChoice", __base__=choice, **fields)
    return create_model("FlatResponse", __base__=response, choices=(list[flat], ...)), flat
