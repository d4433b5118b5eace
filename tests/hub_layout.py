"""A folder for HF_HOME with the checkpoints and data sets of conf/experiment, as huggingface_hub leaves them after a
download: the real files' names, shapes, dtypes and keys; random numbers and made-up text.

    python tests/hub_layout.py FOLDER math_qwen3_4b                  # full size: 8 GB, drawn on a GPU if there is one
    python tests/hub_layout.py FOLDER math_qwen3_4b --scale tiny     # for CPUs; prints the overrides that go with it
    HF_HOME=FOLDER HF_HUB_OFFLINE=1 python -m prl.rl +experiment=math_qwen3_4b ...

Keys and values of config.json are written down here and not taken from conf/model, so that either can be wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from hub_text import DATA_SETS, generation_config, write_tokenizer
from safetensors.torch import save_file
from torch import Tensor

from prl.config import compose
from prl.config.errors import ConfigError
from prl.config.schema import RunConfig

SHARD_BYTES = 4_000_000_000
TINY_SHARD_BYTES = 60_000
TOKENIZER_LACKS = 267  # rows of the embedding that no token has: 151,936 - 151,669
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 1024,
}
TINY_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

# --- config.json ------------------------------------------------------------------------------------------------------


def _config(family: str, layers: int, **sizes: Any) -> dict[str, Any]:
    """What all models of Qwen3 have in common, in their files' order of keys (alphabetical)."""
    values = {
        "architectures": [{"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}[family]],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "model_type": family,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
        **sizes,
    }
    return dict(sorted(values.items()))


_HEADS_8 = {"num_attention_heads": 32, "num_key_value_heads": 8}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-1.7B": _config(
        "qwen3",
        28,
        hidden_size=2048,
        intermediate_size=6144,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    ),
    "Qwen/Qwen3-4B-Instruct-2507": _config(
        "qwen3",
        36,
        hidden_size=2560,
        intermediate_size=9728,
        max_position_embeddings=262144,
        rope_theta=5000000,
        tie_word_embeddings=True,
        **_HEADS_8,
    ),
    "Qwen/Qwen3-30B-A3B": _config(
        "qwen3_moe",
        48,
        decoder_sparse_step=1,
        hidden_size=2048,
        intermediate_size=6144,
        mlp_only_layers=[],
        moe_intermediate_size=768,
        norm_topk_prob=True,
        num_attention_heads=32,
        num_experts=128,
        num_experts_per_tok=8,
        num_key_value_heads=4,
        output_router_logits=False,
        rope_theta=1000000.0,
        router_aux_loss_coef=0.001,
        tie_word_embeddings=False,
    ),
}
HEAD_STORED_THOUGH_TIED = ("Qwen/Qwen3-1.7B",)  # the embedding a second time, under lm_head.weight


def model_config(repo: str, scale: str = "full", layers: int | None = None) -> dict[str, Any]:
    """config.json of `repo`, its sizes made small or its layers fewer."""
    config = dict(MODELS[repo])
    if scale == "tiny":
        config |= TINY | (TINY_EXPERTS if "num_experts" in config else {})
        first = config["vocab_size"] - TOKENIZER_LACKS - 26
        config |= {"bos_token_id": first, "eos_token_id": first + 2}
    if layers is not None:
        config["num_hidden_layers"] = layers
    return config | {"max_window_layers": config["num_hidden_layers"]}


def card_overrides(repo: str, config: dict[str, Any]) -> list[str]:
    """Overrides of conf/model for a checkpoint whose sizes are not those of `repo`."""
    return [f"model.card.{key}={config[key]}" for key in (*TINY, *TINY_EXPERTS) if config.get(key) != MODELS[repo].get(key)]  # fmt: skip  # noqa: E501


# --- the cache's layout -----------------------------------------------------------------------------------------------


class Snapshot:
    """One repository in the cache: files as blobs named by their hash, and a snapshot of links to them."""

    def __init__(self, home: Path, repo: str, kind: str = "model") -> None:
        self.folder = home / "hub" / f"{kind}s--{repo.replace('/', '--')}"
        self.commit = hashlib.sha1(f"{kind} {repo}".encode()).hexdigest()
        self.path = self.folder / "snapshots" / self.commit
        for folder in (self.folder / "blobs", self.folder / "refs", self.path):
            folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "refs" / "main").write_text(self.commit)

    def text(self, name: str, content: str) -> None:
        """A file that git holds itself: its blob is named by git's hash."""
        data = content.encode()
        self._link(name, hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()).write_bytes(data)

    def json(self, name: str, content: Any, indent: int | None = 2) -> None:
        self.text(name, json.dumps(content, indent=indent, ensure_ascii=False) + "\n")

    def large(self, name: str, file: Path) -> None:
        """A file of large-file storage: its blob is named by its SHA-256. `file` is moved."""
        with file.open("rb") as opened:
            blob = self._link(name, hashlib.file_digest(opened, "sha256").hexdigest())
        file.replace(blob)

    def scratch(self) -> Path:
        """Where a large file may be written before its hash is known."""
        return self.folder / "blobs" / "writing.incomplete"

    def _link(self, name: str, digest: str) -> Path:
        blob, link = self.folder / "blobs" / digest, self.path / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
        return blob


# --- weights ----------------------------------------------------------------------------------------------------------


def tensor_shapes(config: dict[str, Any], stores_head: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a checkpoint's tensors, layer by layer."""
    hidden, head = config["hidden_size"], config["head_dim"]
    query, key = (config[f"num_{kind}_heads"] * head for kind in ("attention", "key_value"))
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_norm.weight", (head,)
        yield f"{layer}.self_attn.k_norm.weight", (head,)
        yield f"{layer}.self_attn.q_proj.weight", (query, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (key, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (key, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, query)
        if experts := config.get("num_experts", 0):
            yield f"{layer}.mlp.gate.weight", (experts, hidden)
        width = config["moe_intermediate_size" if experts else "intermediate_size"]
        for block in [f"{layer}.mlp.experts.{i}" for i in range(experts)] or [f"{layer}.mlp"]:
            yield f"{block}.gate_proj.weight", (width, hidden)
            yield f"{block}.up_proj.weight", (width, hidden)
            yield f"{block}.down_proj.weight", (hidden, width)
    yield "model.norm.weight", (hidden,)
    if stores_head or not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def shards(shapes: list[tuple[str, tuple[int, ...]]], shard_bytes: int) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Consecutive tensors in files of at most `shard_bytes` (bfloat16); one that is larger has its own."""
    files: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    size = 0
    for name, shape in shapes:
        nbytes = 2 * torch.Size(shape).numel()
        if files[-1] and size + nbytes > shard_bytes:
            files.append([])
            size = 0
        files[-1].append((name, shape))
        size += nbytes
    return files


def write_weights(
    snapshot: Snapshot,
    config: dict[str, Any],
    stores_head: bool,
    shard_bytes: int,
    seed: int,
    favoured: tuple[int, ...] = (),
) -> int:
    """Safetensors of bfloat16 and their index, one file in memory at a time. Returns the bytes of all tensors.

    favoured: tokens that the model is to draw more often than all others together, for rewards that are not all 0.
    """
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    files = shards(list(tensor_shapes(config, stores_head)), shard_bytes)
    where: dict[str, str] = {}
    embedding, total = torch.empty(0), 0
    for number, content in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        tensors: dict[str, Tensor] = {}
        for key, shape in content:
            drawn = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
            mean = 1.0 if key.endswith("norm.weight") else 0.0
            tensors[key] = drawn.mul_(config["initializer_range"]).add_(mean).cpu()
            if favoured and key == "model.embed_tokens.weight":
                tensors[key] += 0.1  # a direction that every hidden state then has
            if favoured and key == head:
                tensors[key][list(favoured)] += 0.15
            if key == "model.embed_tokens.weight":
                embedding = tensors[key]
            if key == "lm_head.weight" and config["tie_word_embeddings"]:
                tensors[key] = embedding.clone()
            total += tensors[key].nbytes
        save_file(tensors, snapshot.scratch(), metadata={"format": "pt"})
        snapshot.large(name, snapshot.scratch())
        where |= dict.fromkeys(tensors, name)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        snapshot.json("model.safetensors.index.json", index)
    return total


def make_model(home: Path, repo: str, config: dict[str, Any], shard_bytes: int = SHARD_BYTES) -> tuple[Path, int]:
    """The checkpoint `repo` with `config`; returns its snapshot and the bytes of its tensors."""
    snapshot = Snapshot(home, repo)
    snapshot.json("config.json", config)
    snapshot.json("generation_config.json", generation_config(config))
    snapshot.text("README.md", f"---\nlicense: apache-2.0\n---\n# {repo}, in shape only: random numbers\n")
    write_tokenizer(snapshot, repo, config["vocab_size"] - TOKENIZER_LACKS)
    favoured = (*b"06", config["eos_token_id"]) if config["hidden_size"] == TINY["hidden_size"] else ()
    stores_head = repo in HEAD_STORED_THOUGH_TIED
    return snapshot.path, write_weights(snapshot, config, stores_head, shard_bytes, 0, favoured)


def make_data_set(home: Path, repo: str, rows: int = 400) -> Path:
    """The data set `repo` with made-up rows under the real one's file names and columns; returns its snapshot."""
    snapshot = Snapshot(home, repo, "dataset")
    DATA_SETS[repo](snapshot, rows, random.Random(0))
    return snapshot.path


# --- what an experiment reads -----------------------------------------------------------------------------------------


def experiment(name: str, *overrides: str) -> RunConfig:
    """The composed experiment, of whichever job it is."""
    try:
        return compose([f"+experiment={name}", *overrides], "rl")
    except ConfigError as error:
        try:
            return compose([f"+experiment={name}", *overrides], "sft")
        except ConfigError:
            raise error from None


def data_set_of(config: RunConfig) -> str:
    return config.sft.data.source if config.sft else str(config.env.mix["hf_math"].args["dataset"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("home", type=Path, help="what HF_HOME will be")
    parser.add_argument("experiments", nargs="+", help="names in conf/experiment")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--layers", type=int, help="that many instead of the real number")
    parser.add_argument("--rows", type=int, default=400, help="of each data set")
    asked = parser.parse_args()
    for name in asked.experiments:
        config = experiment(name)
        repo, began = str(config.model.path), time.monotonic()
        sizes = model_config(repo, asked.scale, asked.layers)
        path, nbytes = make_model(asked.home, repo, sizes, TINY_SHARD_BYTES if asked.scale == "tiny" else SHARD_BYTES)
        print(f"{repo}: {nbytes / 1e9:.3f} GB in {time.monotonic() - began:.1f} s: {path}")
        print(f"{data_set_of(config)}: {make_data_set(asked.home, data_set_of(config), asked.rows)}")
        print(f"{name}:", *(card_overrides(repo, sizes) or ["no overrides"]))


if __name__ == "__main__":
    main()
