"""The engine without HTTP: numerics, batching, prefix cache, weight swaps, sleep, determinism."""

from __future__ import annotations

import random

import pytest
import torch
from tiny import END, VOCAB, dense_card, moe_card, random_model

from prl.config.schema import InferenceConfig
from prl.inference.engine import TorchEngine
from prl.inference.isolation import MAX_FAILED_STEPS
from prl.inference.sampling import SamplingParams
from prl.inference.sequences import Request, Sequence
from prl.models.checkpoints.writing import hf_tensors, save_checkpoint
from prl.models.experts.routing import RoutingRecorder
from prl.models.layers.packed_attention import packed_attention

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
MODEL = random_model(moe_card())
OTHER = list(hf_tensors(random_model(moe_card(), seed=1)))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_engine(model=None, **changes) -> TorchEngine:
    config = InferenceConfig(**{"max_num_seqs": 8, "max_model_len": 128, **changes})
    if model is None:
        model = random_model(moe_card())
    return TorchEngine(model.requires_grad_(False).eval(), config, (END,))


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(length)]


def add(engine: TorchEngine, ids: list[int], params: SamplingParams = GREEDY, **fields) -> list[Sequence]:
    arrival = engine.stats.steps * 1000 + len(engine.waiting)
    sequences = engine.prepare(
        Request(**{"request_id": "r", "prompt_ids": ids, "params": params, "arrival": arrival, **fields})
    )
    engine.submit(sequences)
    return sequences


def finish(engine: TorchEngine) -> None:
    while engine.busy:
        engine.step()


def full_logprobs(model, token_ids: list[int], recorder: RoutingRecorder | None = None) -> torch.Tensor:
    """log-probability of each token but the first, by one forward pass over the whole: [T - 1]"""
    ids = torch.tensor(token_ids)
    with torch.no_grad():
        hidden = model(ids, torch.arange(len(ids)), packed_attention([len(ids)], CPU), recorder=recorder)
        return model.logits(hidden)[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]


# --- numerics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("card", [moe_card(), dense_card()], ids=["moe", "dense"])
def test_greedy_is_what_transformers_generates(card, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    model = random_model(card)
    save_checkpoint(hf_tensors(model), tmp_path, card)
    reference = AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype=torch.float32)
    engine = make_engine(model)
    ours = [add(engine, prompt(n, seed=n))[0] for n in (3, 9, 20, 70)]
    finish(engine)
    for sequence in ours:
        ids = torch.tensor([sequence.request.prompt_ids])
        expected = reference.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert sequence.token_ids == expected[0].tolist()


def test_logprobs_are_those_of_a_full_forward_pass_whatever_shares_the_batch() -> None:
    engine = make_engine(max_num_seqs=5)  # fewer slots than sequences: they come and go
    lengths = [3, 5, 17, 60, 64, 65, 90, 2, 33, 8, 8, 8]
    plain = SamplingParams(max_tokens=25, ignore_eos=True, seed=3)
    sequences = [add(engine, prompt(n, seed=i), plain)[0] for i, n in enumerate(lengths)]
    sequences += add(engine, prompt(30, seed=99), SamplingParams(n=3, max_tokens=30, ignore_eos=True, seed=4))
    finish(engine)
    for sequence in sequences:
        expected = full_logprobs(engine.model, sequence.token_ids)[sequence.num_prompt - 1 :]
        torch.testing.assert_close(torch.tensor(sequence.logprobs), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=1.4, top_k=5, min_p=0.02, seed=2, max_tokens=20, ignore_eos=True),
        SamplingParams(min_tokens=20, stop_token_ids=tuple(range(200)), seed=3, max_tokens=20),
    ],
    ids=["top_p", "top_k and min_p", "min_tokens"],
)
def test_logprobs_are_those_of_the_filtered_distribution(params: SamplingParams) -> None:
    engine = make_engine(MODEL)
    sequences = [add(engine, prompt(n, seed=n), params)[0] for n in (4, 40)]
    finish(engine)
    for sequence in sequences:
        ids, start = torch.tensor(sequence.token_ids), sequence.num_prompt - 1
        with torch.no_grad():
            hidden = MODEL(ids, torch.arange(len(ids)), packed_attention([len(ids)], CPU))
            logits = MODEL.logits(hidden)[start:-1].double() / params.temperature
        if params.min_tokens:
            logits[:, [*range(200), END]] = -torch.inf
        for row, token, logprob in zip(logits, sequence.completion_ids, sequence.logprobs, strict=True):
            kept = kept_tokens(row.softmax(-1), params)
            assert token in kept
            assert logprob == pytest.approx((row[token] - row[kept].logsumexp(0)).item(), abs=1e-5)


def kept_tokens(probs: torch.Tensor, p: SamplingParams) -> list[int]:
    """What min-p, top-k and top-p leave of probs [V], one token at a time."""
    order = probs.argsort(descending=True).tolist()
    order = [i for i in order if probs[i] >= p.min_p * probs[order[0]]][: p.top_k or None]
    if p.top_p == 1:
        return order
    total, mass, kept = probs[order].sum().item(), 0.0, []
    while mass < p.top_p * total:
        kept.append(order[len(kept)])
        mass += probs[kept[-1]].item()
    return kept


def test_routed_experts_are_those_of_a_full_forward_pass() -> None:
    engine = make_engine(return_routed_experts=True)
    sequences = add(engine, prompt(20), SamplingParams(n=3, max_tokens=10, ignore_eos=True, seed=1))
    sequences += add(engine, prompt(7, seed=1))
    finish(engine)
    for sequence in sequences:
        recorder = RoutingRecorder()
        full_logprobs(engine.model, sequence.token_ids, recorder)
        routed = sequence.routed_experts()
        assert routed.shape == (len(sequence.token_ids) - 1, 2, 2)
        assert routed.dtype == "uint8"
        assert torch.equal(torch.from_numpy(routed), recorder.stacked(engine.model.card)[:-1])


def test_bfloat16_stays_near_float32() -> None:
    exact, rough = make_engine(MODEL), make_engine(random_model(moe_card()).to(torch.bfloat16))
    a, b = (add(engine, prompt(30), SamplingParams(max_tokens=1, temperature=0))[0] for engine in (exact, rough))
    finish(exact)
    finish(rough)
    assert a.logprobs[0] == pytest.approx(b.logprobs[0], abs=0.2)


def test_weights_that_give_nan_are_named_instead_of_sampled() -> None:
    model = random_model(moe_card())
    with torch.no_grad():
        model.norm.weight.fill_(torch.nan)
    engine = make_engine(model)
    for _ in range(MAX_FAILED_STEPS - 1):
        add(engine, prompt(5))
        (failed,) = engine.step()
        assert failed.completion_ids == []
        assert "weight version 0" in str(failed.error)
    add(engine, prompt(5))
    with pytest.raises(RuntimeError, match="weight version 0"):
        engine.step()


# --- ends of a completion ---------------------------------------------------------------------------------------------


def test_stop_tokens_eos_and_length_end_a_completion_as_in_vllm() -> None:
    engine = make_engine(MODEL)
    (free,) = add(engine, prompt(6))
    finish(engine)
    token = free.completion_ids[4]
    first = free.completion_ids.index(token)
    (stopped,) = add(engine, prompt(6), SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(token,)))
    engine.eos = (token,)
    (ended,) = add(engine, prompt(6), SamplingParams(temperature=0, max_tokens=12))
    (ignoring,) = add(engine, prompt(6), GREEDY)
    (full,) = add(engine, prompt(120), SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    finish(engine)
    assert stopped.finish_reason == "stop"
    assert stopped.completion_ids == free.completion_ids[: first + 1]
    assert (ended.finish_reason, ended.stop_reason, ended.completion_ids) == ("stop", None, stopped.completion_ids)
    assert (ignoring.finish_reason, ignoring.completion_ids) == ("length", free.completion_ids)
    assert (full.finish_reason, len(full.token_ids)) == ("length", 128)


def test_stop_reason_is_the_stop_token() -> None:
    engine = make_engine(MODEL)
    everything = SamplingParams(max_tokens=5, stop_token_ids=tuple(range(VOCAB)), ignore_eos=True, seed=1)
    (sequence,) = add(engine, prompt(6), everything)
    finish(engine)
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", sequence.completion_ids[0])


@pytest.mark.parametrize(
    ("ids", "params", "message"),
    [
        ([], GREEDY, "empty"),
        ([1] * 128, GREEDY, "max_model_len"),
        ([VOCAB], GREEDY, "token ids"),
        ([-1], GREEDY, "token ids"),
        ([1], SamplingParams(stop_token_ids=(VOCAB,)), "stop_token_ids"),
        ([1], SamplingParams(min_tokens=1, stop_token_ids=tuple(range(VOCAB))), "min_tokens"),
    ],
    ids=["empty", "long", "beyond vocabulary", "negative", "stop beyond vocabulary", "all banned"],
)
def test_requests_that_the_model_cannot_take_are_refused(ids, params, message) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(MODEL).prepare(Request("r", ids, params))


def test_abort_keeps_what_was_sampled_and_frees_the_slot() -> None:
    engine = make_engine(MODEL, max_num_seqs=1)
    running, waiting = add(engine, prompt(6)) + add(engine, prompt(7))
    for _ in range(3):
        engine.step()
    done = engine.abort([running, waiting])
    assert done == [running, waiting]
    assert [s.finish_reason for s in done] == ["abort", "abort"]
    assert (running.num_generated, waiting.num_generated) == (4, 0)  # prefill and decode share the first step
    assert not engine.busy
    assert engine.cache.num_free == 1
    assert engine.abort([running]) == []


# --- seeds and determinism --------------------------------------------------------------------------------------------


def test_a_seeded_request_draws_the_same_tokens_in_any_company() -> None:
    params = SamplingParams(n=2, max_tokens=20, ignore_eos=True, seed=11, top_p=0.95)
    alone, crowded = make_engine(MODEL), make_engine(MODEL)
    first = add(alone, prompt(9), params)
    for i in range(5):
        add(crowded, prompt(4 + i, seed=i), SamplingParams(max_tokens=5 + i, temperature=0.5, ignore_eos=True))
    second = add(crowded, prompt(9), params)
    finish(alone)
    finish(crowded)
    assert [s.token_ids for s in first] == [s.token_ids for s in second]
    assert first[0].token_ids != first[1].token_ids


def test_requests_together_give_the_bits_of_a_fresh_engine_whatever_the_engine_did_before() -> None:
    def bits(engine: TorchEngine) -> list[tuple[list[int], list[float]]]:
        sequences = []
        for i in range(7):  # 14 sequences over 8 slots
            params = SamplingParams(n=2, max_tokens=6 + 2 * i, seed=i, top_p=0.95, ignore_eos=True)
            sequences += add(engine, prompt(5 + 4 * i, seed=i % 4), params, arrival=i)
        finish(engine)
        return [(s.token_ids, s.logprobs) for s in sequences]

    same = list(hf_tensors(random_model(moe_card())))
    fresh = make_engine()
    first = bits(fresh)
    for event in ("load", "reset", "sleep"):
        used = make_engine()
        for i in range(11):
            add(used, prompt(9 + 5 * i, seed=90 + i), SamplingParams(max_tokens=3 + i, ignore_eos=True))
        finish(used)
        if event == "load":
            used.load(same, "1")
        elif event == "reset":
            used.reset_prefix_cache()
        else:
            used.sleep(1)
            used.wake_up()
        assert bits(used) == first, event


def test_unseeded_requests_differ() -> None:
    engine = make_engine(MODEL)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    one, two = add(engine, prompt(9), params) + add(engine, prompt(9), params)
    finish(engine)
    assert one.token_ids != two.token_ids


def test_lower_priority_numbers_go_first_then_arrival() -> None:
    engine = make_engine(MODEL, max_num_seqs=1)
    late, early, urgent = (
        add(engine, prompt(5, seed=i), priority=p, arrival=a)[0] for i, (p, a) in enumerate([(0, 2), (0, 1), (-1, 3)])
    )
    order = []
    while engine.busy:
        order += engine.step()
    assert order == [urgent, early, late]


# --- prefix cache -----------------------------------------------------------------------------------------------------


def test_a_group_computes_its_prompt_once() -> None:
    engine = make_engine(MODEL)
    forwarded = []
    hook = MODEL.embed_tokens.register_forward_hook(lambda module, args, out: forwarded.append(len(args[0])))
    add(engine, prompt(40), SamplingParams(n=4, max_tokens=2, seed=1))
    engine.step()
    hook.remove()
    assert forwarded[0] == 40
    assert engine.stats.prefix_hits == 3 * 40


def test_hits_are_counted_in_whole_blocks_and_change_no_logprob() -> None:
    engine = make_engine(MODEL)
    (first,) = add(engine, prompt(20))
    finish(engine)
    again = first.token_ids[:30] + prompt(5, seed=5)
    (second,) = add(engine, again)
    finish(engine)
    assert engine.stats.prefix_hits == 24  # of 30 shared tokens; blocks of 8
    expected = full_logprobs(MODEL, second.token_ids)[len(again) - 1 :]
    torch.testing.assert_close(torch.tensor(second.logprobs), expected, rtol=0, atol=1e-5)


def test_a_running_prompt_is_shared() -> None:
    engine = make_engine(MODEL)
    add(engine, prompt(24))
    engine.step()
    add(engine, [*prompt(24), 1])
    engine.step()
    assert engine.stats.prefix_hits == 24


def test_other_salts_resets_and_disabled_caches_never_hit() -> None:
    for change in ("salt", "reset", "disabled", "load"):
        engine = make_engine(prefix_caching=change != "disabled")
        add(engine, prompt(24), cache_salt="a")
        finish(engine)
        if change == "reset":
            engine.reset_prefix_cache()
        if change == "load":
            engine.load(OTHER, None)  # without a new name
        add(engine, prompt(24), cache_salt="b" if change == "salt" else "a")
        finish(engine)
        assert engine.stats.prefix_hits == 0, change


def test_kv_of_a_sequence_that_spans_a_swap_or_reset_is_never_shared() -> None:
    for change in ("load", "reset"):
        engine = make_engine()
        (old,) = add(engine, prompt(24))
        engine.step()
        if change == "load":
            engine.load(OTHER, None)
        else:
            engine.reset_prefix_cache()
        finish(engine)
        add(engine, old.token_ids)
        finish(engine)
        assert engine.stats.prefix_hits == 0, change


def test_slots_evicted_in_a_batch_are_not_found_by_its_later_members() -> None:
    engine = make_engine(MODEL, max_num_seqs=3, max_model_len=64)
    x, s, y = (prompt(40, seed=i) for i in range(3))
    for ids in (x, s, y):
        add(engine, ids)
        finish(engine)
    a = add(engine, s[:16] + prompt(5, seed=7))[0]  # takes the slot of x, copies from that of s
    b = add(engine, x[:32] + prompt(5, seed=8))[0]  # must not find x there
    finish(engine)
    for sequence in (a, b):
        expected = full_logprobs(MODEL, sequence.token_ids)[sequence.num_prompt - 1 :]
        torch.testing.assert_close(torch.tensor(sequence.logprobs), expected, rtol=0, atol=1e-5)


def test_random_traffic_over_few_slots_never_meets_wrong_kv() -> None:
    engine = make_engine(max_num_seqs=4, max_model_len=64)
    draw = random.Random(5)
    stems = [prompt(40, seed=i) for i in range(4)]
    pending: list[Sequence] = []
    weights = list(hf_tensors(random_model(moe_card())))
    for turn in range(120):
        stem = draw.choice(stems)
        ids = stem[: draw.randrange(1, 40)] + prompt(draw.randrange(0, 4), seed=turn)
        params = SamplingParams(n=draw.choice([1, 1, 3]), max_tokens=draw.randrange(1, 16), seed=turn, ignore_eos=True)
        pending += add(engine, ids, params, cache_salt=draw.choice("ab"))
        for _ in range(draw.randrange(4)):
            if engine.busy:
                engine.step()
        event = draw.random()
        if event < 0.05:
            engine.reset_prefix_cache()
        elif event < 0.1:
            engine.abort(draw.sample(pending, 2))
        elif event < 0.15:
            engine.load(weights, str(turn))  # the same numbers: what was computed before stays comparable
        elif event < 0.2:
            engine.sleep(1)
            engine.wake_up()
    finish(engine)
    assert engine.stats.prefix_hits > 500
    for sequence in pending:
        expected = full_logprobs(engine.model, sequence.token_ids)[sequence.num_prompt - 1 :]
        torch.testing.assert_close(torch.tensor(sequence.logprobs), expected, rtol=0, atol=1e-5)


# --- weights and sleep ------------------------------------------------------------------------------------------------


def test_weights_swapped_in_flight_label_their_tokens_and_keep_old_kv() -> None:
    engine = make_engine()
    (sequence,) = add(engine, prompt(10))
    for _ in range(4):
        engine.step()
    engine.load(OTHER, "7")
    finish(engine)
    assert sequence.version_spans() == [
        {"version": "0", "start": 0, "end": 5},
        {"version": "7", "start": 5, "end": 12},
    ]
    (fresh,) = add(engine, sequence.token_ids[:15], SamplingParams(temperature=0, max_tokens=1))
    finish(engine)
    assert fresh.logprobs[0] != sequence.logprobs[5]  # the old one saw old keys and values
    expected = full_logprobs(engine.model, fresh.token_ids)[-1]
    assert fresh.logprobs[0] == pytest.approx(expected.item(), abs=1e-5)


def test_a_failed_load_leaves_no_usable_weights_until_one_succeeds() -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match="missing"):
        engine.load(OTHER[:3], "1")
    assert not engine.has_weights
    assert engine.version == "0"
    engine.load(OTHER, "2")
    assert engine.has_weights


def test_a_load_frees_the_slots_whose_prefixes_nobody_can_find_any_more() -> None:
    engine = make_engine()
    add(engine, prompt(24), SamplingParams(n=3, max_tokens=2, seed=1))
    finish(engine)
    assert len(engine.cache.cached) == 3
    engine.load(OTHER, "1")
    assert not engine.cache.cached
    assert engine.cache.num_free == 8


def test_dropped_weights_stay_dropped_however_often_it_sleeps() -> None:
    engine = make_engine()
    (sequence,) = add(engine, prompt(10))
    engine.step()
    for level in (2, 1, 2, 1):
        engine.sleep(level)
        assert all(p.is_meta for p in engine.model.parameters())
    engine.wake_up()
    assert not engine.has_weights
    engine.load(OTHER, "1")
    finish(engine)
    assert sequence.version_spans() == [
        {"version": "0", "start": 0, "end": 2},
        {"version": "1", "start": 2, "end": 12},
    ]
    assert engine.stats.prompt_tokens == 10  # counted once, though computed twice


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_sequences_go_on_after_it(level: int) -> None:
    engine = make_engine()
    (sequence,) = add(engine, prompt(10))
    (undisturbed,) = add(reference := make_engine(), prompt(10))
    finish(reference)
    for _ in range(4):
        engine.step()
    engine.sleep(level)
    assert engine.cache.k.numel() == 0
    assert all(p.is_meta for p in engine.model.parameters()) == (level == 2)
    with pytest.raises(ValueError, match="wake_up"):
        engine.load(OTHER, "1")
    engine.wake_up(["weights"])
    assert not engine.awake
    if level == 2:
        assert not engine.has_weights
        engine.load(hf_tensors(random_model(moe_card())), "1")
    engine.wake_up(["kv_cache"])
    finish(engine)
    assert sequence.token_ids == undisturbed.token_ids
    assert sequence.logprobs == pytest.approx(undisturbed.logprobs, abs=1e-5)
