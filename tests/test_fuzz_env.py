"""The websocket of an environment's worker: nothing that is said there ends it, or another rollout."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from env_serving import said, serving
from fuzzing import FEW, MANY, WORDS, Footprint, anything, many, numbers, object_of
from hypothesis import given
from hypothesis import strategies as st

from prl.envs.reverse_text import ReverseText

MESSAGES = object_of(
    {
        "op": st.sampled_from(["start", "assistant", "ended", "cancel", "hello", "reply", "done"]),
        "rollout": st.sampled_from(["0", "1", "x", *WORDS]),
        "split": st.sampled_from(["train", "held_out", "test"]),
        "index": st.integers(0, 5) | numbers,
        "content": st.text(max_size=20) | st.just("\ud800"),
        "finish_reason": st.sampled_from(["stop", "length", "abort"]),
        "prompt_tokens": st.integers(0, 9),
        "completion_tokens": st.integers(0, 9),
    }
) | st.dictionaries(st.sampled_from(["op", "rollout", "split"]), anything, max_size=3)
TEXTS = st.one_of(MESSAGES.map(json.dumps), st.text(max_size=30), st.just("[" * 5000), st.binary(max_size=30))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("requests", [FEW * 2, pytest.param(MANY, marks=pytest.mark.exhaustive)])
def test_an_environments_worker(requests: int) -> None:
    async def scenario() -> None:
        async with serving(ReverseText(max_chars=10)) as (worker, client, main), aiohttp.ClientSession() as session:
            before = Footprint.of()
            header = {"Authorization": f"Bearer {worker.ctx.keys.env}"}
            messages: list[str | bytes] = []

            @many(requests)
            @given(message=TEXTS)
            def collect(message: str | bytes) -> None:
                messages.append(message)

            collect()
            for first in range(0, len(messages), 100):
                async with session.ws_connect(f"{client.url}/ws", headers=header) as stranger:
                    for message in messages[first : first + 100]:
                        if isinstance(message, bytes):
                            await stranger.send_bytes(message)
                        else:
                            await stranger.send_str(message.encode(errors="replace").decode())
                    await stranger.send_str(
                        json.dumps({"op": "start", "rollout": "last", "split": "train", "index": 0})
                    )
                    while json.loads((await stranger.receive(60)).data).get("rollout") != "last":
                        pass
            assert client.socket is not None
            before_it, _ = client.socket, await client.socket.close()  # the worker talked to the stranger last
            async with asyncio.timeout(60):
                while client.socket is before_it or not client.connected.is_set():
                    await asyncio.sleep(0.02)
            task, score = await client.run("train", 1, answer)
            assert task
            assert 0 <= score.reward <= 1
            assert not main.done()
            assert not worker.running, "rollouts of who has left are cancelled"
            assert not worker.chats
            assert Footprint.of().fds <= before.fds + 2

    async def answer(messages, keep, tools):
        return said("x")

    asyncio.run(scenario())
