"""The token side of one rollout: messages in, exactly the sampled tokens kept."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Awaitable, Callable, Iterator

from prl.config.errors import UserError
from prl.config.schema import InferenceConfig
from prl.envs.protocol import Reply, Tool
from prl.models.text.chat import ChatRenderer, Message
from prl.orchestrator.engines.answers import EngineError
from prl.orchestrator.engines.generation import Generation
from prl.orchestrator.rollouts.rollout import RolloutFailed, Sample

LONG = 8_000  # characters of a text that is tokenised beside the event loop, which 110,000 would hold for 0.15 s
LONG_TOKENS = 2_000  # of a turn that is made into text there; 32,000 would hold it for 10 to 20 ms, twice

# (prompt ids, max_tokens, tokens whose experts are known) -> generation
Generate = Callable[[list[int], int, int], Awaitable[Generation]]


class Conversation:
    """Renders each turn's text, tokenises only what is new, and collects training samples.

    As long as the chat template appends, the whole conversation is one sample. Where it rewrites history, the sample
    so far is closed and a new one starts from the rewritten prompt. So it is where an environment rewrites messages.
    """

    def __init__(self, renderer: ChatRenderer, config: InferenceConfig, max_turns: int, generate: Generate) -> None:
        self.renderer, self.config, self.max_turns, self.generate = renderer, config, max_turns, generate
        self.messages: list[Message] = []
        self.samples: list[Sample] = [Sample()]
        self.text = ""  # what samples[-1] says, as text
        self.turns = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.asked_tokens = self.cached_tokens = 0  # of all turns' prompts; found in an engine's prefix cache
        self.truncated = False

    async def reply(
        self, messages: list[Message], keep: int | None = None, tools: list[Tool] | None = None
    ) -> Reply | None:
        """The assistant's next turn after adding `messages`; None when turns or context are used up.

        Args:
            keep: how many of the earlier messages still stand in front of these; None: all of them.
            tools: what the chat template shows. Raises UserError when it does not.
        """
        if tools:
            self._check_shown(tools)
        self.messages[len(self.messages) if keep is None else keep :] = messages
        if self.turns >= self.max_turns:
            return None
        rendered = await self._render_prompt(tools or [])
        if rendered is None:
            self.truncated = True
            return None
        sample, ids, text = rendered
        prompt_ids = [*sample.input_ids, *ids]
        prompt_tokens = len(prompt_ids)
        room = self.config.max_model_len - prompt_tokens
        generation = await self.generate(prompt_ids, min(room, self.config.sampling.max_tokens), sample.routed_tokens)
        if not generation.token_ids:
            raise EngineError(f"the engine returned no token (finish_reason={generation.finish_reason})")
        if sample is not self.samples[-1]:
            self.samples.append(sample)
        sample.append_prompt(ids)  # only now: a sample ends with what was sampled, however the rollout ends
        if self.turns == 0:
            self.prompt_tokens = prompt_tokens
        if generation.cached_tokens is not None:
            self.asked_tokens += prompt_tokens
            self.cached_tokens += generation.cached_tokens
        self.turns += 1
        self.completion_tokens += len(generation.token_ids)
        self.truncated |= generation.finish_reason == "length"
        sample.append_generation(generation)
        said, content = await self._decode(generation.token_ids)
        self.text = text + said
        self.messages.append({"role": "assistant", "content": content})
        return Reply(content, generation.finish_reason, prompt_tokens, len(generation.token_ids))

    async def _decode(self, token_ids: list[int]) -> tuple[str, str]:
        """With special tokens and without."""

        def both() -> tuple[str, str]:
            return self.renderer.decode(token_ids, False), self.renderer.decode(token_ids, True)

        return both() if len(token_ids) <= LONG_TOKENS else await asyncio.to_thread(both)

    def _check_shown(self, tools: list[Tool]) -> None:
        with _rendering("tools"):
            is_shown = self.renderer.shows_tools(tools)
        if not is_shown:
            raise UserError(
                "the chat template of this model does not show tools, or has them called otherwise than in <tool_call>",
                where="model.path, model.tokenizer",
                why="an environment offers tools",
                fix="a model whose template does, say model=qwen3_0_6b, or an environment without tools",
            )

    async def _render_prompt(self, tools: list[Tool]) -> tuple[Sample, list[int], str] | None:
        """The sample to go on with, the prompt's tokens behind it, and the text of both; None when no token would fit
        behind them. Raises RolloutFailed for messages that the chat template or the tokenizer refuses.
        """
        sample, text = self.samples[-1], self.text
        with _rendering("messages"):
            added = self.renderer.extend(text, self.messages, tools=tools) if text else None
            if added is None:
                sample, text = Sample() if text else sample, ""
                added = self.renderer.beginning(self.messages, tools)
            long = len(added) > LONG  # tokenizers let other threads run while they encode
            ids = await asyncio.to_thread(self.renderer.encode, added) if long else self.renderer.encode(added)
        if len(sample.input_ids) + len(ids) >= self.config.max_model_len:
            return None
        return sample, ids, text + added

    def end(self) -> None:
        """No turn follows. Who generates may hold the conversation, too: as a cycle, all tokens and experts would stay
        in memory until a full garbage collection, which holds the event loop the longer for it.
        """
        del self.generate

    def finished_samples(self) -> list[Sample]:
        """The samples that hold at least one sampled token."""
        return [s for s in self.samples if any(s.loss_mask)]


@contextlib.contextmanager
def _rendering(what: str) -> Iterator[None]:
    """A template is a program, which may raise anything about what it dislikes; that is the environment's doing."""
    try:
        yield
    except Exception as error:
        text = f"the chat template or the tokenizer refuses the {what}: {type(error).__name__}: {error}"
        raise RolloutFailed(text, trace=traceback.format_exc()) from error
