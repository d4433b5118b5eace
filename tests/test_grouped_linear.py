"""Products of stacked experts with weights that are wider than what they read."""

from __future__ import annotations

import pytest
import torch

from prl.models.experts.stacked import grouped_linear

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_wider_weight_is_cast_and_its_gradient_is_wide(device: str, frozen: bool, turned: bool) -> None:
    """Bit by bit what a weight that was cast before gives."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor([5, 0, 17, 10], device=device)
    x = torch.randn(32, 64, generator=generator).to(device).bfloat16()
    wide = torch.randn(4, 64, 48, generator=generator).to(device)
    wide = wide.transpose(1, 2) if turned else wide.transpose(1, 2).contiguous()
    grad = torch.randn(32, 48, generator=generator).to(device).bfloat16()
    found = []
    for weight in (wide.clone(), wide.bfloat16()):
        rows, weight = x.clone().requires_grad_(), weight.requires_grad_(not frozen)
        y = grouped_linear(rows, weight, counts)
        y.backward(grad)
        found.append((y.detach(), rows.grad, None if frozen else weight.grad))
    (y, d_x, d_wide), (wanted, d_wanted, d_narrow) = found
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, wanted)
    assert d_x is not None
    assert d_wanted is not None
    assert torch.equal(d_x, d_wanted)
    if d_wide is not None and d_narrow is not None:
        assert d_wide.dtype == torch.float32
        assert torch.equal(d_wide, d_narrow.float())
        assert not d_wide[1].any()  # of an expert without tokens


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gradients_of_micro_batches_are_added_where_they_lie() -> None:
    """The bits that autograd gets, which adds them up where a hook waits for them."""
    found = []
    for waits in (False, True):
        generator = torch.Generator(device="cuda").manual_seed(0)
        weight = torch.randn(8, 64, 48, device="cuda", generator=generator).requires_grad_()
        seen: list[torch.Tensor] = []
        if waits:
            weight.register_post_accumulate_grad_hook(seen.append)
        for _ in range(3):
            x = torch.randn(64, 48, device="cuda", generator=generator).bfloat16().requires_grad_()
            y = grouped_linear(x, weight, torch.full((8,), 8, device="cuda"))
            y.backward(torch.randn(64, 64, device="cuda", generator=generator).bfloat16())
        assert len(seen) == 3 * waits
        found.append(weight.grad)
    ours, wanted = found
    assert ours is not None
    assert wanted is not None
    assert ours.dtype == torch.float32
    assert torch.equal(ours, wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_cast_weight_is_not_kept_for_backward() -> None:
    weight = torch.randn(8, 64, 48, device="cuda").requires_grad_()
    x = torch.randn(64, 48, device="cuda").bfloat16().requires_grad_()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        grouped_linear(x, weight, torch.full((8,), 8, device="cuda"))
    assert {(tensor.dtype, tensor.numel()) for tensor in kept if tensor.is_floating_point()} == {
        (torch.float32, weight.numel()),
        (torch.bfloat16, x.numel()),
    }
