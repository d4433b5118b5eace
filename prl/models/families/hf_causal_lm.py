"""Any causal language model of transformers behind the interface of `Decoder`: `model.impl=hf`.

The adapter takes over the children of the transformers model, so parameters keep the names of the checkpoint, and runs
its attention through the `attend` of the caller: packed documents are separated exactly as in our own models. What
`attend` does not know, sliding windows shorter than a document and capped scores, is computed with a dense mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from prl.config.errors import UserError
from prl.config.schema import ModelCard
from prl.models.experts.routing import RoutingRecorder
from prl.models.layers.attention import Attend
from prl.models.names.region import Region, cut
from prl.models.names.transformers import checkpoint_regions

ATTENTION = "prl_packed"
KNOWN_LAYERS = {"full_attention", "sliding_attention"}
# keys of a config that change the logits after the last matrix product, and the values that change nothing
NEUTRAL = {"final_logit_softcapping": (None,), "logit_scale": (None, 1.0), "logits_scaling": (None, 1.0)}


@dataclass(frozen=True)
class Packing:
    """What the attention of one forward pass needs to know; travels through the model as a keyword argument."""

    attend: Attend
    positions: Tensor  # [N] int64, from 0 in each document
    longest: int  # tokens of the longest document


class HFCausalLM(nn.Module):
    """A transformers model with the interface of `Decoder`. Built on the meta device by `build_hf_model`."""

    def __init__(self, lm: PreTrainedModel, card: ModelCard) -> None:
        super().__init__()
        self.card = card
        for name, child in lm.named_children():
            self.add_module(name, child)
        self._lm = (lm,)  # in a tuple, so that it is no child of its own
        self._aliases = tied_names(self)
        self._regions = checkpoint_regions(lm)

    @property
    def lm(self) -> PreTrainedModel:
        return self._lm[0]

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, whatever the family calls them."""
        count = self.card.num_hidden_layers
        lists = [m for m in self.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
        assert lists, f"{type(self.lm).__name__} has no list of {count} layers"
        return lists[0]

    @property
    def head_weight(self) -> Tensor:
        return self.lm.get_output_embeddings().weight

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        head: Callable[[Tensor, Tensor], Tensor | tuple[Tensor, ...]] | None = None,
        recorder: RoutingRecorder | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """As `Decoder.forward`; routing cannot be replayed."""
        assert recorder is None, "transformers' routers can be neither recorded nor replayed"
        packing = Packing(attend, positions, int(positions.max()) + 1)
        output = self.lm.base_model(
            input_ids=input_ids[None], position_ids=positions[None], use_cache=False, packing=packing
        )
        hidden = output.last_hidden_state[0]
        return hidden if head is None else head(hidden, self.head_weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> logits [N, V]; only for models that are not sharded."""
        return F.linear(hidden, self.head_weight)

    # --- the checkpoint's names

    def locate(self, hf_name: str) -> Region | None:
        """The region that a checkpoint tensor fills, also where it is called as the parameter itself is; None for one
        that this model does not hold: a tied parameter, and tables that some files carry along.
        """
        if hf_name in self._regions:
            return self._regions[hf_name]
        dropped = hf_name in self._aliases or hf_name.endswith(".inv_freq")
        return None if dropped or (hf_name == "lm_head.weight" and self.card.tie_word_embeddings) else Region(hf_name)

    def to_hf(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """One whole parameter -> its checkpoint tensors (views)."""
        yield from ((saved, cut(region, tensor)) for saved, region in self._regions_of[name])

    def checkpoint_buffers(self) -> dict[str, Tensor]:
        """Those that are part of checkpoints, such as the correction of a router's choice."""
        return {name: buffer for name, buffer in self.named_buffers() if name in self._regions_of}

    @functools.cached_property
    def _regions_of(self) -> dict[str, list[tuple[str, Region]]]:
        """Name of each tensor here -> its parts in a checkpoint."""
        parts: dict[str, list[tuple[str, Region]]] = {}
        for saved, region in self._regions.items():
            parts.setdefault(region.param, []).append((saved, region))
        return parts

    def to_empty(self, *, device: Any, recurse: bool = True) -> HFCausalLM:
        """Storage for the parameters. Buffers (rotary frequencies) keep their values, tied parameters stay tied."""
        kept = {name: buffer.clone() for name, buffer in self.named_buffers()}
        super().to_empty(device=device, recurse=recurse)
        for name, buffer in self.named_buffers():
            buffer.copy_(kept[name])
        for alias, name in self._aliases.items():
            owner, _, attribute = alias.rpartition(".")
            setattr(self.get_submodule(owner), attribute, self.get_parameter(name))
        return self


def tied_names(model: nn.Module) -> dict[str, str]:
    """Name of each parameter that is another one -> the name of that one."""
    first: dict[int, str] = {}
    aliases = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), name) != name:
            aliases[name] = first[id(param)]
    return aliases


# --- building ---------------------------------------------------------------------------------------------------------


def build_hf_model(path: Path | None, card: ModelCard) -> HFCausalLM:
    """The model of the config.json at `path` (None: of the card, for Qwen3), parameters on the meta device in float32.

    Raises UserError for a model whose layers or logits this adapter cannot run.
    """
    config = read_config(path, card)
    check_supported(config, path)
    AttentionInterface.register(ATTENTION, attend_packed)
    with meta_parameters():
        lm = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=torch.float32)
    lm.tie_weights()
    check_head_bias(lm, path)
    # in eval mode no dropout is at work, whatever config.json says: engines sample without, and recomputed layers would
    # draw other numbers the second time
    return HFCausalLM(lm.eval(), card.model_copy(update={"family": "other"}))


def read_config(path: Path | None, card: ModelCard) -> PretrainedConfig:
    if path is not None:
        return AutoConfig.from_pretrained(path)
    from prl.config.cards import card_to_hf_config

    if not card.is_native:
        raise UserError(
            "A model of another family needs its config.json.",
            where="model.path=null",
            why="the card does not say which architecture it is",
            fix="model.path=/path/to/a/Hugging-Face/checkpoint",
        )
    fields = card_to_hf_config(card)
    return AutoConfig.for_model(**fields)


def check_supported(config: PretrainedConfig, path: Path | None) -> None:
    fields = config.get_text_config().to_dict()
    odd = sorted(set(fields.get("layer_types") or ()) - KNOWN_LAYERS)
    if odd:
        raise UserError(
            f"{fields['model_type']} has layers of a kind that cannot separate packed documents: {', '.join(odd)}.",
            where=str(path),
            why="only attention layers take part in packing; recurrent ones would carry state across documents",
            fix="a model with attention layers only",
        )
    scaled = [key for key, neutral in NEUTRAL.items() if fields.get(key) not in neutral]
    if scaled:
        raise UserError(
            f"{fields['model_type']} changes its logits after the LM head: {', '.join(scaled)}.",
            where=str(path),
            why="losses are computed from hidden states and the LM head's weight",
            fix="a model without these, or a custom implementation in prl/models",
        )


def check_head_bias(lm: PreTrainedModel, path: Path | None) -> None:
    if lm.get_output_embeddings().bias is not None:
        raise UserError(
            f"The LM head of {lm.config.model_type} has a bias.",
            where=str(path),
            why="losses are computed from hidden states and the LM head's weight",
            fix="a model without it, or a custom implementation in prl/models",
        )


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Parameters created within go to the meta device; buffers are real, because nobody could compute them later."""
    register = nn.Module.register_parameter

    def register_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.data.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


# --- attention --------------------------------------------------------------------------------------------------------


def attend_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, Hq, N, D], key and value [1, Hkv, N, D] -> [1, N, Hq, D]."""
    if s_aux is not None:
        raise UserError(
            "Attention sinks are not supported.",
            where=type(module).__name__,
            why="the packed attention kernels do not know them",
            fix="another model",
        )
    assert not dropout, "models run in eval mode"
    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))  # [N, H, D]
    usual = q.shape[-1] ** -0.5
    if scaling is not None and scaling != usual:
        q = q * (scaling / usual)
    if softcap is None and (sliding_window is None or packing.longest <= sliding_window):
        return packing.attend(0, q.contiguous(), k.contiguous(), v.contiguous()).unsqueeze(0), None
    return attend_dense(q, k, v, packing.positions, sliding_window, softcap).unsqueeze(0), None


def attend_dense(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, window: int | None, softcap: float | None
) -> Tensor:
    """Causal attention inside each document with a mask [N, N]. q [N, Hq, D], k and v [N, Hkv, D] -> [N, Hq, D].

    window: a token sees so many, itself included; softcap: scores are softcap * tanh(score / softcap).
    """
    document = (positions == 0).cumsum(0)
    distance = positions[:, None] - positions[None, :]
    mask = (document[:, None] == document[None, :]) & (distance >= 0)
    if window is not None:
        mask &= distance < window
    groups = q.shape[1] // k.shape[1]
    q, k, v = (t.transpose(0, 1) for t in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
    if softcap is None:
        return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0].transpose(0, 1)
    scores = softcap * torch.tanh(q @ k.transpose(1, 2) * q.shape[-1] ** -0.5 / softcap)
    weights = scores.masked_fill(~mask, float("-inf")).float().softmax(-1).to(v.dtype)
    return (weights @ v).transpose(0, 1)
