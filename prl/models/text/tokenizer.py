"""Tokenizers: whatever the checkpoint brings, or the built-in byte-level one for models made here."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prl.config.errors import UserError
from prl.config.schema import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("prl")
BYTE = "byte"  # `model.tokenizer` of models made here
SPECIAL_TOKENS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|pad|>")  # ids 256, 257, ...
BYTES = 256
# in which checkpoints keep one
FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
# of tokenizer_config.json: what transformers 5 and 4 write of a tokenizer that is no model's own
PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def load_tokenizer(config: ModelConfig, path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of the run: model.tokenizer if it names one, else the one beside the weights at `path`; where there
    is none and it says byte, the byte-level one.
    """
    own = config.tokenizer not in (None, BYTE)
    if is_built_in(config, path):
        with tempfile.TemporaryDirectory() as place:
            save_byte_tokenizer(Path(place))
            tokenizer = _tokenizer_class(Path(place)).from_pretrained(place)
        check_ids(len(tokenizer) - 1, config, path)
        return tokenizer
    wanted = str(config.tokenizer) if own else str(path)
    try:
        tokenizer = _tokenizer_class(Path(wanted)).from_pretrained(wanted)
        if not tokenizer.encode("a b", add_special_tokens=False):  # as transformers makes one where there are no files
            raise ValueError("it has no vocabulary: the files of a tokenizer (tokenizer.json) are not there")
    except Exception as error:  # a dozen unrelated types for "not there", "no network" and "not a tokenizer"
        said = str(error).strip().splitlines() or [repr(error)]
        raise UserError(
            f"there is no tokenizer to be had at {wanted!r}",
            where="model.tokenizer" if own else "model.path",
            why=f"{type(error).__name__}: {said[0][:300]}",
            fix="model.tokenizer=/path/to/tokenizer or the name of one on the Hugging Face hub"
            + ("; model.tokenizer=byte" if config.path is None else ""),
        ) from error
    check_ids(int(tokenizer.vocab_size) - 1, config, path)  # of text; whether special tokens are used is seen later
    if config.tokenizer == BYTE and tokenizer.vocab_size != BYTES:
        log.warning(
            "model.tokenizer=byte is for models without a tokenizer; used is the one beside the weights: %s", path
        )
    return tokenizer


def eos_of(config: ModelConfig, path: Path) -> int | None:
    """`load_tokenizer(config, path).eos_token_id`, without transformers where the files say that they are all there is
    to the tokenizer.
    """
    if is_built_in(config, path):
        return BYTES  # the first of SPECIAL_TOKENS
    found = _plain_eos(path if config.tokenizer in (None, BYTE) else Path(str(config.tokenizer)))
    return load_tokenizer(config, path).eos_token_id if found is None else found


def _plain_eos(place: Path) -> int | None:
    """None where transformers must say it, or what is wrong."""
    if not (place / "tokenizer.json").is_file() or (place / "special_tokens_map.json").exists():
        return None
    try:
        said = _config_file(place)
        token = said.get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if said.get("tokenizer_class") not in PLAIN_CLASSES or not isinstance(text, str):
            return None
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(place / "tokenizer.json")).token_to_id(text)
    except Exception:  # as various as in `load_tokenizer`, which tells it
        return None


def _config_file(path: Path) -> dict[str, Any]:
    file = path / "tokenizer_config.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return found


def is_built_in(config: ModelConfig, path: Path) -> bool:
    """Whether the run's tokenizer is that of bytes and lies in no directory: the checkpoint at `path` brings none."""
    return config.tokenizer == BYTE and brings_none(path)


def brings_none(path: Path) -> bool:
    """Whether a checkpoint has no tokenizer."""
    return path.is_dir() and not any((path / name).is_file() for name in FILES) and not any(path.glob("*.tiktoken"))


def check_ids(largest: int, config: ModelConfig, path: Path) -> None:
    """Raise UserError if the model has no embedding for a token of the tokenizer's.

    Args:
        largest: the largest number of a token that it may come to.
    """
    vocab, own = config.card.vocab_size, config.tokenizer not in (None, BYTE)
    if largest >= vocab:
        raise UserError(
            f"The tokenizer has a token {largest}, and the model {vocab} tokens (0 to {vocab - 1}).",
            where=f"model.tokenizer={config.tokenizer}" if own else f"tokenizer.json and vocab_size in {path}",
            why="each token needs its row of the embedding",
            fix="model.tokenizer=/path/to/the/model's/own"
            + ("" if own else "; or model.path=, a checkpoint with embeddings for the tokenizer beside it"),
        )


def check_template(tokenizer: PreTrainedTokenizerBase, config: ModelConfig, path: Path) -> None:
    """Raise UserError where conversations cannot be written: a base model's tokenizer has no chat template, and one
    with added tokens may write those that the model has not.
    """
    try:
        asked = [{"role": "user", "content": "?"}]
        text = str(tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # of some templates for this conversation; any is told where it is written
        if tokenizer.chat_template:
            return
        own = config.tokenizer not in (None, BYTE)
        raise UserError(
            "The tokenizer has no chat template.",
            where=f"model.tokenizer={config.tokenizer}" if own else str(path),
            why="rollouts and examples are conversations, and the template says how the model reads them",
            fix="model.tokenizer= the instruction-tuned model of the same vocabulary, or a copy of this one with a "
            "chat_template.jinja",
        ) from error
    check_ids(max(tokenizer.encode(text, add_special_tokens=False), default=0), config, path)


def _tokenizer_class(path: Path) -> type[Any]:
    """What reads the tokenizer; where its files say that they are all there is to it, AutoTokenizer and the 2.5 seconds
    in which it looks through every model of transformers are not needed.
    """
    if _config_file(path).get("tokenizer_class") in PLAIN_CLASSES:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def byte_characters() -> list[str]:
    """The printable stand-in for each byte value, as the byte-level pre-tokenizer of GPT-2 maps them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(extra)) for byte in range(256)]


def save_byte_tokenizer(path: Path) -> None:
    """Write a tokenizer whose ids 0-255 are the byte values, followed by the chat roles' special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {char: byte for byte, char in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(str(path))
