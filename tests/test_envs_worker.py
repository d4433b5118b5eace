"""The environment process and its client over a real websocket: what an environment does costs one rollout at most."""

import asyncio
import math
import sys
import threading

import aiohttp
import pytest
from env_serving import said, serving

from prl.envs.protocol import ChatEnded, Environment, Score, Task, user
from prl.envs.worker import MAX_STUCK_REWARDS, TooManyStuckRewards
from prl.orchestrator.rollouts.env_client import RolloutFailed

RELEASE = threading.Event()  # ends hanging rewards when a test is over


@pytest.fixture(autouse=True)
def _release():
    yield
    RELEASE.set()
    RELEASE.clear()


class Misbehaving(Environment):
    """What goes wrong is the task's own prompt."""

    KINDS = (
        *("fine", "raise", "stop", "exit", "nan", "none", "hang", "rollout raises", "not json", "wait"),
        *("text for a message", "cancelled", "leaves"),
    )

    def tasks(self, split):
        return [Task(f"{split}/{kind}", (user(kind),)) for kind in self.KINDS]

    async def rollout(self, task, chat):
        kind = task.prompt[0]["content"]
        if kind == "rollout raises":
            raise LookupError("no such thing")
        if kind == "not json":
            await chat.reply({"role": "user", "content": {1, 2}})
        if kind == "text for a message":
            await chat.reply("hello")
        if kind == "cancelled":
            raise asyncio.CancelledError
        if kind == "leaves":
            sys.exit(4)
        if kind == "wait":
            await asyncio.sleep(3600)
        await chat.reply(*task.prompt)

    def reward(self, task, messages):
        kind = task.prompt[0]["content"]
        if kind == "raise":
            raise ZeroDivisionError("rewards divide by zero")
        if kind == "stop":
            return next(iter([]))
        if kind == "exit":
            sys.exit(3)
        if kind == "hang":
            RELEASE.wait(30)
        return {"nan": math.nan, "none": None}.get(kind, 0.25)


class Calculator(Environment):
    """Tool use: a reply that starts with "add" is answered by a tool message with the sum."""

    def tasks(self, split):
        return [Task(split, ({"role": "system", "content": "use add"}, user("3+4?")))]

    async def rollout(self, task, chat):
        reply = await chat.reply(*task.prompt)
        while reply.startswith("add "):
            total = sum(int(word) for word in reply.split()[1:])
            reply = await chat.reply({"role": "tool", "content": str(total)})

    def reward(self, task, messages):
        used = [m["content"] for m in messages if m["role"] == "tool"]
        return float(messages[-1]["content"] == "7") - 0.1 * len(used)


async def say_hello(messages, keep, tools):
    return said("hello")


def index_of(kind):
    return Misbehaving.KINDS.index(kind)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("raise", "ZeroDivisionError: rewards divide by zero"),
        ("stop", "StopIteration"),
        ("exit", "SystemExit: 3"),
        ("nan", "the reward is nan"),
        ("none", "the reward is None, not a number"),
        ("hang", "no reward after 2.0 s"),
        ("rollout raises", "LookupError: no such thing"),
        ("not json", r"messages\[0\].content is a set"),
        ("text for a message", r"messages\[0\] is a str"),
        ("cancelled", "CancelledError"),
        ("leaves", "SystemExit: 4"),
    ],
)
def test_a_misbehaving_rollout_fails_alone(kind, message):
    async def scenario():
        async with serving(Misbehaving(), reward_timeout_s=2) as (worker, client, main):
            assert client.counts == {"train": len(Misbehaving.KINDS), "held_out": len(Misbehaving.KINDS)}
            good = [client.run("train", 0, say_hello) for _ in range(3)]
            bad = client.run("held_out", index_of(kind), say_hello)
            *results, failure = await asyncio.gather(*good, bad, return_exceptions=True)
            assert results == [("train/fine", Score(0.25))] * 3
            with pytest.raises(RolloutFailed, match=message):
                raise failure
            assert await client.run("train", 0, say_hello) == ("train/fine", Score(0.25))
            assert not main.done()
            assert not worker.running
            assert not worker.chats
            assert not client.inbox

    asyncio.run(scenario())


def test_a_tool_using_environment():
    replies = iter(["add 3 4", "7"])
    seen = []

    async def answer(messages, keep, tools):
        seen.append(messages)
        return said(next(replies))

    async def scenario():
        async with serving(Calculator()) as (_, client, _main):
            assert await client.run("train", 0, answer) == ("train", Score(0.9))

    asyncio.run(scenario())
    assert [[m["role"] for m in messages] for messages in seen] == [["system", "user"], ["tool"]]
    assert seen[1][0]["content"] == "7"


def test_a_conversation_that_ends_is_scored_and_may_be_caught():
    class Endless(Environment):
        def tasks(self, split):
            return [Task("caught", (user("a"),)), Task("passed on", (user("b"),))]

        async def rollout(self, task, chat):
            try:
                while True:
                    await chat.reply(user("more"))
            except ChatEnded:
                if task.id == "passed on":
                    raise

        def reward(self, task, messages):
            return sum(m["role"] == "assistant" for m in messages)

    async def scenario():
        async with serving(Endless()) as (_, client, _main):
            for index, name in enumerate(["caught", "passed on"]):
                replies = iter(["x", "y", None])

                async def answer(messages, keep, tools, replies=replies):
                    reply = next(replies)
                    return said(reply) if reply else None

                assert await client.run("train", index, answer) == (name, Score(2.0))

    asyncio.run(scenario())


def test_what_the_orchestrator_cancels_ends_in_the_worker_too():
    async def scenario():
        async with serving(Misbehaving()) as (worker, client, _main):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.run("train", index_of("wait"), say_hello), 0.2)

            async def fail(messages, keep, tools):
                raise RuntimeError("the engine is gone")

            with pytest.raises(RuntimeError, match="the engine is gone"):
                await client.run("train", 0, fail)
            for _ in range(3000):
                if not worker.running:
                    break
                await asyncio.sleep(0.02)
            assert not worker.running
            assert not worker.chats

    asyncio.run(scenario())


def test_too_many_stuck_rewards_end_the_process():
    async def scenario():
        async with serving(Misbehaving(), reward_timeout_s=0.05) as (_, client, main):
            hangs = [client.run("train", index_of("hang"), say_hello) for _ in range(MAX_STUCK_REWARDS)]
            await asyncio.gather(*hangs, return_exceptions=True)
            with pytest.raises(TooManyStuckRewards, match="8 rewards of env/toy never returned"):
                await asyncio.wait_for(main, 60)

    asyncio.run(scenario())


def test_rewards_that_come_late_are_not_stuck():
    async def scenario():
        async with serving(Misbehaving(), reward_timeout_s=0.05) as (worker, client, main):
            for _ in range(2):
                hangs = [client.run("train", index_of("hang"), say_hello) for _ in range(MAX_STUCK_REWARDS - 1)]
                await asyncio.gather(*hangs, return_exceptions=True)
                assert len(worker.stuck) == MAX_STUCK_REWARDS - 1
                RELEASE.set()
                async with asyncio.timeout(60):
                    while worker.stuck:
                        await asyncio.sleep(0.02)
                RELEASE.clear()
            assert not main.done()

    asyncio.run(scenario())


def test_a_wrong_token_is_refused():
    async def scenario():
        async with serving(Misbehaving()) as (_, client, _main), aiohttp.ClientSession() as session:
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                async with session.get(f"{client.url}/ws", headers=headers) as response:
                    assert response.status == 401

    asyncio.run(scenario())


def test_a_lost_process_fails_its_rollouts_and_a_new_one_is_found():
    async def scenario():
        async with serving(Misbehaving()) as (worker, client, _main):
            waiting = asyncio.create_task(client.run("train", index_of("wait"), say_hello))
            while not worker.running:
                await asyncio.sleep(0.01)
            await worker.socket.close()
            with pytest.raises(RolloutFailed, match="went away"):
                await asyncio.wait_for(waiting, 60)
            assert await asyncio.wait_for(client.run("train", 0, say_hello), 60) == ("train/fine", Score(0.25))

    asyncio.run(scenario())
