"""Each loss against a written-out NumPy reference, and its gradient against float64 finite differences."""

import numpy as np
import pytest
import torch

from prl.config.schema import AlgoConfig
from prl.trainer.losses import LOSSES, LossInputs, masked_importance_keep, mismatch_kl

ALGO = AlgoConfig(mask_low=0.2, mask_high=0.15, kl_tau=0.01, clip_low=0.2, clip_high=0.28)


def reference_masked_importance(logp, infer, adv, docs):
    out = []
    for lp, li, a in zip(logp, infer, adv, strict=True):
        moved = np.exp(lp) - np.exp(li)
        dropped = (a > 0 and moved > 0.15) or (a <= 0 and moved < -0.2)
        out.append((0.0 if dropped else -a * np.exp(lp - li)) + 0.01 * (lp - li) ** 2)
    return out


def reference_ppo_clip(logp, infer, adv, docs):
    out = []
    for lp, li, a in zip(logp, infer, adv, strict=True):
        rho = np.exp(lp - li)
        out.append(-min(rho * a, min(max(rho, 0.8), 1.28) * a))
    return out


def reference_cispo(logp, infer, adv, docs):
    return [-min(max(np.exp(lp - li), 0.8), 1.28) * a * lp for lp, li, a in zip(logp, infer, adv, strict=True)]


def reference_gspo(logp, infer, adv, docs):
    out = []
    for i, a in enumerate(adv):
        mine = [j for j in range(len(docs)) if docs[j] == docs[i]]
        ratio = np.exp(sum(logp[j] - infer[j] for j in mine) / len(mine))
        out.append(-min(ratio * a, min(max(ratio, 0.8), 1.28) * a) / len(mine))
    return out


REFERENCES = {
    "masked_importance": reference_masked_importance,
    "ppo_clip": reference_ppo_clip,
    "cispo": reference_cispo,
    "gspo": reference_gspo,
}


def make_inputs(seed, dtype=torch.float64):
    """Tokens of three documents, with ratios on both sides of every clip and mask border."""
    rng = np.random.default_rng(seed)
    infer = np.log(rng.uniform(0.05, 0.95, 24))
    logp = np.log(np.clip(np.exp(infer) + rng.uniform(-0.4, 0.4, 24), 0.02, 0.98))
    docs = np.repeat([0, 1, 2], [5, 11, 8])
    adv = rng.normal(size=3)[docs]
    tensors = [torch.tensor(x, dtype=dtype) for x in (logp, infer, adv)]
    return LossInputs(tensors[0].requires_grad_(), tensors[1], tensors[2], torch.tensor(docs), 3)


def test_every_loss_has_a_reference():
    assert set(LOSSES) == set(REFERENCES)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(5))
def test_loss_equals_numpy_reference(name, seed):
    x = make_inputs(seed)
    args = [t.detach().numpy() for t in (x.logp, x.logp_infer, x.advantages, x.doc_ids)]
    np.testing.assert_allclose(LOSSES[name](x, ALGO).detach().numpy(), REFERENCES[name](*args), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"cispo"}))
@pytest.mark.parametrize("seed", range(3))
def test_gradient_equals_finite_differences(name, seed):
    x = make_inputs(seed)
    LOSSES[name](x, ALGO).sum().backward()
    step, numeric = 1e-6, []
    for i in range(len(x.logp)):
        ends = []
        for sign in (1, -1):
            moved = x.logp.detach().clone()
            moved[i] += sign * step
            ends.append(LOSSES[name](LossInputs(moved, x.logp_infer, x.advantages, x.doc_ids, 3), ALGO).sum().item())
        numeric.append((ends[0] - ends[1]) / (2 * step))
    np.testing.assert_allclose(x.logp.grad.numpy(), numeric, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("seed", range(3))
def test_cispo_gradient_is_reinforce_with_a_constant_weight(seed):
    """Its weight is detached on purpose, so finite differences of the loss are not its gradient; w * A is."""
    x = make_inputs(seed)
    LOSSES["cispo"](x, ALGO).sum().backward()
    weight = (x.logp.detach() - x.logp_infer).exp().clamp(0.8, 1.28)
    np.testing.assert_allclose(x.logp.grad.numpy(), (-weight * x.advantages).numpy(), rtol=1e-9)


def test_mask_drops_only_tokens_that_moved_in_the_direction_of_their_advantage():
    infer = torch.tensor([0.5, 0.5, 0.5, 0.5]).log()
    logp = torch.tensor([0.9, 0.9, 0.1, 0.1]).log()
    adv = torch.tensor([1.0, -1.0, 1.0, -1.0])
    keep = masked_importance_keep(LossInputs(logp, infer, adv, torch.zeros(4, dtype=torch.int64), 1), ALGO)
    assert keep.tolist() == [0.0, 1.0, 1.0, 0.0]


def test_clip_high_is_dapos_asymmetry():
    """With A > 0 the gradient lives up to 1 + clip_high, with A < 0 down to 1 - clip_low."""
    logp = torch.tensor([1.25, 1.30, 0.85, 0.75], dtype=torch.float64).log().requires_grad_()
    adv = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    x = LossInputs(logp, torch.zeros(4, dtype=torch.float64), adv, torch.zeros(4, dtype=torch.int64), 1)
    LOSSES["ppo_clip"](x, ALGO).sum().backward()
    assert [g != 0 for g in logp.grad.tolist()] == [True, False, True, False]


def test_mismatch_kl_estimates_the_kl_divergence():
    """Averaged over samples of the engine's distribution, it is KL(infer || train)."""
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    drawn = torch.multinomial(p, 200_000, replacement=True, generator=generator)
    estimate = mismatch_kl(q.log()[drawn], p.log()[drawn]).mean().item()
    assert estimate == pytest.approx((p * (p / q).log()).sum().item(), rel=0.05)
