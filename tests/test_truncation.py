"""Truncated sampling on its way from the sampler to the LM head: what could be drawn is told, kept apart, and used."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from fake_engine import SAMPLING, generate, pool_of
from hypothesis import given, settings
from hypothesis import strategies as st
from inference_server import running_server
from tiny import END, moe_card, random_model, sets_of

from prl.config.errors import UserError
from prl.config.schema import GREEDY_BELOW, InferenceConfig
from prl.inference.engine import TorchEngine
from prl.inference.sampling import SamplingParams
from prl.inference.sequences import Request
from prl.models.layers.packed_attention import packed_attention
from prl.orchestrator.batching import to_document
from prl.orchestrator.engines.answers import EngineError
from prl.orchestrator.engines.generation import Generation
from prl.orchestrator.rollouts.rollout import Rollout, Sample
from prl.trainer.head.head import logprob_head
from prl.trainer.head.truncation import KeptSets
from prl.transport.batch import TrainBatch
from prl.transport.kept import KeptTokens, kept_of_candidates
from prl.transport.packing import pack_for_ranks

CPU = torch.device("cpu")
NOTHING = np.zeros(0, np.uint16)


def ids(*numbers):
    return np.array(numbers, np.uint16)


# --- ragged sets ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 300), max_size=6), min_size=1, max_size=12), st.integers(0, 15), st.data())
def test_sets_are_cut_filled_chosen_and_sent_without_loss(lists, length, data):
    kept = KeptTokens.of_sets([ids(*one) for one in lists])
    fitted = sets_of(kept.fit(length))
    assert fitted == (lists + [[]] * length)[:length]
    chosen = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=8))
    assert sets_of(kept.of_rows(np.array(chosen, np.int64))) == [lists[i] for i in chosen]
    back = KeptTokens.from_json(kept.to_json())
    assert sets_of(back) == lists
    assert back.ids.dtype == np.uint16


def test_ids_take_as_many_bytes_as_the_largest_needs():
    assert KeptTokens.of_sets([ids(1), np.array([70_000])]).ids.dtype == np.uint32


@pytest.mark.parametrize("wrong", [None, [], {}, {"counts": "x", "ids": ""}, "sizes", "floats"])
def test_nonsense_is_no_set(wrong):
    good = KeptTokens.of_sets([ids(1, 2), ids(3)])
    if wrong == "sizes":
        wrong = good.to_json() | {"counts": KeptTokens.of_sets([ids(1)]).to_json()["ids"]}
    elif wrong == "floats":
        wrong = KeptTokens(good.counts, good.ids.astype(np.float32)).to_json()
    with pytest.raises(ValueError, match=r"kept tokens|not those of sets"):
        KeptTokens.from_json(wrong)


def test_samples_of_several_turns_reach_the_trainer_in_place():
    """Two turns, prompts between them, cut at the end of the row; another rollout was drawn from everything."""
    sample = Sample()
    for prompt, sets in (([1, 2], [ids(5, 6), ids(7)]), ([3], [NOTHING, ids(9), ids(4)])):
        sample.append_prompt(prompt)
        drawn = [int(one[0]) if len(one) else 8 for one in sets]
        sample.append_generation(
            Generation(drawn, [-1.0] * len(sets), [0] * len(sets), "stop", None, KeptTokens.of_sets(sets))
        )
    sample.append_prompt([11])
    plain = Sample()
    plain.append_prompt([1])
    plain.append_generation(Generation([2], [-1.0], [0], "stop", None))
    rollout = Rollout("env", "task", 1.0, [sample, plain], 2, 5, False, 2, advantage=1.0)
    whole = [[], [], [5, 6], [7], [], [], [9], [4], []]
    for length in (9, 7):
        documents = [to_document(s, rollout, length) for s in rollout.samples]
        (rank,) = pack_for_ranks(documents, 16, 1)
        (micro,) = TrainBatch.from_bytes(bytes(TrainBatch(1, rank, 1, 1).to_message())).micro_batches
        assert sets_of(micro.kept) == [*whole[:length], [], []]
    (rank,) = pack_for_ranks([to_document(plain, rollout, 9)], 16, 1)
    assert rank[0].kept is None
    assert b"kept" not in bytes(TrainBatch(1, rank, 1, 1).to_message())


# --- the built-in engine ----------------------------------------------------------------------------------------------


def drawn(params):
    engine = TorchEngine(random_model(moe_card()), InferenceConfig(max_num_seqs=4, max_model_len=64), (END,))
    sequences = [s for i, p in enumerate(params) for s in engine.prepare(Request(str(i), [1, 2, 3 + i], p, arrival=i))]
    engine.submit(sequences)
    while engine.busy:
        engine.step()
    return engine, sequences


def test_the_engine_tells_who_asks_what_each_token_was_drawn_from():
    common = {"max_tokens": 12, "ignore_eos": True, "temperature": 1.5, "kept_tokens": True}
    asked = [
        SamplingParams(**common, seed=1, top_p=0.6, n=2),
        SamplingParams(**common, seed=2, top_k=7),
        SamplingParams(**common, seed=3),  # from everything
        SamplingParams(**common | {"kept_tokens": False}, seed=4, top_k=3),
        SamplingParams(**common | {"temperature": GREEDY_BELOW / 2}, top_k=3),  # greedy engines ignore it
    ]
    engine, sequences = drawn(asked)
    assert [len(s.kept) for s in sequences] == [12, 12, 12, 12, 0, 12]
    assert not any(len(one) for s in (sequences[3], sequences[5]) for one in s.kept)
    assert all(len(one) == 7 for one in sequences[2].kept)
    for s in sequences[:3]:
        logits = engine.model.logits(
            engine.model(
                torch.tensor(s.token_ids), torch.arange(len(s.token_ids)), packed_attention([len(s.token_ids)], CPU)
            )
        )
        for i, (token, logprob, kept) in enumerate(zip(s.completion_ids, s.logprobs, s.kept, strict=True)):
            assert token in kept
            assert kept.dtype == np.uint16
            among = torch.from_numpy(kept.astype(np.int64))
            expected = (logits[s.num_prompt - 1 + i, among] / 1.5).log_softmax(-1)[among.tolist().index(token)]
            assert float(expected.detach()) == pytest.approx(logprob, abs=1e-4)


def test_banned_tokens_are_not_among_those_kept():
    _, (sequence,) = drawn(
        [SamplingParams(max_tokens=6, min_tokens=3, stop_token_ids=(1, 2), kept_tokens=True, seed=5)]
    )
    sizes = [len(one) for one in sequence.kept]
    assert sizes[:3] == [moe_card().vocab_size - 3] * 3  # two stop tokens and the EOS
    assert not any(sizes[3:])


# --- what engines answer ----------------------------------------------------------------------------------------------


def ask(**choice):
    """Tokens 9 and 9, drawn by an engine that is asked to tell."""

    async def scenario():
        async with pool_of() as (pool, (engine,)):
            engine.choice = choice
            telling = {"extra_args": {"kept_tokens": True}}
            return await pool.generate([1, 9], 7, 11, "s", SAMPLING, "r", telling=telling), engine.bodies[0]

    return asyncio.run(scenario())


def candidates(*logprobs):
    """As vLLM answers: the sampled one first, then others by rank."""
    return [{"token_id": token, "logprob": value} for token, value in zip((9, 4, 3), logprobs, strict=False)]


def content(top):
    return {"content": [{"token_id": 9, "logprob": top[0]["logprob"], "top_logprobs": top} for _ in range(2)]}


HALF, QUARTER = np.log(0.5), np.log(0.25)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"kept_tokens": KeptTokens.of_sets([ids(9, 4), ids(9)]).to_json()}, [[9, 4], [9]]),
        ({"sampling_mask": [[4, 9], [9]]}, [[4, 9], [9]]),
        ({"logprobs": content(candidates(HALF, HALF, -9999.0))}, [[9, 4]] * 2),
        ({"logprobs": content(candidates(QUARTER, HALF, QUARTER))}, [[9, 4, 3]] * 2),
    ],
    ids=["the built-in engine", "vLLM's sampling mask", "vLLM's logprobs", "all of them"],
)
def test_engines_say_in_their_own_ways_what_they_kept(choice, expected):
    generation, body = ask(**choice)
    assert sets_of(generation.kept) == expected
    assert body["sampling_params"]["extra_args"] == {"kept_tokens": True, "frames": True}


def test_an_engine_that_does_not_say_it_ends_the_run_with_what_to_do():
    with pytest.raises(UserError, match="does not say which tokens") as caught:
        ask()
    assert "inference.sampling.top_p=1" in caught.value.render()


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"logprobs": content(candidates(QUARTER, HALF))}, "adds up to 0.75"),
        ({"kept_tokens": KeptTokens.of_sets([ids(9), ids(4)]).to_json()}, "not among those"),
        ({"kept_tokens": KeptTokens.of_sets([ids(9)]).to_json()}, "2 tokens but 1 sets"),
        ({"kept_tokens": {}}, "no sets"),
    ],
    ids=["before truncation", "another token", "too few", "nonsense"],
)
def test_what_cannot_be_is_an_error_of_the_engine(choice, words):
    with pytest.raises(EngineError, match=words):
        ask(**choice)


def test_nobody_is_asked_where_nothing_is_truncated():
    async def scenario():
        async with pool_of() as (pool, (engine,)):
            return await generate(pool), engine.bodies[0]

    generation, body = asyncio.run(scenario())
    assert generation.kept is None
    assert body["sampling_params"].keys().isdisjoint({"kept_tokens"})
    assert body["sampling_params"]["extra_args"] == {"frames": True}
    assert body["sampling_params"]["logprobs"] == 0


def test_candidates_may_repeat_the_sampled_token_and_leave_it_out():
    lengths, found = np.array([3, 2]), np.array([7, 5, 7, 8, 9])
    kept, mass = kept_of_candidates(lengths, found, np.array([HALF, HALF, HALF, HALF, HALF]))
    assert sets_of(kept) == [[5, 7], [8, 9]]
    assert mass == pytest.approx(1)


# --- the LM head ------------------------------------------------------------------------------------------------------

V, N, M = 41, 13, 9


def problem(dtype=torch.float64, vocab=V, tokens=N, picked=M, width=8):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, dtype=dtype)
    weight = torch.randn(vocab, width, generator=generator, dtype=dtype) * 3 / width**0.5
    rows = torch.randperm(tokens, generator=generator)[:picked]
    targets = torch.randint(0, vocab, (picked,), generator=generator)
    rng = np.random.default_rng(0)
    sets = []
    for i, target in enumerate(targets.tolist()):
        size = 0 if i == 4 else 1 if i == 5 else int(rng.integers(2, vocab))  # all; the target alone
        others = rng.permutation([t for t in range(vocab) if t != target])[: size - 1]
        sets.append(np.array([target, *others] if size else [], np.uint16))
    return hidden, weight, rows, targets, KeptTokens.of_sets(sets)


def through_head(chunk, dtype, device="cpu", kind=None, **sizes):
    """logp and entropy [M], gradients of hidden and weight; computed in `kind` of numbers rounded to `dtype`."""
    hidden, weight, rows, targets, kept = problem(**sizes)
    h, w = (t.to(dtype).to(device, kind or dtype).requires_grad_(True) for t in (hidden, weight))
    sets = KeptSets.build(kept, torch.device(device))
    logp, entropy = logprob_head(rows.to(device), targets.to(device), 0.7, chunk, sets)(h, w)
    (2 * logp.sum() + 0.3 * entropy.sum()).backward()
    return [t.detach().double().cpu() for t in (logp, entropy, h.grad, w.grad)]


def by_definition(dtype=torch.float64):
    """One token at a time, over its own set only."""
    hidden, weight, rows, targets, kept = problem()
    h, w = (t.to(dtype).double().requires_grad_(True) for t in (hidden, weight))
    logps, entropies = [], []
    for row, target, ids_of_token in zip(rows, targets.tolist(), sets_of(kept), strict=True):
        among = torch.tensor(ids_of_token) if ids_of_token else torch.arange(V)
        logprobs = ((w[among] @ h[row]) / 0.7).log_softmax(-1)
        logps.append(logprobs[among.tolist().index(target)])
        entropies.append(-(logprobs.exp() * logprobs).sum())
    logp, entropy = torch.stack(logps), torch.stack(entropies)
    (2 * logp.sum() + 0.3 * entropy.sum()).backward()
    return [t.detach() for t in (logp, entropy, h.grad, w.grad)]


@pytest.mark.parametrize("chunk", ["disabled", "auto", 1, 4, M])
def test_the_head_renormalises_over_what_was_kept(chunk):
    for got, expected in zip(through_head(chunk, torch.float64), by_definition(), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
    logp, entropy, *_ = through_head(chunk, torch.float64)
    assert logp[5] == entropy[5] == 0  # the token alone


@pytest.mark.parametrize("chunk", ["disabled", 4])
def test_bfloat16_rounds_and_nothing_more(chunk):
    for got, expected in zip(through_head(chunk, torch.bfloat16), by_definition(torch.bfloat16), strict=True):
        assert got.isfinite().all()
        assert (got - expected).norm() / expected.norm() < 3e-2


@pytest.mark.parametrize("temperature", [GREEDY_BELOW, 1e-3, 1.0, 100.0])
@pytest.mark.parametrize("chunk", ["disabled", 4])
def test_no_temperature_makes_numbers_that_are_not_finite(chunk, temperature):
    hidden, weight, rows, targets, kept = problem(torch.float32)
    h, w = hidden.requires_grad_(True), weight.requires_grad_(True)
    logp, entropy = logprob_head(rows, targets, temperature, chunk, KeptSets.build(kept, CPU))(h, w)
    (logp.sum() + entropy.sum()).backward()
    for tensor in (logp, entropy, h.grad, w.grad):
        assert tensor.isfinite().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton kernels need a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_renormalise_as_the_whole_head(dtype):
    """Vocabularies of several blocks of the kernels, sets that leave whole blocks out."""
    sizes = {"vocab": 10007, "tokens": 300, "picked": 150, "width": 64}
    whole = through_head("disabled", dtype, kind=torch.float32, **sizes)
    for chunk in ("disabled", 64):
        for got, expected in zip(through_head(chunk, dtype, "cuda", **sizes), whole, strict=True):
            assert got.isfinite().all()
            assert (got - expected).norm() / expected.norm() < (1e-2 if dtype == torch.bfloat16 else 1e-4)


# --- over HTTP --------------------------------------------------------------------------------------------------------


def test_the_route_tells_only_who_asks(tmp_path):
    with running_server([], tmp_path) as http:
        sampling = {"max_tokens": 5, "top_k": 3}
        (told,) = http.generate(**sampling, extra_args={"kept_tokens": True}).body["choices"]
        assert KeptTokens.from_json(told["kept_tokens"]).counts.tolist() == [3] * 5
        (silent,) = http.generate(**sampling).body["choices"]
        assert silent == {key: value for key, value in told.items() if key != "kept_tokens"}
        wrong = http.generate(extra_args={"other": 1})
        assert wrong.status == 400
        assert "extra_args" in str(wrong.body)
