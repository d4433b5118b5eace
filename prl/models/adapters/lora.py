"""Low-rank adapters (LoRA, arXiv:2106.09685): y = W x + alpha / rank * B (A x), with W frozen.

Adapters of a linear are `lora_a` [r, in] and `lora_b` [out, r] beside its `weight`; those of stacked experts lie beside
their matrices, one for each expert: `gate_up_lora_a` [E, H, r], `gate_up_lora_b` [E, 2I, r], `down_lora_a` [E, I, r],
`down_lora_b` [E, H, r] (without a gate `up_lora_a` and `up_lora_b` [E, I, r]). There A is stored transposed, so that
dimension 1 of all can be sharded like the experts' own, while dimension 0 is the expert group's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prl.config.errors import UserError
from prl.config.schema import ATTENTION, LoraConfig
from prl.models.experts.stacked import Experts, grouped_linear
from prl.models.sharding import is_sharded, local_part, place_of
from prl.models.state_space.mixer import keeps_float32

EXPERTS = "experts"  # the target that means the stacked matrices


class LoraLinear(nn.Linear):
    """A linear with adapters. Takes over the parameters of the one that it replaces."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.lora_scale = linear.in_features, linear.out_features, alpha / rank
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_a = adapter_like(linear.weight, rank, linear.in_features)
        self.lora_b = adapter_like(linear.weight, linear.out_features, rank)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return F.linear(x, self.weight, self.bias) + F.linear(F.linear(x, self.lora_a) * self.lora_scale, self.lora_b)


class LoraExperts(Experts):
    """Experts with adapters; a module of `Experts` becomes one in place."""

    lora_scale: float
    down_lora_a: nn.Parameter
    down_lora_b: nn.Parameter

    def grouped_mlp(self, x: Tensor, counts: Tensor, scale: Tensor) -> Tensor:
        """x [M, H] sorted by the experts held here, counts [E_local], scale [M] -> [M, H], each row times its scale."""
        a, b = (getattr(self, f"{self.first}_lora_{kind}") for kind in "ab")
        inner = self.activate(self.adapted(x, counts, self.first_proj, a, b), scale)
        return self.adapted(inner, counts, self.down_proj, self.down_lora_a, self.down_lora_b)

    def adapted(self, x: Tensor, counts: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """x [M, in], weight [E, out, in], a [E, in, r], b [E, out, r] -> [M, out]."""
        low = grouped_linear(x, local_part(a).transpose(1, 2), counts) * self.lora_scale  # [M, r]
        return grouped_linear(x, local_part(weight), counts) + grouped_linear(low, local_part(b), counts)


# --- model ------------------------------------------------------------------------------------------------------------


def apply_lora(model: nn.Module, lora: LoraConfig, base_dtype: torch.dtype) -> None:
    """Freeze a model, keep it in `base_dtype`, and give adapters to all modules that a target names, in float32.

    For models on the meta device, after expert parallelism and before compilation, checkpointing and sharding; fill
    the adapters by `init_adapters`. Raises UserError for a target that names nothing.
    """
    cast_parameters(model, base_dtype, requires_grad=False)
    targets = named_targets(model, lora.targets)
    missing = set(targets)
    for module in list(model.modules()):
        if isinstance(module, Experts) and EXPERTS in targets:
            missing.discard(EXPERTS)
            adapt_experts(module, lora)
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name in targets:
                missing.discard(name)
                setattr(module, name, LoraLinear(child, lora.rank, lora.alpha))
    if missing:
        linears = sorted({name.split(".")[-1] for name, m in model.named_modules() if isinstance(m, nn.Linear)})
        usual = [name for name in linears if name != "lm_head"]
        has_conv = any(type(module).__name__ == "Conv1D" for module in model.modules())
        raise UserError(
            f"The model has no LoRA target {', '.join(sorted(missing))}.",
            where=f"memory_recipe.lora.targets=[{','.join(lora.targets)}]",
            why=f"its linears are: {', '.join(linears)}" + "; Conv1D of transformers takes no adapters here" * has_conv,
            fix=f"memory_recipe.lora.targets=[{','.join(usual)}]" if usual else "memory_recipe.lora.rank=0",
        )


def named_targets(model: nn.Module, targets: Sequence[str]) -> tuple[str, ...]:
    """`LoraConfig.targets` with the linears of this model's attention for "attention", unless it has none that are
    called as no other. Of our own families the configuration has settled them; transformers' have attention in classes
    that are called so.
    """
    if ATTENTION not in targets:
        return tuple(targets)
    around = [name for name, module in model.named_modules() if type(module).__name__.endswith("Attention")]
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    within = [name for name in linears if any(name.startswith(f"{owner}.") for owner in around)]
    others = {name.rpartition(".")[2] for name in set(linears) - set(within)}
    found = dict.fromkeys(leaf for leaf in (name.rpartition(".")[2] for name in within) if leaf not in others)
    return tuple(dict.fromkeys(name for one in targets for name in (found if one == ATTENTION and found else (one,))))


def cast_parameters(model: nn.Module, dtype: torch.dtype, requires_grad: bool) -> None:
    """New parameters in place of the old, tied ones still tied. Buffers stay: rotary frequencies need float32; and so
    does what says how fast states decay.
    """
    cast: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(param) not in cast:
                kept = torch.float32 if keeps_float32(module) else dtype
                trains = requires_grad and param.requires_grad
                cast[id(param)] = nn.Parameter(param.data.to(kept), requires_grad=trains)
            module.register_parameter(name, cast[id(param)])


def adapt_experts(module: Experts, lora: LoraConfig) -> None:
    module.__class__ = LoraExperts
    assert isinstance(module, LoraExperts)
    module.lora_scale = lora.alpha / lora.rank
    for kind, weight in ((module.first, module.first_proj), ("down", module.down_proj)):
        experts, out_features, in_features = weight.shape
        setattr(module, f"{kind}_lora_a", adapter_like(weight, experts, in_features, lora.rank))
        setattr(module, f"{kind}_lora_b", adapter_like(weight, experts, out_features, lora.rank))


def adapter_like(weight: Tensor, *shape: int) -> nn.Parameter:
    """Uninitialised, float32, on the weight's device; of experts that are spread over a group, spread alike."""
    if is_sharded(weight):
        from torch.distributed.tensor import distribute_tensor

        whole = torch.empty(shape, device=weight.to_local().device)
        return nn.Parameter(distribute_tensor(whole, weight.device_mesh, weight.placements))
    return nn.Parameter(torch.empty(shape, device=weight.device))


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an adapter."""
    return name.rpartition(".")[2].endswith(("lora_a", "lora_b"))


def adapters_of(name: str) -> tuple[str, str]:
    """The adapters' names of the weight called `name`, which need not exist."""
    owner, _, attribute = name.rpartition(".")
    prefix = f"{owner}." + ("" if attribute == "weight" else attribute.removesuffix("proj"))
    return f"{prefix}lora_a", f"{prefix}lora_b"


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int) -> None:
    """A uniform in +-1 / sqrt(in) (Kaiming with a = sqrt(5), as in PEFT), B zero: the model is as it was.

    Numbers are drawn for whole tensors, on the host: the same on every mesh.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        if name.endswith("lora_b"):
            local_part(param).zero_()
        elif is_adapter(name):
            bound = param.shape[1] ** -0.5  # of [r, in] and [E, in, r] alike
            copy_shard(param, torch.empty(param.shape).uniform_(-bound, bound, generator=generator))


@torch.no_grad()
def copy_shard(param: Tensor, whole: Tensor) -> None:
    """Fill what this rank holds of `param` from the whole tensor."""
    if is_sharded(param):
        for dim, (size, start) in enumerate(zip(*place_of(param), strict=True)):
            whole = whole.narrow(dim, min(start, whole.shape[dim]), size)
    local_part(param).copy_(whole)


# --- whole tensors ----------------------------------------------------------------------------------------------------


def whole_tensor(param: Tensor) -> Tensor:
    """A collective when the parameter is sharded; else its own memory."""
    data = param.detach()
    if not is_sharded(data):
        return data
    if data.device_mesh.size() > 1:
        return data.full_tensor()
    with torch.no_grad():  # to_local is differentiable, and slow for it
        return data.to_local()


def merged_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every parameter but adapters, with these added in: what an engine runs. One at a time,
    and a collective when the model is sharded.
    """
    params = dict(model.named_parameters())
    for name, param in params.items():
        if is_adapter(name):
            continue
        weight = whole_tensor(param)
        a, b = adapters_of(name)
        if a in params:
            module = model.get_submodule(name.rpartition(".")[0])
            assert isinstance(module, LoraLinear | LoraExperts)
            weight = merge(weight, whole_tensor(params[a]), whole_tensor(params[b]), module.lora_scale)
        yield name, weight


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """weight [out, in], a [r, in], b [out, r]; of experts weight [E, out, in], a [E, in, r], b [E, out, r]. Added in
    float32, returned in the weight's dtype.
    """
    down = a.float() if a.dim() == 2 else a.float().transpose(1, 2)
    return (weight.float() + scale * (b.float() @ down)).to(weight.dtype)
