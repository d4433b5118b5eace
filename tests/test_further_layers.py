"""Layers that predict further tokens (MTP): kept aside when a checkpoint is read, and in exports as they were."""

import json
import logging
import shutil
from types import SimpleNamespace

import pytest
import torch
from families import family_card
from quantised import FP8, quantise, to_fp8
from safetensors.torch import load_file, save_file
from tiny import random_model

from prl.config import compose
from prl.config.schema import ModelConfig
from prl.models.checkpoints.further_layers import further_layers
from prl.models.checkpoints.reading import INDEX, load_model, open_tensors
from prl.models.checkpoints.writing import export_checkpoint, hf_tensors, save_checkpoint
from prl.models.families.build import DECODERS
from prl.models.families.hf_causal_lm import build_hf_model
from prl.models.text.tokenizer import load_tokenizer, save_byte_tokenizer
from prl.trainer.loops.export import export_policy

CPU = torch.device("cpu")
PREFIX = {family: "model.layers.3." for family, decoder in DECODERS.items() if decoder.names.has_more_layers}
PREFIX |= {"nemotron_h": "mtp.layers.0."}
KEYS = {"nemotron_h": {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"},
        "minimax_m2": {"num_mtp_modules": 1, "use_mtp": True}}  # fmt: skip


def made_up(prefix):
    generator = torch.Generator().manual_seed(7)
    return {
        f"{prefix}eh_proj.weight": torch.randn(32, 64, generator=generator).bfloat16(),
        f"{prefix}enorm.weight": torch.randn(32, generator=generator).bfloat16(),
        f"{prefix}mlp.experts.5.up_proj.weight": torch.randn(16, 32, generator=generator).bfloat16(),
        f"{prefix}mlp.gate.e_score_correction_bias": torch.randn(8, generator=generator),
        f"{prefix}shared_head.head.weight": torch.randn(264, 32, generator=generator).half(),
    }


def with_further_layers(path, family, **config):
    """A tiny checkpoint of `family` in two files with an index, the second of them with layers behind the last."""
    card = family_card(family)
    save_checkpoint(hf_tensors(random_model(card)), path, card)
    save_byte_tokenizer(path)
    further = made_up(PREFIX.get(family, "mtp."))
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    save_file(further, path / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    own = load_file(path / "model-00001-of-00002.safetensors")
    where = dict.fromkeys(own, "model-00001-of-00002.safetensors")
    where |= dict.fromkeys(further, "model-00002-of-00002.safetensors")
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    said = json.loads((path / "config.json").read_text())
    counts = config or KEYS.get(family, {"num_nextn_predict_layers": 1})
    (path / "config.json").write_text(json.dumps(said | counts))
    return card, further


def all_tensors(path):
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def config_of(path):
    return json.loads((path / "config.json").read_text())


@pytest.mark.parametrize("family", PREFIX)
def test_exports_have_them_byte_for_byte(family, tmp_path):
    source, target = tmp_path / "source", tmp_path / "export"
    card, further = with_further_layers(source, family)
    model = load_model(source, card, torch.float32, CPU)
    export_checkpoint(model, hf_tensors(model), source, target, card, shard_bytes=30_000)
    held, exported = dict(hf_tensors(model)), all_tensors(target)
    assert exported.keys() == held.keys() | further.keys()
    for name, tensor in further.items():
        assert exported[name].dtype == tensor.dtype
        assert torch.equal(exported[name], tensor)
    index = json.loads((target / INDEX).read_text())
    assert index["weight_map"].keys() == exported.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in exported.values())
    assert KEYS.get(family, {"num_nextn_predict_layers": 1}).items() <= config_of(target).items()
    again = load_model(target, card, torch.float32, CPU)
    export_checkpoint(
        again, hf_tensors(again), target, tmp_path / "again", card, shard_bytes=30_000
    )  # after a warm start
    assert {file.name: file.read_bytes() for file in target.glob("*.safetensors")} == {
        file.name: file.read_bytes() for file in (tmp_path / "again").glob("*.safetensors")
    }


def test_those_of_a_quantised_checkpoint_are_dequantised(tmp_path):
    source = tmp_path / "source"
    card, further = with_further_layers(source, "deepseek_v3")
    quantise(source, FP8, to_fp8, lambda name: "layers.3" in name and "head" not in name)
    model = load_model(source, card, torch.float32, CPU)
    export_checkpoint(model, hf_tensors(model), source, tmp_path / "export", card)
    exported = all_tensors(tmp_path / "export")
    with open_tensors(source) as said:
        for name, tensor in further.items():
            assert torch.equal(exported[name], said[name][:])
            is_quantised = tensor.ndim == 2 and "head" not in name
            assert exported[name].dtype == (torch.float32 if is_quantised else tensor.dtype)
    assert not any("scale" in name for name in exported)


def test_counts_agree_with_the_files(tmp_path):
    """What config.json counts and the files have not is 0 in an export; and the other way round."""
    source, target = tmp_path / "source", tmp_path / "export"
    card, _ = with_further_layers(source, "deepseek_v3", num_hidden_layers=3)
    model = load_model(source, card, torch.float32, CPU)
    with further_layers(model, source) as layers:
        assert layers.config == {"num_nextn_predict_layers": 1}
    config = config_of(source) | {"num_nextn_predict_layers": 1}
    shutil.rmtree(source)
    save_checkpoint(hf_tensors(model), source, card)
    (source / "config.json").write_text(json.dumps(config))
    export_checkpoint(model, hf_tensors(model), source, target, card)
    assert config_of(target)["num_nextn_predict_layers"] == 0
    (source / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    export_checkpoint(model, hf_tensors(model), source, tmp_path / "other", card)
    assert "num_nextn_predict_layers" not in config_of(tmp_path / "other")


@pytest.mark.parametrize("left", ["nothing", "a directory without weights", "a damaged file"])
def test_an_export_goes_on_where_the_source_is_gone(left, tmp_path, caplog):
    source, target = tmp_path / "source", tmp_path / "export"
    card, _ = with_further_layers(source, "deepseek_v3")
    model = load_model(source, card, torch.float32, CPU)
    if left == "nothing":
        shutil.rmtree(source)
    elif left == "a damaged file":
        (source / "model-00002-of-00002.safetensors").write_bytes(b"12345678")
    else:
        for file in source.glob("*.safetensors"):
            file.unlink()
    with caplog.at_level(logging.WARNING, "prl"):
        export_checkpoint(model, hf_tensors(model), source, target, card)
    assert all_tensors(target).keys() == dict(hf_tensors(model)).keys()
    assert not config_of(target).get("num_nextn_predict_layers")
    assert "without the layers that predict further tokens" in caplog.text
    assert ("without tokenizer" in caplog.text) == (left == "nothing")


def test_exports_of_adapters_have_them_too(tmp_path):
    from prl.models.adapters.lora import apply_lora, init_adapters

    source = tmp_path / "source"
    card, further = with_further_layers(source, "glm4_moe")
    config = compose(["model=auto", "model.tokenizer=byte", "memory=lora", "memory_recipe.lora.rank=2",
                      f"model.path={source}", "warm_start=none", "weight_transport=filesystem"])  # fmt: skip
    model = load_model(source, card, torch.float32, CPU)
    apply_lora(model, config.memory_recipe.lora, torch.float32)
    init_adapters(model, 0)
    policy = SimpleNamespace(config=config, model=model, world=SimpleNamespace(is_main=True))
    export_policy(policy, source, tmp_path / "export")
    exported = all_tensors(tmp_path / "export")
    assert all(torch.equal(exported[name], tensor) for name, tensor in further.items())
    assert not any("layers.3." in name for name in load_file(tmp_path / "export/adapter/adapter_model.safetensors"))


@pytest.mark.parametrize("is_gone", [False, True])
def test_an_export_has_the_tokenizer_that_the_run_had(is_gone, tmp_path, caplog):
    """One of another directory than the weights'."""
    source, place = tmp_path / "source", tmp_path / "tokenizer"
    card, _ = with_further_layers(source, "glm4_moe")
    save_byte_tokenizer(place)
    (place / "chat_template.jinja").write_text(mine := "mine: {{ messages[0]['content'] }}")
    config = compose(["model=auto", f"model.tokenizer={place}", f"model.path={source}", "memory=none"], "sft")
    if is_gone:
        shutil.rmtree(place)
    model = load_model(source, card, torch.float32, CPU)
    policy = SimpleNamespace(config=config, model=model, world=SimpleNamespace(is_main=True))
    export_policy(policy, source, tmp_path / "export")
    assert (tmp_path / "export/model.safetensors").exists()
    if is_gone:
        assert "is without the tokenizer" in caplog.text
        return
    shutil.rmtree(place)
    alone = load_tokenizer(ModelConfig(name="x", path=str(tmp_path / "export"), card=card), tmp_path / "export")
    assert alone.encode("abc", add_special_tokens=False) == [97, 98, 99]
    assert alone.chat_template == mine


def test_a_checkpoint_without_a_tokenizer_is_exported_with_that_of_bytes(tmp_path):
    source = tmp_path / "source"
    card, _ = with_further_layers(source, "glm4_moe")
    for file in source.glob("*token*"):
        file.unlink()
    config = compose(["model=auto", "model.tokenizer=byte", f"model.path={source}", "memory=none"], "sft")
    model = load_model(source, card, torch.float32, CPU)
    policy = SimpleNamespace(config=config, model=model, world=SimpleNamespace(is_main=True))
    export_policy(policy, source, tmp_path / "export")
    alone = load_tokenizer(ModelConfig(name="x", path=str(tmp_path / "export"), card=card), tmp_path / "export")
    assert alone.encode("abc", add_special_tokens=False) == [97, 98, 99]


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_models_of_transformers_keep_them_aside_as_well(family, tmp_path):
    from prl.models.checkpoints.reading import load_checkpoint

    source = tmp_path / "source"
    card, further = with_further_layers(source, family)
    model = build_hf_model(source, card).to_empty(device="cpu")
    load_checkpoint(model, source)
    other = card.model_copy(update={"family": "other"})
    export_checkpoint(model, hf_tensors(model), source, tmp_path / "export", other)
    exported = all_tensors(tmp_path / "export")
    assert exported.keys() == all_tensors(source).keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in further.items())
    assert config_of(tmp_path / "export")["num_nextn_predict_layers"] == 1
