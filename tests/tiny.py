"""Tiny models, tokenizers and documents that several test files share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from prl.config.schema import ModelCard
from prl.models.checkpoints.writing import hf_tensors, save_checkpoint
from prl.models.families.build import build_decoder
from prl.models.layers.decoder import Decoder
from prl.models.text.tokenizer import save_byte_tokenizer
from prl.transport.kept import KeptTokens

VOCAB = 264  # 256 bytes, 6 special tokens, padded to a multiple of 8
END = 256  # "<|end|>"

BASE = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rope_theta": 5000.0,
}


def moe_card(**changes: object) -> ModelCard:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "tie_word_embeddings": True}
    return ModelCard(**{"family": "qwen3_moe", **BASE, **sizes, **changes})


def dense_card(**changes: object) -> ModelCard:
    return ModelCard(**{"family": "qwen3", **BASE, "intermediate_size": 48, "tie_word_embeddings": False, **changes})


def random_model(card: ModelCard, seed: int = 0, std: float = 0.2) -> Decoder:
    """A model whose every weight, norms included, is off its default."""
    model = build_decoder(card)
    generator = torch.Generator().manual_seed(seed)
    model.init_weights(generator, std)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("norm.weight"):
                param.add_(torch.randn(param.shape, generator=generator), alpha=0.1)
    return model


def moe_checkpoint(path: Path, std: float = 0.1) -> Path:
    """`random_model(moe_card())` as a Hugging Face checkpoint."""
    save_checkpoint(hf_tensors(random_model(moe_card(), std=std)), path, moe_card())
    return path


def byte_tokenizer(path: Path):
    from transformers import AutoTokenizer

    save_byte_tokenizer(path)
    return AutoTokenizer.from_pretrained(str(path))


def sets_of(kept: KeptTokens) -> list[list[int]]:
    """The ids of each token, none where it was drawn from the whole vocabulary."""
    return [one.tolist() for one in np.split(kept.ids, np.cumsum(kept.counts)[:-1])] if len(kept) else []
