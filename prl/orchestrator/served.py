"""Models that are served already (inference.urls), for evaluations: asked as any client asks, and changed in nothing.

By /inference/v1/generate where a server has it (ours, vLLM), else by /v1/completions, with token ids for a prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import aiohttp

from prl.config.errors import UserError
from prl.config.schema import InferenceConfig, SamplingConfig
from prl.models.chat import ChatRenderer
from prl.orchestrator.engine_answers import EngineError
from prl.orchestrator.engines import CLIENT_ROUTES, GENERATE, EnginePool
from prl.orchestrator.rollout import Generation
from prl.runtime.process.keys import RunKeys

MODELS, COMPLETIONS = "/v1/models", "/v1/completions"
LOOK_S = 1.0
ANSWER = aiohttp.ClientTimeout(total=5.0)


class ServedEngines(EnginePool):
    """Replicas of one model, each asked in the way that it understands."""

    def __init__(self, config: InferenceConfig, renderer: ChatRenderer) -> None:
        super().__init__(list(config.urls), config, RunKeys())
        if config.api_key_var is None:
            del self.session.headers["Authorization"]
        self.renderer = renderer
        self.names: dict[int, str] = {}  # of replicas that are asked by COMPLETIONS: what they call their model

    async def wait_healthy(self, timeout_s: float) -> None:
        """Until each server has said what it serves. Raises UserError for one that does not, or not to us."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        for index, url in enumerate(self.urls):
            while (models := await self._models(url)) is None:
                if asyncio.get_running_loop().time() > deadline:
                    raise UserError(
                        f"{url} does not answer.",
                        where=f"inference.urls, deployment.start_timeout_s={timeout_s:g}",
                        why=f"{MODELS} gave no answer for {timeout_s:g} s",
                        fix="start the server (python -m prl.inference, vllm serve, ...), or correct its address",
                    )
                await asyncio.sleep(LOOK_S)
            self._check_length(url, models[0])
            if not await self._generates(url):
                self.names[index] = str(models[0].get("id"))

    async def _models(self, url: str) -> list[dict[str, Any]] | None:
        """What it serves; None while there is no answer."""
        try:
            async with self.session.get(url + MODELS, timeout=ANSWER) as response:
                status, text = response.status, await response.text(errors="replace")
                if status == 200:
                    models = (await response.json(content_type=None))["data"]
                    return [dict(model) for model in models] if models else None
        except (aiohttp.ClientConnectionError, TimeoutError):
            return None
        except (LookupError, TypeError, ValueError):
            status, text = 200, "no list of models"
        if status >= 500:
            return None
        where = f"inference.api_key_var={self.config.api_key_var or 'null'}"
        raise UserError(
            f"{url} does not take the key." if status in (401, 403) else f"{url} serves no models.",
            where=where if status in (401, 403) else "inference.urls",
            why=f"{MODELS}: {status}: {text[:200]}",
            fix="inference.api_key_var=NAME of the environment variable that holds its API key"
            if status in (401, 403)
            else "the address of a server with OpenAI's routes",
        )

    def _check_length(self, url: str, model: dict[str, Any]) -> None:
        """Of vLLM and ours, which say it."""
        length, wanted = model.get("max_model_len"), self.config.max_model_len
        if isinstance(length, int) and length < wanted:
            raise UserError(
                f"{url} takes {length} tokens (prompt and completion), the evaluation wants {wanted}.",
                where=f"inference.max_model_len={wanted}",
                why="an engine's context is set when it is started",
                fix=f"inference.max_model_len={length}, or start it with more",
            )

    async def _generates(self, url: str) -> bool:
        """Whether it knows our route: an empty request is refused where it does, and not found where it does not."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self.session.post(url + GENERATE, json={}, timeout=ANSWER) as response:
                return response.status not in (404, 405)
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
    ) -> Generation:
        """As of the base class. `seed` makes an answer repeatable where the server honours it."""
        index = self._least_busy(self.decoding)
        if index not in self.names:
            return await super().generate(prompt_ids, max_tokens, seed, salt, sampling, request_id, index, telling)
        body = {
            "model": self.names[index],
            "prompt": prompt_ids,
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed,
        }
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
        ids, reason = self.renderer.encode(choice["text"]), choice.get("finish_reason") or "stop"
        end = self.renderer.tokenizer.eos_token_id
        if reason == "stop" and isinstance(end, int):  # which is no text
            ids.append(end)
        if not ids:
            raise EngineError(f"{self.urls[index]}{COMPLETIONS}: an answer without text (finish_reason={reason})")
        return Generation(ids, [0.0] * len(ids), [0] * len(ids), reason, None)


def served_engines(config: InferenceConfig, renderer: ChatRenderer) -> ServedEngines:
    """Those of inference.urls; within an event loop."""
    assert COMPLETIONS in CLIENT_ROUTES
    return ServedEngines(config, renderer)
