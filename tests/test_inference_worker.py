"""The engine's thread without HTTP: what happens when calls meet at an awkward moment."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer
from tiny import END, byte_tokenizer, moe_card, random_model

from prl.config import compose
from prl.config.schema import InferenceConfig
from prl.inference import engine as engine_module
from prl.inference.engine import TorchEngine
from prl.inference.guard import Doors
from prl.inference.sampling import SamplingParams
from prl.inference.sequences import Request, Sequence
from prl.inference.server import build_app, eos_token_ids
from prl.inference.worker import EngineUnavailable, EngineWorker
from prl.models.text.chat import ChatRenderer
from prl.transport.sources import WeightSource

KEY = {"Authorization": "Bearer key"}
SOURCE = WeightSource("filesystem", "/nowhere", "/dev/shm/prl-none", (), 1.0)
MODEL = random_model(moe_card()).requires_grad_(False).eval()


@pytest.fixture(scope="module")
def renderer(tmp_path_factory) -> ChatRenderer:
    return ChatRenderer(byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def play(renderer) -> Callable[[Callable[[EngineWorker], Coroutine[Any, Any, None]]], None]:
    """Run a scenario against a fresh worker; nothing may reach the event loop's handler of forgotten errors."""

    def run(scenario: Callable[[EngineWorker], Coroutine[Any, Any, None]]) -> None:
        forgotten: list[dict[str, Any]] = []

        async def main() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: forgotten.append(context))
            engine = TorchEngine(MODEL, InferenceConfig(max_num_seqs=4, max_model_len=128), (END,))
            worker = EngineWorker(lambda: (engine, renderer), lambda: None)
            await worker.settled.wait()
            try:
                await asyncio.wait_for(scenario(worker), 120)
            finally:
                worker.stop()

        torch.set_num_threads(1)
        asyncio.run(main())
        assert not forgotten, forgotten

    return run


def request(name: str, max_tokens: int = 5, **changes: Any) -> Request:
    return Request(name, [1, 2, 3], SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True, **changes))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


class Gate:
    """A job that holds the engine's thread until it is opened."""

    def __init__(self, worker: EngineWorker) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self.future = asyncio.ensure_future(worker.run(self.hold))

    def hold(self) -> None:
        self.reached.set()
        assert self.opened.wait(120)


def test_a_pause_right_behind_a_resume_holds(play) -> None:
    async def scenario(worker: EngineWorker) -> None:
        running = asyncio.ensure_future(worker.generate(request("a", 100)))
        await until(lambda: len(worker.engine.running) == 1)
        await worker.pause("keep")
        gate = Gate(worker)
        await until(gate.reached.is_set)
        both = asyncio.gather(worker.resume(), worker.pause("keep"))
        await asyncio.sleep(0)  # both have been asked for before the engine's thread takes either
        gate.opened.set()
        await both
        assert worker.paused
        done = worker.engine.stats.generation_tokens
        await asyncio.sleep(0.1)
        assert worker.engine.stats.generation_tokens == done
        assert not running.done()
        await worker.resume()
        (sequence,) = await running
        assert sequence.num_generated == 100

    play(scenario)


def test_requests_in_prefill_count_as_running(play, monkeypatch) -> None:
    prefill, reached, go = engine_module.prefill, threading.Event(), threading.Event()

    def slow_prefill(*args: Any) -> Any:
        reached.set()
        assert go.wait(120)
        return prefill(*args)

    monkeypatch.setattr(engine_module, "prefill", slow_prefill)

    async def scenario(worker: EngineWorker) -> None:
        tasks = [asyncio.ensure_future(worker.generate(request(name, n=2))) for name in "abc"]
        await until(reached.is_set)
        running, waiting = worker.counts
        assert running in (2, 4, 6)  # those whose prefill it is
        assert running + waiting == 6
        go.set()
        await asyncio.gather(*tasks)
        assert worker.counts == (0, 0)

    play(scenario)


def test_a_request_cancelled_while_held_leaves_nothing_behind(play) -> None:
    async def scenario(worker: EngineWorker) -> None:
        await worker.pause("keep")
        gone = asyncio.ensure_future(worker.generate(request("a", n=3)))
        kept = asyncio.ensure_future(worker.generate(request("b")))
        await until(lambda: worker.counts == (0, 4))
        gone.cancel()
        await until(lambda: worker.counts == (0, 1))
        await worker.resume()
        (sequence,) = await kept
        assert sequence.finish_reason == "length"
        assert worker.engine.stats.finished == {"abort": 3, "length": 1}
        assert not worker.results
        assert not worker.held

    play(scenario)


def test_an_invalid_request_while_paused_is_refused_at_once_and_harms_no_other(play) -> None:
    async def scenario(worker: EngineWorker) -> None:
        await worker.pause("keep")
        good = [asyncio.ensure_future(worker.generate(request(name))) for name in "ac"]
        bad = Request("b", [10_000], SamplingParams())
        with pytest.raises(ValueError, match="token ids"):
            await worker.generate(bad)
        await worker.resume()
        assert [s.finish_reason for (s,) in await asyncio.gather(*good)] == ["length", "length"]
        assert not worker.results

    play(scenario)


def test_an_abort_that_comes_with_the_last_token_changes_nothing(play, monkeypatch) -> None:
    step, reached, go = TorchEngine.step, threading.Event(), threading.Event()

    def step_then_wait(engine: TorchEngine) -> list[Sequence]:
        finished = step(engine)
        if finished:
            reached.set()
            assert go.wait(120)
        return finished

    monkeypatch.setattr(TorchEngine, "step", step_then_wait)

    async def scenario(worker: EngineWorker) -> None:
        task = asyncio.ensure_future(worker.generate(request("a")))
        await until(reached.is_set)
        abort = asyncio.ensure_future(worker.abort(["a"]))  # asked for when the sequence has ended, not yet delivered
        await asyncio.sleep(0)
        go.set()
        await abort
        (sequence,) = await task
        assert (sequence.finish_reason, sequence.num_generated) == ("length", 5)
        assert worker.engine.stats.finished == {"length": 1}
        assert not worker.results

    play(scenario)


def test_more_completions_than_slots_all_come_and_can_be_aborted_half_way(play) -> None:
    async def scenario(worker: EngineWorker) -> None:
        assert [s.index for s in await worker.generate(request("a", n=11))] == list(range(11))
        task = asyncio.ensure_future(worker.generate(request("b", 100, n=11)))
        await until(lambda: worker.counts == (4, 7))
        assert await worker.abort(["b"]) == 1
        assert {s.finish_reason for s in await task} == {"abort"}
        assert worker.engine.cache.num_free == 4

    play(scenario)


def test_after_the_engines_death_everything_is_refused_and_nothing_hangs(play, monkeypatch) -> None:
    async def scenario(worker: EngineWorker) -> None:
        running = asyncio.ensure_future(worker.generate(request("a", 100)))
        await until(lambda: len(worker.engine.running) == 1)
        held_by = Gate(worker)
        await until(held_by.reached.is_set)
        monkeypatch.setattr(TorchEngine, "step", lambda engine: 1 // 0)
        held_by.opened.set()
        for call in (running, worker.generate(request("b")), worker.pause("wait"), worker.abort(None), worker.resume()):
            with pytest.raises(EngineUnavailable, match="ZeroDivisionError"):
                await call
        assert not worker.loaded
        assert not worker.results

    play(scenario)


def test_health_is_503_once_the_engine_is_dead_and_other_routes_say_why(play, monkeypatch) -> None:
    config = compose([], config_name="inference")

    async def scenario(worker: EngineWorker) -> None:
        async with TestClient(TestServer(build_app(worker, config, Doors(None, (b"key",)), SOURCE))) as client:
            assert (await client.get("/health")).status == 200
            monkeypatch.setattr(TorchEngine, "step", lambda engine: 1 // 0)
            with pytest.raises(EngineUnavailable):
                await worker.generate(request("a"))
            assert (await client.get("/health")).status == 503
            for call in (client.get("/metrics", headers=KEY), client.post("/resume", headers=KEY)):
                reply = await call
                assert reply.status == 503
                assert "ZeroDivisionError" in (await reply.json())["error"]["message"]

    play(scenario)


def test_eos_comes_from_tokenizer_and_generation_config(tmp_path: Path) -> None:
    assert eos_token_ids(7, tmp_path, 10) == (7,)
    assert eos_token_ids(None, tmp_path, 10) == ()
    for text, expected in (
        ('{"eos_token_id": [3, 7, 99]}', (7, 3)),  # 99 is beyond the vocabulary
        ('{"eos_token_id": 4}', (7, 4)),
        ('{"eos_token_id": null}', (7,)),
        ("{}", (7,)),
    ):
        (tmp_path / "generation_config.json").write_text(text)
        assert eos_token_ids(7, tmp_path, 10) == expected
