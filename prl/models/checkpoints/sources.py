"""Which checkpoint a run begins with."""

from __future__ import annotations

import tempfile
from pathlib import Path

from prl.config.hub import fetch_checkpoint
from prl.config.point import random_checkpoint_dir
from prl.config.schema import ModelConfig


def resolve_model_path(config: ModelConfig, cache_dir: Path, init_model_path: str | None = None) -> Path:
    """The directory of the initial weights: the given one, else model.path (from the hub), else made from the card.

    Raises UserError when model.path is neither a directory nor to be had from the hub.
    """
    if init_model_path is not None:
        return Path(init_model_path)
    if config.path is None:
        return random_checkpoint(config, cache_dir)
    if Path(config.path).is_dir():
        return Path(config.path)
    return fetch_checkpoint(config.path)


def random_checkpoint(config: ModelConfig, cache_dir: Path) -> Path:
    """A checkpoint of random weights for the card, made once per (card, seed, tokenizer) and kept under
    cache_dir/models/.
    """
    path = random_checkpoint_dir(config, cache_dir)
    if path.is_dir():
        return path
    # with torch, which who wants the path only need not import
    from prl.models.checkpoints.made_up import one_at_a_time, write_made_up
    from prl.models.text.tokenizer import save_byte_tokenizer
    from prl.runtime.directory.intact import filling, seal

    with filling(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with filling(path), one_at_a_time(path.parent), tempfile.TemporaryDirectory(dir=path.parent) as tmp:
        if path.is_dir():  # another process was making it
            return path
        partial = Path(tmp, "model")
        write_made_up(config, partial)
        if config.tokenizer == "byte":
            save_byte_tokenizer(partial)
        seal(partial)
        try:
            partial.rename(path)
        except OSError:  # another process was first all the same; the content is the same
            assert path.is_dir()
    return path
