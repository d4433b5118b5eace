"""Requests to sample, and their answers, as the frames of one websocket to an engine.

An HTTP request for each completion costs client and server 0.2 ms of CPU time each, more than a small model's own
share of it. Requests are text: a JSON list of {"id", "body"}, the body as for POST, or {"cancel": id}. Answers are
binary: parts one behind another, each a header and its payload. A long answer comes in several parts, between which
those of others may be. What comes in is looked at here before anything is done with it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from prl.transport import frames

HEADER = struct.Struct("<QHHI")  # id, status as of HTTP, whether more of this answer comes, bytes of the payload
FRAME = 1 << 20  # bytes up to which requests are put into one frame
PIECE = 1 << 18  # of an answer, sent at once


class Part(NamedTuple):
    """Of an answer."""

    number: int
    status: int
    more: bool
    payload: bytes | memoryview


def request_text(number: int, body: dict[str, Any]) -> str:
    """Raises ValueError and TypeError for a body that is not to be had as JSON."""
    return json.dumps({"id": number, "body": body}, allow_nan=False)


def cancel_text(number: int) -> str:
    return json.dumps({"cancel": number})


def frames_of(texts: Iterable[str]) -> Iterator[str]:
    """As few frames as hold them."""
    held: list[str] = []
    size = 0
    for text in texts:
        if held and size + len(text) > FRAME:
            yield f"[{','.join(held)}]"
            held, size = [], 0
        held.append(text)
        size += len(text) + 1
    if held:
        yield f"[{','.join(held)}]"


def read_messages(parsed: Any) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(id, body) of each request, (id, None) of what is cancelled. Raises ValueError for what is neither."""
    if not isinstance(parsed, list):
        raise ValueError("a frame must be a list of requests")
    for message in parsed:
        number = message.get("cancel", message.get("id")) if isinstance(message, dict) else None
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise ValueError("each of a frame's requests must have an id, a number")
        if "cancel" in message:
            yield number, None
        elif isinstance(message.get("body"), dict):
            yield number, message["body"]
        else:
            raise ValueError(f"request {number} has no body")


def parts_of(number: int, status: int, answer: bytes | frames.Message) -> Iterator[bytes]:
    """An answer, in parts that may be sent one by one."""
    if len(answer) <= PIECE:
        yield HEADER.pack(number, status, False, len(answer)) + bytes(answer)
        return
    pieces = answer.pieces(PIECE) if isinstance(answer, frames.Message) else [answer]
    for piece in pieces:
        yield HEADER.pack(number, status, True, len(piece)) + piece
    yield HEADER.pack(number, status, False, 0)


def read_parts(frame: bytes) -> Iterator[Part]:
    """Inverse of `parts_of`, one behind another. Raises ValueError for what is none."""
    data, at = memoryview(frame), 0
    while at < len(data):
        if len(data) - at < HEADER.size:
            raise ValueError("an answer's header is cut off")
        number, status, more, size = HEADER.unpack_from(data, at)
        at += HEADER.size
        if len(data) - at < size:
            raise ValueError("an answer is cut off")
        yield Part(number, status, bool(more), data[at : at + size])
        at += size
