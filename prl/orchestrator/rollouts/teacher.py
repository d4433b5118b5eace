"""On-policy distillation: a teacher's log-probabilities of what the policy has sampled, as an advantage of each token.

    A_t = adv_tau * A(rollout) + tau * (log p_teacher(token t) - log p_policy(token t))

The second part, summed over a rollout's tokens, is minus the reverse KL divergence of the policy from its teacher, as
sampled (MiniLLM, arXiv:2306.08543; GKD, arXiv:2306.13649). Teachers are servers that run already (`algo.teacher.urls`):
a stock vLLM, or `python -m prl.inference`. They are asked for `prompt_logprobs`, and are given no weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import numpy as np

from prl.config.errors import AwayError, UserError
from prl.config.schema import InferenceConfig, RunConfig
from prl.models.text.chat import ChatRenderer
from prl.orchestrator.engines.answers import EngineError
from prl.orchestrator.engines.served import ServedEngines
from prl.orchestrator.rollouts.rollout import Group, Sample

log = logging.getLogger("prl.orchestrator")

AT = "algo.teacher"
AT_ONCE = 32  # requests to each server
ROUNDING = 1e-2  # above 0, that a log-probability may be
FLOOR = -30.0  # nats: what is less probable to the teacher is so much of a mistake and no more
AGAIN_S = 1.0
PART = 0.7  # of the time for starting
BUSY = (408, 409, 425, 429)  # of a server that may take the same request later
PROBE = "Hello, world! 1234567890 = 3 x^2; é 你好 \n\tdef f(x):"  # in which tokenizers differ


class Teacher:
    """Of a run; made within its event loop. `gone` is told once none has answered for deployment.start_timeout_s."""

    def __init__(self, config: RunConfig, renderer: ChatRenderer, gone: Callable[[Exception], None]) -> None:
        teacher = config.algo.teacher
        asked = {
            "urls": teacher.urls,
            "served_model": teacher.served_model,
            "api_key_var": teacher.api_key_var,
            "max_model_len": longest_asked(config),
            # who takes a request and never answers is away, too
            "request_timeout_s": min(config.inference.request_timeout_s, config.deployment.start_timeout_s),
        }
        inference: InferenceConfig = config.inference.model_copy(update=asked)
        self.pool = ServedEngines(inference, renderer, AT, "the teacher's part of the run")
        self.tau, self.seq_len, self.renderer, self.gone = teacher.tau, config.seq_len, renderer, gone
        self.timeout_s = config.deployment.start_timeout_s
        self.places = asyncio.Semaphore(AT_ONCE * len(teacher.urls))
        self.answered = 0.0  # when one has, last
        self.is_gone = False

    async def prepare(self) -> None:
        """Until all are there. Raises UserError for one that cannot teach this policy, before who watches over the
        run's processes would say that this one does not come up.
        """
        await self.pool.wait_healthy(PART * self.timeout_s)
        for url in self.pool.urls:
            await self._check_tokenizer(url)

    async def score(self, group: Group) -> None:
        """Give all samples of a group their `bonus`. Raises UserError for a teacher that refuses them."""
        samples = [sample for rollout in group.finished for sample in rollout.samples]
        for sample, logp in zip(samples, await asyncio.gather(*map(self._logprobs, samples)), strict=True):
            mask = np.asarray(sample.loss_mask).view(bool)[: self.seq_len]
            ours = np.asarray(sample.logp_infer)[: self.seq_len]
            sample.bonus = np.where(mask, self.tau * (np.maximum(logp, FLOOR) - ours), 0.0).astype(np.float32)

    async def close(self) -> None:
        await self.pool.close()

    async def _logprobs(self, sample: Sample) -> np.ndarray:
        """[T] of each token given those before it; 0 of the first."""
        ids, failing_since = sample.input_ids[: self.seq_len].tolist(), 0.0
        while True:
            url, began = "a teacher", time.monotonic()
            try:
                async with self.places:
                    began = time.monotonic()
                    url, answer = await self.pool.score(ids)
                self.answered = time.monotonic()
                return await asyncio.to_thread(read_logprobs, answer, ids)
            except EngineError as error:
                if error.refused and error.status not in BUSY:
                    raise self._refuses(str(error)) from error
                log.warning("a teacher is asked again: %s", error)
                failing_since = failing_since or began
                if time.monotonic() - max(failing_since, self.answered) > self.timeout_s:
                    if not self.is_gone:  # many wait: one of them says it
                        self.is_gone = True
                        self.gone(self._is_away(str(error)))
                    await asyncio.Event().wait()  # until the run has ended in order
                await asyncio.sleep(AGAIN_S)
            except (LookupError, TypeError, ValueError) as error:
                raise self._refuses(f"{url}: its answer cannot be read: {in_words(error)}") from error

    async def _check_tokenizer(self, url: str) -> None:
        """Raises UserError where the teacher cuts text otherwise than the policy: its tokens would mean something else.
        Of servers that do not say (`/tokenize` is vLLM's) nothing is known.
        """
        body = {"model": self.pool.served[url], "prompt": PROBE, "add_special_tokens": False}
        theirs = None
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError, TypeError):
            async with self.pool.session.post(f"{url}/tokenize", json=body) as response:
                told = await response.json() if response.status == 200 else None
                theirs = told.get("tokens") if isinstance(told, dict) else None
        if theirs is None:
            log.info("%s does not tell how it cuts text; it must have the policy's tokenizer", url)
            return
        ours = self.renderer.encode(PROBE)
        if theirs != ours:
            raise UserError(
                f"{url} has another tokenizer than the policy.",
                where=f"{AT}.urls, model.tokenizer",
                why=f"{PROBE[:13]!r}... is {theirs[:6]}... to it and {ours[:6]}... to the policy, which it judges",
                fix="a teacher of the policy's own family (with the same tokenizer.json)",
            )

    def _refuses(self, said: str) -> UserError:
        return UserError(
            "A teacher does not tell what it thinks of the policy's tokens.",
            where=f"{AT}.urls",
            why=said[:400],
            fix="a server that knows prompt_logprobs, with the policy's vocabulary: vllm serve MODEL, or python -m "
            "prl.inference",
        )

    def _is_away(self, said: str) -> AwayError:
        return AwayError(
            f"No teacher has answered for {self.timeout_s:.0f} s: {', '.join(self.pool.urls)}.",
            where=f"{AT}.urls, deployment.start_timeout_s={self.timeout_s:g}",
            why=said[:400],
            fix="start it again; then this command again, which resumes (a run by itself with its output_dir)",
        )


def longest_asked(config: RunConfig) -> int:
    """Tokens that a teacher's context must hold: the longest sample, and one that it draws behind it."""
    return min(config.seq_len, config.inference.max_model_len) + 1


def read_logprobs(answer: dict[str, Any], ids: list[int]) -> np.ndarray:
    """[T] float32 of vLLM's `prompt_logprobs`: for each token but the first an object by token id. Raises ValueError,
    LookupError or TypeError for what is none.
    """
    if not isinstance(answer, dict):
        raise ValueError("it is no object")
    told = answer.get("prompt_logprobs")
    if told is None:
        told = answer["choices"][0].get("prompt_logprobs")
    if not isinstance(told, list) or len(told) != len(ids):
        raise ValueError(f"{len(ids)} prompt_logprobs were asked for, and {len(told or ())} came")
    numbers = [float(entry[str(token)]["logprob"]) for token, entry in zip(ids[1:], told[1:], strict=True)]
    found = np.array([0.0, *numbers], np.float32)
    if not np.isfinite(found).all() or found.max() > ROUNDING:
        raise ValueError("prompt_logprobs that are not finite, or above 0, are no logarithms of probabilities")
    return found


def in_words(error: Exception) -> str:
    if isinstance(error, LookupError):
        return f"it says nothing of {error}"
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def teacher_columns(samples: list[Sample], tau: float) -> dict[str, float]:
    """For a step's row: mean over its tokens of log p_policy - log p_teacher, the reverse KL in nats as sampled."""
    scored = [sample for sample in samples if sample.bonus is not None]
    tokens, total = 0, 0.0
    for sample in scored:
        assert sample.bonus is not None
        tokens += int(np.count_nonzero(np.asarray(sample.loss_mask)[: len(sample.bonus)]))
        total += float(np.sum(sample.bonus, dtype=np.float64))
    return {"teacher_kl": -total / tau / tokens} if tokens else {}
