"""Block-scaled FP8 training: the casts, the emulated GEMMs against float32, grouped rows, a model that trains."""

import copy

import pytest
import tiny
import torch
import torch.nn.functional as F
from families import EACH, family_card
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from prl.models.experts.dispatch import collect, spread, spread_scalars
from prl.models.experts.placement import place
from prl.models.experts.stacked import Experts
from prl.models.fp8.apply import apply_fp8
from prl.models.fp8.cast import cast, cast_blocks, cast_columns, cast_rows, join_blocks, restore_blocks, restore_rows
from prl.models.fp8.dense import Fp8DenseMLP, fp8_swiglu, fp8_swiglu_backward
from prl.models.fp8.experts import Fp8Experts
from prl.models.fp8.format import BLOCK
from prl.models.fp8.groups import group_rows
from prl.models.fp8.linears import Fp8Attention, Fp8Linear, fp8_linears, fp8_linears_backward
from prl.models.layers.documents import attend_documents
from prl.models.layers.lm_head import LMHead
from prl.models.layers.mlp import DenseMLP, Router
from prl.models.sharding import local_part

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
    assert down == 1 or columns.scales.stride() == (1, k)  # as cuBLAS reads them


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


def test_parts_are_cast_as_what_they_make_up():
    parts = [torch.randn(150, 128), torch.randn(150, 256)]
    whole = torch.cat(parts, 1)
    for ours, theirs in zip(cast(parts, True, True), (cast_rows(whole), cast_columns(whole)), strict=True):
        assert torch.equal(restore_rows(ours), restore_rows(theirs))
    assert torch.equal(restore_blocks(join_blocks([whole[:128], whole[128:]])), restore_blocks(cast_blocks(whole)))


def test_rows_are_taken_from_where_they_lie():
    x = torch.randn(5, 130)
    x[4] = float("nan")  # nobody takes it
    rows, columns = cast([x], True, True, source=torch.tensor([2, -1, 0, 0]))
    expected = torch.stack([x[2], torch.zeros(130), x[0], x[0]])
    assert torch.equal(restore_rows(rows), restore_rows(cast_rows(expected)))
    assert torch.equal(restore_rows(columns), restore_rows(cast_columns(expected)))


# --- linear -----------------------------------------------------------------------------------------------------------


def run_linears(multiply, x, weights, grads):
    leaves = [tensor.clone().requires_grad_() for tensor in (x, *weights)]
    outputs = multiply(leaves[0], leaves[1:])
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, grads)]


def emulated(x, weights):
    return fp8_linears(x, weights, "emulated")


@pytest.mark.parametrize(
    ("tokens", "k", "sizes"), [(128, 256, [128]), (100, 200, [72]), (3, 130, [300]), (40, 200, [72, 130, 9])], ids=str
)
def test_linears_and_their_gradients_are_within_a_few_per_cent(tokens, k, sizes):
    x, weights = torch.randn(tokens, k), [torch.randn(n, k) for n in sizes]
    grads = [torch.randn(tokens, n) for n in sizes]
    exact = run_linears(lambda x, weights: [F.linear(x, w) for w in weights], x, weights, grads)
    errors = [relative(o, e) for o, e in zip(run_linears(emulated, x, weights, grads), exact, strict=True)]
    assert all(1e-3 < error < 0.06 for error in errors), errors


def test_linears_together_are_the_linears_one_by_one():
    x, weights = torch.randn(40, 256), [torch.randn(n, 256) for n in (128, 256)]
    grads = [torch.randn(40, 128), torch.randn(40, 256)]
    together = run_linears(emulated, x, weights, grads)
    apart = run_linears(lambda x, weights: [emulated(x, [w])[0] for w in weights], x, weights, grads)
    for ours, theirs in zip(together, apart, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wants", [(True, False), (False, True)], ids=["frozen weight", "input without gradient"])
def test_gradients_only_where_they_are_wanted(wants):
    x, weight = torch.randn(5, 64, requires_grad=wants[0]), torch.randn(16, 64, requires_grad=wants[1])
    emulated(x, [weight])[0].sum().backward()
    assert (x.grad is not None, weight.grad is not None) == wants
    grads = fp8_linears_backward([torch.randn(5, 16)], x.detach(), [weight.detach()], "emulated", *wants)
    assert tuple(grad.numel() > 0 for grad in grads) == wants, "what nobody wants is not computed"


def test_a_linear_whose_output_nobody_uses():
    x, weights = torch.randn(5, 64, requires_grad=True), [torch.randn(16, 64, requires_grad=True) for _ in range(2)]
    emulated(x, weights)[0].sum().backward()
    assert weights[0].grad.abs().sum() > 0
    assert weights[1].grad is None or weights[1].grad.abs().sum() == 0


def test_products_of_representable_values_are_exact():
    """Blocks hold small integers and one 448, so that the scale is 1 and nothing is rounded."""
    x, weight = (torch.randint(-8, 9, (128, 256)).float() for _ in range(2))
    x[:, ::BLOCK] = 448.0
    weight[0, ::BLOCK] = 448.0
    assert torch.equal(emulated(x, [weight])[0], x @ weight.t())


def test_linears_pass_torch_library_checks():
    weights = [torch.randn(n, 130, requires_grad=True) for n in (7, 140)]
    args = (torch.randn(5, 130, requires_grad=True), weights, "emulated")
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(fp8_linears, args, test_utils=tests)


# --- dense MLPs -------------------------------------------------------------------------------------------------------


def run_mlp(mlp, x, grad):
    leaf = x.clone().requires_grad_()
    y = mlp(leaf)
    y.backward(grad)
    return [y.detach(), leaf.grad, *(param.grad for param in mlp.parameters())]


def pair_of_mlps(hidden, size):
    plain = DenseMLP(hidden, size)
    for param in plain.parameters():
        param.data.normal_(std=0.1)
    scaled = copy.deepcopy(plain)
    holder = nn.Module()
    holder.mlp = scaled
    apply_fp8(holder, "emulated")
    return plain, scaled


@pytest.mark.parametrize("tokens", [0, 1, 127, 128, 300])
@pytest.mark.parametrize("sizes", [(256, 384), (160, 96)], ids=str)
def test_a_dense_mlp_is_one_operation(tokens, sizes):
    """Tokens are filled up to whole blocks, and what fills them changes nothing."""
    plain, scaled = pair_of_mlps(*sizes)
    x, grad = torch.randn(2, tokens, sizes[0])[1], torch.randn(tokens, sizes[0])
    for ours, theirs in zip(run_mlp(scaled, x, grad), run_mlp(plain, x, grad), strict=True):
        assert ours.shape == theirs.shape
        assert torch.equal(ours, theirs) if tokens == 0 else relative(ours, theirs) < 0.08


def test_a_dense_mlp_multiplies_what_linears_would():
    """In float32 the activation is not rounded in between, so that only the order of sums is another."""
    _, scaled = pair_of_mlps(256, 384)
    x, grad = torch.randn(128, 256), torch.randn(128, 256)
    ours = run_mlp(scaled, x, grad)
    scaled.zero_grad()
    scaled.__class__ = DenseMLP
    for mine, theirs in zip(ours, run_mlp(scaled, x, grad), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


@pytest.mark.parametrize("size", [384, 96])
def test_the_activation_of_a_dense_mlp_is_not_kept(size):
    """Where units are whole blocks; others are linears, each of which keeps what it reads."""
    _, scaled = pair_of_mlps(256, size)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        scaled(torch.randn(128, 256, requires_grad=True))
    assert ((128, 2 * size) in kept) == (size % BLOCK == 0)
    assert ((128, size) in kept) == (size % BLOCK > 0)


def test_frozen_weights_of_a_dense_mlp_get_no_gradient():
    _, scaled = pair_of_mlps(128, 128)
    scaled.up_proj.weight.requires_grad_(False)
    run_mlp(scaled, torch.randn(5, 128), torch.randn(5, 128))
    assert scaled.up_proj.weight.grad is None
    assert scaled.gate_proj.weight.grad.abs().sum() > 0
    with torch.no_grad():
        assert not scaled(torch.randn(5, 128)).requires_grad


def test_dense_mlps_pass_torch_library_checks():
    weights = [torch.randn(*shape, requires_grad=True) for shape in ((140, 130), (140, 130), (130, 140))]
    args = (torch.randn(5, 130, requires_grad=True), *weights, "emulated")
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(fp8_swiglu, args, test_utils=tests)
    hidden = fp8_swiglu(*args)[1].detach()
    detached = [t.detach() for t in args[:-1]]
    torch.library.opcheck(
        fp8_swiglu_backward, (torch.randn(5, 130), *detached, hidden, "emulated"), test_utils=tests[:2]
    )


# --- grouped ----------------------------------------------------------------------------------------------------------

COUNTS = [[3, 0, 130, 128], [0, 0, 0, 1], [5], [0, 200], [0, 0]]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_groups_start_at_multiples_of_128(counts):
    rows = sum(-(-count // BLOCK) for count in counts) * BLOCK + 2 * BLOCK
    groups = group_rows(torch.tensor(counts), rows)
    start, wanted = 0, torch.full((rows,), -1)
    for expert, count in enumerate(counts):
        size = -(-count // BLOCK) * BLOCK
        wanted[start : start + count] = torch.arange(start, start + count)
        assert (groups.expert[start : start + size] == expert).all()
        assert (groups.starts[expert], groups.sizes[expert]) == (start, size)
        start += size
    assert torch.equal(groups.source, wanted)
    assert (groups.expert[start:] == -1).all()


def pair_of_experts(count: int, hidden: int, size: int, gated: bool = True) -> tuple[Experts, Fp8Experts]:
    """The same weights, multiplied exactly and in FP8."""
    pair = [Experts(count, hidden, size, gated) for _ in range(2)]
    for plain, scaled in zip(*(experts.parameters() for experts in pair), strict=True):
        plain.data.normal_(std=0.1)
        scaled.data.copy_(plain.data)
    pair[1].__class__ = Fp8Experts
    pair[1].backend = "emulated"
    return pair[0], pair[1]


def test_wide_weights_are_rounded_as_they_are_quantised():
    """The same bits as with weights that were cast before, but for gradients, which stay as wide."""
    wide, narrow = (pair_of_experts(3, 160, 96)[1] for _ in range(2))
    narrow.load_state_dict(wide.state_dict())
    narrow.bfloat16()
    counts, x = torch.tensor([100, 0, 130]), torch.randn(384, 160).bfloat16()
    results = []
    for experts in (wide, narrow):
        rows = x.clone().requires_grad_()
        y = experts.grouped_mlp(rows, counts, torch.ones(384))
        y.float().square().sum().backward()
        results.append([y, rows.grad, *(param.grad for param in experts.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours.to(theirs.dtype), theirs)
    assert wide.down_proj.grad.dtype == torch.float32
    assert not torch.equal(wide.down_proj.grad, narrow.down_proj.grad.float())


@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_of_micro_batches_are_added_where_they_lie(sharded, world):
    """The bits that autograd gets, which adds them up where a hook waits for them."""
    found = []
    for waits in (False, True):
        torch.manual_seed(1)
        experts = pair_of_experts(3, 160, 96)[1]
        if sharded:
            for name, param in list(experts.named_parameters()):
                data = distribute_tensor(param.detach(), world.dense["fsdp"], [Shard(0)])
                experts.register_parameter(name, torch.nn.Parameter(data))
        seen, places = [], []
        for param in experts.parameters():
            if waits:
                param.register_post_accumulate_grad_hook(seen.append)
        for counts in ([5, 0, 130], [128, 7, 3], [0, 0, 1]):
            rows = torch.randn(384, 160).bfloat16().requires_grad_()
            experts.grouped_mlp(rows, torch.tensor(counts), torch.rand(384)).sum().backward()
            places.append([local_part(param.grad).data_ptr() for param in experts.parameters()])
        assert len(seen) == (6 if waits else 0)
        assert places[0] == places[1] == places[2]
        found.append([param.grad for param in experts.parameters()])
    for ours, wanted in zip(*found, strict=True):
        assert type(ours) is type(wanted)
        assert ours.shape == wanted.shape
        assert torch.equal(local_part(ours), local_part(wanted))
        assert local_part(ours).any()


def compare_experts(run, pair, x, scale, idle):
    """Outputs and gradients of run(experts, x, scale) for both, and that experts without tokens get a zero gradient."""
    results = []
    for experts in pair:
        leaves = [x.clone().requires_grad_(), scale.clone().requires_grad_()]
        y = run(experts, *leaves)
        torch.manual_seed(1)
        y.backward(torch.randn_like(y))
        results.append([y.detach(), *(leaf.grad for leaf in leaves), *(param.grad for param in experts.parameters())])
    for theirs, ours in zip(*results, strict=True):
        assert ours.shape == theirs.shape
        if len(x):
            assert relative(ours, theirs) < (0.08 if pair[0].first == "gate_up" else 0.12)  # a square doubles errors
        assert not ours.isnan().any()
    for grad in results[1][3:]:
        assert grad[idle].abs().sum() == 0


@pytest.mark.parametrize("gated", [True, False], ids=["swiglu", "squared relu"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_experts_of_sorted_rows(counts, gated):
    sizes, total = torch.tensor(counts), sum(counts)
    idle = [expert for expert, count in enumerate(counts) if count == 0]
    pair = pair_of_experts(len(counts), 160, 96, gated)
    x, scale = torch.randn(total, 160), torch.rand(total) + 0.5
    chosen = torch.arange(len(counts)).repeat_interleave(sizes)[:, None]

    def run(experts, x, scale):
        places, there = place(chosen, 0, len(counts), total, experts.alignment)
        rows, scales = spread(x, places), spread_scalars(scale[:, None], places)
        return collect(experts.grouped_mlp(rows, there, scales), places)

    compare_experts(run, pair, x, scale, idle)


@pytest.mark.parametrize("tokens", [1, 200])
def test_experts_of_routed_tokens(tokens):
    """The way without unpadding."""
    chosen = torch.stack([torch.randperm(4)[:2] + 1 for _ in range(tokens)])  # nobody chooses expert 0
    x, weights = torch.randn(tokens, 160), torch.rand(tokens, 2)
    idle = [expert for expert in range(6) if expert not in chosen]
    compare_experts(lambda experts, x, w: experts(x, w, chosen), pair_of_experts(6, 160, 96), x, weights, idle)


# --- models -----------------------------------------------------------------------------------------------------------


def test_apply_swaps_linears_and_experts_and_nothing_else():
    model = tiny.random_model(tiny.moe_card(tie_word_embeddings=False))
    names = {name for name, _ in model.named_parameters()}
    apply_fp8(model, "emulated")
    kinds = {name: type(module) for name, module in model.named_modules()}
    assert kinds["layers.0.self_attn.q_proj"] is Fp8Linear
    assert kinds["layers.0.self_attn"] is Fp8Attention
    assert kinds["layers.1.mlp.experts"] is Fp8Experts
    assert kinds["layers.1.mlp.gate"] is Router
    assert kinds["lm_head"] is LMHead
    assert {name for name, _ in model.named_parameters()} == names


def test_apply_joins_gate_and_up():
    model = tiny.random_model(tiny.dense_card())
    apply_fp8(model, "emulated")
    assert type(model.layers[0].mlp) is Fp8DenseMLP


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
        hidden = model(ids, torch.arange(len(ids)), attend_documents(card, [len(ids)], ids.device))
        loss = F.cross_entropy(model.logits(hidden)[:-1], ids[1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item())
    return history


CARDS = {"dense": tiny.dense_card(), "moe": tiny.moe_card()} | {name: family_card(name) for name in EACH.values()}


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS.keys())
def test_a_model_trains_as_without(card):
    exact, quantised = losses(card, False, 40), losses(card, True, 40)
    assert exact[-1] < 0.7 * exact[0]
    assert quantised != exact
    assert max(abs(a - b) for a, b in zip(exact, quantised, strict=True)) < 0.05 * exact[0]
