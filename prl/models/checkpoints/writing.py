"""Hugging Face checkpoints, written shard by shard: one parameter at a time is gathered."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from prl.config.cards import card_to_hf_config
from prl.config.schema import ModelCard
from prl.models.adapters.lora import merged_parameters
from prl.models.checkpoints.reading import INDEX
from prl.models.layers.decoder import Decoder
from prl.runtime.directory.files import save_tensors


def hf_tensors(model: Decoder, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Whole checkpoint tensors, adapters added in, gathered one parameter at a time: a collective when the model is
    sharded; else they may be the model's own memory.

    dtype: of matrices, None leaves them as they are. Vectors (norms, biases of routers) are small and stay exact.
    """
    for name, whole in chain(merged_parameters(model), model.checkpoint_buffers().items()):
        narrows = dtype is not None and whole.ndim > 1 and whole.is_floating_point()
        yield from model.to_hf(name, whole.to(dtype) if narrows else whole)


def save_checkpoint(
    tensors: Iterable[tuple[str, Tensor]], path: Path, card: ModelCard, shard_bytes: int = 5 << 30
) -> None:
    """Write safetensors shards, their index and config.json (of another family: `copy_tokenizer` brings it)."""
    path.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    where: dict[str, int] = {}
    size = total = 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if size + nbytes > shard_bytes and shards[-1]:
            save_tensors(shards[-1], path / f"shard-{len(shards)}.tmp", metadata={"format": "pt"})
            shards[-1] = {}
            shards.append({})
            size = 0
        shards[-1][name] = tensor.cpu().contiguous().clone()
        where[name] = len(shards)
        size, total = size + nbytes, total + nbytes
    save_tensors(shards[-1], path / f"shard-{len(shards)}.tmp", metadata={"format": "pt"})
    names = {i: f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)}
    if len(shards) == 1:
        names = {1: "model.safetensors"}
    for index, name in names.items():
        (path / f"shard-{index}.tmp").rename(path / name)
    if len(shards) > 1:
        listing = {"metadata": {"total_size": total}, "weight_map": {name: names[i] for name, i in where.items()}}
        (path / INDEX).write_text(json.dumps(listing, indent=1))
    if card.is_native:
        (path / "config.json").write_text(json.dumps(card_to_hf_config(card), indent=1) + "\n")


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy what is not weights (tokenizer, chat template, generation config), so that the export stands alone."""
    for file in source.iterdir():
        keep = file.suffix in (".json", ".jinja", ".model", ".txt") and not file.name.startswith("model.safetensors")
        written = file.name == "config.json" and (target / file.name).exists()
        if file.is_file() and keep and not written:
            shutil.copy2(file, target / file.name)
