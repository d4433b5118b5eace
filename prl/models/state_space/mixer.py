"""The mixer of Mamba-2 (arXiv:2405.21060): projections, convolution, recurrence, gated norm.

What works on single tokens is here; what goes along a document is done by whoever knows where documents lie (`Mix`),
as attention is by `Attend`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prl.config.schema import ModelCard
from prl.models.state_space.convolution import Documents, convolve_documents


@dataclass(frozen=True)
class Channels:
    """The weights along a document, of all heads or of some."""

    conv: Tensor  # [C, K], C = H * P + 2 * G * S: x of all heads, then B and C of all groups
    conv_bias: Tensor  # [C]
    a: Tensor  # [H] float32, negative
    d: Tensor  # [H] float32
    head_dim: int  # P
    groups: int  # G
    state: int  # S

    @property
    def heads(self) -> int:
        return len(self.a)

    def cut(self, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., C] -> x [..., H, P], B and C [..., G, S]."""
        inner, state = self.heads * self.head_dim, self.groups * self.state
        x, b, c = xbc.split([inner, state, state], dim=-1)
        return x.unflatten(-1, (self.heads, -1)), *(t.unflatten(-1, (self.groups, -1)) for t in (b, c))

    def share(self, rank: int, size: int, repeats: int) -> Channels:
        """Those of the rank's part of the heads, of groups that are repeated so many times each."""
        taken = _share_of(torch.arange(self.conv.shape[0]), self, size, repeats)[rank].to(self.conv.device)
        heads = slice(rank * self.heads // size, (rank + 1) * self.heads // size)
        return replace(
            self,
            conv=self.conv.index_select(0, taken),
            conv_bias=self.conv_bias.index_select(0, taken),
            a=self.a[heads],
            d=self.d[heads],
            groups=self.groups * repeats // size,
        )

    def shares(self, xbc: Tensor, size: int, repeats: int) -> Tensor:
        """xbc [N, C] -> [size, N, C']: the channels of `share`, for each rank."""
        return _share_of(xbc, self, size, repeats)


def _share_of(xbc: Tensor, channels: Channels, size: int, repeats: int) -> Tensor:
    """[..., C] -> [size, ..., C']: neighbouring heads, and the groups that these read."""
    x, b, c = channels.cut(xbc)
    if repeats > 1:
        b, c = b.repeat_interleave(repeats, dim=-2), c.repeat_interleave(repeats, dim=-2)
    parts = [t.unflatten(-2, (size, -1)).flatten(-2) for t in (x, b, c)]  # [..., size, C_i]
    return torch.cat(parts, dim=-1).movedim(-2, 0)


# convolve(xbc [N, C], weight [C, K], bias [C], documents) -> [N, C]
Convolve = Callable[[Tensor, Tensor, Tensor, Documents], Tensor]
# mix(layer_idx, xbc [N, C], dt [N, H] float32, channels, convolve) -> y [N, H * P], along each document. The trainer's
# convolves by what it is given, a layer's `convolve`, which may be made to forget and repeat
Mix = Callable[[int, Tensor, Tensor, Channels, Convolve], Tensor]


class GatedRMSNorm(nn.Module):
    """Of each group of channels alone, after the gate."""

    def __init__(self, dim: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.groups, self.eps = groups, eps

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """y and gate [N, D] -> [N, D] in y's dtype."""
        wide = torch.promote_types(y.dtype, torch.float32)
        gated = (y.to(wide) * F.silu(gate.to(wide))).unflatten(-1, (self.groups, -1))
        return F.rms_norm(gated, (gated.shape[-1],), eps=self.eps).flatten(-2).to(y.dtype) * self.weight


class Decay(nn.Module):
    """What says how fast heads forget. Its numbers stay in float32, whatever the model's dtype: their rounding would be
    raised to the power of the document's length.
    """

    keeps_float32 = True

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))

    def forward(self, dt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dt [N, H] -> step sizes [N, H], a [H], d [H], in float32 or wider. None is the memory of a parameter, which
        under FSDP is gone when this returns.
        """
        wide = torch.promote_types(dt.dtype, torch.float32)
        return F.softplus(dt.to(wide) + self.dt_bias.to(wide)), -self.A_log.to(wide).exp(), self.D.to(wide).clone()


class Mamba2Mixer(nn.Module):
    def __init__(self, card: ModelCard, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.head_dim = layer_idx, card.mamba_head_dim
        self.groups, self.state = card.mamba_n_groups, card.ssm_state_size
        self.inner = card.mamba_num_heads * card.mamba_head_dim
        self.channels = self.inner + 2 * self.groups * self.state
        self.in_proj = nn.Linear(card.hidden_size, self.inner + self.channels + card.mamba_num_heads, bias=False)
        self.conv1d = nn.Conv1d(self.channels, self.channels, card.conv_kernel, groups=self.channels)
        self.decay = Decay(card.mamba_num_heads)
        self.norm = GatedRMSNorm(self.inner, self.groups, card.rms_norm_eps)
        self.out_proj = nn.Linear(self.inner, card.hidden_size, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, H] -> the gate [N, I], xbc [N, C], dt [N, heads]."""
        gate, xbc, dt = self.in_proj(x).split([self.inner, self.channels, self.decay.D.shape[0]], dim=-1)
        return gate, xbc, dt

    def along(self, xbc: Tensor, dt: Tensor, mix: Mix) -> Tensor:
        """-> y [N, I]."""
        steps, a, d = self.decay(dt)
        assert self.conv1d.bias is not None
        conv = self.conv1d.weight.squeeze(1)
        channels = Channels(conv, self.conv1d.bias, a, d, self.head_dim, self.groups, self.state)
        return mix(self.layer_idx, xbc, steps, channels, self.convolve)

    def convolve(self, xbc: Tensor, weight: Tensor, bias: Tensor, documents: Documents) -> Tensor:
        """xbc [N, C] of all heads or of some, weight [C, K], bias [C] -> [N, C]."""
        return convolve_documents(xbc, weight, bias, documents)

    def output(self, y: Tensor, gate: Tensor) -> Tensor:
        """y and gate [N, I] -> [N, H]."""
        return self.out_proj(self.norm(y, gate))


@torch.no_grad()
def draw_decay(name: str, values: Tensor, generator: torch.Generator) -> bool:
    """Fill a parameter of a `Decay`, or a part of it, as Mamba-2 begins: rates uniform in 1 to 16, steps log-uniform in
    0.001 to 0.1, D one. False for the name of any other parameter.
    """
    kind = name.rpartition(".")[2]
    if kind == "D":
        values.fill_(1.0)
    elif kind == "A_log":
        values.uniform_(1.0, 16.0, generator=generator).log_()
    elif kind == "dt_bias":
        steps = values.uniform_(-3.0, -1.0, generator=generator).mul_(2.302585092994046).exp_()
        values.copy_(steps + (-(-steps).expm1()).log())  # the inverse of softplus
    else:
        return False
    return True


def keeps_float32(module: Any) -> bool:
    """Whether a module's own parameters are not to be narrowed."""
    return bool(getattr(module, "keeps_float32", False))
