"""Logprobs of /inference/v1/generate as one list of numbers, for who asks with vLLM's `flat_logprobs`.

vLLM makes a pydantic object of each token's logprob, in its server's only event loop: 64 completions of 448 tokens that
end together hold up all else for half a second, a pause before a weight update too. vLLM has no leaner answer yet
(https://github.com/vllm-project/vllm/pull/57442); until then the last step of its handler is wrapped here. Choices then
have `token_logprobs`, one number for each token, in place of `logprobs`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from pydantic import BaseModel, create_model

LEAST = -9999.0  # vLLM's own substitute for minus infinity and NaN, which JSON does not have


def answer_flat(handler: Any) -> None:
    """Wrap vLLM's handler of the route (`ServingTokens`); requests that do not ask for it are answered as before."""
    answer = handler.serve_tokens_full_generator

    async def flat(request: Any, results: AsyncIterator[Any], *rest: Any) -> Any:
        params = request.sampling_params
        if not params.flat_logprobs or params.logprobs != 0 or getattr(request, "output_mode", "tokens") != "tokens":
            return await answer(request, results, *rest)
        last: Any = None

        async def noted() -> AsyncIterator[Any]:
            nonlocal last
            async for result in results:
                last = result
                yield result

        silent = copy.copy(params)  # the engine has the request's own
        silent.logprobs = None
        response = await answer(request.model_copy(update={"sampling_params": silent}), noted(), *rest)
        return with_logprobs(response, last.outputs) if hasattr(response, "choices") else response

    handler.serve_tokens_full_generator = flat


def with_logprobs(response: BaseModel, outputs: list[Any]) -> BaseModel:
    """The response with the logprobs of `outputs`, vLLM's own for each choice."""
    choices: list[BaseModel] = response.choices  # type: ignore[attr-defined]
    flat_response, flat_choice = _types(type(response), type(choices[0]))
    flat = [
        flat_choice.model_construct(**dict(choice), token_logprobs=sampled_logprobs(output.logprobs))
        for choice, output in zip(choices, outputs, strict=True)
    ]
    return flat_response.model_construct(**dict(response) | {"choices": flat})


def sampled_logprobs(logprobs: Any) -> list[float]:
    """Of vLLM's FlatLogprobs, the first number at each position: the sampled token's."""
    numbers = np.asarray(logprobs.logprobs, np.float64)[logprobs.start_indices]
    return np.maximum(np.nan_to_num(numbers, nan=LEAST), LEAST).tolist()


@functools.cache
def _types(response: type[BaseModel], choice: type[BaseModel]) -> tuple[type[BaseModel], type[BaseModel]]:
    flat = create_model("FlatChoice", __base__=choice, token_logprobs=(list[float], ...))
    return create_model("FlatResponse", __base__=response, choices=(list[flat], ...)), flat
