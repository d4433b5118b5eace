"""What a step works on: documents of which lengths, in rows for which data ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist

from prl.config.errors import UserError
from prl.config.schema import RunConfig
from prl.config.world import world_of
from prl.metrics.mfu import document_flops
from prl.transport.packing import pack_laps

PROMPT_TOKENS = 512
SIGMA = 1.0  # of the lengths' logarithm, where only their mean is said

Row = tuple[int, ...]  # tokens of each document


@dataclass(frozen=True)
class Workload:
    """prompts and completions: tokens of each rollout; none outside of RL. laps: the longest row of each, by FLOPs."""

    prompt: int
    completions: tuple[int, ...]
    laps: tuple[Row, ...]
    tokens: int  # of all data ranks
    imbalance: float  # FLOPs of the longest rows over the mean of all ranks
    told: tuple[str, ...]  # assumptions


def workload_of(
    config: RunConfig, mean: int | None = None, prompt: int | None = None, ranks: int | None = None
) -> Workload:
    """Of one optimizer step.

    Args:
        mean: tokens of a completion; None: each at its limit.
        prompt: tokens of a prompt; None: PROMPT_TOKENS, or what the context leaves.
        ranks: data ranks among which rows are dealt; None: the trainer's.
    """
    ranks = ranks or world_of(config).mesh.data_ranks
    if config.job == "rl":
        return _rollouts(config, mean, prompt, ranks)
    if config.job in ("sft", "bench"):
        _refuse_lengths(config.job, {"--completion-tokens": mean, "--prompt-tokens": prompt})
    if config.job == "sft":
        assert config.sft is not None
        lengths = [config.seq_len] * config.sft.batch_size
        return _packed(config, 0, (), lengths, ranks, ("documents fill their rows",))
    if config.job == "bench":
        return _made_up(config, ranks)
    raise UserError(
        "There is no trainer's step to forecast.",
        where=f"job {config.job}",
        why="a forecast is of the optimizer steps of RL, SFT or the trainer's benchmark",
        fix="python -m prl.plan --forecast, or with -cn sft or -cn bench",
    )


def _refuse_lengths(job: str, given: Mapping[str, int | None]) -> None:
    """Of rollouts, for a job without any."""
    for flag, value in given.items():
        if value is not None:
            raise UserError(
                f"A step of {job} has no rollouts.",
                where=f"{flag}={value}",
                why="it says how long those of RL are",
                fix=f"leave {flag} out",
            )


def _made_up(config: RunConfig, ranks: int) -> Workload:
    """As prl/bench/rows.py makes them."""
    bench = config.bench
    assert bench is not None
    if not bench.target.startswith("trainer"):
        raise UserError(
            "There is no trainer's step to forecast.",
            where=f"bench.target={bench.target}",
            why="a forecast is of the optimizer steps of prl's own trainer",
            fix="bench.target=trainer_rl",
        )
    if bench.lengths == "variable" and isinstance(bench.doc_len, int):
        raise UserError(
            "Documents of lengths drawn at random cannot be forecast.",
            where="bench.lengths=variable",
            why="which lengths a row has is known to the benchmark that draws them",
            fix=f"bench.lengths=fixed, or bench.doc_len=[{bench.doc_len},{max(1, bench.doc_len // 2)}]",
        )
    length = bench.doc_len
    row = (length,) * max(1, config.seq_len // length) if isinstance(length, int) else tuple(length)
    return Workload(0, (), (row,) * bench.micro_batches, sum(row) * bench.micro_batches * ranks, 1.0, ())


def _rollouts(config: RunConfig, mean: int | None, prompt: int | None, ranks: int) -> Workload:
    limit = min(config.inference.sampling.max_tokens, config.inference.max_model_len - 1, config.seq_len - 1)
    context = min(config.inference.max_model_len, config.seq_len)
    prompt = min(PROMPT_TOKENS, context - limit) if prompt is None else prompt
    if not 0 < prompt < context:
        raise UserError(
            f"Prompts cannot have {prompt} tokens.",
            where=f"--prompt-tokens={prompt}",
            why=f"seq_len and inference.max_model_len leave 1 to {context - 1}, and a token for a completion",
            fix=f"--prompt-tokens={max(1, min(PROMPT_TOKENS, context // 2))}",
        )
    limit = min(limit, context - prompt)
    count = config.algo.batch_size
    if mean is not None and not 0 < mean <= limit:
        raise UserError(
            f"Completions cannot have {mean} tokens on average.",
            where=f"--completion-tokens={mean}",
            why=f"prompts of {prompt}, inference.sampling.max_tokens, max_model_len and seq_len leave 1 to {limit}",
            fix=f"--completion-tokens={max(1, limit // 4)}",
        )
    if mean is None:
        completions, told = (limit,) * count, f"every completion has {limit:,} tokens, the limit"
    else:
        completions = lognormal(mean, limit, count)
        longest = max(completions)
        told = (
            f"completions: lognormal (sigma {SIGMA:g}), mean {mean:,}, longest {longest:,} of at most {limit:,} tokens"
        )
    told_prompt = f"prompts of {prompt:,} tokens, all of a batch's {count} rollouts trained"
    lengths = [prompt + n for n in completions]
    return _packed(config, prompt, completions, lengths, ranks, (told, told_prompt))


def lognormal(mean: int, limit: int, count: int) -> tuple[int, ...]:
    """`count` evenly spaced quantiles, cut off at `limit`, whose mean is `mean`."""
    normal = NormalDist()
    points = [math.exp(SIGMA * normal.inv_cdf((i + 0.5) / count)) for i in range(count)]

    def at(scale: float) -> list[int]:
        return [max(1, min(limit, round(scale * point))) for point in points]

    low, high = 0.0, 1e3 * limit
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(at(middle)) < mean * count else (low, middle)
    return tuple(at(high))


def _packed(
    config: RunConfig,
    prompt: int,
    completions: tuple[int, ...],
    lengths: list[int],
    ranks: int,
    told: tuple[str, ...],
) -> Workload:
    work: Callable[[int], float] = document_flops(config.model.card)
    packed = pack_laps(lengths, config.seq_len, ranks, work)
    costs = [work(length) for length in lengths]
    longest = [max(lap, key=lambda row: sum(costs[i] for i in row)) for lap in packed]
    laps = tuple(tuple(lengths[i] for i in row) for row in longest)
    worst = sum(sum(costs[i] for i in row) for row in longest)
    return Workload(prompt, completions, laps, sum(lengths), worst * ranks / sum(costs), told)
