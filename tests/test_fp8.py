"""Block-scaled FP8 training: the casts, the emulated GEMMs against float32, grouped rows, a model that trains."""

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import nn

from prl.models.attention import packed_attention
from prl.models.fp8 import Fp8Experts, Fp8Linear, apply_fp8, fp8_grouped_mm, fp8_linear, fp8_linear_backward
from prl.models.fp8_cast import BLOCK, cast_blocks, cast_columns, cast_rows, restore_blocks, restore_rows
from prl.models.fp8_groups import group_rows
from prl.models.moe import grouped_linear

EPS = 2**-4  # half the distance of neighbouring e4m3 values, relative to them


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


# --- casts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "k"), [(1, 1), (3, 127), (5, 128), (2, 129), (130, 300)])
def test_casts_of_ragged_sizes(m, k):
    x = torch.randn(m, k)
    rows, columns, blocks = cast_rows(x), cast_columns(x), cast_blocks(x)
    across, down = -(-k // BLOCK), -(-m // BLOCK)
    assert (rows.values.shape, rows.scales.shape) == ((m, k), (m, across))
    assert (columns.values.shape, columns.scales.shape) == ((k, down * BLOCK), (k, down))
    assert (blocks.values.shape, blocks.scales.shape) == ((m, k), (down, across))
    # to half a step of the value, or half the smallest step of its block
    close = {"rtol": EPS, "atol": float(x.abs().max()) / 448 * 2**-10}
    torch.testing.assert_close(restore_rows(rows), x, **close)
    torch.testing.assert_close(restore_rows(columns)[:, :m], x.t(), **close)
    torch.testing.assert_close(restore_blocks(blocks), x, **close)
    assert restore_rows(columns)[:, m:].abs().sum() == 0


def test_transposed_blocks_hold_the_same_numbers():
    weight = torch.randn(3, 200, 300)
    plain, transposed = cast_blocks(weight), cast_blocks(weight, transposed=True)
    assert transposed.values.is_contiguous()
    assert transposed.scales.is_contiguous()
    assert torch.equal(restore_blocks(plain).transpose(1, 2), restore_blocks(transposed))


def test_what_e4m3_can_hold_is_exact():
    """A block whose largest value is 448 has scale 1."""
    x = torch.tensor([448.0, -2.0, 0.5, 0.0, 2**-9, 240.0]).repeat(BLOCK)
    x = x[: 2 * BLOCK].view(2, BLOCK)
    assert torch.equal(restore_rows(cast_rows(x)), x)
    assert torch.equal(restore_blocks(cast_blocks(x)), x)
    assert torch.equal(cast_rows(x).scales, torch.ones(2, 1))


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1.0, 1e6])
def test_error_does_not_depend_on_the_magnitude(size):
    x = torch.randn(16, 256) * size
    assert relative(restore_rows(cast_rows(x)), x) < 0.03
    assert torch.equal(restore_rows(cast_rows(torch.zeros(4, 256))), torch.zeros(4, 256))


def test_an_outlier_hurts_its_own_block_only():
    x = torch.randn(4, 3 * BLOCK)
    spoiled = x.clone()
    spoiled[1, BLOCK + 5] = 1e5
    before, after = restore_rows(cast_rows(x)), restore_rows(cast_rows(spoiled))
    differs = (before != after).view(4, 3, BLOCK).any(-1)
    assert differs.nonzero().tolist() == [[1, 1]]
    weight, spoiled = torch.randn(2 * BLOCK, 2 * BLOCK), None
    spoiled = weight.clone()
    spoiled[3, BLOCK] = 1e5
    differs = restore_blocks(cast_blocks(weight)) != restore_blocks(cast_blocks(spoiled))
    assert differs[:BLOCK, BLOCK:].any()
    differs[:BLOCK, BLOCK:] = False
    assert not differs.any()


# --- linear -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "k", "n"), [(128, 256, 128), (100, 200, 72), (3, 130, 300)])
def test_linear_and_its_gradients_are_within_a_few_per_cent(tokens, k, n):
    x, weight, grad = torch.randn(tokens, k), torch.randn(n, k), torch.randn(tokens, n)
    results = []
    for multiply in (F.linear, lambda x, w: fp8_linear(x, w, "emulated")):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = multiply(*leaves)
        y.backward(grad)
        results.append([y.detach(), leaves[0].grad, leaves[1].grad])
    errors = [relative(ours, theirs) for theirs, ours in zip(*results, strict=True)]
    assert all(1e-3 < error < 0.06 for error in errors), errors


@pytest.mark.parametrize("wants", [(True, False), (False, True)], ids=["frozen weight", "input without gradient"])
def test_gradients_only_where_they_are_wanted(wants):
    x, weight = torch.randn(5, 64, requires_grad=wants[0]), torch.randn(16, 64, requires_grad=wants[1])
    fp8_linear(x, weight, "emulated").sum().backward()
    assert (x.grad is not None, weight.grad is not None) == wants
    grads = fp8_linear_backward(torch.randn(5, 16), x.detach(), weight.detach(), "emulated", *wants)
    assert tuple(grad.numel() > 0 for grad in grads) == wants, "what nobody wants is not computed"


def test_products_of_representable_values_are_exact():
    """Blocks hold small integers and one 448, so that the scale is 1 and nothing is rounded."""
    x, weight = (torch.randint(-8, 9, (128, 256)).float() for _ in range(2))
    x[:, ::BLOCK] = 448.0
    weight[0, ::BLOCK] = 448.0
    assert torch.equal(fp8_linear(x, weight, "emulated"), x @ weight.t())


def test_linear_passes_torch_library_checks():
    args = (torch.randn(5, 130, requires_grad=True), torch.randn(7, 130, requires_grad=True), "emulated")
    torch.library.opcheck(fp8_linear, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))


# --- grouped ----------------------------------------------------------------------------------------------------------

COUNTS = [[3, 0, 130, 128], [0, 0, 0, 1], [5], [0, 200], [0, 0]]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_groups_start_at_multiples_of_128(counts):
    total = sum(counts)
    groups = group_rows(torch.tensor(counts), total)
    x = torch.arange(1.0, total + 1)[:, None]
    padded = groups.pad(x)
    assert groups.padded == len(padded)
    assert torch.equal(groups.unpad(padded), x)
    assert padded.sum() == x.sum()
    start = row = 0
    for expert, count in enumerate(counts):
        size = -(-count // BLOCK) * BLOCK
        assert padded[start : start + count, 0].tolist() == x[row : row + count, 0].tolist()
        assert (groups.expert[start : start + size] == expert).all()
        assert (groups.tile_rows[start // BLOCK : (start + size) // BLOCK] == size).all()
        assert (groups.tile_start[start // BLOCK : (start + size) // BLOCK] == start).all()
        start, row = start + size, row + count
    assert (groups.expert[start:] == -1).all()
    assert (groups.tile_rows[start // BLOCK :] == 0).all()


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_grouped_product_and_its_gradients(counts):
    sizes, total = torch.tensor(counts), sum(counts)
    x, weight, grad = torch.randn(total, 160), torch.randn(len(counts), 96, 160), torch.randn(total, 96)
    results = []
    for multiply in (grouped_linear, lambda x, w, c: fp8_grouped_mm(x, w, c, "emulated")):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = multiply(*leaves, sizes)
        y.backward(grad)
        results.append([y.detach(), leaves[0].grad, leaves[1].grad])
    for theirs, ours in zip(*results, strict=True):
        assert ours.shape == theirs.shape
        if total:
            assert relative(ours, theirs) < 0.06
    idle = [expert for expert, count in enumerate(counts) if count == 0]
    assert results[1][2][idle].abs().sum() == 0


# --- models -----------------------------------------------------------------------------------------------------------


def test_apply_swaps_linears_and_experts_and_nothing_else():
    model = tiny.random_model(tiny.moe_card(tie_word_embeddings=False))
    names = {name for name, _ in model.named_parameters()}
    apply_fp8(model, "emulated")
    kinds = {name: type(module) for name, module in model.named_modules()}
    assert kinds["layers.0.self_attn.q_proj"] is Fp8Linear
    assert kinds["layers.1.mlp.experts"] is Fp8Experts
    assert kinds["layers.1.mlp.gate"] is kinds["lm_head"] is nn.Linear
    assert {name for name, _ in model.named_parameters()} == names


def test_a_linear_with_bias_keeps_it():
    linear = nn.Linear(64, 32)
    x = torch.randn(2, 3, 64)
    assert relative(Fp8Linear(linear, "emulated")(x).detach(), linear(x).detach()) < 0.06


def losses(card, fp8: bool, steps: int) -> list[float]:
    model = tiny.random_model(card, std=0.1)
    if fp8:
        apply_fp8(model, "emulated")
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 32, (96,), generator=generator).repeat(2)
    history = []
    for _ in range(steps):
        hidden = model(ids, torch.arange(len(ids)), packed_attention([len(ids)], ids.device))
        loss = F.cross_entropy(model.logits(hidden)[:-1], ids[1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item())
    return history


@pytest.mark.parametrize("card", [tiny.dense_card(), tiny.moe_card()], ids=["dense", "moe"])
def test_a_model_trains_as_without(card):
    exact, quantised = losses(card, False, 40), losses(card, True, 40)
    assert exact[-1] < 0.7 * exact[0]
    assert quantised != exact
    assert max(abs(a - b) for a, b in zip(exact, quantised, strict=True)) < 0.05 * exact[0]
