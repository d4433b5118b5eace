"""Backward passes written by hand: those of their forward, which is the formula; and training takes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from prl.models import by_hand
from prl.models.by_hand import (
    GroupedLinearByHand,
    PaddedQueries,
    RMSNormByHand,
    RotationByHand,
    ShortAttentionByHand,
    SwiGLUByHand,
    is_by_hand,
)
from prl.models.experts.dispatch import sum_rows
from prl.models.experts.placement import Places
from prl.models.layers.norm import RMSNorm
from prl.models.layers.packed_attention import BY_HAND_TOKENS, packed_attention
from prl.models.layers.rope import rotate

LENGTHS = [1, 7, 3, 20, 9]
TOKENS = sum(LENGTHS)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def documents() -> list[PaddedQueries]:
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)[:-1]
    few = torch.tensor(LENGTHS) <= 3
    return [PaddedQueries(starts[kind], torch.tensor(LENGTHS)[kind]) for kind in (few, ~few)]


def angles(heads_dim: int) -> tuple[Tensor, Tensor]:
    turned = numbers(TOKENS, 1, heads_dim // 2).detach().repeat(1, 1, 2)
    return turned.cos(), turned.sin()


CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "norm": (lambda x, w: RMSNormByHand.apply(x, w, 1e-6), (numbers(5, 3, 8), numbers(8, seed=1))),
    "rotation": (lambda x: RotationByHand.apply(x, *angles(6)), (numbers(TOKENS, 2, 6),)),
    "swiglu": (SwiGLUByHand.apply, (numbers(6, 8), numbers(6, seed=1))),
    "grouped": (
        lambda x, w: GroupedLinearByHand.apply(x, w, [2, 0, 3]),
        (numbers(5, 4), numbers(3, 6, 4, seed=1)),
    ),
    "attention": (
        lambda q, k, v: ShortAttentionByHand.apply(q, k, v, documents()),
        (numbers(TOKENS, 4, 4), numbers(TOKENS, 2, 4, seed=1), numbers(TOKENS, 2, 4, seed=2)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_forward(name: str) -> None:
    function, inputs = CASES[name]
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Document by document."""
    outs = []
    for qd, kd, vd in zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True):
        qd, kd, vd = (x.transpose(0, 1)[None] for x in (qd, kd, vd))
        outs.append(F.scaled_dot_product_attention(qd, kd, vd, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(outs)


FORMULAS: dict[str, Callable[..., Tensor]] = {
    "norm": lambda x, w: F.rms_norm(x, (8,), w, 1e-6),
    "rotation": lambda x: rotate(x, *angles(6)),
    "swiglu": lambda x, scale: F.silu(x[:, :4]) * x[:, 4:] * scale[:, None],
    "grouped": lambda x, w: torch.cat([x[:2] @ w[0].T, x[2:] @ w[2].T]),
    "attention": attention,
}


@pytest.mark.parametrize("name", CASES)
def test_inputs_and_gradients_may_lie_as_they_like(name: str) -> None:
    function, inputs = CASES[name]
    usual = function(*inputs)
    gradient = torch.randn_like(usual).transpose(0, -1).contiguous().transpose(0, -1)
    odd = [x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_() for x in inputs]
    found = torch.autograd.grad(function(*odd), odd, gradient)
    for one, other in zip(found, torch.autograd.grad(usual, inputs, gradient), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", CASES)
def test_forward_is_the_formula(name: str) -> None:
    function, inputs = CASES[name]
    assert not is_by_hand(inputs[0])  # of float64: what `rotate` computes is the ordinary formula
    assert torch.allclose(function(*inputs), FORMULAS[name](*inputs), rtol=1e-12, atol=1e-12)


def test_training_in_float32_on_a_cpu_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    for name in ("RMSNormByHand", "ShortAttentionByHand"):
        original = getattr(by_hand, name).forward
        monkeypatch.setattr(
            getattr(by_hand, name), "forward", lambda *args, n=name, f=original: taken.append(n) or f(*args)
        )
    norm = RMSNorm(8, 1e-6)
    norm(torch.randn(3, 8))
    q = torch.randn(TOKENS, 4, 8, requires_grad=True)
    packed_attention(LENGTHS, torch.device("cpu"))(0, q, q[:, :2], q[:, 2:])
    assert taken == ["RMSNormByHand", "ShortAttentionByHand"]
    norm.bfloat16()(torch.randn(3, 8, dtype=torch.bfloat16))
    long = torch.randn(BY_HAND_TOKENS + 1, 2, 8, requires_grad=True)
    packed_attention([BY_HAND_TOKENS + 1], torch.device("cpu"))(0, long, long, long)
    assert len(taken) == 2


@pytest.mark.parametrize("taken", [False, True])
def test_rows_are_added_up_wherever_some_went_nowhere(taken: bool) -> None:
    rows = torch.randn(6, 4)
    positions = torch.tensor([[0, 5], [3, 1], [2, 4 if taken else -1]])
    expected = torch.stack([sum((rows[p] for p in token if p >= 0), torch.zeros(4)) for token in positions])
    assert torch.allclose(sum_rows(rows, Places(positions, 6, torch.arange(6))), expected)
