"""The Triton kernels of block-scaled training against the formulas; on a GPU."""

import pytest
import torch

from prl.models.fp8 import activations
from prl.models.fp8.cast import cast, cast_blocks, join_blocks, restore_rows
from prl.models.fp8.dense import fp8_swiglu
from prl.models.fp8.format import Scaled
from prl.models.fp8.gemm import multiply_columns, multiply_group_columns
from prl.models.fp8.groups import group_rows

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a GPU with e4m3"
)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def assert_same(ours: Scaled, theirs: Scaled) -> None:
    assert torch.equal(ours.scales.cpu(), theirs.scales)
    assert torch.equal(ours.values.cpu().float(), theirs.values.float())


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def wild(m: int, k: int) -> torch.Tensor:
    """With an outlier and a block of zeros."""
    x = torch.randn(m, k, dtype=torch.bfloat16)
    x[0] *= 1000
    x[:, :128] = 0
    return x


@pytest.mark.parametrize("m", [1, 127, 128, 1000])
@pytest.mark.parametrize("wants", [(True, False), (False, True), (True, True)], ids=["rows", "columns", "both"])
def test_casts_give_the_same_bits(m, wants):
    parts = [wild(m, 256), wild(m, 384)]
    results = zip(cast([part.cuda() for part in parts], *wants), cast(parts, *wants), wants, strict=True)
    for ours, theirs, wanted in results:
        if wanted:
            assert_same(ours, theirs)


def test_scales_of_any_size_have_the_same_bits():
    """Quotients are made without divisions."""
    x = (torch.randn(1024, 1024) * 2 ** torch.linspace(-110, 126, 1024)[:, None]).bfloat16()
    for ours, theirs in zip(cast([x.cuda()], True, True), cast([x], True, True), strict=True):
        assert_same(ours, theirs)


def test_casts_take_rows_from_where_they_lie():
    x = wild(300, 256)
    source = torch.randint(-1, 300, (512,))
    x[source[0]] = torch.nan
    source[source == source[0]] = -1
    for ours, theirs in zip(cast([x.cuda()], True, True, source.cuda()), cast([x], True, True, source), strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("transposed", [False, True])
def test_casts_of_weights_give_the_same_bits(transposed):
    weight = torch.randn(3, 256, 384, dtype=torch.bfloat16)
    assert_same(cast_blocks(weight.cuda(), transposed), cast_blocks(weight, transposed))
    wide = torch.randn(3, 256, 384)
    assert_same(cast_blocks(wide.cuda(), transposed, torch.bfloat16), cast_blocks(wide.bfloat16(), transposed))
    parts = [wild(256, 384), wild(128, 384)]
    assert_same(join_blocks([part.cuda() for part in parts], transposed), join_blocks(parts, transposed))


def test_swiglu_with_its_casts():
    gate_up, scale, grad = torch.randn(256, 512), torch.rand(256), torch.randn(256, 256)
    inputs = [tensor.bfloat16() for tensor in (gate_up, scale, grad)]
    moved = [tensor.cuda() for tensor in inputs]
    ours, theirs = activations.cast_swiglu(*moved[:2]), activations.cast_swiglu(*inputs[:2])
    assert relative(restore_rows(ours).cpu(), restore_rows(theirs)) < 0.01
    for parts in (moved, inputs):  # without a scale: as with 1
        plain, ones = (
            activations.cast_swiglu_backward(parts[0], one, parts[2]) for one in (None, torch.ones_like(parts[1]))
        )
        for one, other in zip(plain[:3], ones[:3], strict=True):
            assert_same(Scaled(*(field.cpu() for field in one)), Scaled(*(field.cpu() for field in other)))
    *ours, ours_scale = activations.cast_swiglu_backward(*moved)
    *theirs, theirs_scale = activations.cast_swiglu_backward(*inputs)
    for one, other in zip(ours, theirs, strict=True):
        assert relative(restore_rows(one).cpu(), restore_rows(other)) < 0.01
    assert relative(ours_scale.cpu(), theirs_scale) < 1e-5


@pytest.mark.parametrize("sizes", [(256, 384), (256, 10944), (10944, 256), (192, 320)], ids=str)
def test_weight_gradients_of_linears(sizes):
    """GLM-4.5-Air's dense layer has 10,944 units, which are no whole blocks."""
    x = [torch.randn(300, size).cuda().bfloat16() for size in sizes]
    a, b = (cast([part], False, True)[1] for part in x)
    ours, theirs = (multiply_columns(a, b, torch.bfloat16, kind) for kind in ("deep_gemm", "emulated"))
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("counts", [[3, 0, 130, 128], [0, 0, 0, 1], [0, 0]], ids=str)
def test_weight_gradients_of_all_experts(counts):
    rows = sum(-(-count // 128) for count in counts) * 128 + 256
    groups, by_formula = group_rows(torch.tensor(counts).cuda(), rows), group_rows(torch.tensor(counts), rows)
    assert all(torch.equal(getattr(groups, name).cpu(), field) for name, field in vars(by_formula).items())
    a, b = (torch.randn(rows, size).cuda().bfloat16() for size in (128, 384))
    columns = [cast([x], False, True, groups.source)[1] for x in (a, b)]
    ours, theirs = (
        multiply_group_columns(*columns, groups, torch.bfloat16, kind) for kind in ("deep_gemm", "emulated")
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    wide, exact = (multiply_group_columns(*columns, groups, torch.float32, kind) for kind in ("deep_gemm", "emulated"))
    assert torch.equal(wide.bfloat16(), ours)
    torch.testing.assert_close(wide, exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("tokens", [128, 300])
def test_dense_mlps(tokens):
    """Kernels beside the emulation, also where tokens are no whole blocks."""
    shapes = [(tokens, 256), (384, 256), (384, 256), (256, 384)]
    tensors = [torch.randn(*shape).div(shape[1] ** 0.5).cuda().bfloat16() for shape in shapes]
    grad = torch.randn(tokens, 256).cuda().bfloat16()
    results = []
    for kind in ("deep_gemm", "emulated"):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        y, _ = fp8_swiglu(*leaves, kind)
        y.backward(grad)
        results.append([y, *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*results, strict=True):
        assert relative(ours, theirs) < 0.02
