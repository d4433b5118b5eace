"""Model FLOPs of packed training, and their share of what the device could do. The formula travels with the number."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prl.config.schema import ModelCard
from prl.planning.model_size import active_parameters

if TYPE_CHECKING:
    import torch

FORMULA = "6*P_active*T + 3*layers*heads*(head_dim+value_dim)*sum(d*(d+1)) over documents of d tokens"
SPARSE_FORMULA = (
    "6*P_active*T + 6*layers*heads*(2*latent+rope)*pairs of tokens and chosen keys"
    " + indexers*index_heads*index_head_dim*sum(d*(d+1)) over documents of d tokens"
)
STATES = " + 12*state_layers*state_heads*state_head_dim*state_size*T"  # of models that have such layers
PEAK_FLOPS = {  # dense bfloat16 FLOP/s by device name, from the vendors' data sheets
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
}
MEASURED_SIZE = {"cpu": 768, "cuda": 4096}  # n of the n x n matrix products that measure an unlisted device
MEASURED_REPEATS = 5


def packed_flops(
    card: ModelCard, doc_lens: Iterable[int], frozen: bool = False, active: int | None = None
) -> tuple[float, str]:
    """Model FLOPs of forward and backward over packed documents, and the formula.

    6 FLOPs per active parameter and token. A document of d tokens has d(d+1)/2 causal pairs; QK^T takes 2*head_dim
    FLOPs per pair and head and PV 2*value_dim, three times that with the backward pass. Recomputation does not count
    (PaLM, arXiv:2204.02311, appendix B), nor does padding or attention across documents. Of a frozen model (LoRA) the
    weights' gradients are not computed, which leaves 4; its adapters, some thousandth of that, are not counted.
    `layers` are those with attention. A state-space layer takes each token into its state and reads it once: 2 FLOPs a
    number each, three times that with the backward pass; what its chunks do besides is of the way it is computed.
    Sparse attention is counted in its absorbed form, which it needs, and over the keys that are chosen; indexers'
    scores, which are frozen, over all pairs, and their projections not at all.

    Args:
        doc_lens: tokens of each document.
        frozen: whether the model's own weights are not trained.
        active: `active_parameters` of the card, for who asks often.
    """
    lengths = list(doc_lens)
    pairs = sum(d * (d + 1) / 2 for d in lengths)
    if card.index_topk:
        formula, attention = SPARSE_FORMULA, _sparse_attention_flops(card, lengths, pairs)
    else:
        per_pair = 6 * len(card.attention_layers) * card.num_attention_heads * (card.head_dim + card.value_dim)
        formula, attention = FORMULA, per_pair * pairs
    per_param = 4 if frozen else 6
    if frozen:  # no gradient of the weights themselves
        formula = formula.replace("6*P_active", "4*P_active", 1)
    active = active_parameters(card) if active is None else active
    flops = float(per_param * active * sum(lengths) + attention)
    if not card.state_layers:
        return flops, formula
    numbers = card.mamba_num_heads * card.mamba_head_dim * card.ssm_state_size
    return flops + 12.0 * len(card.state_layers) * numbers * sum(lengths), formula + STATES


def document_flops(card: ModelCard, frozen: bool = False) -> Callable[[int], float]:
    """Of a document by its tokens, which are remembered."""
    active = active_parameters(card)  # of a step's thousands of lengths each would count them anew, 0.2 ms at a time
    return functools.cache(lambda tokens: packed_flops(card, [tokens], frozen, active)[0])


def _sparse_attention_flops(card: ModelCard, lengths: list[int], pairs: float) -> float:
    """Of attention to the chosen keys, forward and backward, and of the scores by which frozen indexers choose."""
    few = [min(d, card.index_topk) for d in lengths]  # the first tokens of a document see all before them
    chosen = sum(n * (n + 1) / 2 + (d - n) * card.index_topk for d, n in zip(lengths, few, strict=True))
    per_pair = 6 * card.num_attention_heads * (2 * card.kv_lora_rank + card.qk_rope_head_dim)
    scores = 2 * card.index_n_heads * card.index_head_dim * len(set(card.choosing_layers))
    return card.num_hidden_layers * per_pair * chosen + scores * pairs


def utilisation(flops: float, seconds: float, device_type: str, formula: str = FORMULA) -> tuple[float, str]:
    """Model FLOPs utilisation of this process's device, and its formula with the peak that it refers to.

    Args:
        flops: model FLOPs of this rank, from `packed_flops`.
        seconds: that it was busy with them.
        device_type: "cpu" or "cuda".
        formula: of `flops`.
    """
    peak, source = peak_flops(device_type)
    return flops / max(seconds, 1e-9) / peak, f"({formula}) / busy seconds / {peak:.3g} FLOP/s ({source})"


@functools.cache
def peak_flops(device_type: str) -> tuple[float, str]:
    """FLOP/s of this process's device and where the number is from: the data sheet, or a measured matrix product.

    A CPU's is measured with as many threads as this process has, in float32; that of an unlisted GPU in bfloat16.
    """
    import torch

    if device_type == "cuda":
        name = torch.cuda.get_device_name()
        for part, flops in PEAK_FLOPS.items():
            if part in name:
                return flops, f"{part} data sheet, bfloat16"
    size = MEASURED_SIZE[device_type]
    dtype = torch.bfloat16 if device_type == "cuda" else torch.float32
    matrix = torch.ones(size, size, device=device_type, dtype=dtype)
    best_s = min(_time_product(matrix) for _ in range(MEASURED_REPEATS))
    return 2 * size**3 / best_s, f"measured, {size}x{size} {str(dtype).removeprefix('torch.')} matrix product"


def _time_product(matrix: torch.Tensor) -> float:
    """Seconds of matrix @ matrix. The element read at the end waits for the device."""
    start_s = time.perf_counter()
    (matrix @ matrix)[0, 0].item()
    return time.perf_counter() - start_s
