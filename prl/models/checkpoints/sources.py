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
    import torch  # the rest wants the path only

    from prl.models.checkpoints.writing import hf_tensors, save_checkpoint
    from prl.models.families.build import build_decoder
    from prl.models.text.tokenizer import save_byte_tokenizer

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as tmp:
        partial = Path(tmp, "model")
        model = build_decoder(config.card)
        model.init_weights(torch.Generator().manual_seed(config.init_seed))
        save_checkpoint(hf_tensors(model), partial, config.card)
        if config.tokenizer == "byte":
            save_byte_tokenizer(partial)
        try:
            partial.rename(path)
        except OSError:  # another process was first; the content is the same
            assert path.is_dir()
    return path
