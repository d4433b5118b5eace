"""Made-up training rows: random tokens, in documents of fixed or variable length."""

from __future__ import annotations

import math

import numpy as np

from prl.config.schema import BenchConfig, ModelCard
from prl.models.experts.routing import expert_dtype
from prl.transport.batch import MicroBatch
from prl.transport.documents import Document
from prl.transport.packing import build_micro_batch


def document_lengths(bench: BenchConfig, seq_len: int, rng: np.random.Generator) -> list[int]:
    """Lengths of the documents of one row.

    A list is taken as it is. Fixed: as many of doc_len as fit. Variable: uniform from doc_len / 8 to doc_len until the
    next one does not fit, so that the row ends in padding, as packed rows do.
    """
    if not isinstance(bench.doc_len, int):
        return list(bench.doc_len)
    if bench.lengths == "fixed":
        return [bench.doc_len] * (seq_len // bench.doc_len)
    lengths: list[int] = []
    while True:
        length = int(rng.integers(bench.shortest, bench.doc_len + 1))
        if sum(lengths) + length > seq_len:
            return lengths or [min(bench.doc_len, seq_len)]
        lengths.append(length)


def make_row(
    bench: BenchConfig, seq_len: int, card: ModelCard, rng: np.random.Generator, share: bool = False
) -> MicroBatch:
    """A row whose documents are trained behind their prompt, or from their second token on, with advantages of 1 and -1
    by document. share: what they have in common is run once.

    The sampling probability of each token is said to be 1 / vocab, which is near what a randomly initialised model
    gives, so that importance ratios are near 1 and nothing is masked.
    """
    prompt = rng.integers(0, card.vocab_size, bench.prompt_len).tolist()
    documents = [_document(prompt, n, card.vocab_size, rng) for n in document_lengths(bench, seq_len, rng)]
    if bench.experts == "even" and card.num_experts:
        for document in documents:
            document.routed_experts = [even_experts(len(document), card, rng)]
    return build_micro_batch(documents, [0] + [len(prompt)] * (len(documents) - 1) if share else ())


def _document(prompt: list[int], length: int, vocab: int, rng: np.random.Generator) -> Document:
    given = max(len(prompt), 1)
    sign, trained = float(rng.choice([-1.0, 1.0])), length - given
    return Document(
        input_ids=prompt + rng.integers(0, vocab, length - len(prompt)).tolist(),
        loss_mask=[False] * given + [True] * trained,
        logp_infer=[0.0] * given + [-math.log(vocab)] * trained,
        advantages=[0.0] * given + [sign] * trained,
        versions=[-1] * given + [0] * trained,
    )


def even_experts(tokens: int, card: ModelCard, rng: np.random.Generator) -> np.ndarray:
    """Each token's experts in every layer [tokens, L, K], as engines record them: different ones, all as often."""
    experts, layers = card.num_experts, card.num_hidden_layers
    patterns = np.stack([rng.permutation(experts)[: card.num_experts_per_tok] for _ in range(layers)])
    turned = patterns + rng.integers(0, experts, (tokens, layers, 1))
    return (turned % experts).astype(np.uint8 if expert_dtype(experts).itemsize == 1 else np.uint16)


def make_rows(
    bench: BenchConfig, seq_len: int, card: ModelCard, seed: int, step: int, data_rank: int, share: bool = False
) -> list[MicroBatch]:
    """A data rank's rows of one step: the same numbers whatever the mesh, as long as the data rank is the same."""
    rng = np.random.default_rng([seed, step, data_rank])
    return [make_row(bench, seq_len, card, rng, share) for _ in range(bench.micro_batches)]
