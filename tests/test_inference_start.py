"""The built-in server while it loads, and when its engine dies."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from inference_server import LIMIT_S, running_server
from runs import environment
from weight_updates import published, update, weights

from prl.config import compose
from prl.config.errors import UserError
from prl.inference import server
from prl.inference.isolation import MAX_FAILED_STEPS
from prl.models.checkpoints.sources import random_checkpoint
from prl.transport.weights import SharedMemoryPublisher

OVERRIDES = ["inference.return_routed_experts=true", "inference.api_key_var=PRL_TEST_KEY", "inference.max_num_seqs=32"]


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def test_health_is_503_while_loading_and_other_routes_wait(cache_dir, monkeypatch) -> None:
    go = threading.Event()
    load = server.load_engine

    def slow_load(*args):
        go.wait(LIMIT_S)
        return load(*args)

    monkeypatch.setattr(server, "load_engine", slow_load)
    with running_server([], cache_dir, wait=False) as client:
        assert client.get("/health", key=None).status == 503
        waiting = client.pool.submit(client.get, "/v1/models")
        time.sleep(0.1)
        assert not waiting.done()
        go.set()
        assert waiting.result(timeout=LIMIT_S).status == 200
        assert client.get("/health", key=None).status == 200


def test_what_an_engine_never_uses_is_not_imported(cache_dir) -> None:
    """Transformers take 0.6 s, torch's compiler with sympy 0.4 s, and sharded tensors more."""
    random_checkpoint(compose(["warm_start=none"]).model, cache_dir)  # made once, by transformers
    code = (
        "import sys; from prl.config import compose; from prl.inference.server import load_engine\n"
        f"load_engine(compose(['warm_start=none', 'cache_dir={cache_dir}']), None)\n"
        "print([name for name in ('sympy', 'torch.distributed.tensor', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_trainer_that_serves_nothing_imports_no_web_server() -> None:
    """It takes 0.25 s."""
    code = (
        "import sys, prl.trainer.loops.rl_loop, prl.trainer.loops.sft_loop\n"
        "print([name for name in ('aiohttp', 'transformers', 'wandb', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_an_engine_that_dies_fails_its_requests_and_ends_the_server_with_the_cause(cache_dir) -> None:
    with running_server(["weight_transport=shared_memory"], cache_dir) as client:
        broken = [(name, torch.full_like(t, torch.nan)) for name, t in weights(client, 0)]
        info = published(SharedMemoryPublisher(Path(client.ctx.shared_memory)), 1, broken)
        update(client, info, "1")
        replies = [client.generate() for _ in range(MAX_FAILED_STEPS)]
        assert [reply.status for reply in replies] == [500] * (MAX_FAILED_STEPS - 1) + [503]
        assert all("weight version 1" in reply.body["error"]["message"] for reply in replies)
        deadline = time.monotonic() + LIMIT_S
        while not client.error and time.monotonic() < deadline:
            time.sleep(0.01)
        assert isinstance(client.error[0], RuntimeError)
        assert "not finite" in str(client.error[0])


def test_a_checkpoint_of_another_shape_is_a_user_error(cache_dir) -> None:
    small = compose(["model.card.hidden_size=64", f"cache_dir={cache_dir}"], config_name="inference").model
    path = random_checkpoint(small, cache_dir)
    with pytest.raises(UserError, match="hidden_size"):  # of what a warm start left; model.path planning has looked at
        server.load_engine(compose([f"cache_dir={cache_dir}"], config_name="inference"), str(path))
