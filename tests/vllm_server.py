"""`python -m prl.inference inference=vllm` as a process, and the orchestrator's own client of it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from inference_server import TOKEN, HttpClient
from runs import finish, start
from torch import Tensor
from weight_updates import published

from prl.config import compose
from prl.config.schema import RunConfig, SamplingConfig
from prl.models.checkpoints.reading import load_model
from prl.models.checkpoints.writing import hf_tensors
from prl.models.layers.decoder import Decoder
from prl.models.layers.packed_attention import packed_attention
from prl.orchestrator.engines.generation import Generation
from prl.orchestrator.engines.pool import EnginePool
from prl.planning import make_plan
from prl.runtime.process.keys import RunKeys
from prl.transport.kinds import PREFETCHED
from prl.transport.weights import Publisher
from prl.transport.weights_files import FilesystemPublisher

T = TypeVar("T")
KEY_VAR = "PRL_TEST_KEY"
PROMPT = [258, *b"hello", 256, 259]
PLAIN = SamplingConfig()


@dataclass
class Server:
    """A running `python -m prl.inference`; `http` asks its last engine."""

    process: psutil.Process
    run_dir: Path
    config: RunConfig
    http: HttpClient
    ports: list[int]
    kinds: list[str]
    version: int = 0

    def with_pool(self, work: Callable[[EnginePool], Awaitable[T]]) -> T:
        """Work with the orchestrator's own client."""

        async def scenario() -> T:
            urls = [f"http://127.0.0.1:{port}" for port in self.ports]
            pool = EnginePool(
                urls, self.config.inference, RunKeys(generate="another", control=self.http.control), self.kinds
            )
            pool.version = self.version
            try:
                return await work(pool)
            finally:
                await pool.close()

        return asyncio.run(scenario())

    def sample(self, prompt: list[int] = PROMPT, max_tokens: int = 24, salt: str | None = None,
               sampling: SamplingConfig = PLAIN) -> Generation:  # fmt: skip
        salt = f"train-{self.version}" if salt is None else salt
        return self.with_pool(lambda pool: pool.generate(prompt, max_tokens, 3, salt, sampling, "r"))

    def file_publisher(self) -> Publisher:
        """Where this server takes weights from."""
        return FilesystemPublisher(self.run_dir / "weights", 2)

    def update(self, model: Decoder, publisher: Publisher) -> None:
        """A whole update, as trainer and orchestrator make it."""
        info = published(publisher, self.version + 1, hf_tensors(model))
        self.with_pool(lambda pool: self.take(pool, info))
        publisher.acknowledge()
        self.version += 1

    async def take(self, pool: EnginePool, info: dict[str, Any]) -> None:
        await pool.update_weights(self.version + 1, info)
        if info["type"] in PREFETCHED:
            assert "prefetch_weights" in pool.clock.seconds, "it was fetched while the engine stood still"

    def update_from_near(self, model: Decoder, publisher: Publisher) -> None:
        """As `update`, but once engines have brought it near nobody else has the version any more."""
        info = published(publisher, self.version + 1, hf_tensors(model))

        async def take(pool: EnginePool) -> None:
            await pool.prefetch(info)
            publisher.acknowledge()
            await self.take(pool, info)

        self.with_pool(take)
        self.version += 1


@contextmanager
def serving(overrides: list[str], cache_dir: Path, where: Path) -> Iterator[Server]:
    """One or more engines, up."""
    os.environ[KEY_VAR] = TOKEN
    given = [*overrides, f"cache_dir={cache_dir}", f"inference.api_key_var={KEY_VAR}"]
    config = compose(given, config_name="inference")
    process = start([*given, f"output_dir={where}/run"], where, "prl.inference")
    ports = announced_ports(process)
    kinds = [role.engine.kind for role in make_plan(config).servers()]
    server = Server(
        psutil.Process(process.pid),
        where / "run",
        config,
        HttpClient(ports[-1], (where / "run" / "control_key").read_text().strip()),
        ports,
        kinds,
    )
    try:
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        output = finish(process, 120).output
        server.http.pool.shutdown(wait=False, cancel_futures=True)
        print(output)


def announced_ports(process: subprocess.Popen[str]) -> list[int]:
    """Of all servers, in their order, once all are up."""
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if line.startswith("serving "):
            return [int(port) for port in re.findall(r"http://127\.0\.0\.1:(\d+)", line)]
    raise AssertionError("".join(said))


def other_model(path: Path, config: RunConfig, seed: int) -> Decoder:
    """Every weight far off those of any other seed."""
    model = load_model(path, config.model.card, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=generator), alpha=0.05)
    return model


@torch.no_grad()
def trainer_logprobs(model: Decoder, tokens: list[int], temperature: float = 1.0) -> Tensor:
    """[T, V], of the token that follows each."""
    length = len(tokens)
    hidden = model(torch.tensor(tokens), torch.arange(length), packed_attention([length], torch.device("cpu")))
    return torch.log_softmax(model.logits(hidden) / temperature, dim=-1)


def differences(model: Decoder, generation: Generation, prompt: list[int] = PROMPT, **kwargs) -> Tensor:
    """[completion tokens], |logprob of the engine - logprob of the trainer|."""
    ids = generation.token_ids
    ours = trainer_logprobs(model, prompt + ids, **kwargs)[len(prompt) - 1 : -1]
    return (ours[torch.arange(len(ids)), torch.tensor(ids)] - torch.tensor(generation.logprobs)).abs()
