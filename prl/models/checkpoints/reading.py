"""Hugging Face checkpoints, read tensor by tensor into (possibly sharded) parameters: reading slices the files, and no
process holds the whole model unless the model is unsharded there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prl.config.config_json import read_config_json
from prl.config.errors import UserError
from prl.config.hub import repair
from prl.config.quantised import quantisation_of
from prl.config.schema import ModelCard
from prl.models.adapters.lora import cast_parameters, is_adapter
from prl.models.checkpoints.dequantising import as_model_tensors, is_scaled
from prl.models.families.build import build_decoder
from prl.models.layers.decoder import Decoder
from prl.models.names.decoder import MTP, MTP_MARK
from prl.models.names.region import Region
from prl.models.sharding import is_sharded, place_of

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ROWS = 4096  # of a matrix that are compared at once


def load_model(path: Path, card: ModelCard, dtype: torch.dtype, device: torch.device) -> Decoder:
    """The whole model on one device, in eval mode (inference)."""
    with torch.device("meta"):
        model = build_decoder(card)
    cast_parameters(model, dtype, requires_grad=False)  # corrections of routers stay in float32
    model.to_empty(device=device)
    load_checkpoint(model, path)
    return model.eval()


def load_checkpoint(model: Decoder, path: Path, params: Mapping[str, Tensor] | None = None) -> None:
    """`load_weights` from the files at `path`. Raises UserError when they are damaged or do not fit the model."""
    try:
        with open_tensors(path) as tensors:
            load_weights(model, tensors.items(), params)
            _check_tied(dict(params or model.named_parameters()), model, tensors)
    except ValueError as error:
        why = "its files are incomplete, or are those of another model"
        fix = "fetch the checkpoint again, or correct model.path"
        if (wrote := _other_transformers(model, path)) is not None:
            why += f", or transformers {wrote}, which wrote config.json, means something else by it than the one here"
            fix = f"pip install transformers=={wrote}; or {fix}"
        what = f"the checkpoint cannot be loaded: {error}"
        raise UserError(what, where=str(path), why=why, fix=fix) from error


def _other_transformers(model: Decoder, path: Path) -> str | None:
    """The version that wrote the checkpoint's config.json, where another one has made a model of it here."""
    import transformers

    wrote = read_config_json(path).get("transformers_version")
    is_other = not model.card.is_native and isinstance(wrote, str) and wrote != transformers.__version__
    return wrote if is_other else None


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
    has_index = (path / INDEX).is_file()
    whole = (path / SINGLE).is_file() and path / SINGLE not in files
    if gone := [file for file in files if not file.exists()]:  # of the hub's cache also a link to what is not there
        raise UserError(
            f"{gone[0].name} is missing" + (f", and {len(gone) - 1} files more" if gone[1:] else ""),
            where=str(gone[0]),
            why=f"{INDEX} lists {len(files)} files; the download may have ended early, or the index is another's"
            if has_index
            else "it is a link to what is not there; the hub's cache keeps files so, in blobs",
            fix=(f"remove {INDEX}, if all weights are in {SINGLE}; or " if whole else "") + repair(gone[0]),
        )


def read_tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """(name, slice) of every tensor in the checkpoint; a slice reads from disk what is indexed out of it, and
    dequantises that.
    """
    with open_tensors(path) as tensors:
        yield from tensors.items()


@contextmanager
def open_tensors(path: Path) -> Iterator[dict[str, Any]]:
    """All tensors of the checkpoint as a model has them: name -> slice, to be read from within. Raises UserError for
    files that are missing or damaged and a quantisation that is not read, ValueError for one that is incomplete.
    """
    from safetensors import SafetensorError, safe_open

    check_files(path)
    config = read_config_json(path) if (path / "config.json").is_file() else {}
    how = quantisation_of(config, path / "config.json")
    with ExitStack() as stack:
        stored: dict[str, Any] = {}
        for file in weight_files(path):
            try:
                handle = stack.enter_context(safe_open(file, framework="pt"))
            except SafetensorError as error:
                raise UserError(f"{file.name} is damaged: {error}", where=str(file), fix=repair(file)) from error
            stored |= {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (safe_open is not a dict)
        single = path / SINGLE
        if single.is_file() and single not in weight_files(path):
            _check_single(single, stored)
        if how is None and (odd := next((name for name, part in stored.items() if is_scaled(part)), None)):
            raise UserError(
                f"the checkpoint cannot be loaded: {odd} is stored as {stored[odd].get_dtype()}, and config.json does "
                "not say how it is scaled",
                where=str(path / "config.json"),
                why="numbers of 8 bits stand for weights beside their scales, of which quantization_config tells",
                fix="the config.json that the checkpoint came with; or another checkpoint",
            )
        yield dict(as_model_tensors(stored, how))


def _check_single(file: Path, stored: Mapping[str, Any]) -> None:
    """Raise UserError where a file beside those of the index has other tensors, as far as their first rows tell."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as handle:
            single = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
            same = single.keys() == stored.keys() and all(_alike(part, stored[name]) for name, part in single.items())
    except SafetensorError:  # no weights of anybody's
        return
    if not same:
        raise UserError(
            f"the checkpoint has two sets of weights: {SINGLE}, and the files of {INDEX}.",
            where=str(file.parent),
            why="they differ, and transformers would take the first, others the second",
            fix=f"remove {SINGLE}, or {INDEX} and its files",
        )


def _alike(one: Any, other: Any) -> bool:
    if (one.get_dtype(), one.get_shape()) != (other.get_dtype(), other.get_shape()):
        return False
    part = slice(0, 1) if one.get_shape() else ...
    return torch.equal(one[part].view(torch.uint8), other[part].view(torch.uint8))


def weight_files(path: Path) -> list[Path]:
    """Those that the index lists, else model.safetensors, else all there are. Raises UserError for an index that lists
    none.
    """
    index, single = path / INDEX, path / SINGLE
    if not index.is_file():
        return [single] if single.is_file() else sorted(path.glob("*.safetensors"))
    try:
        names = [str(name) for name in json.loads(index.read_text())["weight_map"].values()]
        if not names:
            raise ValueError("its weight_map is empty")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{INDEX} cannot be read: {type(error).__name__}: {error}",
            where=str(index),
            why="its weight_map says in which file each tensor is",
            fix=f"{repair(index)}; or remove it if {SINGLE} has all tensors",
        ) from error
    return sorted({path / name for name in names})


@torch.no_grad()
def load_weights(
    model: Decoder, tensors: Iterable[tuple[str, Any]], params: Mapping[str, Tensor] | None = None
) -> None:
    """Copy Hugging Face tensors (or lazy slices) into the model in place, each rank only its own part.

    params: what to copy into instead of the model's parameters, by their names and sharded as they are.
    Raises ValueError naming what is missing, unknown or of another shape; parameters already copied stay copied.
    """
    params = dict(params or model.named_parameters()) | model.checkpoint_buffers()
    missing, behind = _expected_regions(model), set()
    for name, tensor in tensors:
        region = model.locate(name)
        if region is None:
            behind.add(name)
            continue
        shape = list(tensor.shape if isinstance(tensor, Tensor) else tensor.get_shape())
        if region.param not in params or not _has_room(params[region.param], region):
            if 0 in shape:  # of a part that the model has none of, as transformers saves no shared experts
                continue
            raise ValueError(f"checkpoint tensor {name} has no place in {type(model).__name__}")
        if shape != (expected := _shape_of(region, params[region.param])):
            raise ValueError(f"checkpoint tensor {name} has shape {shape}, but {type(model).__name__} needs {expected}")
        _copy_region(params[region.param], region, tensor)
        missing.discard(region)
        if region == Region(
            region.param
        ):  # the parameter in one piece, though its checkpoints usually have it in parts
            missing = {part for part in missing if part.param != region.param}
    _check_behind(model, behind)
    if missing:
        names = sorted({region.param for region in missing})
        raise ValueError(
            f"{len(missing)} tensors are missing from the checkpoint, among them for {', '.join(names[:3])}"
        )


def _has_room(param: Tensor, region: Region) -> bool:
    return region.expert is None or region.expert < param.shape[0]


def _check_behind(model: Decoder, names: set[str]) -> None:
    """Raise ValueError for a layer behind the card's last that predicts no further tokens: then the card is wrong."""
    layers: dict[str, bool] = {}
    for name in (model.own_name(name) for name in names):
        layer = re.search(r"\blayers\.(\d+)\.", name or "")
        if name is not None and layer is not None and model.is_further(name) and not name.startswith(MTP):
            layers[layer[1]] = layers.get(layer[1], False) or MTP_MARK in name
    for number in sorted(number for number, predicts in layers.items() if not predicts):
        raise ValueError(
            f"layer {number} is behind the last of {model.card.num_hidden_layers} that the card counts, and does not "
            f"predict further tokens: it has no {MTP_MARK}"
        )


def _expected_regions(model: Decoder) -> set[Region]:
    tensors = dict(model.named_parameters()) | model.checkpoint_buffers()
    meta = ((name, torch.empty(t.shape, device="meta")) for name, t in tensors.items() if not is_adapter(name))
    regions = (model.locate(hf_name) for name, t in meta for hf_name, _ in model.to_hf(name, t))
    return {region for region in regions if region is not None}


def _shape_of(region: Region, param: Tensor) -> list[int]:
    """Of the checkpoint tensor that fills `region`; `param` has its whole shape, sharded or not."""
    shape = list(param.shape)[0 if region.expert is None else 1 :]
    return [region.rows[1] - region.rows[0], *shape[1:]] if region.rows else shape


def _check_tied(params: Mapping[str, Tensor], model: Decoder, tensors: Mapping[str, Any]) -> None:
    """Raise UserError for a head that is stored, and is not the embedding that config.json says it is."""
    for name, tensor in tensors.items():
        tied = model.tied_to(name)
        if tied is not None and tied in params and not _agrees(params[tied], tensor):
            raise UserError(
                f"{name} is stored with other numbers than the embedding, which it is to be.",
                where=f"tie_word_embeddings=true, {name} of the checkpoint",
                why="one of the two is wrong: transformers goes by the files, engines by config.json",
                fix="tie_word_embeddings=false in config.json if the head is its own, else files without it",
            )


def _agrees(param: Tensor, tensor: Any) -> bool:
    """Whether a whole tensor of a checkpoint has the numbers of the part of `param` that this rank holds."""
    local, start = param.data, 0
    if is_sharded(param):
        local, start = param.to_local(), place_of(param)[1][0]
    for first in range(0, len(local), ROWS):
        rows = local[first : first + ROWS]
        stored = tensor[start + first : start + first + len(rows)].to(rows)
        if stored.shape != rows.shape or not torch.allclose(stored, rows, rtol=0, atol=0, equal_nan=True):
            return False
    return True


def _copy_region(param: Tensor, region: Region, tensor: Any) -> None:
    """Copy the part of `tensor` that this rank holds; `tensor` covers `region` of the whole parameter."""
    local, offset = param.data, [0] * param.dim()
    if not offset:  # a buffer; parameters have rows
        local.copy_(tensor[...])
        return
    if is_sharded(param):
        local, offset = param.to_local(), list(place_of(param)[1])
    if region.expert is not None:
        index = region.expert - offset[0]
        if not 0 <= index < local.shape[0]:
            return
        local, offset = local[index], offset[1:]
    start = region.rows[0] if region.rows else 0
    stop = region.rows[1] if region.rows else (param.shape[1] if region.expert is not None else param.shape[0])
    low, high = max(start, offset[0]), min(stop, offset[0] + local.shape[0])
    if low < high and local.numel():
        part = [slice(low - start, high - start)]
        if is_sharded(param):  # columns, too, where experts are sharded along them
            part += [slice(first, first + n) for first, n in zip(offset[1:], local.shape[1:], strict=True)]
        local[low - offset[0] : high - offset[0]].copy_(tensor[tuple(part)])
