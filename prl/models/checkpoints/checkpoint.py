"""Hugging Face checkpoints: read tensor by tensor into (possibly sharded) parameters, written back shard by shard.

No process ever holds the whole model unless the model is unsharded there: reading slices the file, writing gathers one
parameter at a time.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from prl.config.errors import UserError
from prl.config.point import random_checkpoint_dir
from prl.config.schema import ModelCard, ModelConfig
from prl.models.adapters.lora import is_adapter, merged_parameters
from prl.models.checkpoints.hub import fetch_checkpoint, repair
from prl.models.checkpoints.names import Region
from prl.models.families.qwen3 import Qwen3Model
from prl.runtime.directory.files import save_tensors

INDEX = "model.safetensors.index.json"
_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


# --- which checkpoint -------------------------------------------------------------------------------------------------


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
    from prl.models.text.tokenizer import save_byte_tokenizer

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as tmp:
        partial = Path(tmp, "model")
        model = Qwen3Model(config.card)
        model.init_weights(torch.Generator().manual_seed(config.init_seed))
        save_checkpoint(hf_tensors(model), partial, config.card)
        if config.tokenizer == "byte":
            save_byte_tokenizer(partial)
        try:
            partial.rename(path)
        except OSError:  # another process was first; the content is the same
            assert path.is_dir()
    return path


def check_card(path: Path, card: ModelCard) -> None:
    """Raise UserError unless the checkpoint's config.json agrees with the card."""
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"config.json of the checkpoint cannot be read: {error}",
            where=str(path / "config.json"),
            fix="model.path=/path/to/a/Hugging-Face/checkpoint",
        ) from error
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}  # as transformers 5 and 4 have it
    config |= rotary
    described = _described(card)
    wrong = [
        key
        for key, value in described.items()
        if key in config and config[key] != value and key not in ("architectures", "torch_dtype", "dtype")
    ]
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind != "default" and card.family != "other":
        raise UserError(
            f"rotary embeddings of rope_type {kind} are not built here",
            where=str(path / "config.json"),
            why="the models of prl/models know the usual ones only",
            fix="model.impl=hf, or remove rope_scaling from config.json if sequences are short",
        )
    if wrong:
        raise UserError(
            "the model card does not describe this checkpoint: "
            + "; ".join(f"{key}: card {described[key]}, checkpoint {config[key]}" for key in wrong),
            where=f"model.card, {path / 'config.json'}",
            why="rules and plan are computed from the card",
            fix="another model= or model.path=; or, if this is the model that you want, "
            + " ".join(_override(key, config[key]) for key in wrong),
        )


def _override(key: str, value: Any) -> str:
    text = json.dumps(value, separators=(",", ":"))
    if key not in ModelCard.model_fields and key != "model_type":
        return f"({key}={text} cannot be changed)"
    return f"model.card.{'family' if key == 'model_type' else key}={value if isinstance(value, str) else text}"


def _described(card: ModelCard) -> dict[str, Any]:
    """What config.json must say; of another family's only what all families call the same."""
    if card.family != "other":
        return card_to_hf_config(card)
    same = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    return card.model_dump(include={*same, "tie_word_embeddings"})


# --- reading ----------------------------------------------------------------------------------------------------------


def load_model(path: Path, card: ModelCard, dtype: torch.dtype, device: torch.device) -> Qwen3Model:
    """The whole model on one device, in eval mode (inference)."""
    with torch.device("meta"):
        model = Qwen3Model(card)
    model = model.to(dtype).to_empty(device=device)
    load_checkpoint(model, path)
    return model.requires_grad_(False).eval()


def load_checkpoint(model: Qwen3Model, path: Path, params: Mapping[str, Tensor] | None = None) -> None:
    """`load_weights` from the files at `path`. Raises UserError when they are damaged or do not fit the model."""
    try:
        load_weights(model, read_tensors(path), params)
    except ValueError as error:
        raise UserError(
            f"the checkpoint cannot be loaded: {error}",
            where=str(path),
            why="its files are incomplete, or are those of another model",
            fix="fetch the checkpoint again, or correct model.path",
        ) from error


def check_files(path: Path) -> None:
    """Raise UserError unless all files are there that weights are read from."""
    files = weight_files(path)
    if not files:
        raise UserError(
            "no *.safetensors in the checkpoint directory",
            where=str(path),
            why="weights are read from safetensors only",
            fix="model.path=/path/to/a/Hugging-Face/checkpoint",
        )
    if gone := [file for file in files if not file.exists()]:  # of the hub's cache also a link to what is not there
        raise UserError(
            f"{gone[0].name} is missing" + (f", and {len(gone) - 1} files more" if gone[1:] else ""),
            where=str(gone[0]),
            why=f"{INDEX} lists {len(files)} files; the download may have ended early, or the index is another's",
            fix=repair(gone[0]),
        )


def read_tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """(name, slice) of every tensor in the checkpoint; a slice reads from disk what is indexed out of it."""
    from safetensors import SafetensorError, safe_open

    check_files(path)
    with ExitStack() as stack:
        for file in weight_files(path):
            try:
                handle = stack.enter_context(safe_open(file, framework="pt"))
            except SafetensorError as error:
                raise UserError(f"{file.name} is damaged: {error}", where=str(file), fix=repair(file)) from error
            for name in handle.keys():  # noqa: SIM118 (safe_open is not a dict)
                yield name, handle.get_slice(name)


def weight_files(path: Path) -> list[Path]:
    """Those that the index lists, else model.safetensors, else all there are."""
    index, single = path / INDEX, path / "model.safetensors"
    if index.is_file():
        return sorted({path / name for name in json.loads(index.read_text())["weight_map"].values()})
    return [single] if single.is_file() else sorted(path.glob("*.safetensors"))


@torch.no_grad()
def load_weights(
    model: Qwen3Model, tensors: Iterable[tuple[str, Any]], params: Mapping[str, Tensor] | None = None
) -> None:
    """Copy Hugging Face tensors (or lazy slices) into the model in place, each rank only its own part.

    params: what to copy into instead of the model's parameters, by their names and sharded as they are.
    Raises ValueError naming what is missing, unknown or of another shape; parameters already copied stay copied.
    """
    params = dict(params or model.named_parameters()) | model.checkpoint_buffers()
    missing = _expected_regions(model)
    for name, tensor in tensors:
        region = model.locate(name)
        if region is None:
            continue
        if region.param not in params:
            raise ValueError(f"checkpoint tensor {name} has no place in {type(model).__name__}")
        shape = list(tensor.shape if isinstance(tensor, Tensor) else tensor.get_shape())
        if shape != (expected := _shape_of(region, params[region.param])):
            raise ValueError(f"checkpoint tensor {name} has shape {shape}, but {type(model).__name__} needs {expected}")
        _copy_region(params[region.param], region, tensor)
        missing.discard(region)
        if region == Region(
            region.param
        ):  # the parameter in one piece, though its checkpoints usually have it in parts
            missing = {part for part in missing if part.param != region.param}
    if missing:
        names = sorted({region.param for region in missing})
        raise ValueError(
            f"{len(missing)} tensors are missing from the checkpoint, among them for {', '.join(names[:3])}"
        )


def _expected_regions(model: Qwen3Model) -> set[Region]:
    tensors = dict(model.named_parameters()) | model.checkpoint_buffers()
    meta = ((name, torch.empty(t.shape, device="meta")) for name, t in tensors.items() if not is_adapter(name))
    regions = (model.locate(hf_name) for name, t in meta for hf_name, _ in model.to_hf(name, t))
    return {region for region in regions if region is not None}


def _shape_of(region: Region, param: Tensor) -> list[int]:
    """Of the checkpoint tensor that fills `region`; `param` has its whole shape, sharded or not."""
    shape = list(param.shape)[0 if region.expert is None else 1 :]
    return [region.rows[1] - region.rows[0], *shape[1:]] if region.rows else shape


def _copy_region(param: Tensor, region: Region, tensor: Any) -> None:
    """Copy the part of `tensor` that this rank holds; `tensor` covers `region` of the whole parameter."""
    local, offset = param.data, [0] * param.dim()
    if isinstance(param, DTensor):
        _, offsets = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
        local, offset = param.to_local(), list(offsets)
    if region.expert is not None:
        index = region.expert - offset[0]
        if not 0 <= index < local.shape[0]:
            return
        local, offset = local[index], offset[1:]
    start = region.rows[0] if region.rows else 0
    stop = region.rows[1] if region.rows else (param.shape[1] if region.expert is not None else param.shape[0])
    low, high = max(start, offset[0]), min(stop, offset[0] + local.shape[0])
    if low < high:
        part = tensor[low - start : high - start]
        for dim in range(1, local.dim()):  # columns, where experts are sharded along them
            part = part.narrow(dim, min(offset[dim], part.shape[dim]), local.shape[dim])
        local[low - offset[0] : high - offset[0]].copy_(part)


# --- writing ----------------------------------------------------------------------------------------------------------


def hf_tensors(model: Qwen3Model, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
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
    if card.family != "other":
        (path / "config.json").write_text(json.dumps(card_to_hf_config(card), indent=1) + "\n")


def card_to_hf_config(card: ModelCard) -> dict[str, Any]:
    """The config.json with which transformers builds the same architecture."""
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[card.family]],
        "model_type": card.family,
        "attention_bias": False,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "dtype": "float32",
        **card.model_dump(exclude={"family", "cp_styles", "ac_targets", "num_experts", "num_experts_per_tok",
                                   "moe_intermediate_size", "norm_topk_prob", "mlp_only_layers"}),
    }  # fmt: skip
    if card.family == "qwen3_moe":
        config |= {
            "num_experts": card.num_experts,
            "num_experts_per_tok": card.num_experts_per_tok,
            "moe_intermediate_size": card.moe_intermediate_size,
            "norm_topk_prob": card.norm_topk_prob,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(card.mlp_only_layers),
        }
    return config


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy what is not weights (tokenizer, chat template, generation config), so that the export stands alone."""
    for file in source.iterdir():
        keep = file.suffix in (".json", ".jinja", ".model", ".txt") and not file.name.startswith("model.safetensors")
        written = file.name == "config.json" and (target / file.name).exists()
        if file.is_file() and keep and not written:
            shutil.copy2(file, target / file.name)
