"""Chat requests that fail: in the template, in their fields, and in the engine while they stream."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from inference_server import Client, running_server, slow_steps
from tiny import byte_tokenizer

from prl.inference import engine as engine_module
from prl.inference.chat_route import parse_messages, render
from prl.models.text.chat import ChatRenderer

CHAT = "/v1/chat/completions"
WITH_CALLS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name + '' }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
CALLS: dict[str, Any] = {
    "a number": 5,
    "an empty call": [{}],
    "a call without arguments": [{"function": {"name": "f"}}],
    "a name that is none": [{"function": {"name": 5, "arguments": {}}}],
}


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    tokenizer = byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    tokenizer.chat_template = WITH_CALLS
    return ChatRenderer(tokenizer)


@pytest.mark.parametrize("what", CALLS)
def test_whatever_the_template_stumbles_over_is_the_requests_fault(renderer: ChatRenderer, what: str) -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": CALLS[what]}
    with pytest.raises(ValueError, match="chat template"):
        render(renderer, parse_messages({"messages": [message]}))


def test_a_call_that_is_one_is_rendered(renderer: ChatRenderer) -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert bytes(render(renderer, parse_messages({"messages": [message]}))) == b"xf{}"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory):
    with running_server(["inference.max_model_len=128"], tmp_path_factory.mktemp("cache"), job="rl") as client:
        yield client


def chat(client: Client, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": True, **fields}
    return client.post(CHAT, body)


@pytest.mark.parametrize("options", [[1], "x", 5, {"include_usage": "x"}], ids=str)
def test_options_of_a_stream_that_are_none_are_refused(client: Client, options: Any) -> None:
    assert chat(client, stream=True, stream_options=options).status == 400


@pytest.mark.parametrize("name", ["stream", "logprobs", "return_token_ids"])
@pytest.mark.parametrize("value", ["false", 0, 1, []])
def test_what_is_neither_true_nor_false_is_refused(client: Client, name: str, value: Any) -> None:
    reply = chat(client, **{name: value})
    assert (reply.status, f"{name} must be true or false" in str(reply.body)) == (400, True)


def events(text: str) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line not in ("", "data: [DONE]")]


def test_a_stream_whose_sequence_fails_ends_with_an_error_event(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the engine, after that, is long busy with the others of its step, one by one."""
    draw, failed = engine_module.draw, threading.Event()

    def failing(distribution, table, positions):
        if 99 in table.seed.tolist() and (failed.is_set() or len(positions) == 2):
            failed.set()
            raise RuntimeError("a bug of this sequence")
        if failed.is_set() and len(positions) == 1:  # the other's turn
            time.sleep(0.2)
        return draw(distribution, table, positions)

    with slow_steps():
        bad = client.pool.submit(chat, client, seed=99, max_tokens=90, stream=True)
        client.until("num_requests_running", 1)
        good = client.start_generate("good", seed=1, max_tokens=100)
        client.until("num_requests_running", 2)
        monkeypatch.setattr(engine_module, "draw", failing)
    text = bad.result().body
    monkeypatch.undo()
    assert failed.is_set()
    assert good.result().status == 200
    *chunks, last = events(text)
    assert last["error"]["code"] == 500
    assert "a bug of this sequence" in last["error"]["message"]
    assert "[DONE]" not in text
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
