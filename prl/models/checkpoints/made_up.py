"""Checkpoints of random weights for a card, for tiny models that learn and for large ones whose speed is measured."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from prl.config.errors import UserError
from prl.config.schema import ModelConfig
from prl.models.checkpoints.writing import hf_tensors, name_of, save_checkpoint
from prl.models.families.build import build_decoder
from prl.models.layers.decoder import Decoder, draw

LARGE = 2_000_000_000  # parameters from which no whole model is held, matrices are bfloat16, and threads draw them
THREADS = 16  # at most
AHEAD = 8 << 30  # bytes that are drawn, or are being drawn, and not yet written
DTYPE = torch.bfloat16  # of a large model
SPREAD = 0x9E3779B1  # odd: the parameters of another seed have other seeds


def write_made_up(config: ModelConfig, target: Path, large: int = LARGE) -> None:
    """At `target`, without a tokenizer. The numbers of a card and seed are always the same, however many threads draw.

    Raises UserError where a large model does not fit on the disk.
    """
    with torch.device("meta"):
        model = build_decoder(config.card)
    count = sum(param.numel() for param in model.parameters())
    if count < large:
        model = build_decoder(config.card)
        model.init_weights(torch.Generator().manual_seed(config.init_seed))
        return save_checkpoint(hf_tensors(model), target, config.card)
    check_space(target.parent, count * DTYPE.itemsize, config)
    save_checkpoint(drawn(model, config.init_seed), target, config.card, more={"dtype": name_of(DTYPE)})


def check_space(place: Path, wanted: int, config: ModelConfig) -> None:
    free = shutil.disk_usage(place).free
    if free < wanted:
        raise UserError(
            f"random weights of {config.name} take {wanted / 1e9:.0f} GB, of which {free / 1e9:.0f} are free.",
            where=f"model.path=null, {place}",
            why="they are written once, for all roles to begin with",
            fix="cache_dir= a directory on a larger disk; fewer layers (model.card.num_hidden_layers); or a checkpoint "
            "(model.path)",
        )


def drawn(model: Decoder, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Checkpoint tensors of a model without storage, a few parameters at a time, each drawn from a seed of its own."""
    waiting: deque[tuple[str, int, Future[Tensor]]] = deque()
    with ThreadPoolExecutor(max(1, min(THREADS, len(os.sched_getaffinity(0))))) as pool:
        for index, (name, form) in enumerate(chain(model.named_parameters(), model.checkpoint_buffers().items())):
            while waiting and sum(size for _, size, _ in waiting) + form.numel() * DTYPE.itemsize > AHEAD:
                yield from _first(model, waiting)
            waiting.append((name, form.numel() * DTYPE.itemsize, pool.submit(_draw, name, form, seed, index)))
        while waiting:
            yield from _first(model, waiting)


def _first(model: Decoder, waiting: deque[tuple[str, int, Future[Tensor]]]) -> Iterator[tuple[str, Tensor]]:
    name, _, values = waiting.popleft()
    yield from model.to_hf(name, values.result())


def _draw(name: str, form: Tensor, seed: int, index: int) -> Tensor:
    values = torch.empty(form.shape, dtype=DTYPE if form.ndim > 1 else form.dtype)
    generator = torch.Generator().manual_seed((seed * SPREAD + index) % (1 << 32))  # a CPU's has no more bits of it
    if isinstance(form, torch.nn.Parameter):
        draw(name, values, generator)
    else:  # the corrections of routers' choices
        values.zero_()
    return values


@contextlib.contextmanager
def one_at_a_time(place: Path) -> Iterator[None]:
    """Among the processes that make models at `place`; where its filesystem has no locks, each makes its own."""
    fd = os.open(place, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
