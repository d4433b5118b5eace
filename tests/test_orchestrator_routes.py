"""The orchestrator's routes for the trainer, called as by a client whose first answer was lost: twice each."""

import asyncio
import socket
import threading
from types import SimpleNamespace

import aiohttp
import pytest
from test_orchestrator_publications import info, orchestrator_of

from prl.config import compose
from prl.orchestrator.server import start_server
from prl.runtime.directory.checkpoints import latest_valid, parts_of, staging_dir
from prl.trainer.loops import batches, rl_loop
from prl.trainer.loops.batches import BatchClient
from prl.trainer.loops.rl_loop import RLTrainer

TOKEN = "t"


def test_what_is_posted_twice_counts_once(tmp_path):
    async def scenario():
        async with orchestrator_of(run_dir=tmp_path) as (orchestrator, _, (engine,)):
            orchestrator.checkpoints.note(1, {"cursor": 7})
            (staging_dir(tmp_path, 1) / "trainer").mkdir()
            (staging_dir(tmp_path, 1) / "trainer" / "shard").write_bytes(b"weights")
            listener = socket.create_server(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            server = await start_server(orchestrator, listener, TOKEN)
            posts = {
                "/train/weights": {"publication": 2, "version": 1, "update_info": info(1)},
                "/train/checkpoint": {"step": 1, "in_haste": False},
                "/train/done": {"step": 1},
            }
            told = {route.resource.canonical for route in server.app.router.routes() if route.method == "POST"}
            assert told == set(posts), "a new route must be one that can be called twice"
            engine.log.clear()
            headers = {"Authorization": f"Bearer {TOKEN}"}
            async with aiohttp.ClientSession(url, headers=headers) as session:
                for route, body in posts.items():
                    for _ in range(2):
                        async with session.post(route, json=body) as answer:
                            assert answer.status == 200, await answer.text()
            client = BatchClient(url, TOKEN, lambda: None)
            while await asyncio.to_thread(client.commit_took, 1) is None:
                pass
            assert await asyncio.wait_for(orchestrator.checkpoint_committed(2, 0.1), 5) is None, "nobody asked for it"
            await orchestrator.publications.finish()
            assert engine.log.count("update_weights") == 1
            assert orchestrator.evaluated == [1]
            assert orchestrator.finished.is_set()
            assert orchestrator.error is None
            assert latest_valid(tmp_path, parts_of("rl"))[0] == 1
            assert orchestrator.checkpoints.load(1) == {"cursor": 7}
            await server.cleanup()

    asyncio.run(scenario())


def orchestrator_that(answers: bytes | None, *, leaves: bool) -> tuple[BatchClient, threading.Thread]:
    """It gives every POST these bytes, or closes the connection; `leaves`: after the first, and listens no more."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for _ in range(1 if leaves else 5):
            connection, _ = listener.accept()
            connection.recv(65536)
            if answers is not None:
                connection.sendall(answers)
            connection.close()
        listener.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return BatchClient(f"http://127.0.0.1:{listener.getsockname()[1]}", TOKEN, lambda: None), thread


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "PAUSE_S", 0.02)


def test_the_last_word_needs_no_answer_from_who_left_upon_it() -> None:
    client, thread = orchestrator_that(None, leaves=True)
    client.say_done(3)
    thread.join(5)
    with pytest.raises(OSError, match="no answer from the orchestrator"):
        client.post("/train/checkpoint", {"step": 3})


@pytest.mark.parametrize("answers", [None, b"HTTP/1.1 500 x\r\nContent-Length: 0\r\n\r\n"])
def test_the_last_word_is_an_error_where_somebody_listens_and_does_not_take_it(answers: bytes | None) -> None:
    client, _ = orchestrator_that(answers, leaves=False)
    with pytest.raises(OSError, match="/train/done"):
        client.say_done(3)


def test_the_last_word_waits_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that had its last answer late would ask an orchestrator that has left."""
    trainer, told = object.__new__(RLTrainer), []
    trainer.world = SimpleNamespace(is_main=True)
    trainer.config = compose(["max_steps=5"])
    trainer.saving = SimpleNamespace(end=lambda step, policy, wanted: None)
    trainer.policy = trainer.announced = trainer.publisher = None
    trainer.client = SimpleNamespace(say_done=lambda step: told.append("done"))
    monkeypatch.setattr(rl_loop, "meet", lambda: told.append("all are here"))
    trainer.end(3)
    assert told == ["all are here", "done"]
