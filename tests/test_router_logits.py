"""Routers' logits: float32 by default, rounded to the model's dtype where the card says so."""

from __future__ import annotations

import pytest
import torch
from tiny import moe_card, random_model

from prl.config.schema import LoraConfig
from prl.models.adapters.lora import apply_lora
from prl.models.experts.routing import router_logits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("device", DEVICES)
def test_logits_of_16_bits_are_not_rounded_and_gradients_are_those_of_a_linear(device: str, compiled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(size, generator=generator).to(device) for size in ((40, 64), (8, 64), (40, 8)))
    x, weight = (t.bfloat16().requires_grad_() for t in (x, weight))
    product = torch.compile(router_logits) if compiled else router_logits
    logits = product(x, weight)
    exact = x.double() @ weight.double().t()
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)
    assert (logits.bfloat16() != logits).any(), "there is something to round"
    logits.backward(grad)
    rounded = grad.bfloat16().double()
    torch.testing.assert_close(x.grad.double(), rounded @ weight.double(), rtol=1e-2, atol=1e-2)  # type: ignore[union-attr]
    torch.testing.assert_close(weight.grad.double(), rounded.t() @ x.double(), rtol=1e-2, atol=5e-2)  # type: ignore[union-attr]


@pytest.mark.parametrize(("router_dtype", "rounds"), [("float32", False), ("model", True)])
def test_the_card_says_whether_logits_are_rounded(router_dtype: str, rounds: bool) -> None:
    """Seen in logits that differ by less than bfloat16 tells apart."""
    mlp = random_model(moe_card(router_dtype=router_dtype), std=0.1).bfloat16().layers[0].mlp
    width = mlp.gate.weight.shape[1]
    with torch.no_grad():
        mlp.gate.weight.zero_()
        mlp.gate.weight[:, 0] = 256.0
        mlp.gate.weight[2, 1] = 0.5  # 256.5 is no bfloat16
        x = torch.zeros(4, width, dtype=torch.bfloat16)
        x[:, :2] = 1.0
        weights, experts = mlp.route(x, None)
    assert weights.dtype == torch.bfloat16
    assert bool((weights[:, 0] == weights[:, 1]).all()) is rounds
    assert rounds or bool((experts[:, 0] == 2).all())


def test_float32_models_route_as_before() -> None:
    x, weight = torch.randn(6, 16), torch.randn(4, 16)
    assert torch.equal(router_logits(x, weight), x @ weight.t())


def test_adapters_of_the_router_are_learned() -> None:
    model = random_model(moe_card(), std=0.1)
    apply_lora(model, LoraConfig(rank=2, targets=("gate",)), torch.float32)
    mlp = model.layers[0].mlp
    torch.manual_seed(0)
    for name, param in mlp.gate.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(param)
    weights, _ = mlp.route(torch.randn(6, mlp.gate.weight.shape[1]), None)
    weights[:, 0].sum().backward()
    adapters = {name: param.grad for name, param in mlp.gate.named_parameters() if "lora" in name}
    assert len(adapters) == 2
    assert all(grad is not None and grad.abs().max() > 0 for grad in adapters.values())
