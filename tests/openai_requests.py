"""What the package `openai` asks of a server of ours, the same for both engines."""

from __future__ import annotations

import openai
import pytest

MODEL = "tiny_qwen3_moe"
ASKED = {
    "model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 3, "temperature": 1.0
}  # fmt: skip
WITH_IDS = {"return_token_ids": True}


def make_client(port: int, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=60)


def check_completions(client: openai.OpenAI) -> None:
    """Token ids, log-probabilities, n, ends and usage of one request."""
    prompt_ids = [258, *b"hi", 256, 259]
    reply = client.chat.completions.create(**ASKED, n=2, logprobs=True, extra_body=WITH_IDS)
    assert reply.prompt_token_ids == prompt_ids
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert reply.choices[0].token_ids != reply.choices[1].token_ids
    for choice in reply.choices:
        assert len(choice.token_ids) == len(choice.logprobs.content) <= 12
        assert all(entry.logprob < 0 for entry in choice.logprobs.content)
        assert choice.finish_reason == ("length" if len(choice.token_ids) == 12 else "stop")
        assert isinstance(choice.message.content, str)
    total = sum(len(choice.token_ids) for choice in reply.choices)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt_ids), total)
    stop = reply.choices[0].token_ids[2]
    ended = client.chat.completions.create(**ASKED, n=2, extra_body={**WITH_IDS, "stop_token_ids": [stop]}).choices[0]
    assert (ended.finish_reason, ended.stop_reason, ended.token_ids[-1]) == ("stop", stop, stop)
    assert ended.logprobs is None


def check_stream(client: openai.OpenAI) -> None:
    """The pieces of a stream are the whole."""
    whole = client.chat.completions.create(**ASKED, n=2, logprobs=True, extra_body=WITH_IDS)
    chunks = list(
        client.chat.completions.create(
            **ASKED, n=2, logprobs=True, extra_body=WITH_IDS, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        pieces = [piece for chunk in chunks for piece in chunk.choices if piece.index == choice.index]
        assert pieces[0].delta.role == "assistant"
        assert "".join(piece.delta.content or "" for piece in pieces) == choice.message.content
        assert [token for piece in pieces for token in getattr(piece, "token_ids", None) or []] == choice.token_ids
        numbers = [entry.logprob for piece in pieces if piece.logprobs for entry in piece.logprobs.content]
        assert numbers == pytest.approx([entry.logprob for entry in choice.logprobs.content], abs=1e-4)
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [choice.finish_reason]


def check_models_and_refusals(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    with pytest.raises(openai.AuthenticationError, match="wrong or missing API key"):
        client.with_options(api_key="wrong").chat.completions.create(**ASKED)
    with pytest.raises(openai.NotFoundError, match="gpt"):
        client.chat.completions.create(**{**ASKED, "model": "gpt"})
    long = [{"role": "user", "content": "x" * 300}]
    with pytest.raises(openai.BadRequestError, match=r"maximum context length"):
        client.chat.completions.create(**{**ASKED, "messages": long})
