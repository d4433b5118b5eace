"""The client that a `verifiers` environment asks for completions: a `Chat` behind that package's own interface.

Needs the package; `verifiers_env.py` imports this module only once it is known to be there.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from typing import Any

import verifiers as vf
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage, ToolCall, Usage

from prl.envs.protocol import Chat, ChatEnded, Message, Reply, Tool

MODEL = "policy"  # what environments are told that they talk to
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)  # the orchestrator checks that templates ask for it


class NotSupported(vf.Error):
    """The environment wants what a rollout here cannot give; the message names it."""


class ChatClient(Client):
    """One rollout's client. Tokens, log-probabilities and versions stay with the orchestrator, which answers `chat`."""

    def __init__(self, chat: Chat) -> None:
        super().__init__(chat)
        self.chat = chat
        self.said: dict[tuple[str, ...], str] = {}  # ids of a turn's tool calls -> the turn exactly as sampled

    def setup_client(self, config: Any) -> Chat:
        raise AssertionError("made from a chat, never from a ClientConfig")

    async def close(self) -> None:
        """Nothing to close: the chat ends with the rollout."""

    async def to_native_prompt(self, messages: Any) -> tuple[list[Message], dict[str, Any]]:
        return [self._to_message(message) for message in messages], {}

    def _to_message(self, message: Any) -> Message:
        """verifiers' message as ours. Raises NotSupported for what is not text."""
        calls = message.get("tool_calls") or []
        sampled = self.said.get(tuple(call.id for call in calls)) if calls else None
        if sampled is not None:
            return {"role": "assistant", "content": sampled}
        converted = {"role": "user" if message.role == "text" else message.role, "content": to_text(message.content)}
        if calls:  # an example's, not the policy's: for the chat template to write
            converted["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
                for call in calls
            ]
        return converted

    async def to_native_tool(self, tool: Any) -> Tool:
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        return {"type": "function", "function": function}

    async def get_native_response(
        self,
        prompt: list[Message],
        model: str,
        sampling_args: dict[str, Any],
        tools: list[Tool] | None = None,
        **kwargs: Any,
    ) -> tuple[Reply, bool]:
        if sampling_args:
            wishes = ", ".join(f"{key}={value!r}" for key, value in sampling_args.items())
            raise NotSupported(f"the environment asks for {wishes}; sampling is set by inference.sampling")
        try:
            return await self.chat.complete(prompt, tools), bool(tools)
        except ChatEnded as error:  # the context or the turns are used up: verifiers scores what there is
            raise vf.OverlongPromptError("no further reply: context or turns used up") from error

    async def raise_from_native_response(self, response: tuple[Reply, bool]) -> None:
        """An empty reply is one that can be scored, so nothing is wrong with any."""

    async def from_native_response(self, response: tuple[Reply, bool]) -> Any:
        reply, with_tools = response
        content, calls = split_calls(reply.content) if with_tools else (reply.content, [])
        if calls:
            self.said[tuple(call.id for call in calls)] = reply.content
        cut = reply.finish_reason == "length"
        used = reply.prompt_tokens, reply.completion_tokens
        return Response(
            id=f"chatcmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=MODEL,
            usage=Usage(prompt_tokens=used[0], reasoning_tokens=0, completion_tokens=used[1], total_tokens=sum(used)),
            message=ResponseMessage(
                content=content,
                finish_reason="length" if cut else "tool_calls" if calls else "stop",
                is_truncated=cut,
                tool_calls=calls or None,
            ),
        )


def split_calls(text: str) -> tuple[str, list[Any]]:
    """A turn's text without its tool calls, and these. What is no call by its form stays text."""
    calls: list[Any] = []

    def take(match: re.Match[str]) -> str:
        try:
            call = json.loads(match[1])
            name, arguments = call["name"], json.dumps(call["arguments"])
            calls.append(ToolCall(id=f"call-{uuid.uuid4().hex}", name=name, arguments=arguments))
        except (ValueError, KeyError, TypeError):  # no JSON, no such keys, no object, a name that is no string
            return match[0]
        return ""

    rest = CALL.sub(take, text)
    return (rest.strip() if calls else text), calls


def to_text(content: Any) -> str:
    """The text of a message's content: a string, none, or parts that are all text."""
    if isinstance(content, list):
        foreign = {str(part.get("type")) for part in content} - {"text"}
        if foreign:
            raise NotSupported(f"a message holds {', '.join(sorted(foreign))}; only text is supported")
        return "".join(str(part.get("text")) for part in content)
    return content or ""
