"""The orchestrator's client of the inference engines: vLLM's own routes, whatever engine answers them."""

from __future__ import annotations

import asyncio
import base64
import io
import os
from typing import Any

import aiohttp
import numpy as np

from prl.config.schema import InferenceConfig, SamplingConfig
from prl.orchestrator.rollout import Generation

# running requests keep their KV: vLLM would drop it with the caches, and compute it anew under the next weights
PAUSE = "/pause?mode=keep&clear_cache=false"
HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


class EngineError(RuntimeError):
    """An engine refused or failed; the message names the route, the status and the engine's own words."""


class EnginePool:
    """All replicas. A new request goes to the replica with the fewest of ours in flight."""

    def __init__(self, urls: list[str], config: InferenceConfig, token: str) -> None:
        key = os.environ[config.api_key_var] if config.api_key_var else token
        self.urls, self.config = urls, config
        self.session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"},
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=config.request_timeout_s),
        )
        self.in_flight = [0] * len(urls)
        self.sleep_level = config.sleep_level
        self.version = 0  # that all replicas are known to serve

    async def close(self) -> None:
        await self.session.close()

    async def wait_healthy(self, timeout_s: float) -> None:
        """Wait until every replica answers /health. Raises EngineError after timeout_s."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        for url in self.urls:
            while True:
                try:
                    # an engine that does not answer while it loads keeps the connection
                    async with self.session.get(f"{url}/health", timeout=HEALTH_TIMEOUT) as response:
                        if response.status == 200:
                            break
                except (aiohttp.ClientError, TimeoutError):
                    pass
                if asyncio.get_running_loop().time() > deadline:
                    raise EngineError(f"{url}/health: not ready after {timeout_s:.0f} s")
                await asyncio.sleep(0.05)

    # --- sampling -----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: list[int],
        max_tokens: int,
        seed: int,
        salt: str,
        sampling: SamplingConfig,
        request_id: str,
        replica: int | None = None,
    ) -> Generation:
        """One completion. `salt` separates prefix caches: requests with different salts never share KV."""
        index = min(range(len(self.urls)), key=self.in_flight.__getitem__) if replica is None else replica
        body = {
            "request_id": request_id,
            "token_ids": prompt_ids,
            "cache_salt": salt,
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "min_p": sampling.min_p,
                "max_tokens": max_tokens,
                "seed": seed,
                "stop_token_ids": list(sampling.stop_token_ids),
                "logprobs": 0,
                "detokenize": False,
            },
        }
        known = self.version
        self.in_flight[index] += 1
        try:
            reply = await self._post(self.urls[index], "/inference/v1/generate", body)
        finally:
            self.in_flight[index] -= 1
        generation = _parse_choice(reply["choices"][0], known)
        if self.config.return_routed_experts:
            _check_routing(generation, len(prompt_ids))
        return generation

    # --- control, always on all replicas ------------------------------------------------------------------------------

    async def everywhere(self, route: str, body: dict[str, Any] | None = None) -> None:
        await asyncio.gather(*(self._post(url, route, body) for url in self.urls))

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Once, before the first update."""
        await self.everywhere("/init_weight_transfer_engine", {"init_info": init_info})

    async def sleep(self) -> None:
        """Hand memory over to the trainer; running requests go on after the next update."""
        await self.everywhere(f"/sleep?level={self.sleep_level}&mode=keep")

    async def update_weights(self, version: int, update_info: dict[str, Any], asleep: bool = False) -> None:
        """Swap weights between two decoding steps; running requests keep their KV and go on.

        Engines that are asleep wake up; after level 2, which leaves no weights, nothing is generated before new ones.
        """
        partly = asleep and self.sleep_level == 2
        if asleep:
            await self.everywhere("/wake_up?tags=weights" if partly else "/wake_up")
        await self.everywhere(PAUSE)
        await self.everywhere("/start_weight_update", {})  # 0.23 wants a body
        await self.everywhere("/update_weights", {"update_info": update_info})
        await self.everywhere("/finish_weight_update", {"weight_version": str(version)})
        self.version = version
        if partly:
            await self.everywhere("/wake_up?tags=kv_cache")
        await self.everywhere("/resume")

    async def queued(self, replica: int) -> int:
        """Requests that a replica holds, waiting or running; also right while it is paused, unlike its metrics."""
        return int((await self._call("GET", self.urls[replica], "/load"))["server_load"])

    async def _post(self, url: str, route: str, body: dict[str, Any] | None) -> dict[str, Any]:
        return await self._call("POST", url, route, body)

    async def _call(self, method: str, url: str, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            async with self.session.request(method, url + route, json=body) as response:
                if response.status != 200:
                    raise EngineError(f"{url}{route}: {response.status}: {(await response.text())[:500]}")
                if response.content_type != "application/json":
                    return {}
                return await response.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(f"{url}{route}: {type(error).__name__}: {error}") from error


def _parse_choice(choice: dict[str, Any], known: int) -> Generation:
    """`known`: version served when the request was sent, and so at most that of any token; for what the engine leaves
    unlabelled.
    """
    content = (choice.get("logprobs") or {}).get("content") or []
    token_ids = choice["token_ids"] or []
    if len(content) != len(token_ids):
        raise EngineError(f"an engine returned {len(token_ids)} tokens but {len(content)} logprobs")
    versions = [known] * len(token_ids)
    for span in choice.get("weight_versions") or []:
        versions[span["start"] : span["end"]] = [int(span["version"])] * (span["end"] - span["start"])
    routed = choice.get("routed_experts")
    return Generation(
        token_ids=token_ids,
        logprobs=[entry["logprob"] for entry in content],
        versions=versions,
        finish_reason=choice["finish_reason"] or "stop",
        routed_experts=None if routed is None else np.load(io.BytesIO(base64.b64decode(routed)), allow_pickle=False),
    )


def _check_routing(generation: Generation, num_prompt: int) -> None:
    """Raises EngineError unless every token but the last, which was never forwarded, has a row of experts.

    A row too few would replay each choice on the wrong token, and no routing at all would silently be no replay.
    """
    if not generation.token_ids:  # aborted before its first token
        return
    expected = num_prompt + len(generation.token_ids) - 1
    routed = generation.routed_experts
    found = "no" if routed is None else f"{len(routed)} rows of"
    if routed is None or len(routed) != expected:
        raise EngineError(f"an engine returned {found} routed experts for {expected} forwarded tokens")
    if routed.shape[-1] > 1 and not routed.any():  # vLLM 0.23 with MoE kernels that route by themselves
        raise EngineError("an engine returned expert 0 throughout: its kernels do not record the routing")
