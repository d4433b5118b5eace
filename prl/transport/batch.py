"""Training batches: packed documents with per-token targets, advantages, sampling logprobs and policy versions.

Alignment: everything is indexed by the token that it is about. Token t of a document (t >= 1) is predicted from
tokens < t of the same document; its `loss_mask`, `logp_infer`, `advantages` and `versions` stand at index t.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from prl.transport import frames
from prl.transport.kept import KeptTokens


@dataclass
class MicroBatch:
    """One packed row of T tokens holding D documents."""

    input_ids: np.ndarray  # [T] int64
    positions: np.ndarray  # [T] int64, from 0 in each document
    doc_lens: np.ndarray  # [D] int64, sums to T
    loss_mask: np.ndarray  # [T] bool
    logp_infer: np.ndarray  # [T] float32, 0 outside the mask
    advantages: np.ndarray  # [T] float32
    versions: np.ndarray  # [T] int32, policy version that sampled the token; -1 for tokens nobody sampled
    routed_experts: np.ndarray | None = None  # [T, L, K] uint8 or uint16
    # truncated sampling: how many vocabulary entries a token was drawn from (0: all), and these; as in `KeptTokens`
    kept_counts: np.ndarray | None = None  # [T] int32
    kept_ids: np.ndarray | None = None  # [sum of kept_counts] uint16 or uint32
    # of each document's first tokens, how many are those of the document before it and are run there; None: none
    shared_lens: np.ndarray | None = None  # [D] int64

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def run_tokens(self) -> int:
        """Tokens that go through the model."""
        return self.num_tokens - (0 if self.shared_lens is None else int(self.shared_lens.sum()))

    @property
    def kept(self) -> KeptTokens | None:
        """None where nothing was truncated."""
        if self.kept_counts is None or self.kept_ids is None:
            return None
        return KeptTokens(self.kept_counts, self.kept_ids)


@dataclass
class TrainBatch:
    """What one data rank trains on in one optimizer step."""

    step: int  # 1-based; trains policy step-1 into policy step
    micro_batches: list[MicroBatch]
    loss_tokens: int  # trained tokens over all data ranks: the denominator of the loss
    loss_docs: int  # trained documents over all data ranks (sequence-level losses divide by it)
    meta: dict[str, Any] = field(default_factory=dict)  # {"stop": bool, "checkpoint": bool, ...}

    def to_message(self) -> frames.Message:
        arrays = {}
        for index, micro in enumerate(self.micro_batches):
            for f in fields(micro):
                value = getattr(micro, f.name)
                if value is not None:
                    arrays[f"{index}.{f.name}"] = value
        header = {
            "step": self.step,
            "loss_tokens": self.loss_tokens,
            "loss_docs": self.loss_docs,
            "count": len(self.micro_batches),
            "meta": self.meta,
        }
        return frames.encode(header, arrays)

    @classmethod
    def from_bytes(cls, message: bytes | bytearray | memoryview) -> TrainBatch:
        header, arrays = frames.decode(message)
        parts: list[dict[str, np.ndarray]] = [{} for _ in range(header["count"])]
        for key, value in arrays.items():
            index, name = key.split(".", 1)
            parts[int(index)][name] = value
        micro_batches = [MicroBatch(**part) for part in parts]
        return cls(header["step"], micro_batches, header["loss_tokens"], header["loss_docs"], header["meta"])
