"""What the fuzzers of all servers share: strange requests, made by hypothesis, and what a server is like afterwards."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from prl.inference.bounds import BOUNDS
from prl.runtime.external import LEASE, RUN_HEADER

FEW, MANY = 25, 2000  # requests of each route: in CI, and in the exhaustive tier
EDGES = [
    0,
    -1,
    1,
    2,
    255,
    256,
    263,
    264,
    1 << 15,
    1 << 31,
    (1 << 31) - 1,
    1 << 32,
    1 << 53,
    (1 << 63) - 1,
    1 << 63,
    -(1 << 63),
]
FLOATS = [0.0, -0.0, 1e-300, 1e-45, 1e-6, 0.5, 1.0, 1.5, 1e38, 1e39, 1e308, -1e39, float("nan"), float("inf")]
WORDS = [
    "",
    "a",
    "tiny_qwen3_moe",
    "../../x",
    "\ud800",
    "\x00",
    "ü" * 40,
    "x" * 3000,
    "user",
    "assistant",
    "tokens",
    "{{1/0}}",
]

numbers = st.sampled_from(EDGES) | st.integers() | st.sampled_from(FLOATS) | st.floats()
scalars = st.none() | st.booleans() | numbers | st.sampled_from(WORDS) | st.text(max_size=20)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=12,
)
tokens = st.lists(st.integers(0, 263), min_size=1, max_size=12)


def object_of(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Some of the fields, mostly as they should be, here and there anything."""
    loose = {name: st.one_of(good, good, good, anything) for name, good in fields.items()}
    return st.fixed_dictionaries({}, optional=loose) | anything


def within(name: str) -> st.SearchStrategy[Any]:
    low, high = BOUNDS[name]
    whole = isinstance(low, int) and isinstance(high, int) and high > 1
    near = st.integers(max(int(low), -9), min(int(high), 9)) if whole else st.floats(float(low), min(float(high), 9.0))
    return near | st.sampled_from([low, high, low - 1, high + 1])


SAMPLING = {
    **{name: within(name) for name in BOUNDS if name not in ("n", "best_of")},
    "max_tokens": st.integers(1, 4),
    "n": st.integers(1, 3),
    "stop_token_ids": tokens,
    "ignore_eos": st.booleans(),
    "flat_logprobs": st.booleans(),
    "logprobs": st.just(0),
}
COMMON = {
    "model": st.just("tiny_qwen3_moe"),
    "cache_salt": st.text(min_size=1, max_size=5),
    "priority": within("priority"),
}
STREAM = {"stream": st.booleans(), "stream_options": st.none() | st.just({"include_usage": True})}
MESSAGES = st.lists(
    object_of(
        {
            "role": st.sampled_from(["user", "assistant", "system"]),
            "content": st.text(max_size=20),
            "tool_calls": st.none(),
        }
    ),
    max_size=3,
)
RUNS, LIVES = st.sampled_from(["r", "s"]), st.sampled_from(["0", "1"])
WEIGHTS = {
    "transport": st.sampled_from(["filesystem", "tcp"]),
    "directory": st.sampled_from(["/r", "/nowhere/at/all"]),
    "hosts": st.lists(st.sampled_from(["127.0.0.1", "h"]), max_size=2),
    "timeout_s": st.floats(0.1, 10.0),
}
BODIES = {
    "/inference/v1/generate": object_of({"token_ids": tokens, "sampling_params": object_of(SAMPLING), **COMMON}),
    "/v1/chat/completions": object_of({"messages": MESSAGES, **STREAM, **SAMPLING, **COMMON}),
    "/v1/completions": object_of({"prompt": tokens | st.text(max_size=20), **SAMPLING, **COMMON}),
    "/train/checkpoint": object_of({"step": st.integers(0, 9), "in_haste": st.booleans()}),
    "/train/done": object_of({"step": st.integers(0, 9)}),
    "/train/weights": object_of(
        {"publication": st.integers(0, 9), "version": st.integers(0, 9), "update_info": st.just({})}
    ),
    LEASE: object_of({"run": RUNS, "life": LIVES, "host": st.text(max_size=20), "weights": object_of(WEIGHTS)}),
}
QUERIES = st.sampled_from(
    [
        *("", "?mode=keep", "?mode=abort", "?mode=x", "?level=1", "?level=9", "?tags=weights", "?tags=x", "?%ff=%00"),
        *("?step=1&data_rank=0&publications=0", "?step=-1", "?step=9999999999999999999999", "?publication=0"),
        *("?publication=x", "?=&&&=="),
    ]
)
QUERIES_OF = {  # what routes begin with -> queries that are right, or nearly
    "/api/": [
        *("?run=sweeps/s/a&step=1", "?run=sweeps/s/a&sort=reward&order=rising&first=0&count=9", "?run=..&id=x"),
        *("?run=sweeps/s/a&sort=x", "?run=sweeps/s/a&first=-1", "?sweep=sweeps/s", "?sweep=../..", "?token=%ff%00"),
        *("?run=sweeps/s/a&count=99999999999&first=99999999999", "?one=sweeps/s/a&other=sweeps/s/a", "?one=%00"),
    ],
    "/train/": [
        *("?step=1&data_rank=0&publications=0", "?publication=0", "?step=3", "?step=x&publication=-1"),
    ],
}
NAMES = ["Content-Type", "Content-Encoding", "Origin", "Host", "Accept", "X-A", "Expect", "Cookie", "Range"]
RUN_NAMES = ["r", "s", "ü", "\udcff", ""]
VALUES = [
    *("", "a", "text/html; charset=klingon", "gzip", "deflate", "http://e", "100-continue", "ü", "\udcff", "bytes=0-"),
    "b" * 9000,
]
HEADERS = st.lists(
    # aiohttp 3.14 itself answers an Expect that is no UTF-8 with 500, before any code of ours
    st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES)).filter(lambda pair: pair != ("Expect", "\udcff"))
    | st.tuples(st.just(RUN_HEADER), st.sampled_from(RUN_NAMES)),
    max_size=2,
)
CONTROL_FIELDS = ("init_info", "update_info", "request_ids", "weight_version", "step", "publication", "version")


RIGHT = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 4)},
    optional={
        "temperature": st.floats(0, 1000),
        "top_p": st.floats(1e-6, 1),
        "top_k": st.integers(-1, 300),
        "min_p": st.floats(0, 1),
        "seed": st.integers(-(1 << 63), (1 << 63) - 1),
        "min_tokens": st.integers(0, 1),
        "n": st.integers(1, 3),
        "ignore_eos": st.booleans(),
        "stop_token_ids": tokens,
    },
)
RIGHT_BODIES = {
    "/inference/v1/generate": st.fixed_dictionaries({"token_ids": tokens, "sampling_params": RIGHT}),
    LEASE: st.fixed_dictionaries(
        {"run": RUNS, "life": LIVES, "host": st.just("h"), "weights": st.fixed_dictionaries(WEIGHTS)}
    ),
    "/v1/chat/completions": st.builds(
        lambda text, rest: {"messages": [{"role": "user", "content": text}], **rest}, st.text(max_size=8), RIGHT
    ),
}


BEARER = "Authorization: Bearer "


@dataclass(frozen=True)
class Ask:
    """A request as bytes, to be sent as it is."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def to_bytes(self, key: str | None, bearer: str = BEARER) -> bytes:
        given = {"Host": "127.0.0.1", "Content-Length": str(len(self.body)), "Connection": "close"}
        lines = [
            f"{self.method} {self.path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in {**given, **dict(self.headers)}.items()),
        ]
        if key is not None:
            lines.append(f"{bearer}{key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogateescape") + self.body


@st.composite
def asks(draw: st.DrawFn, route: str, methods: Sequence[str] = ("POST",)) -> Ask:
    """Of a route: one of its methods or another, with bodies from nearly right to no JSON at all."""
    others = ["POST", "GET", "GET", "DELETE", "PUT", "OPTIONS", "HEAD"]
    method = draw(st.sampled_from(methods) | st.sampled_from(methods) | st.sampled_from(others))
    own = next((given for start, given in QUERIES_OF.items() if route.startswith(start)), [])
    query = draw(st.sampled_from(own) | QUERIES if own else QUERIES)
    made = BODIES.get(route, object_of(dict.fromkeys(CONTROL_FIELDS, anything)))
    made = st.one_of(made, RIGHT_BODIES[route]) if route in RIGHT_BODIES else made
    as_json = made.map(lambda value: json.dumps(value).encode())
    body = draw(st.one_of(as_json, as_json, as_json, as_json, st.binary(max_size=60), st.just(b"")))
    return Ask(method, route + query, tuple(draw(st.just([]) | HEADERS)), body)


def many(requests: int) -> settings:
    """As many, not shrunk for long, and the same ones at every run."""
    return settings(
        max_examples=requests,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate, Phase.shrink) if requests == FEW else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )


@dataclass(frozen=True)
class Footprint:
    """What a process holds."""

    fds: int
    threads: int
    rss_mib: float

    @staticmethod
    def of(pid: int | None = None) -> Footprint:
        if pid is None:
            gc.collect()
        process = psutil.Process(pid or os.getpid())
        return Footprint(process.num_fds(), process.num_threads(), process.memory_info().rss / (1 << 20))
