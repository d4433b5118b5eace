"""Keys that the schema knows and this version cannot honour yet. They are errors, never silently ignored.

This module shrinks as things land: delete the line together with the change that builds the thing.
"""

from __future__ import annotations

from collections.abc import Iterator

from prl.config.errors import UserError
from prl.config.schema import RunConfig
from prl.config.world import World


class NotAvailableError(UserError):
    """A valid wish that this version cannot fulfil."""

    def __init__(self, what: str, where: str, fix: str) -> None:
        super().__init__(f"{what} is not available in this version.", where=where, why="not built yet", fix=fix)


def not_available(config: RunConfig, world: World) -> Iterator[NotAvailableError]:
    """All wishes of the config that must wait for a later version."""
    if world.samples and config.inference.engine == "vllm":
        yield from _not_with_vllm(config)


def _not_with_vllm(config: RunConfig) -> Iterator[NotAvailableError]:
    """What the built-in engine does and vLLM, as it is used here, does not."""
    bench, model = config.bench, config.model
    for wished, what, where, fix in (
        (config.debug.deterministic, "Determinism to the bit, with vLLM,", "debug.deterministic=true",
         "debug.deterministic=false, or inference=torch"),
        (not model.card.is_native and model.path is None, "A random checkpoint of another family",
         "model.card.family=other, model.path=null", "model.path=/path/to/checkpoint"),
        (bench is not None and bench.target == "inference", "Measuring vLLM without its server",
         "bench.target=inference", "bench.target=stack, or inference=torch"),
    ):  # fmt: skip
        if wished:
            yield NotAvailableError(what, f"inference.engine=vllm, {where}", fix)
