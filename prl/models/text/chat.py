"""Chat messages to tokens, turn by turn, without ever re-tokenising an earlier turn.

A conversation's tokens are only ever appended to: what the engine sampled stays exactly as sampled, and a new turn
adds the tokens of the text that the chat template puts behind it. Where a template rewrites history (one that drops
earlier reasoning, say), that exact-prefix property breaks, and `extend` says so by returning None.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prl.models.text.tokenizer import byte_characters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTE_OF = {char: byte for byte, char in enumerate(byte_characters())}
RECENT, REMEMBERED = 64, 8_000  # texts, and of how many characters at most, that are not worked out again
TOOL_CALL = "<tool_call>"  # how Qwen's and Hermes' models open one
Message = dict[str, Any]  # {"role": "system" | "user" | "assistant" | "tool", "content": str, ...}


class ChatRenderer:
    """A tokenizer's chat template as text and as tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._set(lambda: tokenizer)

    @classmethod
    def later(cls, load: Callable[[], PreTrainedTokenizerBase]) -> ChatRenderer:
        """One whose tokenizer is loaded, with transformers (0.6 s), when first wanted."""
        renderer = cls.__new__(cls)
        renderer._set(load)
        return renderer

    def _set(self, load: Callable[[], PreTrainedTokenizerBase]) -> None:
        self._load = load
        self._encoded = functools.lru_cache(RECENT)(self._encode)
        self._beginning = functools.lru_cache(RECENT)(self._begin)

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._load()

    @functools.cached_property
    def backend(self) -> Any:
        return backend_of(self.tokenizer)

    def text(
        self, messages: list[Message], add_generation_prompt: bool, tools: list[dict[str, Any]] | None = None
    ) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                messages,
                tools=tools or None,  # type: ignore[arg-type]  # transformers wants a list of its own union
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        )

    def shows_tools(self, tools: list[dict[str, Any]]) -> bool:
        """Whether the chat template says which tools there are, and to call them as JSON within <tool_call>."""
        asked: list[Message] = [{"role": "user", "content": ""}]
        return TOOL_CALL in self.text(asked, False, tools) and TOOL_CALL not in self.text(asked, False)

    def beginning(self, messages: list[Message], tools: list[dict[str, Any]]) -> str:
        """The text of a conversation's first prompt, which the rollouts of a group have in common."""
        try:
            said = json.dumps([messages, tools])
        except (TypeError, ValueError, RecursionError):
            return self.text(messages, True, tools)
        return self._beginning(said)

    def _begin(self, said: str) -> str:
        messages, tools = json.loads(said)
        return self.text(messages, True, tools)

    def encode(self, text: str) -> list[int]:
        return list(self._encoded(text)) if len(text) <= REMEMBERED else self._encode(text)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        if self.backend is not None:  # unlike its `decode` this lets other threads run
            return str(self.backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0])
        return str(
            self.tokenizer.decode(
                token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, in UTF-8; of a byte-level vocabulary that may be half a character."""
        piece = self.tokenizer.convert_ids_to_tokens(token_id)
        text = self.decode([token_id], skip_special_tokens=False)
        if "\ufffd" in text and isinstance(piece, str) and all(char in BYTE_OF for char in piece):
            return bytes(BYTE_OF[char] for char in piece)
        return text.encode()

    def extend(
        self,
        text: str,
        messages: list[Message],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
    ) -> str | None:
        """What `messages` adds behind `text`, the text already tokenised; None when it does not begin with that
        text.
        """
        whole = self.text(messages, add_generation_prompt, tools)
        return whole[len(text) :] if whole.startswith(text) else None


def backend_of(tokenizer: PreTrainedTokenizerBase) -> Any:
    """What decodes, where transformers adds nothing to it but the clean-up that nobody asks for here; else None."""
    from transformers import PreTrainedTokenizerFast

    kind, plain = type(tokenizer), PreTrainedTokenizerFast
    adds_nothing = all(getattr(kind, name, 0) is getattr(plain, name, 1) for name in ("decode", "_decode"))
    return tokenizer.backend_tokenizer if adds_nothing and isinstance(tokenizer, plain) else None


@dataclass
class MaskedSequence:
    """Tokens with the mask of those to train on, [T] each."""

    input_ids: list[int]
    loss_mask: list[bool]


def mask_by_role(renderer: ChatRenderer, messages: list[Message], loss_roles: tuple[str, ...]) -> list[MaskedSequence]:
    """Supervised sequences of one conversation, training on the turns of `loss_roles` (content and end-of-turn tokens).

    One sequence if the template only ever appends; otherwise one for each piece that does.
    """
    sequences: list[MaskedSequence] = []
    current, text = MaskedSequence([], []), ""
    for index, message in enumerate(messages):
        is_assistant, train_it = message["role"] == "assistant", message["role"] in loss_roles
        before = renderer.extend(text, messages[:index], add_generation_prompt=is_assistant) if index else ""
        if before is None or renderer.extend(text + before, messages[: index + 1], False) is None:
            sequences.append(current)
            current, text = MaskedSequence([], []), ""
            # a turn that is not trained needs no border: history may be rewritten because of this very turn
            known = messages[:index] if train_it else messages[: index + 1]
            before = renderer.text(known, add_generation_prompt=is_assistant and train_it)
        text += before
        turn = renderer.extend(text, messages[: index + 1], add_generation_prompt=False)
        if turn is None:  # a template that renders a last assistant turn unlike an earlier one
            raise ValueError("the chat template does not render a conversation as a prefix plus its last turn")
        for piece, train in ((before, False), (turn, train_it)):
            ids = renderer.encode(piece)
            current.input_ids += ids
            current.loss_mask += [train] * len(ids)
        text += turn
    sequences.append(current)
    for sequence in sequences:
        sequence.loss_mask[:1] = [False] * len(sequence.loss_mask[:1])  # nothing precedes the first token
    return [s for s in sequences if any(s.loss_mask)]
