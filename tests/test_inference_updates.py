"""New weights for the built-in engine over its routes, and sleep without any: one server for all tests of this file."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from inference_server import Client, running_server, slow_steps
from weight_updates import published, update, weights

from prl.models.families.build import build_decoder
from prl.models.layers.decoder import Decoder
from prl.transport.weights import FilesystemPublisher, Publisher, SharedMemoryPublisher


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def client(cache_dir: Path) -> Iterator[Client]:
    with running_server([], cache_dir) as client:
        yield client


@pytest.fixture(autouse=True)
def clean(client: Client) -> Iterator[None]:
    """Every test leaves the server running, awake and idle."""
    yield
    assert not client.error, client.error
    assert client.get("/is_paused").body == {"is_paused": False}
    client.until("num_requests_running", 0)
    client.until("num_requests_waiting", 0)


@pytest.fixture
def mapping(cache_dir):
    """A server that takes weights by shared memory."""
    with running_server(["weight_transport=shared_memory"], cache_dir) as client:
        yield client


@pytest.mark.parametrize("paused", [False, True], ids=["running", "paused"])
def test_weights_are_swapped_in_flight(client: Client, paused: bool) -> None:
    swap(client, FilesystemPublisher(client.ctx.run_dir / "weights", 2), paused)


def test_weights_are_swapped_by_shared_memory(mapping: Client) -> None:
    swap(mapping, SharedMemoryPublisher(Path(mapping.ctx.shared_memory)), paused=False)


def swap(client: Client, publisher: Publisher, paused: bool) -> None:
    before = client.get("/weight_info").body["weight_version"]
    version = str(int(before) + 1)
    info = published(publisher, int(version), weights(client, seed=int(version)))
    with slow_steps():
        running = client.start_generate("a", max_tokens=240, n=4)
        client.until("num_requests_running", 4)
        if paused:
            client.post("/pause?mode=keep")
        update(client, info, version)
    publisher.acknowledge()
    assert client.get("/weight_info").body == {"weight_version": version}
    if paused:
        client.post("/resume")
    for choice in running.result().body["choices"]:
        old, new = choice["weight_versions"]
        assert (old["version"], old["start"]) == (before, 0)
        assert (new["version"], new["start"], new["end"]) == (version, old["end"], 240)
    fresh = client.generate("b", token_ids=[5, 6, 7], max_tokens=1, temperature=0).body["choices"][0]
    model = build_decoder(client.ctx.plan.config.model.card)
    model.init_weights(torch.Generator().manual_seed(int(version)))
    assert fresh["token_ids"] == [greedy(model, [5, 6, 7])]


def greedy(model: Decoder, ids: list[int]) -> int:
    from prl.models.layers.packed_attention import packed_attention

    with torch.no_grad():
        attend = packed_attention([len(ids)], torch.device("cpu"))
        return int(model.logits(model(torch.tensor(ids), torch.arange(len(ids)), attend))[-1].argmax())


def test_updates_out_of_order_or_damaged_change_nothing(client: Client) -> None:
    version = client.get("/weight_info").body
    assert client.post("/update_weights", {"update_info": {}}).status == 400
    assert client.post("/finish_weight_update").status == 400
    client.post("/start_weight_update")
    assert client.post("/finish_weight_update", {"weight_version": "99"}).status == 400  # nothing came
    client.post("/start_weight_update")
    info = published(FilesystemPublisher(client.ctx.run_dir / "weights", 2), 99, weights(client, 99))
    damaged = client.ctx.run_dir / "weights" / "step_99" / "model.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    reply = client.post("/update_weights", {"update_info": info})
    assert reply.status == 400
    assert "damaged" in reply.body["error"]["message"]
    gone = {"type": "filesystem", "path": str(client.ctx.run_dir / "weights/step_98"), "version": 98}
    for wrong in (
        gone,
        {"type": "filesystem", "path": 3, "version": 99},
        {"type": "shared_memory", "path": "/dev/null"},
        {"type": "x"},
    ):
        assert client.post("/update_weights", {"update_info": wrong}).status == 400, wrong
    assert client.post("/finish_weight_update", {"weight_version": "99"}).status == 400
    assert client.get("/weight_info").body == version
    assert client.generate().status == 200


def test_weights_that_came_near_are_loaded_though_nobody_has_them_any_more(client: Client) -> None:
    publisher = FilesystemPublisher(client.ctx.run_dir / "weights", 1)
    info = published(publisher, 60, weights(client, 60))
    assert client.post("/prefetch_weights", {"update_info": info}).status == 200
    assert client.get("/is_paused").body == {"is_paused": False}
    before = client.get("/weight_info").body
    shutil.rmtree(client.ctx.run_dir / "weights" / "step_60")
    assert client.post("/prefetch_weights", {"update_info": info}).status == 200, "it has them"
    assert client.get("/weight_info").body == before
    update(client, info, "60")
    fresh = client.generate("near", token_ids=[5, 6, 7], max_tokens=1, temperature=0).body["choices"][0]
    model = build_decoder(client.ctx.plan.config.model.card)
    model.init_weights(torch.Generator().manual_seed(60))
    assert fresh["token_ids"] == [greedy(model, [5, 6, 7])]
    assert client.post("/start_weight_update").status == 200
    assert client.post("/update_weights", {"update_info": info}).status == 400, "they were for one update"


def test_other_weights_than_those_asked_for_do_not_come_near(client: Client) -> None:
    publisher = FilesystemPublisher(client.ctx.run_dir / "weights", 2)
    first, second = (published(publisher, version, weights(client, version)) for version in (61, 62))
    assert client.post("/prefetch_weights", {"update_info": first}).status == 200
    update(client, second, "62")
    fresh = client.generate("far", token_ids=[5, 6, 7], max_tokens=1, temperature=0).body["choices"][0]
    model = build_decoder(client.ctx.plan.config.model.card)
    model.init_weights(torch.Generator().manual_seed(62))
    assert fresh["token_ids"] == [greedy(model, [5, 6, 7])]
    gone = first | {"version": 63, "path": first["path"].replace("61", "63")}
    for wrong in ({"update_info": gone}, {"update_info": {"type": "nccl"}}, {"update_info": 3}, {}):
        assert client.post("/prefetch_weights", wrong).status == 400, wrong


def test_level_2_sleep_refuses_to_generate_until_weights_come(client: Client) -> None:
    version = client.get("/weight_info").body["weight_version"]
    info = published(FilesystemPublisher(client.ctx.run_dir / "weights", 2), 1, weights(client, 1))
    assert client.post("/sleep?level=2").status == 200
    assert client.get("/is_sleeping").body == {"is_sleeping": True}
    assert client.generate().status == 503
    assert client.post("/wake_up?tags=weights").body == {"status": "sleeping", "tags": ["weights"]}
    assert client.generate().status == 503
    update(client, info, version)
    waiting = client.start_generate("a", temperature=0, max_tokens=1, token_ids=[5, 6, 7])
    client.until("num_requests_waiting", 1)  # no KV cache yet
    assert client.post("/wake_up?tags=kv_cache").body["status"] == "awake"
    model = build_decoder(client.ctx.plan.config.model.card)
    model.init_weights(torch.Generator().manual_seed(1))
    assert waiting.result().body["choices"][0]["token_ids"] == [greedy(model, [5, 6, 7])]


def test_level_1_sleep_keeps_running_requests_for_later(client: Client) -> None:
    undisturbed = client.generate("a", seed=3, max_tokens=150).body["choices"][0]["token_ids"]
    with slow_steps():
        running = client.start_generate("a", seed=3, max_tokens=150)
        client.until("num_requests_running", 1)
        client.post("/sleep?level=1")
    time.sleep(0.05)
    assert not running.done()
    client.post("/wake_up")
    assert running.result().body["choices"][0]["token_ids"] == undisturbed
    assert client.metric("num_preemptions_total") >= 1
