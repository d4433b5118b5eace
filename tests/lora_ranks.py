"""A model with adapters, sharded as the trainer does: `python lora_ranks.py DIR RANK SIZE` checks it on several ranks.

DIR holds an adapter of PEFT for each kind of model; error_<rank>.txt tells what was wrong.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from rank_processes import serve_rank
from tiny import dense_card, moe_card, random_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from prl.config.schema import LoraConfig
from prl.models.adapters.lora import apply_lora, copy_shard, init_adapters, is_adapter, merged_parameters
from prl.models.adapters.peft import export_adapter, import_adapter
from prl.models.experts.all_to_all import AllToAllDispatch
from prl.models.families.build import build_decoder

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LORA = {
    "dense": LoraConfig(rank=4, alpha=6.0, targets=(*ATTENTION, "gate_proj", "up_proj", "down_proj")),
    "moe": LoraConfig(rank=4, alpha=6.0, targets=(*ATTENTION, "experts")),
}
CARDS = {"dense": dense_card, "moe": moe_card}
SEED = 3


def lora_model(kind, seed=SEED, trained=True, dtype=torch.float32, lora=None):
    """In one piece; with adapters as training might have left them: B off zero."""
    model = random_model(CARDS[kind](), std=0.1)
    apply_lora(model, lora or LORA[kind], dtype)
    init_adapters(model, seed)
    if trained:
        generator = torch.Generator().manual_seed(5)
        for name, param in model.named_parameters():
            if name.endswith("lora_b"):
                param.data.normal_(0.0, 0.1, generator=generator)
    return model


def sharded_model(kind, dtype, mesh: DeviceMesh):
    """From the meta device; mesh: efsdp x ep."""
    with torch.device("meta"):
        model = build_decoder(CARDS[kind]())
    stacks = [layer.mlp.experts for layer in model.layers] if kind == "moe" else []
    for experts in stacks:
        for name, param in list(experts.named_parameters(recurse=False)):
            experts.register_parameter(name, nn.Parameter(distribute_tensor(param.data, mesh["ep"], [Shard(0)])))
        experts.dispatch = AllToAllDispatch(mesh["ep"].get_group())
    apply_lora(model, LORA[kind], dtype)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for experts in stacks:
        fully_shard(experts, mesh=mesh["efsdp"], mp_policy=policy, shard_placement_fn=lambda _: Shard(1))
    dense = init_device_mesh("cpu", (mesh.size(),))
    for part in (*model.layers, model):
        fully_shard(part, mesh=dense, mp_policy=policy)
    model.to_empty(device="cpu")
    base = dict(random_model(CARDS[kind](), std=0.1).named_parameters())
    for name, param in model.named_parameters():
        if not is_adapter(name):
            copy_shard(param, base[name].detach())
    init_adapters(model, SEED)
    return model


def check_adapters(kind, dtype, mesh, directory: Path):
    """Initial adapters, import, merging and export agree with those of a model in one piece."""
    model, fresh = sharded_model(kind, dtype, mesh), lora_model(kind, trained=False)
    weights = dict(fresh.named_parameters())
    for name, param in model.named_parameters():
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        assert torch.equal(whole, weights[name].to(whole.dtype)), name
    trained = lora_model(kind, dtype=dtype)
    import_adapter(model, model.card, LORA[kind], directory / kind)
    merged = dict(merged_parameters(trained))
    for name, weight in merged_parameters(model):
        assert torch.equal(weight, merged[name]), name
    again = directory / f"{kind}-{dist.get_rank()}"
    export_adapter(model, model.card, LORA[kind], again, "base", write=dist.get_rank() == 0)
    if dist.get_rank() == 0:
        assert (again / "adapter_model.safetensors").read_bytes() == (
            directory / kind / "adapter_model.safetensors"
        ).read_bytes()


def check_all(directory: Path, rank: int, size: int) -> None:
    for shape in ((size, 1), (1, size)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("efsdp", "ep"))
        for kind in CARDS:
            check_adapters(kind, torch.bfloat16, mesh, directory)


def main() -> None:
    serve_rank(check_all)


if __name__ == "__main__":
    main()
