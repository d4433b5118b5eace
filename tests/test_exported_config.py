"""The config.json of what transformers' code trained: the checkpoint's own, where a card could not say all of it."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from prl.config.auto_card import complete_card
from prl.config.config_json import card_of_impl, check_card
from prl.config.schema import ModelCard, ModelConfig
from prl.models.checkpoints.plain import write_plain
from prl.models.checkpoints.reading import load_checkpoint
from prl.models.checkpoints.writing import export_checkpoint, hf_tensors
from prl.models.families.hf_causal_lm import build_hf_model

IDS = torch.arange(24)[None] * 7 % 100
SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
         "intermediate_size": 48, "vocab_size": 100, "max_position_embeddings": 64}  # fmt: skip


def checkpoint(path, family, **changes):
    """Of transformers, its weights away from their beginnings."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.1)
    model.save_pretrained(path)
    return model


def config_of(path):
    return json.loads((path / "config.json").read_text())


def auto_card(path, **said) -> ModelCard:
    model = {"name": "auto", "path": str(path), "card": {"family": None, **said}}
    complete_card(model)
    return ModelCard.model_validate(model["card"])


@torch.no_grad()
def logits_at(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(IDS).logits


def exported(source, card, target):
    """What a run with impl=hf leaves of it, untrained."""
    check_card(source, card_of_impl(ModelConfig(name="x", path=str(source), impl="hf", card=card)))
    model = build_hf_model(source, card).to_empty(device="cpu")
    load_checkpoint(model, source)
    export_checkpoint(model, hf_tensors(model), source, target, card)
    return target


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    ],
)
def test_what_a_card_cannot_say_comes_out_as_it_was(family, changes, tmp_path):
    model = checkpoint(tmp_path / "source", family, **changes)
    export = exported(tmp_path / "source", auto_card(tmp_path / "source"), tmp_path / "export")
    assert config_of(export) == config_of(tmp_path / "source")
    with torch.no_grad():
        torch.testing.assert_close(logits_at(export), model(IDS).logits)


def test_exports_are_float32_whatever_the_checkpoint_is(tmp_path):
    checkpoint(tmp_path / "source", "llama", hidden_act="gelu").to(torch.bfloat16).save_pretrained(tmp_path / "source")
    export = exported(tmp_path / "source", auto_card(tmp_path / "source"), tmp_path / "export")
    assert config_of(export) == config_of(tmp_path / "source") | {"dtype": "float32"}


def test_a_copy_for_engines_says_what_a_card_cannot(tmp_path):
    model = checkpoint(tmp_path / "source", "llama", hidden_act="gelu")
    write_plain(build_hf_model(tmp_path / "source", auto_card(tmp_path / "source")), tmp_path / "source",
                tmp_path / "plain", torch.float32)  # fmt: skip
    assert config_of(tmp_path / "plain") == config_of(tmp_path / "source")
    with torch.no_grad():
        torch.testing.assert_close(logits_at(tmp_path / "plain"), model(IDS).logits)


def test_the_context_that_a_user_says_is_the_exports(tmp_path):
    checkpoint(tmp_path / "source", "llama", hidden_act="gelu")
    card = auto_card(tmp_path / "source", max_position_embeddings=256)
    export = exported(tmp_path / "source", card, tmp_path / "export")
    assert config_of(export) == config_of(tmp_path / "source") | {"max_position_embeddings": 256}
