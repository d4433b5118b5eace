"""Policy-gradient losses, one small function each.

All take the same `LossInputs` and return the loss of each trained token [M]; the caller sums over all tokens of the
global batch and divides by the number of trained tokens (or of trained sequences, for losses in SEQUENCE_LEVEL). rho
is always exp(logp_train - logp_infer): the behaviour policy is the engine that really sampled the token, whatever its
version was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from prl.config.schema import AlgoConfig

MAX_LOG_RATIO = 20.0  # exp of it is 5e8; float32 ends at exp(88)


@dataclass(frozen=True)
class LossInputs:
    logp: Tensor  # [M] float32, of the policy in training; carries the gradient
    logp_infer: Tensor  # [M] float32, of the distribution that the token was sampled from
    advantages: Tensor  # [M] float32
    doc_ids: Tensor  # [M] int64, which document of the micro-batch a token belongs to
    num_docs: int


def importance_ratio(log_ratio: Tensor) -> Tensor:
    """rho, kept within exp(+-MAX_LOG_RATIO), beyond which it is constant and has no gradient.

    Log-probabilities of trainer and engine may be far apart (a rare token, rounding): an infinite rho is NaN as soon as
    it meets a mask or an advantage of zero, and one token would spoil the whole batch.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def masked_importance(x: LossInputs, algo: AlgoConfig) -> Tensor:
    """Importance-weighted policy gradient with masking by probability difference (prl's default; DESIGN.md).

    -keep * A * rho + kl_tau * (log rho)^2. A token is dropped from the first term when the policy has already moved
    further than allowed in the direction in which its advantage pushes: A > 0 and p_train - p_infer > mask_high, or A
    <= 0 and p_train - p_infer < -mask_low. Differences of probabilities rather than ratios: a ratio is large for rare
    tokens whose probability hardly moved.
    """
    keep = masked_importance_keep(x, algo)
    log_ratio = x.logp - x.logp_infer
    return -keep * x.advantages * importance_ratio(log_ratio) + algo.kl_tau * log_ratio.square()


def masked_importance_keep(x: LossInputs, algo: AlgoConfig) -> Tensor:
    """[M] float32 of ones and zeros: the tokens that `masked_importance` trains on."""
    moved = x.logp.detach().exp() - x.logp_infer.exp()
    raised_enough = (x.advantages > 0) & (moved > algo.mask_high)
    lowered_enough = (x.advantages <= 0) & (moved < -algo.mask_low)
    return (~(raised_enough | lowered_enough)).float()


def ppo_clip(x: LossInputs, algo: AlgoConfig) -> Tensor:
    """PPO's clipped surrogate (arXiv:1707.06347); with clip_high > clip_low, DAPO's clip-higher (arXiv:2503.14476)."""
    rho = importance_ratio(x.logp - x.logp_infer)
    clipped = rho.clamp(1 - algo.clip_low, 1 + algo.clip_high)
    return -torch.minimum(rho * x.advantages, clipped * x.advantages)


def cispo(x: LossInputs, algo: AlgoConfig) -> Tensor:
    """CISPO (MiniMax-M1, arXiv:2506.13585): REINFORCE with a clipped, detached importance weight; no token loses
    its gradient.
    """
    rho = importance_ratio(x.logp.detach() - x.logp_infer).clamp(1 - algo.clip_low, 1 + algo.clip_high)
    return -rho * x.advantages * x.logp


def gspo(x: LossInputs, algo: AlgoConfig) -> Tensor:
    """GSPO (arXiv:2507.18071): clipping on the sequence's ratio s = exp(mean of log rho over its tokens).

    A sequence's loss -min(s * A, clip(s) * A) is spread evenly over its tokens, so the sum over tokens is the sum over
    sequences.
    """
    log_ratio = x.logp - x.logp_infer
    lengths = log_ratio.new_zeros(x.num_docs).index_add(0, x.doc_ids, torch.ones_like(log_ratio))
    lengths = lengths.clamp(min=1)
    total = log_ratio.new_zeros(x.num_docs).index_add(0, x.doc_ids, log_ratio)
    ratio = importance_ratio(total / lengths)[x.doc_ids]
    clipped = ratio.clamp(1 - algo.clip_low, 1 + algo.clip_high)
    return -torch.minimum(ratio * x.advantages, clipped * x.advantages) / lengths[x.doc_ids]


LOSSES: dict[str, Callable[[LossInputs, AlgoConfig], Tensor]] = {
    "masked_importance": masked_importance,
    "ppo_clip": ppo_clip,
    "cispo": cispo,
    "gspo": gspo,
}
SEQUENCE_LEVEL = frozenset({"gspo"})


def mismatch_kl(logp: Tensor, logp_infer: Tensor) -> Tensor:
    """[M] float64: k3 estimate of KL(infer || train) per token, rho - log rho - 1 (http://joschu.net/blog/kl-approx.html).

    In double precision through expm1, because its size is the square of log ratios that are rounding errors themselves.
    """
    log_ratio = (logp - logp_infer).detach().double()
    return torch.expm1(log_ratio) - log_ratio
