"""Packing, batches on the wire, and packed against unpacked numerics."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.bench.packing import DRAWS, unevenness
from prl.config.schema import ModelCard
from prl.metrics.mfu import document_flops
from prl.models.families.build import build_decoder
from prl.models.layers.packed_attention import packed_attention
from prl.orchestrator.batching import imbalance
from prl.trainer.head.head import logprob_head
from prl.transport import frames
from prl.transport.answers import decode_answer, encode_answer, unframed
from prl.transport.batch import TrainBatch
from prl.transport.documents import Document
from prl.transport.kept import KeptTokens
from prl.transport.packing import build_micro_batch, deal_rows, laps_work, pack_for_ranks, pack_laps, pack_rows

CARD = ModelCard(
    family="qwen3_moe", num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, vocab_size=64, tie_word_embeddings=True,
)  # fmt: skip


def document(length, seed=0, prompt=2):
    rng = np.random.default_rng([seed, length])
    mask = [i >= min(prompt, length - 1) for i in range(length)]
    return Document(
        rng.integers(0, 64, length).tolist(), mask, rng.normal(size=length).tolist(),
        rng.normal(size=length).tolist(), [3 if m else -1 for m in mask],
    )  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=60), st.integers(64, 200))
def test_pack_rows_places_every_document_once_within_the_limit(lengths, seq_len):
    rows = pack_rows(lengths, seq_len)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= seq_len for row in rows)
    # first-fit: no two rows could have been one
    fills = [sum(lengths[i] for i in row) for row in rows]
    assert all(a + b > seq_len for i, a in enumerate(fills) for b in fills[i + 1 :])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 8))
def test_deal_rows_gives_every_rank_equally_many(weights, ranks):
    dealt = deal_rows(weights, ranks)
    assert len({len(rows) for rows in dealt}) == 1
    assert sorted(i for rows in dealt for i in rows if i >= 0) == list(range(len(weights)))


def squared(tokens):
    """Work as of a long document: linear layers, and attention that is as costly at 64 tokens."""
    return tokens + tokens**2 / 64


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=60), st.integers(64, 200), st.integers(1, 7))
def test_laps_hold_every_document_once_and_take_no_longer_than_rows_dealt_by_tokens(lengths, seq_len, ranks):
    laps = pack_laps(lengths, seq_len, ranks, squared)
    rows = pack_rows(lengths, seq_len)
    assert [len(lap) for lap in laps] == [ranks] * -(-len(rows) // ranks)
    assert sorted(i for lap in laps for row in lap for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= seq_len for lap in laps for row in lap)
    costs = [squared(n) for n in lengths]
    dealt = deal_rows([sum(lengths[i] for i in row) for row in rows], ranks)
    by_tokens = [[rows[i] if i >= 0 else [] for i in lap] for lap in zip(*dealt, strict=True)]
    assert laps_work(laps, costs) <= laps_work(by_tokens, costs) * (1 + 1e-9)
    assert pack_laps(lengths, seq_len, ranks, squared) == laps


@pytest.mark.parametrize(("draw", "most"), list(zip(DRAWS, (1.4, 1.25, 1.2), strict=True)))
def test_lognormal_documents_of_131k_are_balanced_by_work(draw, most):
    """A mixture of the size of Qwen3-30B-A3B: a step's time over that with all ranks busy."""
    card = ModelCard(**{**CARD.model_dump(), "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128,
                        "num_key_value_heads": 4, "hidden_size": 2048, "num_experts": 128, "num_experts_per_tok": 8,
                        "moe_intermediate_size": 768, "vocab_size": 151936})  # fmt: skip
    work = document_flops(card)
    before, after = np.mean([unevenness(draw, 131072, seed, work) for seed in range(5)], axis=0)
    assert after < most < before


def test_the_imbalance_of_a_step_is_that_of_its_laps():
    ranks = pack_for_ranks([document(n) for n in (16, 8, 8, 4)], 16, 2, squared)
    batches = [TrainBatch(1, rows, 1, 1, {}) for rows in ranks]
    work = [[sum(squared(int(n)) for n in row.doc_lens) for row in rows] for rows in ranks]
    laps = sum(max(lap) for lap in zip(*work, strict=True))
    assert imbalance(batches, squared) == pytest.approx(2 * laps / sum(map(sum, work)))
    assert imbalance([TrainBatch(1, rows, 0, 0, {}) for rows in pack_for_ranks([], 16, 2, squared)], squared) == 1.0
    alone = [TrainBatch(1, pack_for_ranks([document(9)], 16, 1)[0], 1, 1, {})]
    assert imbalance(alone, squared) == 1.0


def test_a_document_longer_than_the_row_is_an_error():
    with pytest.raises(ValueError, match="document 1 has 9 tokens"):
        pack_rows([3, 9], 8)


def test_padding_rows_train_nothing():
    ranks = pack_for_ranks([document(10)], 16, data_ranks=3)
    assert [[int(m.loss_mask.sum()) for m in rank] for rank in ranks] == [[8], [0], [0]]


def test_batch_survives_the_wire():
    documents = [document(n) for n in (5, 9, 16, 3)]
    for d in documents:
        routed = np.arange(len(d) * 4, dtype=np.uint8).reshape(len(d), 2, 2)
        d.routed_experts = [routed[:2], routed[2:]]
        d.kept = KeptTokens.of_sets([np.arange(i, dtype=np.uint16) for i in range(len(d))])
    (rows,) = pack_for_ranks(documents, 16, 1)
    batch = TrainBatch(7, rows, 25, 4, {"stop": False, "checkpoint": True})
    back = TrainBatch.from_bytes(bytes(batch.to_message()))
    assert (back.step, back.loss_tokens, back.loss_docs, back.meta) == (7, 25, 4, batch.meta)
    for before, after in zip(rows, back.micro_batches, strict=True):
        for name, value in vars(before).items():
            np.testing.assert_array_equal(value, getattr(after, name))
            if value is None:  # of what documents share, which these do not
                continue
            assert value.dtype == getattr(after, name).dtype


@pytest.mark.parametrize("size", [64, 1000, 1 << 20])
def test_a_message_in_pieces_is_the_whole(size):
    arrays = {str(n): np.arange(n, dtype=np.uint16).reshape(n, 1) for n in (0, 1, 3, 40, 4096, 5, 9000, 2)}
    message = frames.encode({"a": 1}, arrays)
    pieces = [bytes(piece) for piece in message.pieces(size)]
    assert b"".join(pieces) == bytes(message)
    assert len(bytes(message)) == len(message)
    assert max(map(len, pieces)) <= size
    _, back = frames.decode(bytes(message))
    assert all(np.array_equal(arrays[name], back[name]) for name in arrays)


def test_a_message_cut_short_is_noticed():
    message = bytes(frames.encode({"a": 1}, {"x": np.arange(100)}))
    for length in (4, 20, len(message) - 1):
        with pytest.raises(ValueError, match=r"cut short|Expecting"):
            frames.decode(message[:length])


@pytest.mark.parametrize("chunk", ["disabled", 8])
def test_packed_equals_unpacked(chunk):
    """Loss and gradients of packed documents equal those of each document alone, to 1e-6."""
    documents = [document(n, seed=n) for n in (7, 3, 30, 18, 18)]
    model = build_decoder(CARD)
    model.init_weights(torch.Generator().manual_seed(0), std=0.2)

    def run(groups):
        model.zero_grad()
        total, logps = 0.0, []
        for group in groups:
            micro = build_micro_batch(group)
            rows = torch.from_numpy(micro.loss_mask).nonzero().squeeze(-1)
            ids = torch.from_numpy(micro.input_ids)
            head = logprob_head(rows - 1, ids[rows], 0.7, chunk)
            attend = packed_attention(micro.doc_lens.tolist(), ids.device)
            logp, entropy = model(ids, torch.from_numpy(micro.positions), attend, head=head)
            loss = (logp * torch.from_numpy(micro.advantages)[rows]).sum() + entropy.sum()
            loss.backward()
            total += loss.item()
            logps.append(logp.detach())
        return total, torch.cat(logps), [p.grad.clone() for p in model.parameters()]

    packed, alone = run([documents]), run([[d] for d in documents])
    assert packed[0] == pytest.approx(alone[0], rel=1e-6)
    torch.testing.assert_close(packed[1], alone[1], rtol=1e-6, atol=1e-6)
    for a, b in zip(packed[2], alone[2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_an_answer_in_frames_is_what_it_was():
    answer = {
        "id": "r",
        "choices": [
            {"ids": np.arange(3, dtype=np.uint16), "routed": np.zeros((0, 2, 2), np.uint8), "spans": [{"a": 1}]}
        ],
        "usage": {"n": [1, 2], "nothing": []},
    }
    message = bytes(encode_answer(answer))
    found = decode_answer(message)
    (choice,), (expected,) = found["choices"], answer["choices"]
    for name in ("ids", "routed"):
        assert np.array_equal(choice[name], expected[name])
        assert (choice[name].dtype, choice[name].shape) == (expected[name].dtype, expected[name].shape)
    assert (choice["spans"], found["usage"], found["id"]) == ([{"a": 1}], answer["usage"], "r")
    with pytest.raises(ValueError, match="cut short"):
        decode_answer(message[:-8])
    with pytest.raises(ValueError, match="lacks its array"):
        decode_answer(bytes(frames.encode({"x": {"__array__": "0"}}, {})))


def test_a_request_for_json_keeps_what_else_was_asked_for():
    extra = {"frames": True, "routing_start": 3}
    assert unframed({"top_p": 1, "extra_args": extra}) == {"top_p": 1}
    assert unframed({"extra_args": extra | {"kept_tokens": True}}) == {"extra_args": {"kept_tokens": True}}
