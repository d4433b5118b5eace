"""The package `openai` as a client of the built-in server."""

from __future__ import annotations

import threading
import time

import openai
import pytest
from inference_server import LIMIT_S, TOKEN, Client, running_server, slow_steps
from openai_requests import ASKED, check_completions, check_models_and_refusals, check_stream, make_client


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_server(["inference.max_model_len=128"], tmp_path_factory.mktemp("cache"), job="rl") as client:
        yield client


@pytest.fixture
def client(server: Client) -> openai.OpenAI:
    return make_client(server.port, TOKEN)


def test_completions(client):
    check_completions(client)


def test_streams(client):
    check_stream(client)


def test_models_and_refusals(client):
    check_models_and_refusals(client)


@pytest.mark.parametrize("wish", [{"stop": ["\n"]}, {"top_logprobs": 2}, {"tools": [{"type": "function"}]}], ids=str)
def test_what_the_engine_does_not_have_is_refused_by_name(client, wish):
    with pytest.raises(openai.BadRequestError, match=f"does not have {next(iter(wish))}.*inference=vllm"):
        client.chat.completions.create(**ASKED, **wish)
    with pytest.raises(openai.BadRequestError, match=next(iter(wish))):
        client.chat.completions.create(**ASKED, **wish, stream=True)


def test_the_first_tokens_of_a_stream_come_before_the_last(client, server):
    """And who hangs up takes the generation along."""
    with slow_steps():
        stream = client.chat.completions.create(
            **{**ASKED, "max_tokens": 120}, stream=True, extra_body={"ignore_eos": True, "return_token_ids": True}
        )
        pieces = [piece for chunk in (next(stream) for _ in range(2)) for piece in chunk.choices]
        assert 0 < len(pieces[1].token_ids) < 120
        assert pieces[1].finish_reason is None
        server.until("num_requests_running", 1)
        stream.close()
        server.until("num_requests_running", 0)


def test_a_stream_waits_while_the_engine_is_paused(client, server):
    whole = client.chat.completions.create(**ASKED).choices[0].message.content
    server.post("/pause?mode=keep")
    text: list[str] = []

    def read() -> None:
        for chunk in client.chat.completions.create(**ASKED, stream=True):
            text.extend(choice.delta.content or "" for choice in chunk.choices)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    time.sleep(0.2)
    assert "".join(text) == ""
    server.post("/resume")
    reader.join(LIMIT_S)
    assert "".join(text) == whole
