"""Sequences that fail alone: what they leave behind, what the others keep, and when it is the engine that is broken."""

from __future__ import annotations

import pytest
import torch
from test_inference_engine import add, finish, make_engine, prompt

from prl.inference import engine as engine_module
from prl.inference.engine import TorchEngine
from prl.inference.isolation import MAX_FAILED_STEPS, BrokenWeights
from prl.inference.sampling import SamplingParams

PLAIN = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
POISON = 99  # a token


@pytest.fixture
def steps_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sequences of each attempt at a step."""
    sizes: list[int] = []
    draw = engine_module.draw

    def counting(distribution, table, positions):
        sizes.append(len(distribution))
        return draw(distribution, table, positions)

    monkeypatch.setattr(engine_module, "draw", counting)
    return sizes


def overflowing(engine: TorchEngine) -> None:
    """A prompt with the token POISON has NaN for keys and values, as one whose activations overflow."""

    def spoil(module, ids, out):
        return torch.where((ids[0] == POISON)[..., None], torch.nan, out)

    engine.model.get_submodule("embed_tokens").register_forward_hook(spoil)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_sequence_that_is_not_finite_leaves_nothing_in_its_slot(prefix_caching, steps_of) -> None:
    engine = make_engine(prefix_caching=prefix_caching)
    overflowing(engine)
    (bad,) = add(engine, [POISON] * 80)
    engine.step()
    assert bad.finish_reason == "error"
    steps_of.clear()
    short, long = add(engine, prompt(5), PLAIN)[0], add(engine, prompt(60, seed=1), PLAIN)[0]
    finish(engine)
    assert steps_of == [2] * 20, "no step had to be done again, one by one"
    alone = make_engine(prefix_caching=prefix_caching)
    expected = [add(alone, prompt(5), PLAIN)[0], add(alone, prompt(60, seed=1), PLAIN)[0]]
    finish(alone)
    assert [s.completion_ids for s in (short, long)] == [s.completion_ids for s in expected]


@pytest.mark.parametrize("ended_by", ["nan", "exception"])
def test_who_goes_on_after_a_failed_step_has_one_kept_set_for_each_token(ended_by, monkeypatch) -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=6, top_k=5, kept_tokens=True, ignore_eos=True)
    sequences = [add(engine, prompt(9, seed=i), params)[0] for i in range(3)]
    draw, calls = engine_module.draw, 0

    def failing_once(distribution, table, positions):
        nonlocal calls
        calls += 1
        if calls == 3 and ended_by == "exception":
            raise RuntimeError("once")
        tokens, logprobs = draw(distribution, table, positions)
        return tokens, torch.full_like(logprobs, torch.nan) if calls == 3 else logprobs

    monkeypatch.setattr(engine_module, "draw", failing_once)
    finish(engine)
    assert calls > 6
    for sequence in sequences:
        assert sequence.error is None
        assert len(sequence.kept) == len(sequence.logprobs) == len(sequence.versions) == 6
        assert all(token in kept for token, kept in zip(sequence.completion_ids, sequence.kept, strict=True))


# --- is it the engine? ------------------------------------------------------------------------------------------------


def failing_prefill(monkeypatch: pytest.MonkeyPatch, fails) -> None:
    """Prefilling sequences of which one `fails` raises, as when there is no memory for them."""
    prefill = engine_module.prefill

    def failing(model, cache, sequences, recorder):
        if any(fails(sequence) for sequence in sequences):
            raise torch.OutOfMemoryError("out of memory")
        return prefill(model, cache, sequences, recorder)

    monkeypatch.setattr(engine_module, "prefill", failing)


@pytest.mark.parametrize("at_once", [1, 4], ids=["alone", "a group"])
def test_one_prompt_that_always_fails_ends_no_idle_engine(at_once, monkeypatch) -> None:
    engine = make_engine()
    failing_prefill(monkeypatch, lambda sequence: POISON in sequence.token_ids)
    for i in range(3 * MAX_FAILED_STEPS):
        bad = [add(engine, [POISON] * 5, request_id=f"{i}-{j}")[0] for j in range(at_once)]
        assert engine.step() == bad
        assert all("out of memory" in str(sequence.error) for sequence in bad)
    assert (engine.stats.prompt_tokens, engine.stats.generation_tokens) == (0, 0), "looking is no work of anybody's"
    assert engine.cache.num_free == 8
    (good,) = add(engine, prompt(5), PLAIN)
    finish(engine)
    assert good.finish_reason == "length"


@pytest.mark.parametrize("probe", ["fails", "works"])
def test_an_engine_in_which_nobody_gets_through_ends_after_some_steps(probe, monkeypatch) -> None:
    """Where a token or two can be computed, several prompts must have failed together."""
    engine = make_engine()
    failing_prefill(monkeypatch, lambda sequence: probe == "fails" or len(sequence.token_ids) > 1)
    for i in range(MAX_FAILED_STEPS - 1):
        for seed in range(1 if probe == "fails" else 2):
            add(engine, prompt(5, seed), request_id=f"{i}-{seed}")
        assert engine.step()
    for seed in range(2):
        add(engine, prompt(5, seed))
    with pytest.raises(torch.OutOfMemoryError):
        engine.step()


def test_a_step_in_between_that_somebody_survives_begins_the_count_anew(monkeypatch) -> None:
    engine = make_engine()
    failing_prefill(monkeypatch, lambda sequence: len(sequence.token_ids) > 1)
    for i in range(3 * MAX_FAILED_STEPS):
        for seed in range(2):
            add(engine, prompt(5, seed), request_id=f"{i}-{seed}")
        if i % MAX_FAILED_STEPS == MAX_FAILED_STEPS - 1:
            add(engine, [1], SamplingParams(max_tokens=1, ignore_eos=True))
        assert engine.step()


def test_broken_weights_end_a_busy_engine_in_its_first_step() -> None:
    """Before they have failed so many requests that the run ends for that, which would be another class of failure."""
    engine = make_engine()
    with torch.no_grad():
        next(engine.model.parameters()).fill_(torch.nan)
    for seed in range(8):
        add(engine, prompt(5, seed))
    with pytest.raises(BrokenWeights, match="weight version 0"):
        engine.step()
