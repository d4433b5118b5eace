"""What one rank runs of a micro-batch, worked out on the host and brought to the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prl.models.device import to_device
from prl.models.layers.shared_prefixes import SharedPrefixes
from prl.trainer.context.parallel import ContextGroup, shard_row
from prl.trainer.head.truncation import KeptSets
from prl.transport.batch import MicroBatch


@dataclass(frozen=True)
class RowInputs:
    """Of the micro-batch's T tokens the n that this rank runs, and the m of M trained ones whose logits it makes. All
    tensors are on the device.
    """

    doc_lens: list[int]
    prefixes: SharedPrefixes | None
    input_ids: Tensor  # [n] int64
    positions: Tensor  # [n] int64, in the document
    routed: Tensor | None  # [n, L, K] uint8 or int32: the engine's choice of experts
    times: Tensor | None  # [n] int64: for how many documents each is run, 0 for padding; None: each for one
    rows: Tensor  # [M] int64: of the T tokens those that are trained
    mine: Tensor | None  # [m] int64: which of the M have their logits here; None: all
    slots: Tensor  # [m] int64: of the n the one before each of these
    targets: Tensor  # [m] int64: and their ids
    kept: KeptSets | None  # what each was drawn from

    @classmethod
    def build(cls, micro: MicroBatch, layers: int, context: ContextGroup | None, device: torch.device) -> RowInputs:
        doc_lens = micro.doc_lens.tolist()
        prefixes = None if micro.shared_lens is None else SharedPrefixes(doc_lens, micro.shared_lens.tolist())
        rows = np.flatnonzero(micro.loss_mask)
        slots = rows - 1
        run = times = mine = None
        if prefixes is not None:
            run, place = prefixes.run.numpy(), prefixes.place.numpy()
            times, slots = np.bincount(place, minlength=len(run)), place[slots]
        if context is not None:
            # Ulysses, which alone knows shared prefixes, cuts what is run into equal parts, whatever its documents
            shard = shard_row(doc_lens if run is None else [len(run)], context, torch.device("cpu"))
            index, valid = shard.index.numpy(), shard.valid.numpy()
            slot_of = np.full(len(micro.input_ids) if run is None else len(run), -1)
            slot_of[index[valid]] = np.flatnonzero(valid)
            mine = np.flatnonzero(slot_of[slots] >= 0)
            times = valid * (1 if times is None else times[index])
            run, slots = index if run is None else run[index], slot_of[slots][mine]
        here = rows if mine is None else rows[mine]
        routed = routing_of(micro, layers)
        return cls(
            doc_lens,
            prefixes,
            to_device(micro.input_ids, device, run),
            to_device(micro.positions, device, run),
            None if routed is None else to_device(routed, device, run),
            None if times is None else to_device(times, device),
            to_device(rows, device),
            None if mine is None else to_device(mine, device),
            to_device(slots, device),
            to_device(micro.input_ids, device, here),
            None if micro.kept is None else KeptSets.build(micro.kept.of_rows(here), device),
        )


def routing_of(micro: MicroBatch, layers: int) -> np.ndarray | None:
    """The engine's choice of experts, [T, L, K] uint8 or int32; None where it is not replayed.

    Raises ValueError for an engine that leaves out layers: which ones, nobody could tell.
    """
    routed = micro.routed_experts
    if routed is None:
        return None
    if routed.shape[1] != layers:
        raise ValueError(f"an engine recorded the routing of {routed.shape[1]} layers, but the model has {layers}")
    return routed if routed.dtype == np.uint8 else routed.astype(np.int32)  # torch has few operations on wider ones
