"""Keys that the schema knows and this version cannot honour yet. They are errors, never silently ignored.

This module shrinks as things land: delete the line together with the change that builds the thing.
"""

from __future__ import annotations

from collections.abc import Iterator

from prl.config.errors import UserError
from prl.config.schema import RunConfig


class NotAvailableError(UserError):
    """A valid wish that this version cannot fulfil."""

    def __init__(self, what: str, where: str, fix: str) -> None:
        super().__init__(f"{what} is not available in this version.", where=where, why="not built yet", fix=fix)


def not_available(config: RunConfig) -> Iterator[NotAvailableError]:
    """All wishes of the config that must wait for a later version."""
    if config.inference.engine == "vllm":
        yield NotAvailableError("The vLLM engine", "inference.engine=vllm", "inference=torch")
