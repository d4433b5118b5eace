"""The sampler alone: distributions, filters, seeds, bans, what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from prl.inference.sampling import (
    SamplingParams,
    SamplingTable,
    draw,
    gumbel_noise,
    log_distribution,
    sequence_seed,
)

V = 12
CPU = torch.device("cpu")


def table(params: list[SamplingParams], seeds: list[int], eos: tuple[int, ...] = (), prompt: int = 0) -> SamplingTable:
    return SamplingTable.build(params, seeds, [prompt] * len(params), eos, V, CPU)


def sample(logits: torch.Tensor, t: SamplingTable, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A token for each row of logits [B, V], and its log-probability."""
    return draw(log_distribution(logits, t, positions), t, positions)


def reference(logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    """The filtered distribution [V] in float64, one token at a time: min-p, top-k, then top-p of what is left."""
    probs = (logits.double() / p.temperature).softmax(-1)
    order = sorted(range(V), key=lambda i: (-probs[i].item(), i))
    kept = [i for i in order if probs[i] >= p.min_p * probs[order[0]]]
    kept = kept[: p.top_k] if p.top_k > 0 else kept
    total, mass, nucleus = sum(probs[i].item() for i in kept), 0.0, []
    for i in kept:
        if mass / total >= p.top_p:
            break
        nucleus.append(i)
        mass += probs[i].item()
    out = torch.zeros(V, dtype=torch.float64)
    out[nucleus] = probs[nucleus] / probs[nucleus].sum()
    return out


CASES = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6),
    "top_p": SamplingParams(top_p=0.7),
    "top_k": SamplingParams(top_k=3),
    "min_p": SamplingParams(min_p=0.2),
    "all": SamplingParams(temperature=1.3, top_p=0.9, top_k=6, min_p=0.05),
}


@pytest.mark.parametrize("params", CASES.values(), ids=CASES.keys())
def test_draws_follow_the_filtered_distribution_and_logprobs_are_its(params: SamplingParams) -> None:
    draws = 20_000
    logits = torch.randn(V, generator=torch.Generator().manual_seed(1)) * 1.5
    expected = reference(logits, params)
    rows = 200  # seeds, each at 100 positions: both counters must give independent draws
    t = table([params] * rows, list(range(rows)))
    drawn = [sample(logits.repeat(rows, 1), t, torch.full((rows,), i)) for i in range(draws // rows)]
    tokens, logprobs = torch.cat([d[0] for d in drawn]), torch.cat([d[1] for d in drawn])
    torch.testing.assert_close(logprobs.double().exp(), expected[tokens], rtol=1e-5, atol=1e-7)
    counts = torch.bincount(tokens, minlength=V).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi2 = ((counts - draws * expected)[possible] ** 2 / (draws * expected[possible])).sum().item()
    freedom = int(possible.sum()) - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom) + 4, (chi2, freedom)


def test_a_row_draws_the_same_alone_and_among_rows_with_other_parameters() -> None:
    params = [*CASES.values(), SamplingParams(temperature=0)]
    seeds = [7 + i for i in range(len(params))]
    logits = torch.randn(len(params), V, generator=torch.Generator().manual_seed(2))
    positions = torch.arange(len(params)) + 5
    together = sample(logits, table(params, seeds), positions)
    for i in range(len(params)):
        alone = sample(logits[i : i + 1], table(params[i : i + 1], seeds[i : i + 1]), positions[i : i + 1])
        assert together[0][i] == alone[0][0]
        assert together[1][i] == alone[1][0]  # to the bit


def test_greedy_takes_the_best_and_reports_its_logprob_at_temperature_1() -> None:
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(3))
    greedy = SamplingParams(temperature=0, top_p=0.5, top_k=2)
    tokens, logprobs = sample(logits, table([greedy] * 3, [1, 2, 3]), torch.zeros(3, dtype=torch.int64))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).amax(-1))


def test_min_tokens_bans_stop_tokens_until_it_is_reached_and_logprobs_know() -> None:
    params = SamplingParams(temperature=1.0, min_tokens=2, stop_token_ids=(1,))
    logits = torch.full((1, V), -9.0)
    logits[0, [0, 1]] = 9.0  # eos and the stop token
    t = table([params], [5], eos=(0,), prompt=10)
    for position in (10, 11):
        token, logprob = sample(logits, t, torch.tensor([position]))
        assert token.item() > 1
        assert logprob.item() == pytest.approx(math.log(1 / 10), abs=1e-5)
    assert sample(logits, t, torch.tensor([12]))[0].item() <= 1


def test_noise_is_finite_and_independent_of_the_number_of_rows() -> None:
    seeds = torch.tensor([0, -1, 2**62, -(2**63), 12345])
    positions = torch.tensor([0, 1, 2**20, 3, 4])
    noise = gumbel_noise(seeds, positions, 1000)
    assert noise.isfinite().all()
    assert noise.std(dim=0).min() > 0  # rows differ
    assert torch.equal(gumbel_noise(seeds[2:3], positions[2:3], 1000), noise[2:3])


def test_the_smallest_hash_gives_large_but_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    for bits in (0, -1, -(2**31), 2**31 - 1):
        monkeypatch.setattr("prl.inference.sampling._mix", lambda x, bits=bits: torch.full_like(x, bits))
        assert gumbel_noise(torch.tensor([1]), torch.tensor([1]), 3).isfinite().all()


def test_seeds_beyond_32_bits_differ_and_completions_of_one_request_get_their_own() -> None:
    low, high = gumbel_noise(torch.tensor([5, 5 + 2**40]), torch.tensor([0, 0]), 50)
    assert not torch.equal(low, high)
    assert len({sequence_seed(2**63 - 1, i) for i in range(8)}) == 8
    assert all(-(2**63) <= sequence_seed(2**63 - 1, i) < 2**63 for i in range(8))


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0},
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": 1001.0},
        {"max_tokens": 1 << 31},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": 2.0},
        {"seed": 2**63},
        {"max_tokens": 0},
        {"min_tokens": 20},
        {"logprobs": 5},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]
