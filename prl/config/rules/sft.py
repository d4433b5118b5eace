"""Rules of supervised fine-tuning, warm starts included."""

from __future__ import annotations

from collections.abc import Iterator

from prl.config.errors import UserError
from prl.config.schema import RunConfig
from prl.config.world import World


def sft_follows_the_run(config: RunConfig, world: World) -> Iterator[UserError]:
    if config.sft is None:
        yield UserError(
            "There is nothing to fine-tune on.", where="sft=null", why="the job needs data", fix="data=reverse_text"
        )
        return
    for key in ("max_steps", "seq_len", "optim"):
        if getattr(config.sft, key) != getattr(config, key):
            yield UserError(
                f"sft.{key} and {key} differ.",
                where=f"sft.{key}",
                why=f"in this job sft.{key} is {key}; it has a key of its own only as a warm start",
                fix=f"set {key} instead of sft.{key}",
            )
