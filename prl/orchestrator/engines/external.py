"""Engines that somebody else has started (inference.urls): leased for the run, watched, taken back in, given up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from typing import Any, NoReturn

import aiohttp

from prl.config.errors import AwayError, UserError
from prl.config.schema import RunConfig, SamplingConfig
from prl.orchestrator.engines.answers import EngineError
from prl.orchestrator.engines.generation import Generation
from prl.orchestrator.engines.pool import EnginePool
from prl.runtime.external import (
    ANSWER_S,
    LEASE,
    RENEW_S,
    RUN_HEADER,
    check_facts,
    command_of,
    held_by_other,
    keys_of,
    none_answers,
    read_answer,
    same_engine,
)
from prl.runtime.process.child import ChildContext
from prl.runtime.process.keys import RunKeys
from prl.transport.addresses import address_towards

log = logging.getLogger("prl.engines")

PATIENCE_S = 4 * ANSWER_S  # with an engine that takes connections and does not answer
ANSWER = aiohttp.ClientTimeout(total=ANSWER_S)


class ExternalPool(EnginePool):
    """As of a run's own engines. Every request names the run, so that an engine which was started again refuses it."""

    def __init__(self, config: RunConfig, run_id: str, life: str) -> None:
        generate, control = keys_of(config.inference)
        super().__init__(list(config.inference.urls), config.inference, RunKeys(generate=generate, control=control))
        self.session.headers[RUN_HEADER] = run_id
        self.life = life

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
        """As of the base class; KV that earlier runs have left in the engines is never found."""
        salt = f"{self.life}-{salt}"
        return await super().generate(
            prompt_ids, max_tokens, seed, salt, sampling, request_id, replica, telling, routing_start
        )

    def leave_out(self, index: int) -> None:
        """A replica that was not there when the run began."""
        self.serving[index] = False
        if not any(self.serving):
            self.any_serving.clear()


class ExternalEngines:
    """The leases of a run on its engines. `take` once, `follow` from then on, `release` at the end."""

    def __init__(self, ctx: ChildContext) -> None:
        self.config = ctx.plan.config
        life = secrets.token_hex(8)
        self.pool = ExternalPool(self.config, ctx.run_id, life)
        self.claim = {"run": ctx.run_id, "life": life, "host": socket.gethostname(), "weights": weights_of(ctx)}
        self.run_id, self.metrics = ctx.run_id, ctx.metrics
        count = len(self.pool.urls)
        self.grants: list[str | None] = [None] * count  # names of our leases; None of an engine that is left out
        self.answered = [time.monotonic()] * count
        self.told = [""] * count  # why each is left out, as it was said last
        self.timeout_s = self.config.deployment.start_timeout_s

    async def take(self) -> None:
        """Lease all engines that are there. Raises UserError for one that cannot serve this run, and for none."""
        deadline = time.monotonic() + self.timeout_s
        while not any(self.grants):
            for index, url in enumerate(self.pool.urls):
                with contextlib.suppress(EngineError):
                    self.grants[index] = await self._renew(index)
                    log.info("%s is leased for run %s", url, self.run_id)
            if not any(self.grants):
                if time.monotonic() > deadline:
                    raise none_answers(self.config.inference, self.timeout_s)
                await asyncio.sleep(RENEW_S)
        for index, grant in enumerate(self.grants):
            if grant is None:
                self.pool.leave_out(index)
                self._tell(index, "it has not answered yet")

    async def follow(self) -> None:
        """For ever. Raises UserError once no engine has answered for deployment.start_timeout_s, and for one that came
        back as another.
        """
        tasks = [asyncio.create_task(self._keep(index)) for index in range(len(self.pool.urls))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _keep(self, index: int) -> None:
        """Renew the lease on one engine; leave it out while it does not answer, and bring it up when it is back."""
        url = self.pool.urls[index]
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                grant = await self._renew(index)
            except UserError as error:  # another's now, or another engine: who started it may start the right one yet
                self._lose(index, _without_address(error.what, url), again=True)
                if self._are_away_for_good():
                    raise AwayError(error.what, where=error.where, why=error.why, fix=error.fix) from error
                continue
            except EngineError as error:
                is_silent = not isinstance(error.__cause__, aiohttp.ClientConnectorError)
                if is_silent and time.monotonic() - self.answered[index] < PATIENCE_S:
                    continue
                self._lose(index, error.why, again=True)
                if self._are_away_for_good():
                    raise none_answers(self.config.inference, self.timeout_s) from error
                continue
            if grant != self.grants[index]:
                self._lose(index, "it was started again, or our lease had run out")
                self.grants[index] = grant
            if not self.pool.serving[index] and index not in self.pool.returned:
                log.info("%s is back, and gets the weights of version %d", url, self.pool.version)
                # while others renew their leases; one that dies meanwhile is found by its next renewal
                bringing = asyncio.create_task(self.pool.readmit(index, self.timeout_s))
                try:
                    while not bringing.done():
                        await asyncio.wait([bringing], timeout=RENEW_S)
                        with contextlib.suppress(EngineError, UserError):
                            if await self._renew(index) != self.grants[index]:
                                break
                finally:
                    if not bringing.done():
                        bringing.cancel()
                if bringing.done() and not bringing.cancelled() and (failure := bringing.exception()) is not None:
                    if not isinstance(failure, EngineError):
                        raise failure
                    log.warning("%s could not be brought up: %s", url, failure.why)
                    self._tell(index, f"it is back, but does not take the weights of the run: {failure.why}")
                elif bringing.done() and not bringing.cancelled():
                    self._tell(index, "")

    def _are_away_for_good(self) -> bool:
        """Whether none could serve for deployment.start_timeout_s."""
        return time.monotonic() - max(self.answered) > self.timeout_s

    def _lose(self, index: int, why: str, again: bool = False) -> None:
        """`again`: tell of one that is left out already, if it is for something else now."""
        if self.grants[index] is None:
            if again and self.told[index] != why:
                self._tell(index, why)
            return
        self.grants[index] = None
        log.warning("%s is left out: %s", self.pool.urls[index], why)
        self._tell(index, why)
        if not any(self.grants):  # those that were lost before wait for nobody else now
            for other, said in enumerate(self.told):
                if said and other != index:
                    self._tell(other, said)
        self.pool.lose(index)
        if self.config.algo.max_off_policy_steps == 0:
            self._end_synchronous(index)

    def _tell(self, index: int, why: str) -> None:
        """The root, and so whoever looks at the run, that an engine is left out, or (no reason) that it serves."""
        url, self.told[index] = self.pool.urls[index], why
        if why:
            now = f"the run waits for it, {self.timeout_s:.0f} s at most"
            if any(grant is not None for other, grant in enumerate(self.grants) if other != index):
                now = "the run goes on with the others, and takes it in again when it can serve"
            why = f"{why}; {now} (to start it: {command_of(url, self.config.inference, self.config)})"
        self.metrics.log(step=self.pool.version, engine=url, engine_lost=why)

    def _end_synchronous(self, index: int) -> NoReturn:
        raise AwayError(
            f"{self.pool.urls[index]} was lost, and a synchronous run cannot go on without it.",
            where="inference.urls, algo.max_off_policy_steps=0",
            why="with other engines it would compute other batches, and could not be repeated",
            fix="start the engine again, then the same command with its output_dir; or algo.max_off_policy_steps=1",
        )

    async def _renew(self, index: int) -> str:
        """Take or renew a lease: its name. Raises EngineError where none answers, UserError where it is
        another's, or another model's.
        """
        url = self.pool.urls[index]
        session, headers = self.pool.session, self.pool.control
        try:
            async with session.post(url + LEASE, json=self.claim, headers=headers, timeout=ANSWER) as response:
                status, text = response.status, await response.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError.of_silence(url, LEASE, error) from error
        if status >= 500:
            raise EngineError.of_status(url, LEASE, status, text)
        answer = read_answer(url, status, text, self.config.inference)
        if status == 409:
            raise held_by_other(url, answer["lease"] or {})
        check_facts(url, answer, self.config)
        self.answered[index] = time.monotonic()
        grant = str(answer["grant"])
        for other, granted in enumerate(self.grants):
            if other != index and granted == grant:
                raise same_engine(url, self.pool.urls[other])
        return grant

    async def release(self) -> None:
        """Give all engines up, unpaused."""
        await asyncio.gather(*(self._release(url) for url in self.pool.urls))

    async def _release(self, url: str) -> None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):  # else its lease runs out
            async with self.pool.session.delete(url + LEASE, headers=self.pool.control, timeout=ANSWER):
                pass


def _without_address(what: str, url: str) -> str:
    """A sentence about an engine, to be said after its address."""
    return what.replace(f"{url} ", "it ", 1).rstrip(".")


def weights_of(ctx: ChildContext) -> dict[str, Any]:
    """From where engines get this run's weights, as a lease says it."""
    transport = ctx.plan.config.weight_transport
    return {
        "transport": transport.type,
        "directory": str(ctx.run_dir.absolute() / "weights"),
        "hosts": [address_towards(ctx.plan.config.inference.urls, ctx.endpoints["rendezvous"].rsplit(":", 1)[0])],
        "timeout_s": transport.timeout_s,
    }
