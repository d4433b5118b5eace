"""What tests of weight transport share."""

from __future__ import annotations

from typing import Any

from prl.transport.weights import NamedTensors, Publisher


def published(publisher: Publisher, version: int, named: NamedTensors) -> dict[str, Any]:
    """The update_info of a version that was published."""
    announced: list[dict[str, Any]] = []
    publisher.publish(version, named, announced.append)
    (info,) = announced
    return info
