"""Context parallelism: which rank holds which token, the kernels of the ring, and ranks against one process."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from context_ranks import Case, attention_inputs, run_attention, run_ranks, train_model
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.models.layers.attention_kernels import varlen_backward, varlen_forward
from prl.models.layers.packed_attention import packed_attention
from prl.trainer.context import gather_latents
from prl.trainer.context.gather_latents import GatheredLatentAttention
from prl.trainer.context.parallel import ContextGroup, shard_row
from prl.trainer.context.ring_attention import block_of, zigzag_layout, zigzag_positions

CPU = torch.device("cpu")
PACKINGS = ((7, 20, 1, 3), (1,), (37,), (2, 2, 1, 9), (8, 16))
CASES = [
    *(
        Case(style, cp, docs, *heads)
        for style in ("ulysses", "ring")
        for cp in (2, 4)
        for docs, heads in zip(PACKINGS, ((4, 1), (4, 4), (8, 2), (4, 2), (8, 1)), strict=True)
    ),
    Case("ulysses", 2, (11, 5), q_heads=6, kv_heads=3),  # cp does not divide the key heads
    Case("ring", 4, (11, 5), q_heads=6, kv_heads=3),  # nor, here, any heads
    *(Case(style, 2, (30, 9), q_heads=4, kv_heads=4, head_dim=12) for style in ("ulysses", "ring")),  # wider keys
    Case("ulysses", 4, (30, 9), q_heads=8, kv_heads=2, dtype="bfloat16"),
    Case("ring", 4, (30, 9), q_heads=8, kv_heads=2, dtype="bfloat16"),
]
lengths = st.lists(st.integers(1, 40), min_size=1, max_size=8)
degrees = st.sampled_from([2, 3, 4, 8])


def shards(doc_lens, cp, style):
    return [shard_row(doc_lens, ContextGroup(None, rank, cp, style), CPU) for rank in range(cp)]


def in_document(doc_lens):
    """Of every row position [T]: document, position inside it."""
    documents = torch.arange(len(doc_lens)).repeat_interleave(torch.tensor(doc_lens))
    return documents, torch.cat([torch.arange(n) for n in doc_lens])


@given(doc_lens=lengths, cp=degrees, style=st.sampled_from(["ulysses", "ring"]))
def test_every_token_is_held_once(doc_lens, cp, style):
    parts, total = shards(doc_lens, cp, style), sum(doc_lens)
    held = torch.cat([part.index[part.valid] for part in parts])
    assert held.sort().values.tolist() == list(range(total))
    slots = {len(part.index) for part in parts}
    assert len(slots) == 1
    padded = total + cp - 1 if style == "ulysses" else sum(n + 2 * cp - 1 for n in doc_lens)
    assert slots.pop() * cp <= padded
    for part in parts:
        assert part.valid.shape == part.index.shape
        assert bool(((part.index >= 0) & (part.index < total)).all())


@given(doc_lens=lengths, cp=degrees)
def test_padding_of_the_ring_follows_its_document(doc_lens, cp):
    documents, position = in_document(doc_lens)
    for part in shards(doc_lens, cp, "ring"):
        assert part.index.numel() % 2 == 0
        assert documents[part.index].tolist() == sorted(documents[part.index].tolist())
        last = torch.tensor(doc_lens)[documents[part.index]] - 1
        assert torch.equal(position[part.index][~part.valid], last[~part.valid])


@given(doc_lens=lengths, cp=degrees)
def test_ring_work_is_balanced_within_the_padding(doc_lens, cp):
    """A query's work is the number of keys it sees. Equal with padding counted; without, it differs by at most what the
    padding would have cost."""
    _, position = in_document(doc_lens)
    work = [int((position[part.index][part.valid] + 1).sum()) for part in shards(doc_lens, cp, "ring")]
    padded = [-(-n // (2 * cp)) * 2 * cp for n in doc_lens]
    share = sum(n * (n + 1) // 2 for n in padded) / cp
    assert share == int(share)
    assert max(work) <= share
    assert share - min(work) <= sum(p * (p - n) for p, n in zip(padded, doc_lens, strict=True))
    assert sum(work) == sum(n * (n + 1) // 2 for n in doc_lens)


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_ring_work_of_long_documents_is_equal(cp):
    doc_lens = [3001, 40, 1500]
    _, position = in_document(doc_lens)
    work = {
        style: [int((position[part.index][part.valid] + 1).sum()) for part in shards(doc_lens, cp, style)]
        for style in ("ring", "ulysses")
    }
    ring, contiguous = (max(work[style]) / min(work[style]) for style in ("ring", "ulysses"))
    assert ring < 1.05
    assert contiguous > 1.15  # what a ring of contiguous chunks would suffer


@given(doc_lens=st.lists(st.integers(1, 20), min_size=1, max_size=4), cp=degrees)
@settings(max_examples=30)
def test_ring_blocks_meet_every_causal_pair_once(doc_lens, cp):
    """Blocks of all steps, as the kernels see them, over padded documents."""
    layout = zigzag_layout(doc_lens, cp, CPU)
    chunks = layout.cu_chunk.diff().tolist()
    starts = [0, *(2 * cp * torch.tensor(chunks).cumsum(0)).tolist()]  # of the padded documents

    def positions(rank):
        numbers = (rank, 2 * cp - 1 - rank)
        return torch.cat(
            [start + n * c + torch.arange(c) for start, c in zip(starts[:-1], chunks, strict=True) for n in numbers]
        )

    pairs = torch.zeros(starts[-1], starts[-1], dtype=torch.int64)
    for rank in range(cp):
        work = 0
        for source in range(cp):
            block = block_of(source, layout, ContextGroup(None, rank, cp, "ring"))
            q = positions(rank) if block.queries is None else positions(rank)[block.queries]
            k = positions(source) if block.keys is None else positions(source)[block.keys]
            cu_q = layout.cu_both if block.queries is None else layout.cu_chunk
            cu_k = layout.cu_both if block.keys is None else layout.cu_chunk
            for (q0, q1), (k0, k1) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
                seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.int64)
                seen = seen.tril() if block.causal else seen
                pairs[q[q0:q1, None], k[None, k0:k1]] += seen
                work += int(seen.sum())
        assert work * cp == sum(2 * cp * c * (2 * cp * c + 1) // 2 for c in chunks), "ranks differ in work"
    documents = torch.arange(len(chunks)).repeat_interleave(torch.tensor(chunks) * 2 * cp)
    assert torch.equal(pairs, (documents[:, None] == documents[None]).long().tril())


def boundaries(doc_lens, device=CPU):
    return torch.tensor([0, *doc_lens]).cumsum(0).to(torch.int32).to(device)


def reference(q, k, v, dout, q_lens, k_lens, causal):
    """Output, log-sum-exp and gradients, document by document, by PyTorch's attention and autograd."""
    q, k, v = (t.detach().clone().requires_grad_() for t in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    outs, lses = [], []
    for qd, kd, vd in zip(q.split(q_lens), k.split(k_lens), v.split(k_lens), strict=True):
        kd, vd = (t.repeat_interleave(groups, dim=1) for t in (kd, vd))
        qh, kh, vh = (t.transpose(0, 1) for t in (qd, kd, vd))
        outs.append(F.scaled_dot_product_attention(qh, kh, vh, is_causal=causal).transpose(0, 1))
        scores = qh @ kh.transpose(1, 2) * q.shape[-1] ** -0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        lses.append(scores.logsumexp(-1))
    out = torch.cat(outs)
    out.backward(dout)
    return out.detach(), torch.cat(lses, dim=1).detach(), q.grad, k.grad, v.grad


def random_heads(q_lens, k_lens, heads, dim, value_dim=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    wide = value_dim or dim
    queries, keys = (sum(q_lens), heads[0]), (sum(k_lens), heads[1])
    shapes = ((*queries, dim), (*keys, dim), (*keys, wide), (*queries, wide))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def run_kernels(q, k, v, dout, q_lens, k_lens, causal):
    bounds = (boundaries(q_lens, q.device), boundaries(k_lens, q.device), max(q_lens), max(k_lens), causal)
    out, lse = varlen_forward(q, k, v, *bounds)
    return out, lse, *varlen_backward(dout, q, k, v, out, lse, *bounds)


@given(
    documents=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=6),
    heads=st.sampled_from([(4, 1), (4, 2), (4, 4), (6, 3)]),
    value_dim=st.sampled_from([8, 5]),
    causal=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_plain_kernels_agree_with_sdpa(documents, heads, value_dim, causal):
    q_lens = [n for n, _ in documents]
    k_lens = q_lens if causal else [n for _, n in documents]
    tensors = random_heads(q_lens, k_lens, heads, 8, value_dim)
    expected = reference(*tensors, q_lens, k_lens, causal)
    for ours, theirs in zip(run_kernels(*tensors, q_lens, k_lens, causal), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_plain_kernels_keep_16_bits_outside_and_compute_in_32():
    tensors = [t.bfloat16() for t in random_heads([9, 4], [9, 4], (4, 2), 8)]
    expected = reference(*(t.float() for t in tensors), [9, 4], [9, 4], True)
    out, lse, *grads = run_kernels(*tensors, [9, 4], [9, 4], True)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=1e-5)
    for ours, theirs in zip((out, *grads), (expected[0], *expected[2:]), strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dims", [(64, 64), (192, 128)], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (8, 1)], ids=str)
@pytest.mark.parametrize(
    ("q_lens", "k_lens", "causal"),
    [
        ([70, 1, 300], [70, 1, 300], True),
        ([70, 1, 300], [140, 2, 600], False),
        ([64, 8], [32, 4], False),
        ([1, 1, 1], [2, 2, 2], False),  # one query each: the decoding path of the kernel
    ],
    ids=["causal", "more keys", "fewer keys", "one query"],
)
def test_flash_kernels_agree_with_sdpa(dims, heads, q_lens, k_lens, causal):
    tensors = [t.to("cuda", torch.bfloat16) for t in random_heads(q_lens, k_lens, heads, *dims)]
    expected = reference(*(t.float() for t in tensors), q_lens, k_lens, causal)
    for ours, theirs in zip(run_kernels(*tensors, q_lens, k_lens, causal), expected, strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (256, 256)], ids=str)
def test_packed_attention_of_long_and_short_documents_agrees_with_sdpa(dims):
    lengths = [300, 2500, 70, 2048]
    tensors = [t.to("cuda", torch.bfloat16) for t in random_heads(lengths, lengths, (4, 4), *dims)]
    expected = reference(*(t.float() for t in tensors), lengths, lengths, True)
    q, k, v = (t.clone().requires_grad_() for t in tensors[:3])
    out = packed_attention(lengths, q.device)(0, q, k, v)
    out.backward(tensors[3])
    for ours, theirs in zip((out, q.grad, k.grad, v.grad), (expected[0], *expected[2:]), strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=2e-2, atol=2e-2)


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Four ranks' results of all cases; with cp = 2 ranks 0, 1 and ranks 2, 3 are two groups."""
    return run_ranks(tmp_path_factory.mktemp("context") / "gloo", 4, CASES)


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory):
    size = 4 if torch.cuda.device_count() >= 4 else 2
    cases = [case for case in CASES if case.cp <= size]
    results = run_ranks(tmp_path_factory.mktemp("context") / "nccl", size, cases, "cuda")
    return {case: [rank[i] for rank in results] for i, case in enumerate(cases)}


def check(case, ranks):
    """One process's attention and training step against those of every group."""
    exact = case.dtype == "float32"
    tensors = attention_inputs(case)
    expected = run_attention(case, packed_attention(list(case.doc_lens), CPU), tuple(t.float() for t in tensors))
    alone = train_model(case, None, CPU)
    for start in range(0, len(ranks), case.cp):
        group = ranks[start : start + case.cp]
        for name, i in (("out", 0), ("dq", 1), ("dk", 2), ("dv", 3)):
            gathered = torch.full_like(expected[i], float("nan"))
            for rank in group:
                gathered[rank["index"][rank["valid"]]] = rank["parts"][i][rank["valid"]].float()
            tolerance = {"rtol": 1e-5, "atol": 5e-6} if exact else {"rtol": 3e-2, "atol": 3e-2}
            torch.testing.assert_close(gathered, expected[i], **tolerance, msg=lambda m, name=name: f"{name}: {m}")
        for rank in group:
            torch.testing.assert_close(rank["model"]["logp"], alone["logp"], rtol=1e-4, atol=1e-5)
        for name, grad in group[0]["model"]["grads"].items():
            torch.testing.assert_close(
                grad, alone["grads"][name], rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
            )


def case_id(case):
    documents = "+".join(map(str, case.doc_lens))
    widths = f"-{case.head_dim}by{case.value_dim}" if case.value_dim != case.head_dim else ""
    return f"{case.style}{case.cp}-{documents}-{case.q_heads}of{case.kv_heads}{widths}-{case.dtype}"


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(CASES)), ids=[case_id(case) for case in CASES])
def test_ranks_agree_with_one_process(together, index):
    check(CASES[index], [rank[index] for rank in together])


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("case", [case for case in CASES if case.cp <= max(torch.cuda.device_count(), 2)], ids=case_id)
def test_gpus_agree_with_one_process(on_gpus, case):
    check(case, on_gpus[case])


@pytest.mark.slow
def test_ring_holds_two_buffers_of_keys(together):
    for index, case in enumerate(CASES):
        for rank in together:
            assert rank[index]["most_keys"] == (2 if case.style == "ring" else 0)


@pytest.mark.slow
def test_gradient_of_a_sum_is_that_of_one_loss(together):
    """loss = |sum_r (r + 1) w_r|^2 with equal w: its gradient with respect to w_r is 2 (r + 1) total, once."""
    for index, case in enumerate(CASES):
        for rank, results in enumerate(together):
            total = torch.tensor([3.0, -1.0]) * sum(range(1, case.cp + 1))
            torch.testing.assert_close(results[index]["sum"]["total"], total)
            torch.testing.assert_close(results[index]["sum"]["grad"], 2 * (rank % case.cp + 1) * total)


@pytest.mark.parametrize("block_bytes", [1, 1 << 30], ids=["a head at a time", "all heads at once"])
def test_gathered_latents_are_expanded_as_written_out(block_bytes, monkeypatch):
    """Two ranks' queries of two documents, each against what it may see, with all gradients."""
    monkeypatch.setattr(gather_latents, "BLOCK_BYTES", block_bytes)
    lengths, heads, still, turned, rank, width = [7, 12], 3, 4, 2, 5, 6
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    inputs = [numbers(sum(lengths), heads, still + turned), numbers(sum(lengths), rank + turned),
              numbers(heads, still, rank), numbers(heads, width, rank)]  # fmt: skip
    dout = numbers(sum(lengths), heads, width)
    q, latents, of_keys, of_values = whole = [t.clone().requires_grad_() for t in inputs]
    k = torch.cat([torch.einsum("tc,hdc->thd", latents[:, :rank], of_keys),
                   latents[:, None, rank:].expand(-1, heads, -1)], dim=2)  # fmt: skip
    v = torch.einsum("tc,hvc->thv", latents[:, :rank], of_values)
    wanted = packed_attention(lengths, CPU)(0, q, k, v)
    gradients = torch.autograd.grad(wanted, whole, dout)

    # what ranks would gather, without ranks: the slots of both, one after another
    places = [zigzag_positions(lengths, ContextGroup(None, r, 2, "gather")) for r in range(2)]
    monkeypatch.setattr(gather_latents, "gather", lambda own, context: everyone)
    parts = [t.clone().requires_grad_() for t in inputs]
    everyone = torch.cat([parts[1][position] for position, _ in places])
    totals = []
    for r, (position, valid) in enumerate(places):
        attend = GatheredLatentAttention(lengths, ContextGroup(None, r, 2, "gather"), CPU)
        out = attend(0, parts[0][position], everyone, *parts[2:])
        torch.testing.assert_close(out[valid], wanted[position[valid]])
        totals.append((out * dout[position] * valid[:, None, None]).sum())
    for ours, theirs in zip(torch.autograd.grad(sum(totals), parts), gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
