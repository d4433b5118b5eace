"""LoRA adapters as PEFT keeps them: adapter_config.json and adapter_model.safetensors.

Checked with PEFT 0.21 over transformers 5. Adapters of experts become those of the stacked parameters that transformers
5 has (`target_parameters`), of which PEFT wraps `gate_up_proj` (or `up_proj`) first and `down_proj` around it: hence
`base_layer` in the names of the inner one.

In mixtures PEFT takes gate_proj, up_proj and down_proj among `target_modules` for those of single experts, as older
checkpoints have them, and fuses them. Those of dense layers and shared experts are therefore named by their weights,
`mlp.gate_proj.weight`, which it adapts in the same way and under the same names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prl.config.errors import UserError
from prl.config.schema import LoraConfig, ModelCard
from prl.models.adapters.lora import (
    EXPERTS,
    LoraExperts,
    LoraLinear,
    copy_shard,
    is_adapter,
    named_targets,
    whole_tensor,
)
from prl.models.names.decoder import to_hf
from prl.runtime.directory.files import save_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_SUFFIXES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")  # what PEFT takes for matrices of experts in a mixture
_LAYERS = {"gate_up": "base_layer.", "up": "base_layer.", "down": ""}  # around the experts' module, from the inside


def export_adapter(model: nn.Module, card: ModelCard, lora: LoraConfig, path: Path, base: str, write: bool) -> None:
    """Write the adapters for `peft.PeftModel.from_pretrained`. A collective when the model is sharded; the ranks with
    `write` write. base: name or path of the model that they belong to.
    """
    tensors = {}
    for name, tensor in peft_tensors(model, card):
        if write:
            tensors[name] = tensor.float().cpu().contiguous()
    if write:
        path.mkdir(parents=True, exist_ok=True)
        save_tensors(tensors, path / WEIGHTS, metadata={"format": "pt"})
        (path / CONFIG).write_text(
            json.dumps(peft_config(model, lora, base, _parameters(model, card, lora)), indent=1) + "\n"
        )


def _parameters(model: nn.Module, card: ModelCard, lora: LoraConfig) -> list[str]:
    """`target_parameters` of a mixture of experts: the ends of transformers' names, which hold in all layers."""
    if not any(name.endswith(f".{EXPERTS}") for name, _ in model.named_modules()):
        return []
    found: dict[str, None] = {}  # a set that keeps the order
    for name, module in model.named_modules():
        if isinstance(module, LoraExperts):
            owner = ".".join(_hf_name(name, card).split(".")[-3:-1])
            found |= {f"{owner}.{module.first}_proj": None, f"{owner}.down_proj": None}
        elif isinstance(module, LoraLinear) and name.rpartition(".")[2] in _OF_EXPERTS:
            found[".".join(_hf_name(name, card).split(".")[-3:])] = None
    return list(found)


def _hf_name(name: str, card: ModelCard) -> str:
    """transformers' name of the weight of a module."""
    (hf_name, _), *_ = to_hf(f"{name}.weight", torch.empty(0), card)
    return hf_name


def peft_config(model: nn.Module, lora: LoraConfig, base: str, parameters: Sequence[str] = ()) -> dict[str, Any]:
    """parameters: those that are named one by one, in whose place no module is named."""
    named = {EXPERTS, *(parameter.split(".")[-2] for parameter in parameters)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": [target for target in named_targets(model, lora.targets) if target not in named],
        "target_parameters": list(parameters) or None,
    }


def peft_tensors(model: nn.Module, card: ModelCard) -> Iterator[tuple[str, Tensor]]:
    """(PEFT's name, whole tensor in PEFT's layout) of every adapter, one at a time."""
    for name, param in model.named_parameters():
        if is_adapter(name):
            yield peft_name(name, card), to_peft(whole_tensor(param), name)


def peft_name(name: str, card: ModelCard) -> str:
    owner, _, attribute = name.rpartition(".")
    layer = _LAYERS[attribute[: -len("_lora_a")]] if attribute not in _SUFFIXES else ""
    module = f"base_model.model.{_hf_name(owner, card).removesuffix('weight')}"
    return f"{module}{layer}{_SUFFIXES[attribute[-len('lora_a') :]]}"


def to_peft(tensor: Tensor, name: str) -> Tensor:
    """Experts: A [E, in, r] -> [E * r, in], B [E, out, r] -> [out, r * E] with the expert changing fastest."""
    if tensor.dim() == 2:
        return tensor
    return tensor.transpose(1, 2).flatten(0, 1) if name.endswith("a") else tensor.permute(1, 2, 0).flatten(1)


def from_peft(tensor: Tensor, name: str, shape: torch.Size) -> Tensor:
    """The inverse of `to_peft`, for an adapter of the given whole shape."""
    if len(shape) == 2:
        return tensor
    experts, features, rank = shape
    if name.endswith("a"):
        return tensor.view(experts, rank, features).transpose(1, 2)
    return tensor.view(features, rank, experts).permute(2, 0, 1)


def import_adapter(model: nn.Module, card: ModelCard, lora: LoraConfig, path: Path) -> None:
    """Read adapters into a model that has them already (`apply_lora`), each rank its own part.

    Raises UserError when they are not those of this model, rank, alpha and targets.
    """
    from safetensors import safe_open

    try:
        config = json.loads((path / CONFIG).read_text())
        file = safe_open(path / WEIGHTS, framework="pt")
    except (OSError, ValueError) as error:
        raise _refuse(path, f"cannot be read: {error}") from error
    for key, expected in (("r", lora.rank), ("lora_alpha", lora.alpha)):
        if config.get(key) != expected:
            raise _refuse(path, f"has {key}={config.get(key)}, but memory_recipe.lora says {expected}")
    if config.get("use_dora") or config.get("use_rslora") or config.get("bias", "none") != "none":
        raise _refuse(path, "uses DoRA, rank-stabilised scaling or biases, which are not built here")
    params = {peft_name(n, card): (n, p) for n, p in model.named_parameters() if is_adapter(n)}
    with file:
        if set(file.keys()) != set(params):
            odd = sorted(set(file.keys()) ^ set(params))[0]
            raise _refuse(path, f"has other targets than memory_recipe.lora.targets, among them {odd}")
        for peft_key, (name, param) in params.items():
            saved = file.get_tensor(peft_key)
            if saved.shape != to_peft(torch.empty(param.shape, device="meta"), name).shape:
                raise _refuse(path, f"is that of another model: {peft_key} has shape {list(saved.shape)}")
            copy_shard(param, from_peft(saved, name, param.shape))


def _refuse(path: Path, what: str) -> UserError:
    return UserError(
        f"The adapter {what}.",
        where=str(path),
        why="an adapter fits one model, rank, scale and set of targets",
        fix="memory_recipe.lora as in the adapter's own adapter_config.json",
    )
