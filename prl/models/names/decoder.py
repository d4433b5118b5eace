"""Between Hugging Face's parameter names and ours (`transformers.py`: those of transformers' own models).

They differ in the prefix `model.` and in the experts, which a checkpoint stores one by one and we stack. Adding a
family means adding its pairs here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor

from prl.config.schema import ModelCard
from prl.models.names.region import Region

_EXPERT = re.compile(r"model\.(layers\.\d+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def locate(hf_name: str, card: ModelCard) -> Region | None:
    """The region that a checkpoint tensor fills; None for one that this model does not hold (a tied LM head)."""
    if match := _EXPERT.fullmatch(hf_name):
        stack, expert, kind = match[1], int(match[2]), match[3]
        if kind == "down":
            return Region(f"{stack}.down_proj", expert)
        size = card.moe_intermediate_size
        return Region(f"{stack}.gate_up_proj", expert, (0, size) if kind == "gate" else (size, 2 * size))
    if hf_name == "lm_head.weight":
        return None if card.tie_word_embeddings else Region("lm_head.weight")
    return Region(hf_name.removeprefix("model."))


def to_hf(name: str, tensor: Tensor, card: ModelCard) -> Iterator[tuple[str, Tensor]]:
    """One whole parameter of ours -> its checkpoint tensors (views)."""
    if name == "lm_head.weight" or card.family == "other":
        yield name, tensor
    elif name.endswith("experts.gate_up_proj"):
        stack, size = name.removesuffix(".gate_up_proj"), card.moe_intermediate_size
        for expert in range(card.num_experts):
            yield f"model.{stack}.{expert}.gate_proj.weight", tensor[expert, :size]
            yield f"model.{stack}.{expert}.up_proj.weight", tensor[expert, size:]
    elif name.endswith("experts.down_proj"):
        stack = name.removesuffix(".down_proj")
        for expert in range(card.num_experts):
            yield f"model.{stack}.{expert}.down_proj.weight", tensor[expert]
    else:
        yield f"model.{name}", tensor
