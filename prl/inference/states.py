"""What state-space layers remember of running sequences: beside the KV cache, and in its slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prl.config.schema import ModelCard
from prl.models.state_space.convolution import convolve
from prl.models.state_space.mixer import Channels, Convolve, Mix
from prl.models.state_space.scan import scan, step


@dataclass(frozen=True)
class PaddedRows:
    """B sequences with up to T new tokens each."""

    flat: Tensor  # [n] index of each of their new tokens among all new tokens
    row: Tensor  # [n]
    column: Tensor  # [n]
    slots: Tensor  # [B]
    new: int  # T
    goes_on: Tensor  # [B] bool: whether the slot has a state to begin with


class StateCache:
    """The state after the last token of each slot, in float32: state [L, slots, H, P, S]; and what its convolution saw
    last: seen [L, slots, K - 1, C]. L are the layers with a state.
    """

    def __init__(self, card: ModelCard, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = {layer: row for row, layer in enumerate(card.state_layers)}
        heads, size = card.mamba_num_heads, card.mamba_head_dim
        channels = heads * size + 2 * card.mamba_n_groups * card.ssm_state_size
        self.shape = (len(self.rows), slots, heads, size, card.ssm_state_size)
        self.seen_shape = (len(self.rows), slots, card.conv_kernel - 1, channels)
        self.dtype, self.device = dtype, device

    def allocate(self) -> None:
        self.state = torch.zeros(self.shape, dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)
        self.seen = torch.zeros(self.seen_shape, dtype=self.dtype, device=self.device)

    def release(self) -> None:
        self.state = self.seen = torch.empty(0, device=self.device)

    def wipe(self, slot: int) -> None:
        self.state[:, slot] = 0
        self.seen[:, slot] = 0

    def copy(self, source: int, target: int) -> None:
        self.state[:, target] = self.state[:, source]
        self.seen[:, target] = self.seen[:, source]

    def prefill(self, classes: list[PaddedRows]) -> Mix:
        """Along the new tokens of each sequence, from what its slot remembers or from nothing."""

        def mix(layer_idx: int, xbc: Tensor, dt: Tensor, channels: Channels, _: Convolve) -> Tensor:
            out = xbc.new_empty(len(xbc), channels.heads * channels.head_dim)
            for rows in classes:
                mixed = self._advance(self.rows[layer_idx], rows, xbc[rows.flat], dt[rows.flat], channels)
                out[rows.flat] = mixed[rows.row, rows.column].flatten(1)
            return out

        return mix

    def _advance(self, layer: int, rows: PaddedRows, xbc: Tensor, dt: Tensor, channels: Channels) -> Tensor:
        """xbc [n, C] and dt [n, H] -> [B, T, H, P]. Padding has no step, which leaves the state as it is."""
        width, places = channels.conv.shape[1] - 1, (rows.row, rows.column)
        seen = self.seen[layer][rows.slots].where(rows.goes_on[:, None, None], 0)
        state = self.state[layer][rows.slots].where(rows.goes_on[:, None, None, None], 0)
        padded = torch.cat([seen, xbc.new_zeros(len(seen), rows.new, xbc.shape[1])], dim=1)  # [B, K - 1 + T, C]
        padded[rows.row, rows.column + width] = xbc
        steps = dt.new_zeros(len(seen), rows.new, dt.shape[1]).index_put(places, dt)
        x, b, c = channels.cut(convolve(padded, channels.conv, channels.conv_bias))
        y, state = scan(x, steps, channels.a, b, c, channels.d, state=state)
        lengths = torch.bincount(rows.row, minlength=len(seen))
        last = lengths[:, None] + torch.arange(width, device=lengths.device)  # [B, K - 1], of `padded`
        self.state[layer][rows.slots] = state
        self.seen[layer][rows.slots] = padded.gather(1, last[:, :, None].expand(-1, -1, padded.shape[2]))
        return y

    def decode(self, slots: Tensor) -> Mix:
        """One token each of the sequences in `slots` [B]."""

        def mix(layer_idx: int, xbc: Tensor, dt: Tensor, channels: Channels, _: Convolve) -> Tensor:
            layer = self.rows[layer_idx]
            seen = torch.cat([self.seen[layer][slots], xbc[:, None]], dim=1)  # [B, K, C]
            x, b, c = channels.cut(convolve(seen, channels.conv, channels.conv_bias)[:, 0])
            y, state = step(x, dt, channels.a, b, c, channels.d, self.state[layer][slots])
            self.state[layer][slots] = state
            self.seen[layer][slots] = seen[:, 1:]
            return y.flatten(1)

        return mix
