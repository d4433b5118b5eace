"""The config.json of what transformers' code trained: the checkpoint's own, where a card could not say all of it."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from prl.config.auto_card import complete_card
from prl.config.cards import facts_of
from prl.config.config_json import card_of_impl, check_card
from prl.config.errors import ConfigError, UserError
from prl.config.schema import ModelCard, ModelConfig
from prl.config.schema_model import RopeScaling
from prl.models.checkpoints.plain import write_plain
from prl.models.checkpoints.reading import load_checkpoint, load_model
from prl.models.checkpoints.writing import export_checkpoint, hf_tensors
from prl.models.families.hf_causal_lm import build_hf_model
from prl.models.layers.packed_attention import packed_attention

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


def test_a_bfloat16_checkpoint_of_transformers_comes_out_as_it_went_in(tmp_path):
    checkpoint(tmp_path / "source", "llama", hidden_act="gelu").to(torch.bfloat16).save_pretrained(tmp_path / "source")
    card = auto_card(tmp_path / "source")
    model = build_hf_model(tmp_path / "source", card).to_empty(device="cpu")
    load_checkpoint(model, tmp_path / "source")
    narrow = torch.bfloat16
    export_checkpoint(model, hf_tensors(model, narrow), tmp_path / "source", tmp_path / "export", card, dtype=narrow)
    assert config_of(tmp_path / "export") == config_of(tmp_path / "source")
    own, given = (load_file(tmp_path / where / "model.safetensors") for where in ("export", "source"))
    assert own.keys() == given.keys()
    assert all(torch.equal(own[name].to(narrow), tensor) for name, tensor in given.items())
    assert {tensor.dtype for tensor in own.values() if tensor.ndim > 1} == {narrow}
    torch.testing.assert_close(logits_at(tmp_path / "export"), logits_at(tmp_path / "source"))


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


@pytest.mark.parametrize("impl", ["custom", "hf"])
@pytest.mark.parametrize("rope", ["yarn", "llama3"])
def test_a_longer_context_leaves_rotary_embeddings_as_the_checkpoint_has_them(rope, impl, tmp_path):
    """Where it does not say from which context they were stretched, that is its own, not the one that a user says."""
    scaling = {"rope_type": rope, "factor": 4.0, "rope_theta": 1e4}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope == "llama3" else {}
    model = checkpoint(tmp_path / "source", "llama", rope_parameters=scaling)
    said = config_of(tmp_path / "source")
    said["rope_parameters"].pop("original_max_position_embeddings", None)
    (tmp_path / "source/config.json").write_text(json.dumps(said))
    card = auto_card(tmp_path / "source", max_position_embeddings=256)
    config = said | {"max_position_embeddings": 256}
    config["rope_parameters"] = scaling | {"original_max_position_embeddings": 64}
    if impl == "hf":
        export = exported(tmp_path / "source", card, tmp_path / "export")
        assert config_of(export) == config
    else:
        ours = load_model(tmp_path / "source", card, torch.float32, torch.device("cpu"))
        with torch.no_grad():
            hidden = ours(IDS[0], torch.arange(24), packed_attention([24], torch.device("cpu")))
            torch.testing.assert_close(ours.logits(hidden), model(IDS).logits[0], rtol=1e-4, atol=1e-4)
        export = tmp_path / "export"
        export_checkpoint(ours, hf_tensors(ours), tmp_path / "source", export, card)
        assert facts_of(config_of(export)) == facts_of(config)
    with torch.no_grad():
        torch.testing.assert_close(logits_at(export), model(IDS).logits)


def test_the_old_context_is_told_where_a_card_has_another(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0}
    checkpoint(tmp_path, "llama", rope_parameters=scaling | {"rope_theta": 1e4})
    card = auto_card(tmp_path, max_position_embeddings=256, rope_scaling=scaling)
    assert card.rope_scaling == card.pinned_scaling == RopeScaling(**scaling, original_max_position_embeddings=64)
    silent = card.model_copy(update={"rope_scaling": RopeScaling(**scaling)})
    check_card(tmp_path, silent.model_copy(update={"max_position_embeddings": 64}))
    with pytest.raises(UserError, match="original_max_position_embeddings") as caught:
        check_card(tmp_path, silent)
    assert "original_max_position_embeddings:64}" in caught.value.fix
    with pytest.raises(ConfigError, match="original_max_position_embeddings"):
        auto_card(tmp_path, rope_scaling=scaling | {"original_max_position_embeddings": 256})


def test_a_context_that_nobody_says_is_told():
    with pytest.raises(ValueError, match=r"stretched \(yarn\)"):
        facts_of({"model_type": "llama", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
