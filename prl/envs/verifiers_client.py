"""The client that a `verifiers` environment asks for completions: a `Chat` behind that package's own interface.

Needs the package; `verifiers_env.py` imports this module only once it is known to be there.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import verifiers as vf
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage, Usage

from prl.envs.protocol import Chat, ChatEnded, Message, Reply

MODEL = "policy"  # what environments are told that they talk to


class NotSupported(vf.Error):
    """The environment wants what a rollout here cannot give; the message names it."""


class ChatClient(Client):
    """One rollout's client. Tokens, log-probabilities and versions stay with the orchestrator, which answers `chat`."""

    def __init__(self, chat: Chat) -> None:
        super().__init__(chat)
        self.chat = chat

    def setup_client(self, config: Any) -> Chat:
        raise AssertionError("made from a chat, never from a ClientConfig")

    async def close(self) -> None:
        """Nothing to close: the chat ends with the rollout."""

    async def to_native_prompt(self, messages: Any) -> tuple[list[Message], dict[str, Any]]:
        return [to_message(message) for message in messages], {}

    async def to_native_tool(self, tool: Any) -> dict[str, Any]:
        raise NotSupported(f"the environment offers the tool {tool.name!r}; tools are not supported")

    async def get_native_response(
        self,
        prompt: list[Message],
        model: str,
        sampling_args: dict[str, Any],
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> Reply:
        if sampling_args:
            wishes = ", ".join(f"{key}={value!r}" for key, value in sampling_args.items())
            raise NotSupported(f"the environment asks for {wishes}; sampling is set by inference.sampling")
        try:
            return await self.chat.complete(prompt)
        except ChatEnded as error:  # the context or the turns are used up: verifiers scores what there is
            raise vf.OverlongPromptError("no further reply: context or turns used up") from error

    async def raise_from_native_response(self, response: Reply) -> None:
        """An empty reply is one that can be scored, so nothing is wrong with any."""

    async def from_native_response(self, response: Reply) -> Any:
        used = response.prompt_tokens, response.completion_tokens
        return Response(
            id=f"chatcmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=MODEL,
            usage=Usage(prompt_tokens=used[0], reasoning_tokens=0, completion_tokens=used[1], total_tokens=sum(used)),
            message=ResponseMessage(
                content=response.content,
                finish_reason="length" if response.finish_reason == "length" else "stop",
                is_truncated=response.finish_reason == "length",
            ),
        )


def to_message(message: Any) -> Message:
    """verifiers' message as ours. Raises NotSupported for what is not text."""
    role = "user" if message.role == "text" else message.role
    if message.get("tool_calls"):
        raise NotSupported("a message holds tool calls; tools are not supported")
    return {"role": role, "content": to_text(message.content)}


def to_text(content: Any) -> str:
    """The text of a message's content: a string, none, or parts that are all text."""
    if isinstance(content, list):
        foreign = {str(part.get("type")) for part in content} - {"text"}
        if foreign:
            raise NotSupported(f"a message holds {', '.join(sorted(foreign))}; only text is supported")
        return "".join(str(part.get("text")) for part in content)
    return content or ""
