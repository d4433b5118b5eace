"""What numbers, lists and bodies of requests may be, in one table, for all routes of all engines.

A number beyond its bounds is no request of anybody's: it overflows somewhere behind (a tensor, a scheduler, a compiled
kernel), and there it ends an engine. What stands here is refused with 400 before an engine sees it.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from prl.config.schema_fields import MAX_TEMPERATURE

INT32, INT64 = (1 << 31) - 1, (1 << 63) - 1
MAX_N = 1024  # completions of one request
BOUNDS: dict[str, tuple[float, float]] = {
    "n": (1, MAX_N),
    "best_of": (1, MAX_N),
    "temperature": (0, MAX_TEMPERATURE),
    "top_p": (0, 1),
    "top_k": (-1, INT32),
    "min_p": (0, 1),
    "seed": (-INT64 - 1, INT64),
    "max_tokens": (1, INT32),
    "max_completion_tokens": (1, INT32),
    "max_output_tokens": (1, INT32),
    "min_tokens": (0, INT32),
    "logprobs": (-1, MAX_N),
    "top_logprobs": (-1, MAX_N),
    "prompt_logprobs": (-1, MAX_N),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "repetition_penalty": (0, 100),
    "length_penalty": (-100, 100),
    "truncate_prompt_tokens": (-1, INT32),
    "thinking_token_budget": (-1, INT32),
    "priority": (-INT32 - 1, INT32),
    "routing_start": (0, INT32),
}
OTHERS = (-1e9, 1e9)  # a number of any other name beside these that is not whole
OTHER_INTEGERS = (-(1 << 53), 1 << 53)
MAX_DEPTH = 128  # of objects and lists within each other
TOKENS = ("token_ids", "prompt_token_ids", "stop_token_ids", "allowed_token_ids", "prompt", "input", "tokens")
# entries of a list, by its name
LENGTHS = {"stop_token_ids": 1024, "stop": 64, "bad_words": 1024, "messages": 1 << 16, "tools": 1024}
MAX_TEXT = 512  # characters of an identifier, a salt, a name
TEXTS = ("request_id", "cache_salt", "model", "user", "weight_version")
CONTROL_BODY = 64 << 20  # bytes; of a large model's layout
SPARE_BODY = 1 << 20
OPEN_BODY = 4 << 10  # of a route that asks for no key
BYTES_PER_TOKEN = 256  # of text, escapes included, and spaces around ids


def body_limit(max_model_len: int) -> int:
    """Bytes of a request to sample: no prompt that fits the context needs more."""
    return SPARE_BODY + BYTES_PER_TOKEN * max_model_len


def parse_json(data: bytes | str) -> Any:
    """Strict JSON: numbers are finite. Raises ValueError."""
    try:
        return json.loads(data, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:50]} is beyond all numbers")
    return number


def check_bounds(body: Any, vocab: int, logprobs: int = MAX_N) -> None:
    """Raises ValueError for the first value of a request that is beyond its bounds.

    Names mean something beside the prompt and in `sampling_params`. What lies deeper (messages, tools, metadata,
    schemas of answers) is its author's, and need only be such that programs can hold it.

    Args:
        logprobs: that may be asked for.
    """
    wide = _widest(body)
    for fields in (body, body.get("sampling_params")) if isinstance(body, dict) else ():
        for name, value in fields.items() if isinstance(fields, dict) else ():
            if name == "logprobs" and type(value) is int and MAX_N < value <= logprobs:
                continue
            _check_field(name, value, vocab)
    if wide is not None:  # after the fields, which have names to tell
        raise ValueError(f"{str(wide)[:50]} has more than 64 bits")


def _widest(body: Any) -> int | None:
    """A whole number beyond 64 bits, however deep it lies, or None. Raises ValueError for what lies too deep."""
    level, wide = [body], None
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                deeper += value.values()
            elif isinstance(value, list):
                # of token ids, which may be many, the least and the greatest are enough
                deeper += (min(value), max(value)) if {*map(type, value)} == {int} else value
            elif isinstance(value, int) and not -INT64 - 1 <= value <= INT64:
                wide = value
        level = deeper
    if level:
        raise ValueError(f"the body nests more than {MAX_DEPTH} objects and lists")
    return wide


def _check_field(name: str, value: Any, vocab: int) -> None:
    if isinstance(value, list):
        if len(value) > LENGTHS.get(name, len(value)):
            raise ValueError(f"{name} has {len(value)} entries, more than {LENGTHS[name]}")
        if name in TOKENS and value and all(type(entry) is int for entry in value):
            if min(value) < 0 or max(value) >= vocab:
                raise ValueError(f"token ids ({name}) must be in [0, {vocab})")
            return
        for entry in value:
            _check_field(name, entry, vocab)
    elif isinstance(value, int | float):
        check_number(name, value)
    elif isinstance(value, str) and name in TEXTS and len(value) > MAX_TEXT:
        raise ValueError(f"{name} has more than {MAX_TEXT} characters")


def check_number(name: str, value: float) -> None:
    """Raises ValueError for a number that is beyond the bounds of its name."""
    low, high = BOUNDS.get(name, OTHER_INTEGERS if isinstance(value, int) else OTHERS)
    if not low <= value <= high:
        raise ValueError(f"{name or 'a number'} must be in [{low:g}, {high:g}], not {str(value)[:50]}")
