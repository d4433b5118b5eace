"""The decoder that all our families are, written for packed tokens.

Tokens of all sequences lie in one flat dimension [N]; what separates sequences is the `attend` callable, so that the
trainer (packed documents) and the built-in inference engine (KV cache) run exactly the same code and agree to
rounding. Parameter names follow the Hugging Face checkpoints (`prl.models.names`), except that the experts of a layer
are stacked (`experts.gate_up_proj` [E, 2I, H], `experts.down_proj` [E, H, I]).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prl.config.schema import ModelCard
from prl.models.experts.routing import RoutingRecorder
from prl.models.layers.attention import Attend, Attention, LatentAttend, SparseAttend
from prl.models.layers.latent_attention import LatentAttention
from prl.models.layers.lm_head import HeadFunction, LMHead
from prl.models.layers.mlp import DenseMLP, SparseMLP
from prl.models.layers.norm import RMSNorm
from prl.models.layers.rope import rotary_tables
from prl.models.names.decoder import HEAD, Names, is_further, locate, own_name, to_hf
from prl.models.names.region import Region
from prl.models.sharding import is_sharded
from prl.models.state_space.mixer import draw_decay


class DecoderLayer(nn.Module):
    """Attention block, then MLP block, each with its residual. The blocks are methods of their own, and the parts that
    run no attention kernel and no communication too (`project`, `join`, of dense layers `finish`), so that
    checkpointing and compilation can wrap exactly them. A layer of some families has one of the blocks alone.
    """

    self_attn: Attention | LatentAttention
    mlp: DenseMLP | SparseMLP

    def __init__(
        self, card: ModelCard, attention: Attention | LatentAttention | None, mlp: DenseMLP | SparseMLP | None
    ) -> None:
        super().__init__()
        self.mixes_tokens, self.has_mlp = attention is not None, mlp is not None
        if attention is not None:
            self.input_layernorm = RMSNorm(card.hidden_size, card.rms_norm_eps)
            self.self_attn = attention
        if mlp is not None:
            self.post_attention_layernorm = RMSNorm(card.hidden_size, card.rms_norm_eps)
            self.mlp = mlp

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend | LatentAttend, recorder: RoutingRecorder | None
    ) -> Tensor:
        if self.is_dense:
            return self.finish(x, self.attended(x, cos, sin, attend))
        if self.mixes_tokens:
            x = self.attention_block(x, cos, sin, attend)
        return self.mlp_block(x, recorder) if self.has_mlp else x

    @property
    def is_dense(self) -> bool:
        """Whether nothing is exchanged behind attention."""
        return self.mixes_tokens and self.has_mlp and isinstance(self.mlp, DenseMLP)

    def attention_block(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend | LatentAttend) -> Tensor:
        return self.join(x, self.attended(x, cos, sin, attend))

    def attended(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend | LatentAttend) -> Tensor:
        """x [N, H] -> what attention gives, before its output projection."""
        q, k, v, *index = self.project(x, cos, sin)
        if isinstance(attend, LatentAttend):
            assert isinstance(self.self_attn, LatentAttention)
            return attend(self.self_attn.layer_idx, q, k[:, 0], *self.self_attn.of_heads())
        if index:
            assert isinstance(attend, SparseAttend), "a layer with an indexer"
            attend.choose(self.self_attn.layer_idx, *index)
        return attend(self.self_attn.layer_idx, q, k, v)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """x [N, H] -> q, k, v as `Attend` wants them, and what `SparseAttend.choose` does."""
        return self.self_attn.project(self.input_layernorm(x), cos, sin)

    def join(self, x: Tensor, attended: Tensor) -> Tensor:
        return x + self.self_attn.output(attended)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Of a dense layer all that follows attention."""
        return self.mlp_block(self.join(x, attended), None)

    def mlp_block(self, x: Tensor, recorder: RoutingRecorder | None) -> Tensor:
        return x + self.mlp(self.post_attention_layernorm(x), recorder)


class Decoder(nn.Module):
    """Decoder with LM head; a family says what its layers are. Built on the meta device by `prl.models.families`, then
    loaded.

    forward: input_ids [N] int64, positions [N] int64, attend as above -> hidden [N, H] after the final norm; with
    `head`, its result instead. `head(hidden [N, H], weight [V, H])` runs inside forward because under FSDP the LM
    head's weight is whole only there.
    """

    names = Names()  # of its checkpoints

    def __init__(self, card: ModelCard) -> None:
        super().__init__()
        self.card = card
        # with a weight given, torch draws none: on the meta device that would import its compiler (1.5 s)
        self.embed_tokens = nn.Embedding.from_pretrained(torch.empty(card.vocab_size, card.hidden_size), freeze=False)
        self.layers = nn.ModuleList(self.layer(card, i) for i in range(card.num_hidden_layers))
        self.norm = RMSNorm(card.hidden_size, card.rms_norm_eps)
        self.lm_head = None if card.tie_word_embeddings else LMHead(card.hidden_size, card.vocab_size, bias=False)

    @classmethod
    def layer(cls, card: ModelCard, index: int) -> DecoderLayer:
        """The layer `index`, from 0."""
        raise NotImplementedError

    @property
    def head_weight(self) -> Tensor:
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend | LatentAttend,
        head: HeadFunction | None = None,
        recorder: RoutingRecorder | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        x = self.embed_tokens(input_ids)
        cos, sin = rotary_tables(positions, self.card)
        for layer in self.layers:
            x = layer(x, cos, sin, attend, recorder)
        x = self.norm(x)
        if head is None:
            return x
        return head(x, self.head_weight) if self.lm_head is None else self.lm_head(x, head)

    def to_empty(self, *, device: str | torch.device | int | None, recurse: bool = True) -> Self:
        """As every module's; but without the compiler that torch imports to copy a meta tensor's strides (0.4 s)."""

        def empty(tensor: Tensor) -> Tensor:
            if is_sharded(tensor) or not tensor.is_contiguous():
                return torch.empty_like(tensor, device=device)
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device if device is None else device)

        return self._apply(empty, recurse=recurse)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> logits [N, V]; only for models that are not sharded."""
        return F.linear(hidden, self.head_weight)

    def absorb_latents(self) -> None:
        """From now on attend to the latents of tokens, where the attention has such: what a cache can hold."""
        for module in self.modules():
            if isinstance(module, LatentAttention):
                module.form = "absorbed"

    def leave_latents(self) -> None:
        """From now on leave it to a `LatentAttend` to make keys and values of latents."""
        for module in self.modules():
            if isinstance(module, LatentAttention) and module.form == "expanded":
                module.form = "left"

    def locate(self, hf_name: str) -> Region | None:
        """The region that a checkpoint tensor fills; None for one that this model does not hold."""
        return locate(hf_name, self.card, self.names)

    def tied_to(self, hf_name: str) -> str | None:
        """Name of the parameter that a checkpoint tensor repeats, of which this model has no other."""
        is_head = self.card.tie_word_embeddings and self.own_name(hf_name) == HEAD
        return "embed_tokens.weight" if is_head else None

    def own_name(self, hf_name: str) -> str | None:
        """What a checkpoint tensor is called where this model is not part of a larger one; None for those of others."""
        return own_name(hf_name, self.names)

    def is_further(self, hf_name: str) -> bool:
        """Whether a checkpoint tensor, by its own name, is of layers that predict further tokens."""
        return is_further(hf_name, self.card, self.names)

    def to_hf(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """One whole parameter -> its checkpoint tensors (views)."""
        return to_hf(name, tensor, self.card, self.names)

    def checkpoint_buffers(self) -> dict[str, Tensor]:
        """Buffers that are part of Hugging Face checkpoints: the corrections of routers' choices, in float32."""
        return {
            f"{name}.router_bias": module.router_bias
            for name, module in self.named_modules()
            if isinstance(module, SparseMLP) and module.corrected and module.router_bias is not None
        }

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator, std: float = 0.02) -> None:
        """Normal(0, std) for matrices, ones for norms, zeros for biases; the same numbers for the same generator state
        on every platform's CPU.
        """
        for name, param in self.named_parameters():
            draw(name, param, generator, std)
        for buffer in self.checkpoint_buffers().values():
            buffer.zero_()


@torch.no_grad()
def draw(name: str, values: Tensor, generator: torch.Generator, std: float = 0.02) -> None:
    """Fill a parameter, or a part of it, as models begin: see `init_weights`."""
    if name.endswith("norm.weight"):
        values.fill_(1.0)
    elif name.endswith(".bias"):
        values.zero_()
    elif not draw_decay(name, values, generator):
        values.normal_(0.0, std, generator=generator)
