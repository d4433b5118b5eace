"""Any causal language model of transformers behind the interface of `Decoder`: `model.impl=hf`.

The adapter takes over the children of the transformers model, so parameters keep the names of the checkpoint, and runs
its attention through the `attend` of the caller: packed documents are separated exactly as in our own models. What
`attend` does not know, sliding windows shorter than a document and capped scores, is computed with a dense mask.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from prl.config.config_json import read_config_json
from prl.config.errors import UserError
from prl.config.families import FAMILIES
from prl.config.foreign import (
    attends_otherwise,
    carries_state,
    has_sinks,
    not_trainable,
    sees_later_tokens,
    switches,
    switching_ropes,
)
from prl.config.schema import ModelCard
from prl.models.experts.routing import RoutingRecorder
from prl.models.layers.attention import Attend
from prl.models.names.decoder import MTP
from prl.models.names.region import Region, cut
from prl.models.names.transformers import checkpoint_regions

ATTENTION = "prl_packed"
TABLE_OF_POSITIONS = re.compile(r"\b(wpe|embed_positions|position_embeddings?|pos_encoding)(\.weights?)?$")
ASIDE = ("position_ids",)  # tensors that a model hands to its attention, and that change nothing there


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
        self._switching = switching_ropes(lm.config.get_text_config().to_dict())

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
        for rope, limit in self._switching:
            if packing.longest > limit:
                told = f"one has {packing.longest}"
                raise switches(self.lm.config.model_type, rope, limit, type(self.lm).__name__, told)
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
        dropped = hf_name in self._aliases or hf_name.endswith(".inv_freq") or self.is_further(hf_name)
        return None if dropped or (hf_name == "lm_head.weight" and self.card.tie_word_embeddings) else Region(hf_name)

    def tied_to(self, hf_name: str) -> str | None:
        """As `Decoder.tied_to`."""
        return self._aliases.get(hf_name)

    def own_name(self, hf_name: str) -> str | None:
        """As `Decoder.own_name`: checkpoints are this model's alone."""
        return hf_name

    def is_further(self, hf_name: str) -> bool:
        """As `Decoder.is_further`, where config.json says that there are such layers, or their names do."""
        layer = re.match(r"model\.layers\.(\d+)\.", hf_name)
        behind = layer is not None and int(layer[1]) >= self.card.num_hidden_layers
        counted = getattr(self.lm.config, "num_nextn_predict_layers", None)
        return (behind and bool(counted)) or (hf_name.startswith(MTP) and not hasattr(self, "mtp"))

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
    check_attention(config, path)
    AttentionInterface.register(ATTENTION, attend_packed)
    lm = _their_model(config, path)
    lm.tie_weights()
    # no dropout is at work, whatever config.json says: engines sample without, and recomputed layers would draw other
    # numbers the second time
    lm.eval()
    check_states(lm, path)
    check_head_bias(lm, path)
    check_sinks(lm, path)
    check_empty(lm, path)
    check_calls(lm, path)
    check_positions(lm, card, path)
    return HFCausalLM(lm, card.model_copy(update={"family": "other"}))


def read_config(path: Path | None, card: ModelCard) -> PretrainedConfig:
    if path is not None:
        config = _their_config(path)
        if hasattr(config, "quantization_config"):  # weights are dequantised on reading
            del config.quantization_config
        return config
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


def _their_config(path: Path) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(path)
    except Exception as error:  # unknown families, code of the checkpoint's own, values of other types: each its own
        fix = "a version of transformers that has this family (pip install --upgrade transformers); a checkpoint of "
        fix += f"a family that it has, without code of its own; or one of {', '.join(FAMILIES)}"
        if str(read_config_json(path).get("model_type")) in CONFIG_MAPPING:
            fix = f"correct config.json; else {fix}"
        raise _told(error, "transformers cannot read config.json of the checkpoint.", path, fix) from error


def _their_model(config: PretrainedConfig, path: Path | None) -> PreTrainedModel:
    try:
        with meta_parameters():
            return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=torch.float32)
    except Exception as error:  # sizes below zero, names of functions that nobody knows: each its own
        raise _told(
            error, "transformers cannot build the model of config.json.", path, "correct config.json"
        ) from error


def _told(error: Exception, what: str, path: Path | None, fix: str) -> UserError:
    """By transformers' own words."""
    said = str(error).strip().splitlines() or [repr(error)]
    why = f"{type(error).__name__}: {' '.join(said)[:400]}"
    return UserError(what, where=str(path / "config.json") if path else "model.card", why=why, fix=fix)


def check_supported(config: PretrainedConfig, path: Path | None) -> None:
    """What config.json says or transformers takes it to say."""
    if (error := not_trainable(config.get_text_config().to_dict(), str(path))) is not None:
        raise error


def check_states(lm: PreTrainedModel, path: Path | None) -> None:
    """Layers that carry something from token to token past attention, whatever config.json calls them: transformers
    says so of a class (`_is_stateful`), and convolutions along the tokens show.
    """
    if lm._is_stateful or any(isinstance(module, nn.Conv1d) for module in lm.modules()):
        raise carries_state(lm.config.model_type, "", str(path))


def check_attention(config: PretrainedConfig, path: Path | None) -> None:
    """Before the model is built: some classes would fail there, others at the first step."""
    classes = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if isinstance(classes, type) and not (classes._supports_attention_backend or classes._is_stateful):
        raise UserError(
            f"{config.model_type} computes its attention itself.",
            where=str(path),
            why="documents of a row are kept apart by our attention, which transformers lets no other code call than "
            f"that of its attention interface; {classes.__name__} is not among it",
            fix="another model, or a custom implementation in prl/models",
        )


def check_head_bias(lm: PreTrainedModel, path: Path | None) -> None:
    if lm.get_output_embeddings().bias is not None:
        raise UserError(
            f"The LM head of {lm.config.model_type} has a bias.",
            where=str(path),
            why="losses are computed from hidden states and the LM head's weight",
            fix="a model without it, or a custom implementation in prl/models",
        )


def check_sinks(lm: PreTrainedModel, path: Path | None) -> None:
    """Before weights are read: `attend_packed` would say so at the first step."""
    if any(name.endswith(".sinks") for name, _ in lm.named_parameters()):
        raise has_sinks(lm.config.model_type, str(path))


def check_empty(lm: PreTrainedModel, path: Path | None) -> None:
    """Matrices of a part that the model has none of (n_shared_experts=0): FSDP fails on them in backward. And numbers
    by themselves, of which it cannot give each rank some rows.
    """
    if alone := [name for name, param in lm.named_parameters() if not param.dim()]:
        raise UserError(
            f"{lm.config.model_type} has parameters of no dimension: {alone[0]}.",
            where=str(path),
            why="parameters are sharded by their rows",
            fix="another model, or a custom implementation in prl/models",
        )
    empty = [name for name, param in lm.named_parameters() if not param.numel()]
    if empty:
        raise UserError(
            f"transformers' code of {lm.config.model_type} has empty parameters here: {empty[0]}.",
            where=str(path),
            why="what is sharded cannot be empty",
            fix="model.impl=custom" if lm.config.model_type in FAMILIES else "another model",
        )


def check_positions(lm: PreTrainedModel, card: ModelCard, path: Path | None) -> None:
    """Tables with a row for each position, learned (gpt2, opt) or not (codegen): a document cannot be longer."""
    tensors = [*lm.named_parameters(), *lm.named_buffers()]
    tables = {name: len(tensor) for name, tensor in tensors if TABLE_OF_POSITIONS.search(name)}
    if not tables:
        return
    name, rows = min(tables.items(), key=lambda one: one[1])
    rows = min(rows, getattr(lm.config, "max_position_embeddings", None) or rows)  # some have rows besides
    if rows < card.max_position_embeddings:
        raise UserError(
            f"{lm.config.model_type} knows {rows} positions, fewer than {card.max_position_embeddings}.",
            where=f"model.card.max_position_embeddings={card.max_position_embeddings}, {path}",
            why=f"each position is a row of {name}, and documents may be as long as the context",
            fix=f"model.card.max_position_embeddings={rows}",
        )


def check_calls(lm: PreTrainedModel, path: Path | None) -> None:
    """What its layers hand to attention, as far as they get without numbers: through all of them, or to the first that
    goes by numbers (experts do). Of those behind it `attend_packed` would say so at the first step.
    """

    def attended(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.new_empty(*q.shape[:2], v.shape[2])

    ids = torch.zeros(2, dtype=torch.int64, device="meta")
    base = copy.deepcopy(lm.base_model).to("meta")  # some keep tensors of a forward pass
    try:
        with torch.no_grad():
            base(input_ids=ids[None], position_ids=ids[None], use_cache=False, packing=Packing(attended, ids, 1))
    except UserError as error:
        error.where = str(path)
        raise
    except RuntimeError:  # what it does next depends on numbers
        return


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
    packing: Packing | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, Hq, N, D], key and value [1, Hkv, N, D] -> [1, N, Hq, D].

    Raises UserError for attention that this is not: with masks, sinks or biases of a model's own, in both directions.
    """
    name = type(module).__name__
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise sees_later_tokens(name, name)
    odd = [key for key, value in others.items() if isinstance(value, Tensor) and key not in ASIDE]
    if attention_mask is not None or odd or packing is None:
        raise attends_otherwise(name, "attention_mask" if attention_mask is not None else ", ".join(odd), name)
    assert not dropout, "models run in eval mode"
    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))  # [N, H, D]
    scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
    if v.shape[-1] > q.shape[-1]:  # kernels pad values, not queries and keys
        q, k = (F.pad(t, (0, v.shape[-1] - q.shape[-1])) for t in (q, k))
    usual = q.shape[-1] ** -0.5
    if scaling != usual:
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
