"""Hugging Face checkpoints, written shard by shard: one parameter at a time is gathered."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prl.config.cards import card_to_hf_config, restated
from prl.config.config_json import read_config_json
from prl.config.families import NOTHING
from prl.config.quantised import without_section
from prl.config.schema import ModelCard
from prl.models.adapters.lora import merged_parameters
from prl.models.checkpoints.block_fp8 import whole_in_blocks
from prl.models.checkpoints.further_layers import further_layers
from prl.models.checkpoints.reading import INDEX
from prl.models.layers.decoder import Decoder
from prl.runtime.directory.files import save_tensors

SHARD_BYTES = 5 << 30
log = logging.getLogger("prl")


def hf_tensors(
    model: Decoder, dtype: torch.dtype | None = None, in_blocks: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Whole checkpoint tensors, adapters added in, gathered one parameter at a time: a collective when the model is
    sharded; else they may be the model's own memory.

    dtype: of matrices, None leaves them as they are. Vectors (norms, biases of routers) are small and stay exact.
    in_blocks: what linear layers and experts multiply by in e4m3, with scales of blocks (`block_fp8.py`).
    """
    cut = whole_in_blocks if in_blocks else type(model).to_hf
    for name, whole in chain(merged_parameters(model), model.checkpoint_buffers().items()):
        narrows = dtype is not None and whole.ndim > 1 and whole.is_floating_point()
        yield from cut(model, name, whole.to(dtype) if narrows else whole)


def export_checkpoint(
    model: Decoder,
    tensors: Iterable[tuple[str, Tensor]],
    source: Path,
    target: Path,
    card: ModelCard,
    shard_bytes: int = SHARD_BYTES,
    dtype: torch.dtype = torch.float32,
) -> None:
    """All that a checkpoint of `model` at `target` needs to stand alone: its `tensors`, and from the checkpoint at
    `source` the layers that predict further tokens, tokenizer and chat template. `dtype`: of the matrices in `tensors`.

    Models of transformers keep the source's config.json, also where `card` is of a family with layers here: it says
    what no card does.
    """
    with further_layers(model, source) as further:
        said = {"dtype": name_of(dtype), **further.config}
        save_checkpoint(chain(tensors, further.tensors(dtype)), target, model.card, shard_bytes, said)
    copy_tokenizer(source, target, further.config, card, dtype)


def save_checkpoint(
    tensors: Iterable[tuple[str, Tensor]],
    path: Path,
    card: ModelCard,
    shard_bytes: int = SHARD_BYTES,
    more: Mapping[str, Any] = NOTHING,
) -> None:
    """Write safetensors shards, their index and config.json (of another family: `copy_tokenizer` brings it).

    more: keys of config.json that the card has no fact for.
    """
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
        write_config_json(card_to_hf_config(card) | dict(more), path)


def copy_tokenizer(
    source: Path,
    target: Path,
    more: Mapping[str, Any] = NOTHING,
    trained: ModelCard | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Copy what is not weights (tokenizer, chat template, generation config), so that the export stands alone. Where
    the source is gone, a warning says so.

    A config.json that is not there yet is the source's, without its quantisation, with the keys of `more`, and with
    what training changes where weights are `trained` by this card and written in `dtype`.
    """
    if not source.is_dir():
        log.warning("%s is without tokenizer and chat template: %s, which had them, is gone", target, source)
        return
    for file in source.iterdir():
        keep = file.suffix in (".json", ".jinja", ".model", ".txt") and not file.name.startswith("model.safetensors")
        if file.is_file() and keep and file.name != "config.json":
            shutil.copy2(file, target / file.name)
    if (source / "config.json").is_file() and not (target / "config.json").exists():
        config = without_section(read_config_json(source))
        inner = config.get("text_config") or {}
        (inner if any(key in inner for key in more) else config).update(more)
        write_config_json(config if trained is None else restated(config, trained, name_of(dtype)), target)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write_config_json(config: Mapping[str, Any], path: Path) -> None:
    (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
