"""Quantised checkpoints as others publish them, written by formulas of our own: block FP8, packed INT4, MXFP4."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False,
            "actorder": None, "block_structure": None}  # fmt: skip


def compressed(form: str, **weights: object) -> dict[str, object]:
    """quantization_config of compressed-tensors."""
    group = {
        "targets": ["Linear"],
        "weights": _WEIGHTS | weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
            "ignore": ["lm_head", "re:.*self_attn.*"], "kv_cache_scheme": None}  # fmt: skip


INT4 = compressed("pack-quantized")
MXFP4 = compressed("mxfp4-pack-quantized", type="float", scale_dtype="torch.uint8")

Parts = dict[str, Tensor]  # by what is added to the name of the matrix


def to_fp8(weight: Tensor, block: tuple[int, int] = (128, 128), power_of_two: bool = False) -> Parts:
    """[O, I] -> e4m3 and float32 scales [ceil(O / block), ceil(I / block)]."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    stored = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scale = weight[place].abs().max() / 448
            scales[i, j] = 2 ** scale.log2().ceil() if power_of_two else scale
            stored[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
    return {"": stored, "_scale_inv": scales}


def to_int4(weight: Tensor, group: int = 32) -> Parts:
    """[O, I] -> eight numbers of -8 to 7 in an int32, bfloat16 scales [O, ceil(I / group)], the shape."""
    rows, columns = weight.shape
    grouped = torch.nn.functional.pad(weight, (0, -columns % group)).view(rows, -1, group)
    scales = (grouped.abs().amax(-1) / 7.5).bfloat16()
    codes = (grouped / scales.float()[..., None]).round().clamp(-8, 7).flatten(1)[:, :columns].long() + 8
    codes = torch.nn.functional.pad(codes, (0, -columns % 8)).view(rows, -1, 8)
    words = sum(codes[..., i] << 4 * i for i in range(8))
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    return {"_packed": words, "_scale": scales, "_shape": torch.tensor([rows, columns])}


def to_mxfp4(weight: Tensor) -> Parts:
    """[O, I] -> two codes in a byte, exponents + 127 of scales [O, I / 32]."""
    rows, columns = weight.shape
    grouped = weight.view(rows, columns // 32, 32)
    exponents = grouped.abs().amax(-1).clamp(min=2**-100).log2().floor() - 2
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scaled = grouped / torch.exp2(exponents)[..., None]
    codes = (scaled.abs()[..., None] - magnitudes).abs().argmin(-1) + 8 * (scaled < 0)
    pairs = codes.view(rows, columns // 2, 2)
    return {
        "_packed": (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8),
        "_scale": (exponents + 127).to(torch.uint8),
    }


def quantise(
    path: Path, section: dict[str, object], how: Callable[[Tensor], Parts], which: Callable[[str], bool]
) -> None:
    """Of the checkpoint at `path` the matrices that `which` names, in place; its config.json says how."""
    tensors: Parts = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            chosen = tensor.ndim == 2 and which(name)
            tensors |= {f"{name}{end}": part for end, part in how(tensor.float()).items()} if chosen else {name: tensor}
        file.unlink()
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    # scales and numbers in different files, as in published checkpoints near the ends of shards
    halves = [{name: t for name, t in tensors.items() if ("scale" in name) == scales} for scales in (False, True)]
    names = [f"model-{i + 1:05d}-of-00002.safetensors" for i in range(2)]
    for name, half in zip(names, halves, strict=True):
        save_file(half, path / name, metadata={"format": "pt"})
    where = {key: name for name, half in zip(names, halves, strict=True) for key in half}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
