"""The token side of one rollout: messages in, exactly the sampled tokens kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from prl.config.errors import UserError
from prl.config.schema import InferenceConfig
from prl.envs.protocol import Reply, Tool
from prl.models.chat import ChatRenderer, Message
from prl.orchestrator.rollout import Generation, Sample

Generate = Callable[[list[int], int], Awaitable[Generation]]  # (prompt ids, max_tokens) -> generation


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
        self.truncated = False

    async def reply(
        self, messages: list[Message], keep: int | None = None, tools: list[Tool] | None = None
    ) -> Reply | None:
        """The assistant's next turn after adding `messages`; None when turns or context are used up.

        Args:
            keep: how many of the earlier messages still stand in front of these; None: all of them.
            tools: what the chat template shows. Raises UserError when it does not.
        """
        if tools and not self.renderer.shows_tools(tools):
            raise UserError(
                "the chat template of this model does not show tools, or has them called otherwise than in <tool_call>",
                where="model.path, model.tokenizer",
                why="an environment offers tools",
                fix="a model whose template does, say model=qwen3_0_6b, or an environment without tools",
            )
        self.messages[len(self.messages) if keep is None else keep :] = messages
        if self.turns >= self.max_turns:
            return None
        sample = self._render_prompt(tools or [])
        if sample is None:
            self.truncated = True
            return None
        room = self.config.max_model_len - len(sample.input_ids)
        prompt_tokens = len(sample.input_ids)
        generation = await self.generate(sample.input_ids, min(room, self.config.sampling.max_tokens))
        if not generation.token_ids:
            raise RuntimeError(f"the engine returned no token (finish_reason={generation.finish_reason})")
        if self.turns == 0:
            self.prompt_tokens = prompt_tokens
        self.turns += 1
        self.completion_tokens += len(generation.token_ids)
        self.truncated |= generation.finish_reason == "length"
        sample.append_generation(generation)
        self.text += self.renderer.decode(generation.token_ids, skip_special_tokens=False)
        content = self.renderer.decode(generation.token_ids, skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": content})
        return Reply(content, generation.finish_reason, prompt_tokens, len(generation.token_ids))

    def _render_prompt(self, tools: list[Tool]) -> Sample | None:
        """The sample to go on with, its prompt appended; None, and nothing changed, when no token would fit behind
        it.
        """
        sample, text = self.samples[-1], self.text
        added = self.renderer.extend(text, self.messages, tools=tools)
        if added is None:
            sample, text = Sample(), ""
            added = self.renderer.text(self.messages, add_generation_prompt=True, tools=tools)
        ids = self.renderer.encode(added)
        if len(sample.input_ids) + len(ids) >= self.config.max_model_len:
            return None
        if sample is not self.samples[-1]:
            self.samples.append(sample)
        sample.append_prompt(ids)
        self.text = text + added
        return sample

    def finished_samples(self) -> list[Sample]:
        """The samples that hold at least one sampled token."""
        return [s for s in self.samples if any(s.loss_mask)]
