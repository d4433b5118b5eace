"""Documents that begin alike: which are packed together, and that running once what they share trains the same."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from families import SIZES, family_card
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import moe_checkpoint, random_model
from torch import Tensor
from trainer_ranks import Job, build_policy

from prl.config import compose
from prl.config.world import shares_prefixes
from prl.metrics.mfu import document_flops, packed_flops
from prl.models.adapters.lora import whole_tensor
from prl.models.by_hand import PaddedQueries, ShortAttentionByHand
from prl.models.checkpoints.writing import hf_tensors, save_checkpoint
from prl.models.layers import prefix_attention
from prl.models.layers.attention_kernels import varlen_backward, varlen_forward
from prl.models.layers.cudnn_attention import Kept
from prl.models.layers.documents import attend_documents
from prl.models.layers.packed_attention import BY_HAND_TOKENS, packed_attention
from prl.models.layers.prefix_attention import PrefixAttention, PrefixPlan
from prl.models.layers.shared_prefixes import SharedPrefixes
from prl.orchestrator.batching import imbalance
from prl.trainer.head.head import logprob_head
from prl.transport.batch import MicroBatch, TrainBatch
from prl.transport.documents import LEAST, Document, alike, items_of
from prl.transport.packing import pack_for_ranks

VOCAB, EXPERTS, LAYERS = 64, 4, 2
FAMILIES = [name for name in SIZES if not family_card(name).state_layers]


def document(ids: list[int], prompt: int, routed: np.ndarray | None = None) -> Document:
    numbers = np.random.default_rng(sum(ids)).normal(size=(2, len(ids))).astype(np.float32)
    mask = np.arange(len(ids)) >= prompt
    return Document(
        ids, mask, np.where(mask, -np.abs(numbers[0]), 0.0), np.where(mask, numbers[1], 0.0), np.where(mask, 3, -1),
        None if routed is None else [routed[:prompt], routed[prompt:]],
    )  # fmt: skip


def groups(seed: int = 0, prompt: int = 24, answers: tuple[int, ...] = (9, 4, 12), replay: bool = False):
    """Three prompts with answers of so many tokens, the last of which comes twice; one document by itself."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(3):
        asked = rng.integers(0, VOCAB, prompt).tolist()
        drawn = [rng.integers(0, VOCAB, n).tolist() for n in answers]
        for answer in [*drawn, drawn[-1]]:
            ids = asked + answer
            routed = np.array(
                [[[(t + n) % EXPERTS, (t + n + 1) % EXPERTS] for n in range(LAYERS)] for t in ids], dtype=np.uint8
            )
            found.append(document(ids, prompt, routed if replay else None))
    alone = rng.integers(0, VOCAB, 17).tolist()
    routed = np.tile(np.arange(2, dtype=np.uint8), (17, LAYERS, 1))
    return [*found, document(alone, 3, routed if replay else None)]


def row_of(documents: list[Document], share: bool) -> MicroBatch:
    ((row,),) = pack_for_ranks(documents, 4096, 1, share=share)
    return row


# --- packing ----------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=30), st.integers(40, 120))
def test_items_hold_every_document_once_and_run_no_more_than_a_row_takes(ids, seq_len):
    documents = [document(d, 1) for d in ids]
    items = items_of(documents, seq_len, share=True)
    assert sorted(i for item in items for i in item.documents) == list(range(len(ids)))
    for item in items:
        assert item.shared[0] == 0
        run = sum(len(ids[i]) - n for i, n in item.pairs())
        assert item.tokens == max(run, sum(len(ids[i]) - 1 for i in item.documents)) <= seq_len
        for (i, _), (j, common) in pairwise(item.pairs()):
            assert common >= LEAST
            assert ids[i][:common] == ids[j][:common]
            assert common in (len(ids[i]), len(ids[j])) or ids[i][common] != ids[j][common], "all that is alike"
    assert items_of(documents, seq_len, share=True) == items


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(0, 3))
def test_rows_run_no_more_than_seq_len_and_less_than_without_sharing(ranks, seed):
    documents = groups(seed)
    rows = [row for rank in pack_for_ranks(documents, 80, ranks, squared, share=True) for row in rank]
    assert all(max(row.run_tokens, row.loss_mask.sum()) <= 80 for row in rows)
    trained = sum(int(row.loss_mask.sum()) for row in rows)
    assert trained == sum(int(np.sum(d.loss_mask)) for d in documents)
    whole = [row for rank in pack_for_ranks(documents, 80, ranks, squared) for row in rank]
    assert all(row.shared_lens is None for row in whole)
    assert sum(row.run_tokens for row in rows) < 0.7 * sum(row.run_tokens for row in whole)
    batch = TrainBatch.from_bytes(b"".join(TrainBatch(1, rows, 1, 1, {}).to_message().parts))
    for sent, row in zip(batch.micro_batches, rows, strict=True):
        assert (sent.shared_lens is None) == (row.shared_lens is None)
        assert row.shared_lens is None or sent.shared_lens.tolist() == row.shared_lens.tolist()


def squared(tokens: int) -> float:
    return tokens + tokens**2 / 64


def test_a_document_longer_than_a_row_is_refused_when_it_would_be_shared():
    with pytest.raises(ValueError, match="document 1 has 9 tokens, more than seq_len=8"):
        items_of([document([1] * 8, 1), document([1] * 9, 1)], 8, share=True)


def test_tokens_that_went_to_other_experts_are_not_shared():
    ids = list(range(20))
    routed = np.zeros((20, LAYERS, 1), dtype=np.uint8)
    other = routed.copy()
    other[12, 1] = 3
    one, same, another = (document(ids, 5, r) for r in (routed, routed.copy(), other))
    assert alike(one, same) == 20
    assert alike(one, another) == 12
    assert alike(one, document(ids, 5)) == 20, "what is not told is no difference"


def test_what_is_shared_is_work_once():
    documents = groups()
    row = row_of(documents, share=True)
    batches = [TrainBatch(1, [row], 1, 1, {}), TrainBatch(1, [row_of([documents[-1]], False)], 1, 1, {})]
    card = family_card("qwen3")
    work = document_flops(card)
    shared = row.shared_lens.tolist()
    flops = packed_flops(card, row.doc_lens.tolist())[0] - packed_flops(card, shared)[0]
    one = work(17)
    assert imbalance(batches, work) == pytest.approx(2 * flops / (flops + one))


# --- attention and models ---------------------------------------------------------------------------------------------


def test_a_row_says_which_token_stands_for_each():
    prefixes = SharedPrefixes([5, 4, 3, 4], [0, 3, 3, 0])
    assert prefixes.run.tolist() == [0, 1, 2, 3, 4, 8, 12, 13, 14, 15]
    assert prefixes.place.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 0, 1, 2, 6, 7, 8, 9]
    assert prefixes.documents() == [(0, 5, 0), (5, 4, 3), (12, 4, 0)]


def test_gradients_of_shared_attention_are_those_of_its_forward():
    prefixes = SharedPrefixes([5, 4, 3, 4], [0, 3, 3, 0])
    starts, lengths, shared = torch.tensor(prefixes.documents()).unbind(1)
    classes = [PaddedQueries(starts[c], lengths[c], shared[c], prefixes.place) for c in (slice(1), slice(1, None))]
    q, k, v = (torch.randn(10, h, 4, dtype=torch.float64).requires_grad_() for h in (4, 2, 2))
    assert torch.autograd.gradcheck(
        lambda q, k, v: ShortAttentionByHand.apply(q, k, v, classes), (q, k, v), fast_mode=True
    )


ROWS = {
    "one prompt": ([9, 7, 12], [0, 5, 5]),
    "branches of branches": ([9, 9, 6, 9, 4], [0, 7, 4, 5, 2]),
    "a document that is another's beginning": ([4, 9, 9], [0, 4, 9]),
    "two groups and one alone": ([5, 6, 3, 8, 8], [0, 4, 0, 0, 3]),
}


def batched_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Kept]:
    """Of cuDNN's, which there is on GPUs alone."""
    out, lse = varlen_forward(*(x.flatten(0, 1) for x in (q, k, v)), *slices(q))
    return out.view(*q.shape[:3], -1), Kept(lse, ())


def batched_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: Kept) -> list[Tensor]:
    flat = (x.flatten(0, 1) for x in (dout, q, k, v, out))
    grads = varlen_backward(*flat, kept.lse, *slices(q))
    return [grad.view(*q.shape[:2], *grad.shape[1:]) for grad in grads]


def slices(q: Tensor) -> tuple[Tensor, Tensor, int, int, bool]:
    ends = torch.arange(len(q) + 1, dtype=torch.int32) * q.shape[1]
    return ends, ends, q.shape[1], q.shape[1], True


@pytest.mark.parametrize("longest", [1, 4096])
@pytest.mark.parametrize("case", ROWS)
def test_attention_over_shared_tokens_is_that_of_whole_documents(monkeypatch, case, longest):
    """By all ways that need no GPU, with values narrower than keys; their gradients, too."""
    monkeypatch.setattr(prefix_attention, "LONGEST", longest)
    if longest == 1:  # each is attended to whole, without a mask
        monkeypatch.setattr(prefix_attention, "PaddedQueries", None)
    for name, stands_in in (("cudnn_forward", batched_forward), ("cudnn_backward", batched_backward)):
        monkeypatch.setattr(prefix_attention, name, stands_in)
    monkeypatch.setattr(prefix_attention, "LONG_DOCUMENT", 8)
    doc_lens, shared = ROWS[case]
    prefixes, cpu = SharedPrefixes(doc_lens, shared), torch.device("cpu")
    count = len(prefixes.run)
    rows = [torch.randn(count, h, d, dtype=torch.float64).requires_grad_() for h, d in ((4, 6), (2, 6), (2, 4))]
    weights = torch.randn(count, 4, 4, dtype=torch.float64)

    def outcome(attend) -> list[Tensor]:
        out = attend(*rows)
        return [out, *torch.autograd.grad((out * weights).sum(), rows)]

    def documents(*parts: Tensor) -> Tensor:
        """Each by itself, from whole keys and values."""
        out = packed_attention(doc_lens, cpu)(0, *(x[prefixes.place] for x in parts))
        own = np.concatenate([np.arange(n) >= c for n, c in zip(doc_lens, shared, strict=True)])
        return out[torch.from_numpy(own)]

    wanted = outcome(documents)
    plan, mixed = PrefixPlan(prefixes, cpu), PrefixPlan(prefixes, cpu, cudnn=True)
    assert not plan.whole
    assert mixed.whole
    for attend in (
        lambda *x: packed_attention(doc_lens, cpu, prefixes=prefixes)(0, *x),
        lambda *x: PrefixAttention.apply(*x, plan),
        lambda *x: PrefixAttention.apply(*x, mixed),
    ):
        for one, other in zip(outcome(attend), wanted, strict=True):
            assert torch.allclose(one, other, atol=1e-12)


def statistics(model, row: MicroBatch, temperature: float, chunk) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities and entropies of a row's trained tokens, and gradients of a function of them."""
    prefixes = None if row.shared_lens is None else SharedPrefixes(row.doc_lens.tolist(), row.shared_lens.tolist())
    attend = attend_documents(model.card, row.doc_lens.tolist(), torch.device("cpu"), prefixes=prefixes)
    ids, positions = torch.from_numpy(row.input_ids), torch.from_numpy(row.positions)
    rows = torch.from_numpy(np.flatnonzero(row.loss_mask))
    before, targets = rows - 1, ids[rows]
    if prefixes is not None:
        ids, positions, before = ids[prefixes.run], positions[prefixes.run], prefixes.place[before]
    head = logprob_head(before, targets, temperature, chunk, repeated=prefixes is not None)
    logp, entropy = model(ids, positions, attend, head=head)
    model.zero_grad()
    weights = torch.from_numpy(row.advantages).to(logp.dtype)[rows]
    (logp @ weights - 0.1 * entropy.sum()).backward()
    order = np.lexsort((row.advantages[rows], row.input_ids[rows]))  # rows are in another order when shared
    found = torch.stack([logp, entropy])[:, torch.from_numpy(order)]
    return found.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("length", [24, BY_HAND_TOKENS])
@pytest.mark.parametrize("chunk", ["disabled", 16])
@pytest.mark.parametrize("name", FAMILIES)
def test_running_shared_tokens_once_trains_the_same(name, chunk, length):
    """By hand in short documents, by SDPA in longer ones and where values are narrower than keys."""
    model = random_model(family_card(name))
    documents = groups(prompt=length)
    shared = row_of(documents, share=True)
    assert shared.run_tokens <= 3 * (length + 9 + 4 + 12) + 17 < shared.num_tokens / 2
    found, grads = statistics(model, shared, 0.8, chunk)
    wanted, whole = statistics(model, row_of(documents, share=False), 0.8, chunk)
    assert torch.allclose(found, wanted, atol=1e-5)
    assert grads.keys() == whole.keys()
    for key, grad in grads.items():
        assert (grad - whole[key]).abs().max() <= 1e-5 * whole[key].abs().max() + 1e-9, key


# --- the trainer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replay", [False, True])
def test_a_policy_runs_shared_tokens_once(world, tmp_path, replay):
    """With the engine's choice of experts, too; its FLOPs are those of what it runs, and experts' load, by which biases
    may move, that of whole documents.
    """
    job = Job(str(moe_checkpoint(tmp_path)), overrides=["optim=adamw"])
    found = []
    for share in (False, True):
        policy = build_policy(job, world)
        ran: list[int] = []
        policy.model.register_forward_pre_hook(lambda _, args, ran=ran: ran.append(len(args[0])))
        row = row_of(groups(replay=replay), share)
        stats = policy.forward(row, 1.0, 1)
        (stats.logp.sum() + 0.1 * stats.entropy.sum()).backward()
        assert ran == [row.run_tokens]
        gradients = {name: whole_tensor(p.grad) for name, p in policy.model.named_parameters()}
        found.append((sorted(stats.logp.tolist()), gradients, policy.flops(row), policy.balance.load.counts))
    (logp, whole, flops, load), (shared_logp, shared, shared_flops, shared_load) = found
    assert torch.equal(shared_load, load)
    assert load.sum() > 0
    assert shared_logp == pytest.approx(logp, abs=1e-5)
    assert shared_flops < 0.6 * flops
    for name, grad in shared.items():
        assert (grad - whole[name]).abs().max() <= 1e-5 * whole[name].abs().max() + 1e-9, name


@pytest.mark.parametrize("memory", ["selective", "tight"])
@pytest.mark.parametrize(("name", "coef"), [("deepseek_v3", 0), ("glm_moe_dsa", 0), ("glm_moe_dsa", 0.5)])
def test_layers_that_are_repeated_for_backward_share_as_before(world, tmp_path, name, coef, memory):
    """Whatever is worked out once, as a choice of keys, is there the second time."""
    card, found = family_card(name), []
    save_checkpoint(hf_tensors(random_model(card)), tmp_path, card)
    for share in (False, True):
        overrides = [f"memory={memory}", "memory_recipe.compile=false", f"model.indexer_loss_coef={coef}"]
        policy = build_policy(Job(str(tmp_path), family=name, overrides=overrides), world)
        policy.forward(row_of(groups(), share), 1.0, 1).logp.sum().backward()
        found.append({name: whole_tensor(p.grad) for name, p in policy.model.named_parameters() if p.grad is not None})
    whole, shared = found
    for key, grad in shared.items():
        assert (grad - whole[key]).abs().max() <= 2e-5 * whole[key].abs().max() + 1e-9, key


def test_indexers_learn_from_shared_tokens_as_from_each_documents(world, tmp_path):
    """The last one of a prompt counts for every answer that begins behind it."""
    card, found = family_card("glm_moe_dsa"), []
    save_checkpoint(hf_tensors(random_model(card)), tmp_path, card)
    for share in (False, True):
        job = Job(str(tmp_path), family="glm_moe_dsa", overrides=["model.indexer_loss_coef=0.5"])
        policy, row = build_policy(job, world), row_of(groups(), share)
        policy.forward(row, 1.0, int(row.loss_mask.sum())).logp.sum().backward()
        gradients = {name: whole_tensor(p.grad) for name, p in policy.model.named_parameters() if p.grad is not None}
        found.append((policy.indexers.total.item(), gradients))
    (divergence, whole), (shared_divergence, shared) = found
    assert shared_divergence == pytest.approx(divergence, rel=1e-5)
    assert any("indexer" in name for name in whole)
    for name, grad in shared.items():
        assert (grad - whole[name]).abs().max() <= 2e-5 * whole[name].abs().max() + 1e-9, name


@pytest.mark.parametrize(
    ("overrides", "shares"),
    [
        ([], True),
        (["memory=tight"], True),
        (["memory_recipe.share_prefixes=false"], False),
        (["model.dtype=bfloat16"], True),
        (["parallelism=cp2"], True),
        (["parallelism=cp2_ring"], False),
        (["parallelism=cp2", "model=tiny_deepseek_v3", "parallelism.cp_style=gather"], False),
        (["model=tiny_glm_moe_dsa"], True),
        (["model=tiny_glm_moe_dsa", "parallelism=cp2"], False),
        (["model=tiny_nemotron_h"], False),
        (["model=tiny_deepseek_v3"], True),
    ],
)
def test_who_shares(overrides, shares):
    assert shares_prefixes(compose(["warm_start=none", *overrides])) is shares
