"""The RL loss of one packed micro-batch, with its gradient and the sums that metrics need. The host does not wait."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from prl.config.schema import AlgoConfig
from prl.models.device import to_device
from prl.trainer.losses import LOSSES, SEQUENCE_LEVEL, LossInputs, masked_importance_keep, mismatch_kl
from prl.trainer.policy import TokenStats
from prl.transport.batch import MicroBatch


def loss_denominator(algo: AlgoConfig, loss_tokens: int, loss_docs: int) -> int:
    """What the sum over the global batch is divided by: trained tokens, or trained documents for sequence losses."""
    return max(loss_docs if algo.loss in SEQUENCE_LEVEL else loss_tokens, 1)


def backward_rl(algo: AlgoConfig, micro: MicroBatch, stats: TokenStats, denominator: int) -> tuple[Tensor, Tensor]:
    """Gradient of one micro-batch's share of the global loss.

    Returns float64 tensors on the device: the sums [6] of loss, entropy, mismatch KL, importance ratio, masked tokens
    and tokens, and the mismatch KL of each trained token [M].
    """
    device = stats.logp.device
    trained = np.flatnonzero(micro.loss_mask)
    doc_ids = to_device(np.repeat(np.arange(len(micro.doc_lens)), micro.doc_lens), device, trained)
    logp_infer, advantages = (to_device(x, device, trained) for x in (micro.logp_infer, micro.advantages))
    inputs = LossInputs(stats.logp, logp_infer, advantages, doc_ids, len(micro.doc_lens))
    per_token = LOSSES[algo.loss](inputs, algo) - algo.entropy_coef * stats.entropy
    loss = per_token.sum() / denominator
    loss.backward()
    kl = mismatch_kl(stats.logp, logp_infer)
    masked = loss.new_zeros(())
    if algo.loss == "masked_importance":
        masked = (1 - masked_importance_keep(inputs, algo)).sum()
    sums = torch.stack([loss.detach(), stats.entropy.detach().sum(), masked]).double()
    count = torch.full_like(sums[0], len(stats.rows))
    ratio = (stats.logp.detach() - logp_infer).double().exp()
    return torch.stack([sums[0], sums[1], kl.sum(), ratio.sum(), sums[2], count]), kl
