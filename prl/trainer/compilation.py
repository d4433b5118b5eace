"""torch.compile for the parts of a layer that run neither an attention kernel nor communication.

Compiling those parts rather than whole layers keeps attention (which chooses kernels by document length), the tokens'
way to their experts and FSDP's hooks out of the graphs, so nothing breaks them and all layers share one compiled code.
Inductor fuses norms, rotary embedding, activations and residuals, and recomputes what is cheap in backward, which is
where both the speed and the memory come from.
"""

from __future__ import annotations

import functools
import logging
import time

import torch

from prl.config.schema import ActivationCheckpointing
from prl.models.layers.decoder import Decoder, DecoderLayer
from prl.models.layers.mlp import SparseMLP

log = logging.getLogger(__name__)

# Of one function for all layers, shapes and grad modes. Beyond its limit (8 by default) dynamo runs a function as it
# is, silently slower; and where that happens between a layer's forward and its repetition for backward
# (memory/recompute.py), the two save different tensors.
RECOMPILE_LIMIT = 64


class CompileClock:
    """Wall seconds that torch.compile has taken in this process: on first use, and for shapes that it has not seen."""

    def __init__(self) -> None:
        self.total_s, self._taken_s, self._began_s = 0.0, 0.0, 0.0
        torch._dynamo.on_compile_start(self._begin)
        torch._dynamo.on_compile_end(self._end)

    def take(self) -> float:
        """Seconds since the last call. Where something was compiled in pieces, the log says why."""
        seconds, self._taken_s = self.total_s - self._taken_s, self.total_s
        if seconds:
            warn_of_pieces()
        return seconds

    def _begin(self, *_: object) -> None:  # with arguments since torch 2.8
        self._began_s = time.perf_counter()

    def _end(self, *_: object) -> None:
        self.total_s += time.perf_counter() - self._began_s


@functools.cache
def warn_once(reason: str) -> None:
    log.warning("torch.compile compiled something in pieces, which is slower: %s", reason)


def warn_of_pieces() -> None:
    """Nothing in the parts that are compiled should break a graph; each reason is told once."""
    from torch._dynamo.utils import counters  # seconds, for those who compile nothing

    for reason in counters["graph_break"]:
        warn_once(reason.partition("\n")[0])


def apply_compile(model: Decoder, enabled: bool, ac: ActivationCheckpointing | None = None) -> None:
    """Replace methods of each layer by compiled ones; before activation checkpointing wraps them, as `ac` says. A call
    of one takes the host 0.4 ms beside its kernels, so they are as large as may be.
    """
    if not enabled:
        return
    repeats_mlp = ac is not None and ac.mode == "selective" and not {"mlp", "moe"}.isdisjoint(ac.targets or ())
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        if layer.mixes_tokens:
            layer.project = torch.compile(layer.project)  # type: ignore[method-assign]
        if layer.is_dense and not repeats_mlp:
            layer.finish = torch.compile(layer.finish)  # type: ignore[method-assign]
            continue
        if layer.mixes_tokens:
            layer.join = torch.compile(layer.join)  # type: ignore[method-assign]
        if not layer.has_mlp:
            continue
        if isinstance(layer.mlp, SparseMLP):
            layer.mlp.route = torch.compile(layer.mlp.route)  # type: ignore[method-assign]
            experts = layer.mlp.experts
            experts.activate = torch.compile(experts.activate)  # type: ignore[method-assign]
            if (shared := layer.mlp.shared_experts) is not None:
                shared.forward = torch.compile(shared.forward)  # type: ignore[method-assign]
        else:
            layer.mlp_block = torch.compile(layer.mlp_block)  # type: ignore[method-assign]
