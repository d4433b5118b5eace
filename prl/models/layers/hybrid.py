"""Layers with a state-space recurrence in place of attention, and what they attend with: `Attend` that can mix, too."""

from __future__ import annotations

from torch import Tensor, nn

from prl.config.schema import ModelCard
from prl.models.layers.attention import Attend, LatentAttend
from prl.models.layers.decoder import DecoderLayer
from prl.models.layers.norm import RMSNorm
from prl.models.state_space.mixer import Mamba2Mixer, Mix


class HybridAttend:
    """`Attend` for the layers with attention, and `Mix` for those with states."""

    def __init__(self, attend: Attend, mix: Mix) -> None:
        self.attend, self.mix = attend, mix

    def __call__(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(layer_idx, q, k, v)


class StateSpaceLayer(DecoderLayer):
    """Norm, mixer, residual. `project` and `join` run neither recurrence nor communication, as those of attention."""

    def __init__(self, card: ModelCard, layer_idx: int) -> None:
        nn.Module.__init__(self)
        self.mixes_tokens, self.has_mlp = True, False
        self.input_layernorm = RMSNorm(card.hidden_size, card.rms_norm_eps)
        self.mamba = Mamba2Mixer(card, layer_idx)

    def attention_block(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend | LatentAttend) -> Tensor:
        assert isinstance(attend, HybridAttend), "a layer with states"
        gate, xbc, dt = self.project(x, cos, sin)
        return self.join(x, self.mamba.along(xbc, dt, attend.mix), gate)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, H] -> gate [N, I], xbc [N, C], dt [N, heads]."""
        return self.mamba.project(self.input_layernorm(x))

    def join(self, x: Tensor, mixed: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return x + self.mamba.output(mixed, gate)
