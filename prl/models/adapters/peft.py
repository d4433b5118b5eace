"""LoRA adapters as PEFT keeps them: adapter_config.json and adapter_model.safetensors.

Checked with PEFT 0.21 over transformers 5. Adapters of experts become those of the stacked parameters that transformers
5 has (`target_parameters`), of which PEFT wraps `gate_up_proj` (or `up_proj`) first and `down_proj` around it: hence
`base_layer` in the names of the inner one.
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
from prl.models.adapters.lora import EXPERTS, copy_shard, is_adapter, whole_tensor
from prl.models.experts.stacked import Experts
from prl.models.names.decoder import to_hf
from prl.runtime.directory.files import save_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_SUFFIXES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
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
        (path / CONFIG).write_text(json.dumps(peft_config(lora, base, _expert_stacks(model, card)), indent=1) + "\n")


def _expert_stacks(model: nn.Module, card: ModelCard) -> list[str]:
    """transformers' names of the stacks of a layer's experts, from the layer on, those first that PEFT wraps first."""
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            (hf_name, _), *_ = to_hf(f"{name}.weight", torch.empty(0), card)
            owner = ".".join(hf_name.split(".")[-3:-1])
            return [f"{owner}.{module.first}_proj", f"{owner}.down_proj"]
    return []


def peft_config(lora: LoraConfig, base: str, stacks: Sequence[str] = ()) -> dict[str, Any]:
    """stacks: of experts, where `lora` has adapters of them."""
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
        "target_modules": [target for target in lora.targets if target != EXPERTS],
        "target_parameters": list(stacks) if EXPERTS in lora.targets else None,
    }


def peft_tensors(model: nn.Module, card: ModelCard) -> Iterator[tuple[str, Tensor]]:
    """(PEFT's name, whole tensor in PEFT's layout) of every adapter, one at a time."""
    for name, param in model.named_parameters():
        if is_adapter(name):
            yield peft_name(name, card), to_peft(whole_tensor(param), name)


def peft_name(name: str, card: ModelCard) -> str:
    owner, _, attribute = name.rpartition(".")
    layer = _LAYERS[attribute[: -len("_lora_a")]] if attribute not in _SUFFIXES else ""
    (hf_name, _), *_ = to_hf(f"{owner}.weight", torch.empty(0), card)
    return f"base_model.model.{hf_name.removesuffix('weight')}{layer}{_SUFFIXES[attribute[-len('lora_a') :]]}"


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
