"""Rules of supervised fine-tuning, warm starts included."""

from __future__ import annotations

from collections.abc import Iterator

from prl.config.errors import UserError
from prl.config.schema import RunConfig
from prl.config.world import resolve_world


def sft_follows_the_run(config: RunConfig) -> Iterator[UserError]:
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


def rows_fill_the_ranks(config: RunConfig) -> Iterator[UserError]:
    world, experts = resolve_world(config), config.model.card.num_experts
    if world.ep > 1 and (experts == 0 or experts % world.ep):
        return  # dp_shard=auto follows from an impossible ep: the number of ranks is not what must change
    ranks = world.data_ranks
    for key, sft in (("warm_start", config.warm_start), ("sft", config.sft)):
        if sft is not None and sft.batch_size % ranks:
            yield UserError(
                f"A batch of {sft.batch_size} packed rows cannot be spread evenly over {ranks} data ranks.",
                where=f"{key}.batch_size={sft.batch_size}",
                why="each data rank takes the same number of rows",
                fix=f"{key}.batch_size={-(-sft.batch_size // ranks) * ranks}",
            )
