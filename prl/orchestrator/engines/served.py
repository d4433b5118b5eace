"""Models that are served already (inference.urls), for evaluations: asked as any client asks, and changed in nothing.

By /inference/v1/generate where a server has it (ours, vLLM), else by /v1/completions, with token ids for a prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from typing import Any
from urllib.parse import urljoin

import aiohttp

from prl.config.errors import AwayError, UserError
from prl.config.schema import InferenceConfig, SamplingConfig
from prl.models.text.chat import ChatRenderer
from prl.orchestrator.engines.answers import EngineError
from prl.orchestrator.engines.generation import Generation
from prl.orchestrator.engines.pool import CLIENT_ROUTES, EnginePool
from prl.orchestrator.engines.requests import GENERATE
from prl.runtime.external import none_answers
from prl.runtime.process.keys import RunKeys

MODELS, COMPLETIONS = "/v1/models", "/v1/completions"
MOST_TOKENS = 1 << 31  # of any vocabulary
LOOK_S = 1.0
REST_S = 10.0
ANSWER = aiohttp.ClientTimeout(total=5.0)


class ServedEngines(EnginePool):
    """Replicas of one model, each asked in the way that it understands."""

    def __init__(
        self, config: InferenceConfig, renderer: ChatRenderer, at: str = "inference", asker: str = "the evaluation"
    ) -> None:
        """`at`: the node of the configuration that names them; `asker`: for whom they answer."""
        super().__init__(list(config.urls), config, RunKeys())
        self.at, self.asker = at, asker
        if config.api_key_var is None:
            del self.session.headers["Authorization"]
        self.renderer = renderer
        self.telling: set[int] = set()  # of these, those that can say which tokens they have drawn
        self.served: dict[str, str] = {}  # URL -> the id there of the model that is asked
        self.empty: set[str] = set()  # of servers that list no model, as while they load one
        self.resting_until: dict[int, float] = {}  # replicas that have failed, while others are asked
        self.names: dict[int, str] = {}  # of replicas that are asked by COMPLETIONS: what they call their model

    async def wait_healthy(self, timeout_s: float) -> None:
        """Until each server has said what it serves. Raises UserError for one that does not, or not to us; AwayError
        for one that gives no answer for so long, whichever it owes.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        for index, url in enumerate(self.urls):
            try:
                async with asyncio.timeout_at(deadline):
                    await self._learn(index, url)
            except TimeoutError as error:
                if url in self.empty:
                    said = f"{MODELS} has listed no model for {timeout_s:.0f} s"
                    raise self._away(url, said, "lists no model") from error
                if self.at != "inference":
                    raise self._away(url, f"it has given no whole answer for {timeout_s:.0f} s") from error
                silent = self.config.model_copy(update={"urls": (url,)})
                raise none_answers(silent, timeout_s, is_silent=True) from error

    async def _learn(self, index: int, url: str) -> None:
        while (models := await self._models(url)) is None:
            await asyncio.sleep(LOOK_S)
        model = self._choose(url, models)
        self._check_length(url, model)
        self.served[url] = str(model.get("id"))
        # the other route has no word for which of several is asked
        if len(models) > 1 or not await self._generates(url):
            self.names[index] = str(model.get("id"))
            self.telling |= {index} if model.get("owned_by") == "vllm" else set()

    def _choose(self, url: str, models: list[dict[str, Any]]) -> dict[str, Any]:
        """The model that inference.served_model names, or the only one. Raises UserError."""
        ids, wanted = [str(model.get("id")) for model in models], self.config.served_model
        if wanted is None and len(models) == 1:
            return models[0]
        if wanted in ids:
            return models[ids.index(wanted)]
        listed = ", ".join(ids)
        raise UserError(
            f"{url} serves {len(ids)} models." if wanted is None else f"{url} serves no model {wanted}.",
            where=f"{self.at}.served_model={'null' if wanted is None else wanted}",
            why=f"{MODELS} lists {listed}",
            fix=f"{self.at}.served_model={ids[0]}" + ", or another of these" * (len(ids) > 1),
        )

    async def _models(self, url: str) -> list[dict[str, Any]] | None:
        """What it serves; None while it loads. Raises UserError where nobody listens, or nobody who serves us."""
        try:
            async with self.session.get(url + MODELS, timeout=ANSWER, allow_redirects=False) as response:
                status, text = response.status, await response.text(errors="replace")
                if 300 <= status < 400:
                    raise self._redirects(url, response.headers.get("Location", ""))
                self.empty.discard(url)
                if status == 200:
                    models = (await response.json(content_type=None))["data"]
                    self.empty |= set() if models else {url}
                    return [dict(model) for model in models] if models else None
        except aiohttp.ClientConnectorError as error:
            raise self._away(url, str(error)) from error
        except (aiohttp.ClientConnectionError, TimeoutError):
            return None
        except (LookupError, TypeError, ValueError):
            status, text = 200, "no list of models"
        if status >= 500:
            return None
        where = f"{self.at}.api_key_var={self.config.api_key_var or 'null'}"
        raise UserError(
            f"{url} does not take the key." if status in (401, 403) else f"{url} serves no models.",
            where=where if status in (401, 403) else f"{self.at}.urls",
            why=f"{MODELS}: {status}: {text[:200]}",
            fix=f"{self.at}.api_key_var=NAME of the environment variable that holds its API key"
            if status in (401, 403)
            else "the address of a server with OpenAI's routes",
        )

    def _check_length(self, url: str, model: dict[str, Any]) -> None:
        """Of vLLM and ours, which say it."""
        length, wanted = model.get("max_model_len"), self.config.max_model_len
        if isinstance(length, int) and length < wanted:
            raise UserError(
                f"{url} takes {length} tokens (prompt and completion), {self.asker} wants {wanted}.",
                where=f"inference.max_model_len={wanted}" if self.at == "inference" else f"{self.at}.urls, seq_len",
                why="an engine's context is set when it is started",
                fix=f"inference.max_model_len={length}, or start it with more"
                if self.at == "inference"
                else f"start it with {wanted} (--max-model-len, inference.max_model_len); or seq_len={length - 1}",
            )

    async def _generates(self, url: str) -> bool:
        """Whether it answers on our route. A stock vLLM 0.32 has it, and refuses every good request (403) unless it was
        started with --enable-scale-out.
        """
        body = {"token_ids": self.renderer.encode("a"), "sampling_params": {"max_tokens": 1}}
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self.session.post(url + GENERATE, json=body) as response:
                return response.status not in (403, 404, 405)
        return False

    async def generate(
        self,
        prompt_ids: list[int],
        max_tokens: int,
        seed: int,
        salt: str,
        sampling: SamplingConfig,
        request_id: str,
        replica: int | None = None,
        telling: dict[str, Any] | None = None,
        routing_start: int = 0,
    ) -> Generation:
        """As of the base class. `seed` makes an answer repeatable where the server honours it."""
        index = self._least_busy(self.decoding)
        if index not in self.names:
            return await super().generate(
                prompt_ids, max_tokens, seed, salt, sampling, request_id, index, telling, routing_start
            )
        body = {
            "model": self.names[index],
            "prompt": prompt_ids,
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed,
        }
        body |= {"return_token_ids": True} if index in self.telling else {}
        # beyond OpenAI's own: asked for only where it matters, so that a server without it refuses, and not ignores it
        body |= {"top_k": sampling.top_k} if sampling.top_k else {}
        body |= {"min_p": sampling.min_p} if sampling.min_p else {}
        body |= {"stop_token_ids": list(sampling.stop_token_ids)} if sampling.stop_token_ids else {}
        self.in_flight[index] += 1
        try:
            answer = await self._ask(index, COMPLETIONS, body)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.in_flight[index] -= 1
        choice = answer["choices"][0]
        reason, ids = choice.get("finish_reason") or "stop", choice.get("token_ids")
        if not all(type(token) is int and 0 <= token < MOST_TOKENS for token in ids or ()):
            raise EngineError(
                f"{self.urls[index]}: its answer cannot be read: token ids that are none: {str(ids)[:80]}"
            )
        if not ids:
            ids, end = self.renderer.encode(choice["text"]), self.renderer.tokenizer.eos_token_id
            if isinstance(end, int) and (reason == "stop" or not ids):  # no text, or what is none: it is scored so
                ids.append(end)
        return Generation(ids, [0.0] * len(ids), [0] * len(ids), reason, None)

    async def score(self, token_ids: list[int]) -> tuple[str, dict[str, Any]]:
        """Who answered, and an answer with `prompt_logprobs`, what the served model thinks of each token given those
        before it. Raises EngineError.
        """
        now = time.monotonic()
        up = [index for index in self.decoding if self.resting_until.get(index, 0.0) <= now]
        index = self._least_busy(up or self.decoding)
        sampling: dict[str, Any] = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        route, body = GENERATE, {"token_ids": token_ids, "sampling_params": sampling | {"detokenize": False}}
        if index in self.names:
            route, body = COMPLETIONS, {"model": self.names[index], "prompt": token_ids, **sampling}
        self.in_flight[index] += 1
        try:
            return self.urls[index], await self._ask(index, route, body, patient=False)
        except EngineError:
            # who answers nothing is the least busy; the longer it has made others wait the later it is asked again
            self.resting_until[index] = time.monotonic() + REST_S * max(1.0, time.monotonic() - now)
            raise
        finally:
            self.in_flight[index] -= 1

    def _redirects(self, url: str, place: str) -> UserError:
        place = urljoin(url, place).split(MODELS)[0]
        return UserError(
            f"{url} redirects to {place}.",
            where=f"{self.at}.urls",
            why="what is asked there would arrive without its body, or without the key",
            fix=f"{self.at}.urls=[{place}], if that is the server: http://HOST:PORT",
        )

    def _away(self, url: str, why: str, what: str = "does not answer") -> AwayError:
        return AwayError(
            f"{url} {what}.",
            where=f"{self.at}.urls",
            why=why,
            fix="start the server (python -m prl.inference, vllm serve, ...), or correct its address",
        )


def gave_nothing(inference: InferenceConfig, said: str) -> UserError:
    """Of an evaluation none of whose rollouts came to an end, for what its servers said: an AwayError, unless they
    refuse what they would refuse again.
    """
    urls, answered = ", ".join(inference.urls), re.search(r" by (\d\d\d)\b", said)  # the first: what follows is theirs
    what = f"{urls}: no rollout of the evaluation came to an end."
    status = answered[1] if answered and answered[1][0] in "34" else ""
    if status in ("401", "403"):
        fix = "inference.api_key_var=NAME of the environment variable that holds its API key"
        return UserError(what, where=f"inference.api_key_var={inference.api_key_var or 'null'}", why=said, fix=fix)
    if status and status not in ("408", "409", "425", "429"):
        fix = f"the address of a server that takes {COMPLETIONS} as OpenAI's does, without another before it"
        return UserError(what, where="inference.urls", why=said, fix=fix)
    fix = "look at the server's own log; the same command tries again, and a sweep's tries this point again"
    return AwayError(what, where="inference.urls", why=said, fix=fix)


def served_engines(config: InferenceConfig, renderer: ChatRenderer) -> ServedEngines:
    """Those of inference.urls; within an event loop."""
    assert COMPLETIONS in CLIENT_ROUTES
    return ServedEngines(config, renderer)
