"""Attention of each query to keys of its own choice, and the choice: against dense attention and plain sorting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import family_card
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from prl.bench import sparse as bench
from prl.models.layers.packed_sparse_attention import PackedSparseAttention
from prl.models.sparse import attention, choice, flashmla, indexer_loss
from prl.models.sparse.attention import sparse_attention
from prl.models.sparse.choice import choose_keys, width_of
from prl.models.sparse.indexer_loss import Index, IndexerLoss, with_indexer_loss

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
VALUES, TURNED, SCALE = 16, 4, 0.3


def dense(q: Tensor, latents: Tensor, chosen: Tensor, values: int, scale: float) -> Tensor:
    """With a mask [N, S] and autograd."""
    mask = torch.zeros(len(q), len(latents) + 1, dtype=torch.bool, device=q.device)
    mask.scatter_(1, chosen.long().where(chosen >= 0, len(latents)), True)
    scores = torch.einsum("nhw,sw->nhs", q, latents) * scale
    probs = scores.masked_fill(~mask[:, None, :-1], float("-inf")).softmax(-1)
    return torch.einsum("nhs,sc->nhc", probs, latents[:, :values])


def random_case(
    queries: int, heads: int, rows: int, count: int, values: int = VALUES, turned: int = TURNED
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, latents, the gradient of the output, and choices of which some are shorter."""
    generator = torch.Generator().manual_seed(queries + rows)
    q, latents, dout = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((queries, heads, values + turned), (rows, values + turned), (queries, heads, values))
    )
    chosen = torch.stack([torch.randperm(rows, generator=generator)[:count] for _ in range(queries)]).int()
    lengths = torch.randint(1, count + 1, (queries, 1), generator=generator)
    chosen = chosen.where(torch.arange(count) < lengths, -1)
    return q, latents, dout, chosen[:, torch.randperm(count, generator=generator)]  # none may stand anywhere


def results(attend: Any, q: Tensor, latents: Tensor, dout: Tensor, chosen: Tensor, values: int) -> list[Tensor]:
    q, latents = (t.detach().clone().requires_grad_() for t in (q, latents))
    out = attend(q, latents, chosen, values, SCALE)
    return [out.detach(), *torch.autograd.grad(out, (q, latents), dout)]


@pytest.mark.parametrize("block_bytes", [1, 5_000, 1 << 26])
@pytest.mark.parametrize("sizes", [(7, 3, 20, 6), (40, 2, 12, 12), (1, 4, 1, 1)], ids=str)
def test_it_is_dense_attention_under_a_mask(
    sizes: tuple[int, int, int, int], block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "BLOCK_BYTES", block_bytes)
    q, latents, dout, chosen = random_case(*sizes)
    for ours, theirs in zip(
        results(sparse_attention, q, latents, dout, chosen, VALUES),
        results(dense, q, latents, dout, chosen, VALUES),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def sorted_choice(scores: Tensor, low: Tensor, high: Tensor, count: int) -> list[list[int]]:
    """Of every query: the `count` best keys of its stretch, of equal ones the earlier, in the order of their places; as
    wide as a choice that has no more columns than it needs.
    """
    found, width = [], width_of(count, int((high - low).max()))
    for row, begin, end in zip(scores.tolist(), low.tolist(), high.tolist(), strict=True):
        best = sorted(range(begin, end), key=lambda key: (-row[key], key))[:count]
        found.append(sorted(best) + [-1] * (width - len(best)))
    return found


@given(
    stretches=st.lists(st.tuples(st.integers(0, 29), st.integers(1, 30)), min_size=1, max_size=8),
    count=st.integers(1, 12) | st.sampled_from([29, 64, 2048]),
    slack=st.sampled_from([0, 1, 40]),
    heads=st.integers(1, 4),
    seed=st.integers(0, 99),
    scores_bytes=st.sampled_from([1, 50_000, 1 << 28]),
)
@settings(max_examples=60, deadline=None)
def test_the_choice_is_that_of_sorting_ties_included(
    stretches: list[tuple[int, int]], count: int, slack: int, heads: int, seed: int, scores_bytes: int
) -> None:
    """Small whole numbers: sums are exact, and many scores are equal, zero above all. With slack the longest stretch is
    another rank's.
    """
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-2, 3, (len(stretches), heads, 3), generator=generator).float()
    weights = torch.randint(-2, 3, (len(stretches), heads), generator=generator).float()
    k = torch.randint(-2, 3, (30, 3), generator=generator).float()
    low = torch.tensor([begin for begin, _ in stretches])
    high = torch.tensor([min(begin + length, 30) for begin, length in stretches])
    scores = (weights[..., None] * (q @ k.t()).relu()).sum(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "SCORES_BYTES", scores_bytes)
        longest = int((high - low).max()) + slack
        chosen = choose_keys(q, weights, k, low, high, count, longest)
    assert chosen.dtype == torch.int32
    assert chosen.shape[1] == width_of(count, longest)
    wanted = sorted_choice(scores, low, high, count)
    assert [row[: len(wanted[0])] for row in chosen.tolist()] == wanted
    assert (chosen[:, len(wanted[0]) :] == -1).all()


def test_a_choice_is_as_wide_as_the_longest_document_needs() -> None:
    """With 2,048 columns for documents of 60 tokens sparse attention on a CPU took ten times as long."""
    assert [width_of(2048, longest) for longest in (1, 60, 64, 65, 1024, 1025, 9000)] == [
        64,
        64,
        64,
        128,
        1024,
        2048,
        2048,
    ]
    assert [width_of(8, longest) for longest in (1, 9)] == [8, 8]
    card = family_card("glm_moe_dsa").model_copy(update={"index_topk": 2048})
    attend = PackedSparseAttention([60, 7], card, torch.device("cpu"))
    index = (torch.randn(67, 4, 16), torch.randn(67, 4), torch.randn(67, 16))
    attend.choose(0, *index)
    assert attend.chosen[0].shape == (67, 64)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that anything makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, Tensor)]
        self.elements = max([self.elements, *(t.untyped_storage().nbytes() // t.itemsize for t in made)])
        return out


def test_nothing_grows_with_the_square_of_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank of several: a quarter of the queries, all keys; choice, attention, its gradients."""
    monkeypatch.setattr(choice, "SCORES_BYTES", 1 << 18)
    monkeypatch.setattr(attention, "BLOCK_BYTES", 1 << 16)
    largest = {}
    for length in (512, 4096):
        q, latents, dout, _ = random_case(length // 4, 2, length, 8)
        index = torch.randn(length // 4, 2, 4), torch.randn(length // 4, 2), torch.randn(length, 4)
        high = torch.arange(4, length + 1, 4)
        with Largest() as largest[length]:
            chosen = choose_keys(*index, torch.zeros_like(high), high, 8, length)
            results(sparse_attention, q, latents, dout, chosen, VALUES)
    assert largest[4096].elements <= 8 * largest[512].elements
    assert largest[4096].elements < 4096 // 4 * 4096 // 16


def test_a_query_without_keys_is_refused() -> None:
    one = torch.ones(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="sees no key"):
        choose_keys(torch.ones(1, 1, 2), torch.ones(1, 1), torch.ones(3, 2), one, one, 2, 3)


@pytest.mark.parametrize("count", [64, 150, 256])
def test_flashmla_is_handed_keys_in_its_multiples(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents shorter than that choose among fewer: its assertion would end the run. It is not to be had here."""

    def prefill(q: Tensor, latents: Tensor, chosen: Tensor, scale: float, values: int, *_: None) -> tuple[Tensor, ...]:
        assert chosen.shape[2] % 128 == 0
        out, lse = attention._plain_forward(q, latents[:, 0], chosen[:, 0], values, scale)
        return out, lse, lse

    monkeypatch.setattr(torch.ops._flashmla_C, "sparse_prefill_fwd", prefill, raising=False)
    q, latents, _, chosen = random_case(5, 3, 300, count)
    out, lse = flashmla.forward(q, latents, chosen, VALUES, SCALE)
    expected = attention._plain_forward(q, latents, chosen, VALUES, SCALE)
    torch.testing.assert_close((out, lse), expected)


@GPU
@pytest.mark.parametrize("theirs", [False, True], ids=["own", "FlashMLA"])
@pytest.mark.parametrize("exactly", [False, True], ids=["atomic", "deterministic"])
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("sizes", [(512, 64), (32, 16)], ids=str)
def test_kernels_agree_with_dense_attention(
    sizes: tuple[int, int], heads: int, exactly: bool, theirs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, turned = sizes
    if not theirs:
        monkeypatch.setattr(flashmla, "fits", lambda q, values: False)
    elif not flashmla.fits(torch.empty(1, heads, values + turned, dtype=torch.bfloat16, device="cuda"), values):
        pytest.skip("FlashMLA comes with vLLM, for Hopper and these sizes alone")
    q, latents, dout, chosen = (t.to("cuda") for t in random_case(70, heads, 500, 150, values, turned))
    q, latents, dout = (t.to(torch.bfloat16) for t in (q * 0.2, latents, dout))
    wide = [t.float() for t in (q, latents, dout)]
    torch.use_deterministic_algorithms(exactly)
    try:
        ours = results(sparse_attention, q, latents, dout, chosen, values)
        again = results(sparse_attention, q, latents, dout, chosen, values)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other, exact in zip(ours, again, results(dense, *wide, chosen, values), strict=True):
        assert (one.float() - exact).norm() < 1e-2 * exact.norm()
        assert not exactly or torch.equal(one, other)


@GPU
@pytest.mark.parametrize("count", [16, 300])
def test_the_kernels_choice_is_that_of_sorting(count: int) -> None:
    """Numbers whose products and sums bfloat16 and float32 hold exactly, with ties."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-3, 4, (700, 32, 64), generator=generator).bfloat16()
    weights = torch.randint(-3, 4, (700, 32), generator=generator).float()
    k = torch.randint(-3, 4, (700, 64), generator=generator).bfloat16()
    low = torch.tensor([0] * 300 + [300] * 400)
    high = torch.arange(1, 701)
    scores = (weights[..., None] * (q.float() @ k.float().t()).relu()).sum(1)
    chosen = choose_keys(*(t.cuda() for t in (q, weights, k, low, high)), count, 400)
    assert chosen.tolist() == sorted_choice(scores, low, high, count)


def test_the_measurement_prints_a_row_for_each_length(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["sparse", "40", "80"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bench.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["40", "80"]
    assert all(float(figure) > 0 for row in rows for figure in row[1:6])


# --- what indexers learn from -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [1, 1 << 30], ids=["a query at a time", "all at once"])
def test_indexers_are_pulled_towards_the_attention_and_nothing_else_is(block_bytes, monkeypatch):
    """Against autograd over a dense distribution, with queries that do not count; attention's own gradients stay."""
    monkeypatch.setattr(indexer_loss, "BLOCK_BYTES", block_bytes)
    q, latents, dout, chosen = random_case(6, 3, 10, 4)
    generator = torch.Generator().manual_seed(1)
    index = Index(
        *(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((6, 2, 5), (6, 2), (10, 5)))
    )
    leaves = [t.clone().requires_grad_() for t in (q, latents, *index)]
    rows, weight = torch.tensor([0, 2, 3, 5]), 0.3

    mask = torch.zeros(6, 11, dtype=torch.bool).scatter_(1, chosen.long().where(chosen >= 0, 10), True)[:, :10]
    scores = torch.einsum("nhw,sw->nhs", q, latents) * SCALE
    target = scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1).mean(1)
    dots = torch.einsum("njd,sd->njs", leaves[2], leaves[4]).relu()
    predicted = torch.einsum("nj,njs->ns", leaves[3], dots).masked_fill(~mask, float("-inf")).softmax(-1)
    ratio = torch.where(mask, target / predicted.where(mask, 1.0), 1.0)
    divergence = (target * ratio.log()).sum(-1)[rows].sum()
    wanted = torch.autograd.grad(weight * divergence, leaves[2:])
    plain = torch.autograd.grad(sparse_attention(*leaves[:2], chosen, VALUES, SCALE), leaves[:2], dout)

    loss = IndexerLoss(rows, weight, torch.zeros((), dtype=torch.float64))
    out = sparse_attention(*leaves[:2], chosen, VALUES, SCALE)
    out = with_indexer_loss(out, Index(*leaves[2:]), (*leaves[:2], chosen, SCALE), loss)
    for ours, theirs in zip(torch.autograd.grad(out, leaves, dout), (*plain, *wanted), strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(loss.total, divergence.detach())
