"""From the JSON of vLLM's routes to a `Request`. What the built-in engine cannot honour is an error, never ignored."""

from __future__ import annotations

import uuid
from typing import Any

from aiohttp import web

from prl.inference.bounds import CONTROL_BODY, body_limit, check_bounds, check_number, parse_json
from prl.inference.sampling import SamplingParams
from prl.inference.sequences import Request
from prl.transport.answers import FRAMES, ROUTING_START
from prl.transport.serving import read_body

_NUMBERS = ("temperature", "top_p", "min_p")
_INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs")
# vLLM's other sampling parameters, with the values at which they change nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "stop": ([], ""),
    "bad_words": ([],),
    "logit_bias": ({},),
    # what vllm-router adds to every chat request
    "no_stop_trim": (False,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "include_reasoning": (True,),
    "return_hidden_states": (False,),
}
# how text is made of tokens: of no consequence where tokens are the answer
_TEXT_ONLY = {
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "output_kind",
    "include_stop_str_in_output",
}
# of vLLM's free field extra_args: ours
_EXTRA = ("kept_tokens", FRAMES, ROUTING_START)
_UNSUPPORTED = ("stream", "features", "content_parts", "kv_transfer_params", "ec_transfer_params")


class ModelNotFound(ValueError):
    """The request names a model that is not served here."""


async def read_object(http: web.Request, limit: int = CONTROL_BODY) -> dict[str, Any]:
    """The body as a JSON object of at most `limit` bytes; an empty body is an empty object. Raises ValueError."""
    body = parse_json(await read_body(http, limit) or b"{}")
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    return body


async def read_request(http: web.Request, max_model_len: int, vocab: int) -> dict[str, Any]:
    """The body of a request to sample, every number and list of it within its bounds. Raises ValueError."""
    body = await read_object(http, body_limit(max_model_len))
    check_bounds(body, vocab)
    return body


def parse_generate(body: dict[str, Any], model_name: str, max_model_len: int) -> Request:
    """The body of /inference/v1/generate. Raises ValueError."""
    refuse(body, _UNSUPPORTED)
    if body.get("output_mode", "tokens") != "tokens":
        raise ValueError("output_mode must be 'tokens': the built-in engine makes no text on this route")
    token_ids = integer_list(body.get("token_ids"), "token_ids")
    sampling = body.get("sampling_params")
    sampling = {} if sampling is None else sampling
    if not isinstance(sampling, dict):
        raise ValueError("sampling_params must be an object")
    return make_request(body, token_ids, sampling, model_name, max_model_len, (*_INTEGERS, "prompt_logprobs"))


def make_request(
    body: dict[str, Any],
    prompt_ids: list[int],
    sampling: dict[str, Any],
    model_name: str,
    max_model_len: int,
    integers: tuple[str, ...] = _INTEGERS,
) -> Request:
    """What all generating routes share. Without max_tokens a completion may fill the context. Raises ValueError."""
    if body.get("model") not in (None, model_name):
        raise ModelNotFound(f"the model {str(body['model'])[:100]!r} does not exist; this is {model_name!r}")
    salt, request_id = body.get("cache_salt"), body.get("request_id")
    for key, value in (("cache_salt", salt), ("request_id", request_id)):
        if value is not None and not (isinstance(value, str) and value):
            raise ValueError(f"{key} must be a string that is not empty")
    priority = _integer(body.get("priority") or 0, "priority")
    check_number("priority", priority)
    sampling = {"max_tokens": max(max_model_len - len(prompt_ids), 1), **_present(sampling)}
    params = parse_sampling(sampling, integers)
    if params.routing_start > len(prompt_ids):
        raise ValueError(
            f"routing_start={params.routing_start} is behind the prompt, which has {len(prompt_ids)} tokens"
        )
    return Request(
        request_id=request_id or uuid.uuid4().hex,
        prompt_ids=prompt_ids,
        params=params,
        cache_salt=salt or "",
        priority=priority,
    )


def parse_sampling(raw: dict[str, Any], integers: tuple[str, ...] = _INTEGERS) -> SamplingParams:
    """vLLM's sampling_params. Raises ValueError naming everything that this engine does not have."""
    values: dict[str, Any] = {}
    foreign = []
    for key, value in _present(raw).items():
        if key in _NUMBERS:
            values[key] = _number(value, key)
        elif key in integers:
            values[key] = _integer(value, key)
        elif key == "stop_token_ids":
            values[key] = tuple(integer_list(value, key))
        elif key in ("ignore_eos", "flat_logprobs"):
            values[key] = _boolean(value, key)
        elif key == "extra_args" and isinstance(value, dict) and value.keys() <= set(_EXTRA):
            values |= {
                name: (_integer if name == ROUTING_START else _boolean)(asked, name) for name, asked in value.items()
            }
        elif key not in _TEXT_ONLY and value not in _NEUTRAL.get(key, ()):
            foreign.append(f"{key}={value!r}"[:100])
    if foreign:
        raise ValueError(f"the built-in engine does not have {', '.join(sorted(foreign))}; use inference=vllm")
    return SamplingParams(**values)


def refuse(body: dict[str, Any], keys: tuple[str, ...]) -> None:
    """Raise ValueError for any of the keys that asks for something."""
    asked = [key for key in keys if body.get(key)]
    if asked:
        raise ValueError(f"the built-in engine does not have {', '.join(asked)}; use inference=vllm")


def integer_list(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):  # bool is an int, too
        raise ValueError(f"{name} must be a list of integers")
    return value


def _present(raw: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if value is not None}


def _number(value: Any, name: str) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{name} must be a number, not {str(value)[:50]}")
    return float(value)


def _integer(value: Any, name: str) -> int:
    if type(value) is not int:
        raise ValueError(f"{name} must be an integer, not {str(value)[:50]}")
    return value


def _boolean(value: Any, name: str) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{name} must be true or false, not {value!r}")
    return value
