"""`python -m prl.bench.control_plane [--help]`: what the orchestrator carries, between made-up engines and trainers.

Engines are processes that answer at once, with random tokens and experts of the sizes asked for; trainers are processes
that fetch their batches and look at them. Between them are the real pool of engines, samples, packing, encoding and
routes, in this process, which is what is measured: trained tokens/s, its CPU time for a million of them, how long its
event loop was held at a time, and its memory. `--json` has the engines answer as JSON, with experts as base64.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from aiohttp import web

from prl.bench.arguments import parser_of, user_errors_told
from prl.bench.processes import Processes
from prl.config.arguments import a_count
from prl.config.schema import InferenceConfig, SamplingConfig
from prl.orchestrator.batching import EncodedStep, encode_step, release
from prl.orchestrator.engines.pool import EnginePool
from prl.orchestrator.loop_watch import LoopWatch
from prl.orchestrator.rollouts.producer import StepGroups
from prl.orchestrator.rollouts.rollout import Group, Rollout, Sample
from prl.orchestrator.server import start_server
from prl.runtime.process.collector import IN_SMALL_PIECES, Collector
from prl.runtime.process.keys import RunKeys
from prl.trainer.loops.batches import BatchClient
from prl.transport.answers import FRAMES, ROUTING_START, encode_answer
from prl.transport.frames import Message
from prl.transport.kept import encode_array
from prl.transport.serving import InPieces

KEY, VOCAB, EXPERTS = "bench", 150_000, 128
AHEAD = 2  # batches that may wait to be fetched
MILLION = 1e6


@dataclass
class Load:
    """One run of the bench."""

    engines: int
    trainers: int
    rollouts: int  # of a step
    steps: int
    in_flight: int
    prompt: int
    completion: int
    turns: int
    layers: int
    topk: int
    seq_len: int
    json: bool

    @property
    def longest(self) -> int:
        return self.prompt + self.completion


# --- engines ----------------------------------------------------------------------------------------------------------


def serve_engine(load: Load, port: Connection) -> None:
    """A process: answers at once."""
    rng = np.random.default_rng(0)
    routed = rng.integers(0, EXPERTS, (load.longest, load.layers, load.topk), dtype=np.uint8)
    ids = rng.integers(0, VOCAB, load.longest, dtype=np.int32)
    logprobs = -rng.random(load.longest, dtype=np.float32)

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        sampling, prompt = body["sampling_params"], len(body["token_ids"])
        count = sampling["max_tokens"]
        start = 0 if load.json else sampling["extra_args"].get(ROUTING_START, 0)
        experts = routed[start : prompt + count - 1]
        choice: dict[str, Any] = {
            "finish_reason": "stop",
            "token_ids": ids[:count].tolist() if load.json else ids[:count],
            "token_logprobs": logprobs[:count].tolist() if load.json else logprobs[:count],
            "routed_experts": encode_array(experts) if load.json else experts,
            "weight_versions": [{"version": "1", "start": 0, "end": count}],
            ROUTING_START: start,
        }
        answer = {"choices": [choice]}
        if load.json:
            return web.json_response(answer)
        assert sampling["extra_args"][FRAMES]
        return web.Response(body=InPieces(encode_answer(answer)))

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/inference/v1/generate", generate)
        listener = socket.create_server(("127.0.0.1", 0))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.SockSite(runner, listener).start()
        port.send(listener.getsockname()[1])
        await asyncio.Event().wait()

    asyncio.run(serve())


# --- trainers ---------------------------------------------------------------------------------------------------------


def train(load: Load, rank: int, port: int, _: Connection) -> None:
    """A process: fetches the batches of one data rank, and looks at each."""
    client = BatchClient(f"http://127.0.0.1:{port}", KEY, lambda: None)
    for step in range(1, load.steps + 1):
        batch = client.fetch(step, rank, 1)
        assert all(
            row.routed_experts is not None and row.routed_experts[-1].max() < EXPERTS for row in batch.micro_batches
        )


# --- the orchestrator between them ------------------------------------------------------------------------------------


@dataclass
class Plane:
    """What `make_app` serves, and who fills it."""

    load: Load
    pool: EnginePool
    ready: dict[int, EncodedStep] = field(default_factory=dict)
    fetched: dict[int, set[int]] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    outdated: list[EncodedStep] = field(default_factory=list)

    async def batch_for(self, step: int, data_rank: int, publications: int, timeout_s: float) -> Message:
        async with self.changed:
            await self.changed.wait_for(lambda: step in self.ready)
            message = self.ready[step].messages[data_rank]
            self.fetched[step].add(data_rank)
            if len(self.fetched[step]) == self.load.trainers:
                self.outdated.append(self.ready.pop(step))
                self.changed.notify_all()
            return message

    def fail(self, error: BaseException) -> None:
        raise error

    async def rollout(self, name: str) -> Rollout:
        """A conversation of several turns, as `Conversation` has it, without text."""
        load, sample, held = self.load, Sample(), list(range(self.load.prompt))
        for turn in range(load.turns):
            asked = [*sample.input_ids, *held]
            count, start = load.completion // load.turns - 1, 0 if load.json else sample.routed_tokens
            answer = await self.pool.generate(
                asked, count, 1, "s", SamplingConfig(), f"{name}-{turn}", routing_start=start
            )
            sample.append_prompt(held)
            sample.append_generation(answer)
            held = [1]
        done = sum(sample.loss_mask)
        return Rollout("made_up", name, 1.0, [sample], load.prompt, done, False, load.turns, advantage=1.0)

    async def feed(self) -> int:
        """All steps, one after another, rollouts of the next ones in flight meanwhile. Returns the trained tokens."""
        free, tokens = asyncio.Semaphore(self.load.in_flight), 0

        async def one(name: str) -> Rollout:
            async with free:
                return await self.rollout(name)

        collecting = [self._collect(step, one) for step in range(1, self.load.steps + 1)]
        for step, collect in enumerate(collecting, 1):
            groups = await collect
            tokens += sum(rollout.completion_tokens for group in groups.groups for rollout in group.finished)
            encoded = await asyncio.to_thread(
                encode_step, groups, self.load.seq_len, self.load.trainers, {"stop": False}
            )
            async with self.changed:
                await self.changed.wait_for(lambda: len(self.ready) < AHEAD)
                self.ready[step], self.fetched[step] = encoded, set()
                self.changed.notify_all()
            outdated, self.outdated = self.outdated, []
            await asyncio.to_thread(release, outdated)
        return tokens

    async def _collect(self, step: int, one: Any) -> StepGroups:
        done = await asyncio.gather(*(one(f"{step}-{index}") for index in range(self.load.rollouts)))
        return StepGroups(step, [Group(step, "made_up", len(done), list(done))])


async def carry(load: Load, processes: Processes, engine_ports: list[int]) -> dict[str, float]:
    urls, listener = [f"http://127.0.0.1:{port}" for port in engine_ports], socket.create_server(("127.0.0.1", 0))
    config = InferenceConfig(return_routed_experts=True, max_model_len=load.longest + 1)
    pool, watch = EnginePool(urls, config, RunKeys(generate=KEY, control=KEY)), LoopWatch()
    plane = Plane(load, pool)
    server = await start_server(plane, listener, KEY)  # type: ignore[arg-type]
    port = listener.getsockname()[1]
    trainers = [
        processes.started[processes.start(f"trainer {rank}", train, load, rank, port)] for rank in range(load.trainers)
    ]
    await plane.rollout("warm")  # connections
    Collector().begin(IN_SMALL_PIECES)  # as in a run
    watching = asyncio.create_task(watch.follow())
    before, started_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    feeding = asyncio.create_task(plane.feed())
    while not feeding.done() or any(trainer.is_alive() for trainer in trainers):
        processes.check()
        await asyncio.sleep(0.005)
    tokens = feeding.result()
    seconds, after = time.perf_counter() - started_s, resource.getrusage(resource.RUSAGE_SELF)
    watching.cancel()
    late_s, busy_s = watch.take()
    await server.cleanup()
    await pool.close()
    processes.check()
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "trained tokens/s": tokens / seconds,
        "orchestrator's CPU seconds for 1M tokens": cpu_s / tokens * MILLION,
        "event loop held for at most, ms": late_s * 1000,
        "and computing all the while, ms": busy_s * 1000,
        "orchestrator's peak memory, GiB": after.ru_maxrss / (1 << 20),
        "seconds": seconds,
    }


def measure(load: Load) -> dict[str, float]:
    """Start all processes, carry all steps, end them. Raises UserError when one has died."""
    with Processes("spawn") as processes:
        engines = [processes.start(f"engine {number}", serve_engine, load) for number in range(load.engines)]
        return asyncio.run(carry(load, processes, [processes.hear(index) for index in engines]))


def main() -> None:
    parser = parser_of("control_plane", __doc__)
    numbers = {
        "engines": 1, "trainers": 2, "rollouts": 16, "steps": 4, "in_flight": 4, "prompt": 1024, "completion": 31744,
        "turns": 1, "layers": 94, "topk": 8, "seq_len": 131072,
    }  # fmt: skip
    for name, value in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=a_count, default=value, help=f"default: {value}")
    parser.add_argument("--json", action="store_true", help="engines answer as JSON, for comparison")
    load = Load(**vars(parser.parse_args()))
    if load.completion < 2 * load.turns:
        parser.error(f"--turns {load.turns} --completion {load.completion}: a turn has two tokens or more")
    if load.longest > load.seq_len:
        parser.error(f"--seq-len {load.seq_len}: a rollout has {load.longest} tokens (--prompt and --completion)")
    with user_errors_told():
        result = measure(load)
    for figure, amount in result.items():
        print(f"{figure:<42}{amount:>14,.2f}")


if __name__ == "__main__":
    main()
