"""The orchestrator's client of the inference engines: vLLM's own routes, whatever engine answers them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import aiohttp

from prl.config.engines import EngineKind
from prl.config.schema import InferenceConfig, SamplingConfig
from prl.orchestrator.engines.answers import (
    EngineError,
    EngineLost,
    NoWeights,
    cached_tokens,
    check_kept,
    check_routing,
    parse_choice,
    read_whole,
)
from prl.orchestrator.engines.generation import Generation
from prl.orchestrator.engines.requests import GENERATE, PAUSE, files_missed, generate_body, update_steps
from prl.orchestrator.engines.socket import SamplingSocket
from prl.orchestrator.engines.turnstile import Turnstile
from prl.orchestrator.engines.update_clock import UpdateClock
from prl.planning.vllm_arguments import PREFILL_ONLY
from prl.runtime.process.keys import RunKeys, users_key
from prl.transport.answers import decode_answer, unframed
from prl.transport.kinds import HOST_TRANSPORTS, PREFETCH, PREFETCHED
from prl.transport.weights_lora import ADAPTER, LORA

HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
CLIENT_ROUTES = (GENERATE, "/v1/completions", "/load")  # all others want the control key
INIT_TRANSFER = "/init_weight_transfer_engine"
# routes that may be asked again when an answer is lost: done twice they do what they do once; a completion has its seed
REPEATABLE = (GENERATE, "/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache", INIT_TRANSFER, PREFETCH)
NOTICE_S = 10.0  # from an engine's failure to the supervisor's word that it was started again
RETRY_S = 0.2
AT_ONCE = 16  # requests that are sent in one turn of the event loop
NCCL = "nccl"  # type of the update_info of weights that nobody holds
TCP = "tcp"  # of those that the trainer serves


class EnginePool:
    """All replicas. A new request goes to the replica with the fewest of ours in flight.

    With a router, new requests go to it instead, but for those meant for one replica; control goes to all replicas.

    A replica that was started again (`lose`) is left out of everything until it has the weights of the others
    (`readmit`). What it was asked to generate is asked anew of whichever replica is there. Where trainers hold no
    weights for it, it waits for those that they publish next; so do all others, paused, when one died in an update.
    """

    def __init__(
        self,
        urls: list[str],
        config: InferenceConfig,
        keys: RunKeys,
        kinds: Sequence[EngineKind] | None = None,
        router: str | None = None,
        processes: Sequence[int] | None = None,
        by_socket: bool = False,
    ) -> None:
        """`kinds`: of each replica; None: all prefill and decode by themselves. `processes`: of each that hold weights,
        as far as it may be started again; None: one. `by_socket`: requests to sample go over one connection."""
        named = config.api_key_var
        key = users_key("inference.api_key_var", named, "API key of the engines") if named else keys.generate
        self.control = {"Authorization": f"Bearer {keys.control}"}
        self.urls, self.config, self.router = urls, config, router
        self.processes = processes or [1] * len(urls)
        kinds = kinds or ["both"] * len(urls)
        self.prefilling = [index for index, kind in enumerate(kinds) if kind == "prefill"]
        self.decoding = [index for index, kind in enumerate(kinds) if kind != "prefill"]
        self.session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),  # uvicorn closes idle ones after 5 s
            timeout=aiohttp.ClientTimeout(total=config.request_timeout_s),
        )
        self.sockets = [SamplingSocket(self.session, url, self._call) for url in urls] if by_socket else []
        self.in_flight = [0] * len(urls)
        self.sleep_level = config.sleep_level
        self.version = 0  # that all replicas are known to serve
        self.serving = [True] * len(urls)
        self.returned: set[int] = set()  # replicas that are up again and wait for the next weights
        self.taking: list[asyncio.Task[None]] = []  # what is left of an update in which a replica died
        self.interrupted = False  # such an update was the last: replicas have nonsense for weights, and are paused
        self.last_weights = False  # the trainer publishes nothing any more
        self.ended = [asyncio.Event() for _ in urls]  # one for each life of a replica
        self.any_serving = asyncio.Event()
        self.any_serving.set()
        self.updating = asyncio.Lock()  # nobody is readmitted between two versions
        self.asking, self.reading = Turnstile(AT_ONCE), Turnstile(1)  # a long answer takes milliseconds
        self.init_info: dict[str, Any] = {}
        self.newest: tuple[int, dict[str, Any]] | None = None  # version and update_info
        self.restarts = self.retried = 0  # replicas, requests
        self.aborted = 0  # requests that we gave up, or that an engine ended before they were done
        self.asleep = False
        self.sleeps = self.interruptions = 0  # so far; an update is an interruption, too
        self.clock = UpdateClock()

    async def close(self) -> None:
        await asyncio.gather(*(socket.close() for socket in self.sockets))
        await self.session.close()

    async def wait_healthy(self, timeout_s: float) -> None:
        """Wait until every replica, and the router, answers /health. Raises EngineError after timeout_s."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        for url in [*self.urls, *([self.router] if self.router else [])]:
            while not await self._is_healthy(url):
                if asyncio.get_running_loop().time() > deadline:
                    raise EngineError(f"{url}: it was not ready after {timeout_s:.0f} s (asked for /health)")
                await asyncio.sleep(0.05)

    async def _is_healthy(self, url: str) -> bool:
        try:
            # an engine that does not answer while it loads keeps the connection
            async with self.session.get(f"{url}/health", timeout=HEALTH_TIMEOUT) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    # --- replicas that die --------------------------------------------------------------------------------------------

    def lose(self, index: int, times: int = 1) -> None:
        """A replica was started again, so many times: what it was asked is gone, and it has old weights."""
        self.restarts += times
        self.serving[index] = False
        self.returned.discard(index)
        if self.sockets:
            self.sockets[index].leave()
        if not any(self.serving):
            self.any_serving.clear()
        ended, self.ended[index] = self.ended[index], asyncio.Event()
        ended.set()

    async def readmit(self, index: int, timeout_s: float) -> None:
        """Bring a replica that was started again to the newest weights, then let it serve.

        Weights that the trainer no longer holds are waited for: the next ones are on their way then. Where it never
        holds any, this is done once the replica waits for the next update. Raises EngineError after timeout_s, and
        NoWeights where the trainer has ended. Returns early when the replica dies once more.
        """
        ended = self.ended[index]
        deadline = asyncio.get_running_loop().time() + timeout_s
        why = f"it was not ready again after {timeout_s:.0f} s"
        error = EngineError(f"{self.urls[index]}: {why}", why=why)
        while not ended.is_set():
            if await self._is_healthy(self.urls[index]):
                try:
                    return await self._bring_up(index)
                except EngineLost:
                    return
                except EngineError as failure:
                    error = failure
            if asyncio.get_running_loop().time() > deadline:
                raise error
            await asyncio.sleep(RETRY_S)

    async def _bring_up(self, index: int) -> None:
        async with self.updating:
            await self._ask(index, INIT_TRANSFER, {"init_info": self.init_info}, patient=False)
            if self._is_unheld():
                self.returned.add(index)
                self._check_hope()
                return
            if self.newest is not None:
                for route, body in update_steps(*self.newest):
                    await self._ask(index, route, body, patient=False)
                await self._ask(index, "/resume", patient=False)
            self._admit(index)

    def _is_unheld(self) -> bool:
        """Whether nobody holds the newest weights: those of NCCL, and those that a trainer served that has ended."""
        kind = None if self.newest is None else self.newest[1].get("type")
        return kind == NCCL or (kind == TCP and self.last_weights)

    def _admit(self, index: int) -> None:
        self.returned.discard(index)
        self.serving[index] = True
        self.any_serving.set()

    def expect_no_weights(self) -> None:
        """The trainer has ended. Raises NoWeights, here or when an engine comes back, if none can serve any more."""
        self.last_weights = True
        self._check_hope()

    def _check_hope(self) -> None:
        if self.last_weights and self.starved:
            raise NoWeights("no engine has weights: one or more died in the last update or after it")

    @property
    def wants_weights(self) -> bool:
        """Whether a replica waits for the trainer to publish weights."""
        return bool(self.returned) or (self.interrupted and any(self.serving))

    @property
    def starved(self) -> bool:
        """Whether nothing can be generated until the trainer publishes weights."""
        return self.wants_weights and (self.interrupted or not any(self.serving))

    async def _ask(
        self, index: int, route: str, body: dict[str, Any] | None = None, patient: bool = True
    ) -> dict[str, Any]:
        """A POST to one replica, and once more if the answer was lost and doing it twice does no harm.

        Raises EngineLost when it is started again before it has answered.
        """
        try:
            return await self._ask_once(index, route, body, patient)
        except EngineError as error:
            if not error.lost or route.partition("?")[0] not in REPEATABLE:
                raise
        self.retried += 1
        return await self._ask_once(index, route, body, patient)

    async def _ask_once(self, index: int, route: str, body: dict[str, Any] | None, patient: bool) -> dict[str, Any]:
        """A POST to one replica. Raises EngineLost when it is started again before it has answered.

        While it is dead, connections to its port are neither answered nor refused, so only the supervisor's word ends
        the wait. The same word tells a failure that came of dying from another one; who is `patient` waits for it.
        """
        ended = self.ended[index]
        if self.sockets and route == GENERATE and body is not None:
            call = asyncio.ensure_future(self.sockets[index].ask(body))
        else:
            call = asyncio.ensure_future(self._call("POST", self.urls[index], route, body))
        end = asyncio.ensure_future(ended.wait())
        try:
            await asyncio.wait([call, end], return_when=asyncio.FIRST_COMPLETED)
            error = call.exception() if call.done() else None
            if isinstance(error, EngineError) and not (error.refused and route == GENERATE):
                await asyncio.wait([end], timeout=NOTICE_S if patient else 0)
            if ended.is_set():
                raise EngineLost(f"{self.urls[index]}: the engine died before it had answered {route}")
            return call.result()
        finally:
            call.cancel()
            end.cancel()

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
        telling: dict[str, Any] | None = None,
        routing_start: int = 0,
    ) -> Generation:
        """One completion. `salt` separates prefix caches: requests with different salts never share KV.
        `telling`: further sampling parameters, by which the engine says what each token was drawn from.
        `routing_start`: of how many tokens the experts are known already.

        Sampled again from the start when its replica dies, unless it was to be that replica and no other.
        """
        body = generate_body(prompt_ids, max_tokens, seed, salt, sampling, request_id, telling or {}, routing_start)
        through_router = self.router is not None and replica is None
        await self.asking.through()
        try:
            known, reply = await (self._ask_router(body) if through_router else self._ask_replica(body, replica))
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        await self.reading.through()
        generation = parse_choice(reply["choices"][0], known)
        generation.cached_tokens = cached_tokens(reply)
        if self.config.return_routed_experts:
            check_routing(generation, len(prompt_ids))
        if telling:
            check_kept(generation)
        self.aborted += generation.finish_reason == "abort"
        return generation

    async def _ask_replica(self, body: dict[str, Any], replica: int | None) -> tuple[int, dict[str, Any]]:
        """The version known when it was asked, and the answer: of one replica, or of whichever lives long enough."""
        while True:
            await self.any_serving.wait()
            known = self._name_weights(body)
            if self.prefilling:
                body["kv_transfer_params"] = await self._prefill(body)
            index = self._least_busy(self.decoding) if replica is None else replica
            self.in_flight[index] += 1
            try:
                return known, await self._ask(index, GENERATE, body)
            except EngineLost:
                if replica is not None:
                    raise
                self.retried += 1
            finally:
                self.in_flight[index] -= 1

    async def _ask_router(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """As `_ask_replica`. Asked again while it may only not know yet who died or got weights, or was restarted."""
        assert self.router is not None
        clock, deadline = asyncio.get_running_loop().time, None
        while True:
            await self.any_serving.wait()
            known = self._name_weights(body)
            try:
                return known, await self._call("POST", self.router, GENERATE, body)
            except EngineError as error:
                if not all(self.serving):
                    deadline = None
                elif deadline is None:
                    deadline = clock() + NOTICE_S
                if error.refused or (deadline is not None and clock() > deadline):
                    raise
            self.retried += 1
            await asyncio.sleep(RETRY_S)

    def _name_weights(self, body: dict[str, Any]) -> int:
        """Ask for the newest weights by their name, if they have one. Returns the version that all serve."""
        if self.newest is not None and self.newest[1].get("type") == LORA:
            body["model"] = ADAPTER
        return self.version

    async def _prefill(self, body: dict[str, Any]) -> dict[str, Any]:
        """Compute a prompt's KV on a prefill replica. Returns where a decode replica finds it, in vLLM's own terms."""
        index = self._least_busy(self.prefilling)
        once = {
            "sampling_params": unframed(body["sampling_params"]) | {"max_tokens": 1},
            "kv_transfer_params": PREFILL_ONLY,
        }
        self.in_flight[index] += 1
        try:
            reply = await self._ask(index, GENERATE, body | once)
        finally:
            self.in_flight[index] -= 1
        found = reply.get("kv_transfer_params")
        if not found:
            raise EngineError(f"{self.urls[index]}{GENERATE}: a prefill engine returned no place of its KV")
        return found

    def _least_busy(self, among: list[int]) -> int:
        serving = [index for index in among if self.serving[index]]
        return min(serving, key=self.in_flight.__getitem__)

    # --- control, always on all replicas ------------------------------------------------------------------------------

    async def everywhere(self, route: str, body: dict[str, Any] | None = None) -> None:
        """Those that were started again are left out; `readmit` gives them what they need."""
        await asyncio.gather(*(self._tell(index, route, body) for index in self._present()))

    def _present(self) -> list[int]:
        return [index for index, serving in enumerate(self.serving) if serving or index in self.returned]

    async def _tell(self, index: int, route: str, body: dict[str, Any] | None) -> None:
        with contextlib.suppress(EngineLost):
            await self._ask(index, route, body)

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Once, before the first update."""
        self.init_info = init_info
        await self.everywhere(INIT_TRANSFER, {"init_info": init_info})

    async def sleep(self) -> None:
        """Hand memory over to the trainer; running requests go on after the next update."""
        self.asleep = True
        self.sleeps += 1
        self.interruptions += 1
        await self.everywhere(f"/sleep?level={self.sleep_level}&mode=keep")

    async def update_weights(self, version: int, update_info: dict[str, Any], asleep: bool = False) -> bool:
        """Swap weights between two decoding steps; running requests keep their KV and go on.

        Engines that are asleep wake up; after level 2, which leaves no weights, nothing is generated before new ones.
        Returns whether engines have them: not if all are gone, nor if one died where it had to meet with others.
        """
        partly = asleep and self.sleep_level == 2
        self.clock.begin()
        await self.prefetch(update_info)
        async with self.updating:
            self.interruptions += 1
            if asleep:
                await self._timed("/wake_up?tags=weights" if partly else "/wake_up")
            self.newest = version, update_info
            complete = True
            if update_info.get("type") == NCCL:
                complete = await self._meet(version, update_info)
            else:
                with files_missed(update_info):
                    await self._load(update_steps(version, update_info), update_info.get("type") in HOST_TRANSPORTS)
            self.version = version
            if not complete:
                return False
            if partly:
                await self._timed("/wake_up?tags=kv_cache")
            await self._timed("/resume")
            self.clock.resumed()
            self.asleep = False
            takers = self._present()
            for index in takers:
                self._admit(index)
            return bool(takers)

    async def prefetch(self, update_info: dict[str, Any]) -> None:
        """Bring a version near while requests go on. Who does not know the route, or cannot, fetches it in the update,
        and says there what is wrong.
        """
        if update_info.get("type") not in PREFETCHED:
            return
        body = {"update_info": update_info, **self.init_info}

        async def ask(index: int) -> None:
            with contextlib.suppress(EngineError), self.clock.timed_alone(PREFETCH):
                await self._ask(index, PREFETCH, body, patient=False)

        await asyncio.gather(*map(ask, self._present()))

    async def _load(self, steps: list[tuple[str, dict[str, Any] | None]], held: bool) -> None:
        """An update whose weights lie ready. Where the trainer holds them, it begins anew if an answer is lost."""
        for is_last in (not held, True):
            try:
                for route, body in steps:
                    await self._timed(route, body)
                return
            except EngineError as error:
                if is_last or not error.lost:
                    raise
            self.retried += 1

    async def _meet(self, version: int, update_info: dict[str, Any]) -> bool:
        """An update for which trainer and engines meet: whether all that are present have it.

        Who died before is out by the time all others have paused, so the trainer need not wait for it. When one dies
        later, the others hang until the trainer withdraws, and are not to be resumed before the next update.
        """
        await asyncio.gather(*self.taking, return_exceptions=True)
        await self._timed(PAUSE)
        takers = self._present()
        absent = sum(count for index, count in enumerate(self.processes) if index not in takers)
        ends = [asyncio.create_task(self.ended[index].wait()) for index in takers]

        async def take(index: int) -> None:
            for route, body in update_steps(version, update_info | {"absent": absent})[1:]:
                with self.clock.timed_alone(route):
                    await self._ask(index, route, body, patient=False)

        self.taking = [asyncio.create_task(take(index)) for index in takers]
        try:
            await asyncio.gather(*self.taking)
            self.interrupted = False
        except EngineError:
            # of the dead one, or of another that lost it
            done, _ = await asyncio.wait(ends, timeout=NOTICE_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise
            self.interrupted = True
        finally:
            for end in ends:
                end.cancel()
        return bool(takers) and not self.interrupted

    async def _timed(self, route: str, body: dict[str, Any] | None = None) -> None:
        with self.clock.timed(route):
            await self.everywhere(route, body)

    # --- load ---------------------------------------------------------------------------------------------------------

    @property
    def standing_still(self) -> bool:
        """Whether some replica is being updated, or all are asleep, or paused by an update that a death ended."""
        return self.asleep or self.updating.locked() or self.interrupted

    async def scrape(self, index: int) -> str:
        """A replica's metrics, as Prometheus text. Raises EngineError, after 5 s at the latest."""
        url = f"{self.urls[index]}/metrics"
        try:
            async with self.session.get(url, timeout=HEALTH_TIMEOUT) as response:
                if response.status != 200:
                    raise EngineError(f"{url}: {response.status}", response.status)
                return await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError.of_silence(self.urls[index], "/metrics", error) from error

    async def queued(self, replica: int) -> int:
        """Requests that a replica holds, waiting or running; also right while it is paused, unlike its metrics."""
        return int((await self._call("GET", self.urls[replica], "/load"))["server_load"])

    async def _call(self, method: str, url: str, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            headers = None if route in CLIENT_ROUTES else self.control
            async with self.session.request(method, url + route, json=body, headers=headers) as response:
                if response.status != 200:
                    text = await response.text(errors="replace")
                    raise EngineError.of_status(url, route, response.status, text)
                if response.content_type == "application/json":
                    return await response.json()
                return decode_answer(await read_whole(response)) if route == GENERATE else {}
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError.of_silence(url, route, error) from error
