"""Tokenizers, chat templates and data sets of the repositories of `hub_layout`: their form, not their content."""

from __future__ import annotations

import itertools
import json
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from prl.models.text.tokenizer import byte_characters


class Files(Protocol):
    """Where a repository's files go (`hub_layout.Snapshot`)."""

    def text(self, name: str, content: str) -> None: ...
    def json(self, name: str, content: Any, indent: int | None = 2) -> None: ...
    def large(self, name: str, file: Path) -> None: ...
    def scratch(self) -> Path: ...


# --- tokenizer --------------------------------------------------------------------------------------------------------

SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
]
ADDED = [  # in the order of their ids; skipping special tokens leaves these
    *["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"],
    *["<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"],
]
WORDS = (  # how text is cut before the merges: contractions, words, single digits, signs, ends of lines, spaces
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TURNS = """{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# reasoning is kept in the turns after the last question only, where an answer without any gets an empty one
REASONING = """{%- set last = namespace(question=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set last.question = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > last.question %}
            {%- set content = '<think>\\n' + thought + '\\n</think>\\n\\n' + content %}
        {%- endif %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""  # noqa: E501


def vocabulary(size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """All bytes, then strings of ever more letters, with or without a space before them, and their merges."""
    vocab = {char: byte for byte, char in enumerate(byte_characters())}
    merges: list[tuple[str, str]] = []
    letters = string.ascii_lowercase
    shorter = ["Ġ", *letters]
    while True:
        longer = []
        for first, second in itertools.product(shorter, letters):
            if len(vocab) == size:
                return vocab, merges
            merges.append((first, second))
            longer.append(first + second)
            vocab[first + second] = len(vocab)
        shorter = longer


def write_tokenizer(files: Files, repo: str, size: int) -> None:
    """A byte-level BPE of `size` tokens, the last 26 those that Qwen3 has added; every id stands for something."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    vocab, merges = vocabulary(size - len(SPECIAL) - len(ADDED))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in ADDED])
    assert tokenizer.get_vocab_size() == size
    files.scratch().write_text(tokenizer.to_str())
    files.large("tokenizer.json", files.scratch())
    files.json("vocab.json", vocab, indent=None)
    files.text("merges.txt", "".join(f"{first} {second}\n" for first, second in merges))
    files.json("tokenizer_config.json", tokenizer_config(repo, len(vocab)))


def tokenizer_config(repo: str, base: int) -> dict[str, Any]:
    added = {
        str(base + i): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": i < len(SPECIAL),
        }
        for i, token in enumerate(SPECIAL + ADDED)
    }
    plain = "Instruct-2507" in repo
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": SPECIAL[1:],
        "bos_token": None,
        "chat_template": TURNS if plain else REASONING,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 1010000 if plain else 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def generation_config(config: dict[str, Any]) -> dict[str, Any]:
    """With sampling defaults that a run must not take over: rewards are those of the policy as it is."""
    return {
        "bos_token_id": config["bos_token_id"],
        "do_sample": True,
        "eos_token_id": [config["eos_token_id"], config["bos_token_id"]],
        "pad_token_id": config["bos_token_id"],
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "transformers_version": "4.51.0",
    }


# --- data sets --------------------------------------------------------------------------------------------------------


def _sum(draw: random.Random) -> tuple[str, str, str]:
    """(question, way, answer): half of the answers are single digits, which even random tokens hit now and then."""
    first, second = draw.randint(2, 99), draw.randint(2, 99)
    product = first * second
    if draw.random() < 0.5:
        return f"What is the last digit of ${first} \\cdot {second}$?", f"The product is {product}.", str(product % 10)
    if draw.random() < 0.5:
        return (
            f"What is $\\frac{{{first}}}{{100}}$ of {second}?",
            f"It is {product}/100.",
            f"\\frac{{{product}}}{{100}}",
        )
    kind, result = draw.choice([("plus", first + second), ("minus", first - second), ("times", product)])
    return f"What is {first} {kind} {second}?", f"{first} {kind} {second} is {result}.", str(result)


def deepscaler(files: Files, rows: int, draw: random.Random) -> None:
    """One JSON array of problem, answer and solution."""
    sums = [_sum(draw) for _ in range(rows)]
    table = [{"problem": q, "answer": a, "solution": f"{way} $\\boxed{{{a}}}$"} for q, way, a in sums]
    files.scratch().write_text(json.dumps(table, indent=2))
    files.large("deepscaler.json", files.scratch())
    files.text("README.md", "---\nlanguage:\n- en\nlicense: mit\nsize_categories:\n- 10K<n<100K\n---\n")


def gsm8k(files: Files, rows: int, draw: random.Random) -> None:
    """Two configurations of two splits; answers are ways with <<calculations>> that end in `#### number`."""
    entries = []
    for name in ("main", "socratic"):
        for split, count in (("train", rows), ("test", max(rows // 6, 1))):
            table = []
            for _ in range(count):
                first, second, price = draw.randint(2, 60), draw.randint(2, 60), draw.randint(2, 9)
                both = first + second
                table.append(
                    {
                        "question": f"Ann has {first} pears, buys {second} and sells all at ${price}. How much is it?",
                        "answer": f"She has {first}+{second}=<<{first}+{second}={both}>>{both} pears.\n"
                        f"That is {both}*${price}=$<<{both}*{price}={both * price}>>{both * price}\n"
                        f"#### {both * price:,}",
                    }
                )
            _parquet(files, f"{name}/{split}-00000-of-00001.parquet", table)
        paths = "".join(f"  - split: {split}\n    path: {name}/{split}-*\n" for split in ("train", "test"))
        entries.append(f"- config_name: {name}\n  data_files:\n{paths}")
    files.text("README.md", f"---\nlicense:\n- mit\nconfigs:\n{''.join(entries)}---\n")


def tulu(files: Files, rows: int, draw: random.Random) -> None:
    """Conversations of one or two questions, some with a system prompt, in two files."""
    table = []
    for i in range(rows):
        messages = [{"content": "Answer briefly.", "role": "system"}] if i % 5 == 0 else []
        for _ in range(1 + i % 2):
            question, way, _ = _sum(draw)
            messages += [{"content": question, "role": "user"}, {"content": way, "role": "assistant"}]
        table.append({"id": f"made_up_{i}", "messages": messages, "source": "made/up"})
    for number, part in enumerate((table[::2], table[1::2])):
        _parquet(files, f"data/train-{number:05d}-of-00002.parquet", part)
    head = "configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/train-*\n"
    files.text("README.md", f"---\nlicense: odc-by\n{head}---\n")


def _parquet(files: Files, name: str, table: list[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), files.scratch())
    files.large(name, files.scratch())


DATA_SETS: dict[str, Callable[[Files, int, random.Random], None]] = {
    "agentica-org/DeepScaleR-Preview-Dataset": deepscaler,
    "openai/gsm8k": gsm8k,
    "allenai/tulu-3-sft-mixture": tulu,
}
