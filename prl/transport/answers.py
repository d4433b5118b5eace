"""Answers of /inference/v1/generate as one binary message: JSON, and beside it the arrays that stand in it.

Who sets `frames` in the `extra_args` of its sampling parameters gets its numbers so. As JSON the routing of 32k tokens
(94 layers, 8 experts) is 33 MB of base64, which its reader's event loop parses for 0.1 s. `routing_start` beside it:
how many tokens' experts the asker has already; only those behind them are sent.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from prl.transport import frames

FRAMES, ROUTING_START = KEYS = "frames", "routing_start"  # of extra_args; the second one stands in a choice, too
PLACE = "__array__"


def unframed(sampling: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters of a request whose answer is to be JSON: of a prefill engine, where its KV is found."""
    extra = {key: value for key, value in (sampling.get("extra_args") or {}).items() if key not in KEYS}
    return {key: value for key, value in sampling.items() if key != "extra_args"} | (
        {"extra_args": extra} if extra else {}
    )


def encode_answer(answer: dict[str, Any]) -> frames.Message:
    """JSON-able but for numpy arrays, wherever they stand."""
    arrays: dict[str, np.ndarray] = {}

    def placed(node: Any) -> Any:
        if isinstance(node, np.ndarray):
            name = str(len(arrays))
            arrays[name] = node
            return {PLACE: name}
        if isinstance(node, dict):
            return {key: placed(value) for key, value in node.items()}
        if isinstance(node, list) and any(isinstance(one, dict | list | np.ndarray) for one in node):
            return [placed(one) for one in node]
        return node

    return frames.encode(placed(answer), arrays)


def decode_answer(message: bytes | memoryview) -> dict[str, Any]:
    """Inverse of `encode_answer`; arrays are views into the message. Raises ValueError for what is none."""
    answer, arrays = frames.decode(message)

    def found(node: Any) -> Any:
        if isinstance(node, dict):
            return arrays[node[PLACE]] if node.keys() == {PLACE} else {k: found(v) for k, v in node.items()}
        return [found(one) for one in node] if isinstance(node, list) and node and isinstance(node[0], dict) else node

    try:
        return found(answer)
    except KeyError as error:
        raise ValueError(f"the message lacks its array {error}") from error
