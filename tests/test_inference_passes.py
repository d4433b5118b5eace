"""What the engine prefills in one pass with what it decodes, and what not."""

from __future__ import annotations

import pytest
import torch
from families import family_card
from test_inference_engine import MODEL, add, finish, full_logprobs, make_engine, one_thread, prompt  # noqa: F401
from tiny import dense_card, moe_card, random_model

from prl.inference.engine import TOKENS_BESIDE
from prl.inference.sampling import SamplingParams
from prl.models.experts.routing import RoutingRecorder


@pytest.mark.parametrize("card", [moe_card(), dense_card(), family_card("deepseek_v3")], ids=["moe", "dense", "latent"])
def test_what_comes_later_is_prefilled_in_one_pass_with_what_runs(card) -> None:
    """Log-probabilities and experts of both are those of a full forward pass, and of the prompts."""
    engine = make_engine(random_model(card), return_routed_experts=bool(card.num_experts))
    passes: list[int] = []
    engine.model.register_forward_pre_hook(lambda _, args: passes.append(len(args[0])))
    asked = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)
    sequences = [add(engine, prompt(n, seed=n), asked)[0] for n in (20, 9)]
    engine.step()
    assert passes == [29, 2]
    sequences += add(engine, prompt(33), SamplingParams(n=2, max_tokens=9, ignore_eos=True, seed=2, prompt_logprobs=0))
    sequences += add(engine, prompt(5, seed=5), asked)
    engine.step()
    assert passes == [29, 2, 2 + 33 + 5], "the group's prompt comes once"
    finish(engine)
    for sequence in sequences:
        recorder = RoutingRecorder() if card.num_experts else None
        told = full_logprobs(engine.model, sequence.token_ids, recorder)
        begin = sequence.num_prompt - 1
        torch.testing.assert_close(torch.tensor(sequence.logprobs), told[begin:], rtol=0, atol=1e-5)
        if sequence.request.params.prompt_logprobs is not None:
            torch.testing.assert_close(torch.tensor(sequence.prompt_logprobs), told[:begin], rtol=0, atol=1e-5)
        if recorder is not None:
            routed = torch.from_numpy(sequence.routed_experts())
            assert torch.equal(routed, recorder.stacked(card)[:-1])


@pytest.mark.parametrize("family", ["glm_moe_dsa", "nemotron_h"])
def test_states_and_choices_of_keys_are_not_written_beside_others(family, caplog) -> None:
    engine = make_engine(random_model(family_card(family)))
    passes: list[int] = []
    engine.model.register_forward_pre_hook(lambda _, args: passes.append(len(args[0])))
    add(engine, prompt(20))
    engine.step()
    add(engine, prompt(9, seed=1))
    engine.step()
    assert passes == [20, 1, 9, 2]
    assert not caplog.records, "no step failed"


@pytest.mark.parametrize(("tokens", "passes"), [(TOKENS_BESIDE, 1), (TOKENS_BESIDE + 1, 2)])
def test_much_to_prefill_has_a_pass_of_its_own(tokens, passes) -> None:
    engine = make_engine(MODEL, max_model_len=1024)
    add(engine, prompt(4), SamplingParams(max_tokens=20, ignore_eos=True))
    engine.step()
    seen: list[int] = []
    hook = MODEL.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    add(engine, prompt(tokens))
    engine.step()
    hook.remove()
    assert len(seen) == passes
