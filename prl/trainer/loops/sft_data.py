"""Supervised data: conversations from a JSONL file, a Hugging Face dataset or a built-in environment, as packed
rows.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from prl.config.errors import UserError
from prl.config.hub import load_rows, why_not
from prl.config.packages import DATASETS
from prl.config.schema import SftConfig, SftDataConfig
from prl.envs.protocol import Split
from prl.models.text.chat import ChatRenderer, Message, mask_by_role
from prl.transport.batch import MicroBatch
from prl.transport.documents import Document
from prl.transport.packing import build_micro_batch

log = logging.getLogger("prl.trainer")


def load_conversations(data: SftDataConfig, split: Split) -> list[list[Message]]:
    """Conversations of one split ("train" or "held_out"). Raises UserError for a missing or malformed source."""
    if split == "held_out" and data.val_source is not None:
        return _read_source(data.val_source, data, "train")
    if data.source.startswith("env:"):
        return _read_source(data.source, data, split)
    everything = _read_source(data.source, data, "train")
    random.Random(0).shuffle(everything)
    if data.val_source is not None:
        return everything
    cut = len(everything) - max(1, round(len(everything) * data.val_fraction))
    return everything[:cut] if split == "train" else everything[cut:]


def _read_source(source: str, data: SftDataConfig, split: Split) -> list[list[Message]]:
    if source.startswith("env:"):
        from prl.envs.loading import load_env, told_with_keys

        with told_with_keys("sft.data.source", "sft.data.args"):
            env = load_env(source.removeprefix("env:"), data.args)
            return [env.demonstration(task) for task in env.tasks(split)]
    if source.endswith((".jsonl", ".json")):
        return _read_jsonl(Path(source))
    return _read_hf_dataset(source, data)


def _read_jsonl(path: Path) -> list[list[Message]]:
    if not path.is_file():
        raise UserError(
            "the dataset does not exist", where=f"sft.data.source={path}", fix="sft.data.source=/path/to/file.jsonl"
        )
    conversations = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):  # not splitlines: U+2028 is no line's end in JSON
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            text = line.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(
                "the dataset is not in UTF-8", where=where, why=str(error), fix=f"iconv -f ITS_ENCODING -t UTF-8 {path}"
            ) from error
        try:
            conversations.append(to_messages(json.loads(text)))
        except RecursionError as error:
            raise UserError("not a training example: nested too deeply", where=where, fix=_EXPECTED) from error
        except ValueError as error:
            raise UserError(f"not a training example: {error}", where=where, fix=_EXPECTED) from error
    if not conversations:
        raise UserError("the dataset is empty", where=str(path), fix=_EXPECTED)
    return conversations


def _read_hf_dataset(name: str, data: SftDataConfig) -> list[list[Message]]:
    try:
        import datasets  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"reading the Hugging Face dataset {name!r} needs the package `datasets`",
            where="sft.data.source",
            fix=DATASETS.install,
        ) from error
    try:
        rows = load_rows(name, data.split, data.args)
    except Exception as error:  # datasets and the hub client raise many unrelated types for "not there"
        why, fix = why_not(error, name, "dataset")
        raise UserError(
            f"dataset {name!r} could not be loaded",
            where=f"sft.data.source={name}, sft.data.split={data.split}",
            why=why,
            fix=f"{fix}; or a JSONL file or a local dataset directory",
        ) from error
    try:
        return [to_messages(dict(row)) for row in rows]
    except ValueError as error:
        raise UserError(f"not a training example: {error}", where=f"sft.data.source={name}", fix=_EXPECTED) from error


ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")  # that chat templates know
_EXPECTED = 'each example is {"messages": [{"role": ..., "content": ...}, ...]} or {"prompt": ..., "completion": ...}'


def to_messages(row: dict[str, Any]) -> list[Message]:
    """A row with `messages`, or with `prompt` and `completion` (strings or message lists). Raises ValueError
    otherwise.
    """
    if not isinstance(row, dict):
        raise ValueError(f"not an object: {str(row)[:80]}")
    if "messages" in row:
        parts = [row["messages"]]
    elif "prompt" in row and "completion" in row:
        turns = (("user", row["prompt"]), ("assistant", row["completion"]))
        parts = [[{"role": role, "content": text}] if isinstance(text, str) else text for role, text in turns]
    else:
        raise ValueError(f"neither 'messages' nor 'prompt' and 'completion' among its keys {sorted(row)}")
    for part in parts:
        if not isinstance(part, list):
            raise ValueError(f"not a list of messages: {str(part)[:80]}")
    messages = [message for part in parts for message in part]
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str) or "role" not in message:
            raise ValueError(f"a message without a role or a text content: {str(message)[:80]}")
        if message["role"] not in ROLES:
            raise ValueError(f"a message of role {message['role']!r}, which is none of {', '.join(ROLES)}")
        try:
            message["content"].encode()
        except UnicodeEncodeError:
            raise ValueError(f"a message with half of a surrogate pair: {str(message)[:80]!a}") from None
    if not messages:
        raise ValueError("no messages")
    return messages


@dataclass
class SftData:
    """Tokenised documents of one split, served as packed rows in a fixed pseudo-random order."""

    documents: list[Document]
    seq_len: int
    seed: int
    shuffle: bool
    dropped: int  # left out: longer than seq_len or the model's context, or without a turn that is trained

    def rows(self, skip: int = 0) -> Iterator[MicroBatch]:
        """Endless packed rows, epoch after epoch, each epoch in an order of its own; `skip` rows were used before."""
        epoch = 0
        while True:
            for row in self._epoch(epoch):
                if skip > 0:
                    skip -= 1
                else:
                    yield build_micro_batch([self.documents[i] for i in row])
            epoch += 1

    def one_epoch(self) -> list[MicroBatch]:
        return [build_micro_batch([self.documents[i] for i in row]) for row in self._epoch(0)]

    def _epoch(self, epoch: int) -> Iterator[list[int]]:
        """Document indices of each row: consecutive documents until the next one does not fit."""
        order = list(range(len(self.documents)))
        if self.shuffle:
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
        row: list[int] = []
        used = 0
        for index in order:
            length = len(self.documents[index])
            if used + length > self.seq_len:
                yield row
                row, used = [], 0
            row.append(index)
            used += length
        yield row


def load_sft_data(config: SftConfig, split: Split, renderer: ChatRenderer, seed: int, context: int) -> SftData:
    """Tokenise and mask a split.

    Args:
        context: tokens that the model knows positions of: longer documents are left out, and so are those that no row
            of config.seq_len holds.

    Raises:
        UserError: when nothing is left to train on.
    """
    documents, dropped, untrained = [], 0, 0
    conversations = load_conversations(config.data, split)
    if not conversations:
        raise UserError(
            f"no example is left for the {split} split",
            where=f"sft.data.source={config.data.source}, sft.data.val_fraction={config.data.val_fraction:g}",
            why="one example at least is held out, and val_fraction of all",
            fix="more examples, a smaller sft.data.val_fraction, or held-out ones of their own: "
            "sft.data.val_source=FILE.jsonl",
        )
    limit = min(config.seq_len, context)
    bound = f"seq_len={limit}" if limit == config.seq_len else f"the model's context, {limit}"
    for messages in conversations:
        try:
            sequences = mask_by_role(renderer, messages, config.data.loss_roles)
        except (ValueError, TemplateError) as error:
            refused = isinstance(error, TemplateError)
            raise UserError(
                f"the chat template refuses a conversation: {error}" if refused else str(error),
                where=f"model.tokenizer, sft.data.source={config.data.source}" if refused else "model.tokenizer",
                why=f"the conversation of {', '.join(str(message.get('role')) for message in messages[:8])} begins "
                f"{str(messages[0])[:80]}",
                fix="another chat template (model.tokenizer), or "
                + ("conversations that it takes" if refused else "single-turn data"),
            ) from error
        untrained += not sequences
        for sequence in sequences:
            if len(sequence.input_ids) > limit:
                dropped += 1
                continue
            zeros = [0.0] * len(sequence.input_ids)
            documents.append(Document(sequence.input_ids, sequence.loss_mask, zeros, zeros, [-1] * len(zeros)))
    roles = ", ".join(config.data.loss_roles)
    if not documents:
        without = f", {untrained} have no turn of {roles}" if untrained else ""
        raise UserError(
            f"no example of the {split} split is left to train on ({dropped} are longer than {bound}{without})",
            where=f"sft.data.val_source={config.data.val_source}"
            if split == "held_out" and config.data.val_source is not None
            else f"sft.data.source={config.data.source}",
            fix=(
                "raise seq_len"
                if limit == config.seq_len
                else f"model.card.max_position_embeddings={config.seq_len}, if the model can"
            )
            + ", or check sft.data.loss_roles",
        )
    if untrained:
        log.warning("%d examples of the %s split are left out: they have no turn of %s", untrained, split, roles)
    if dropped:
        log.warning("%d documents of the %s split are left out: they are longer than %s", dropped, split, bound)
    return SftData(documents, config.seq_len, seed, config.data.shuffle and split == "train", dropped + untrained)
