"""Directories that are no checkpoint, or two at once: told by what is wrong with them."""

import json
import os
import shutil

import pytest
import torch
from families import family_card
from safetensors.torch import load_file, save_file
from tiny import moe_card, random_model
from transformers import AutoConfig, AutoModelForCausalLM

from prl.config import compose
from prl.config.config_json import check_card
from prl.config.errors import ConfigError, UserError
from prl.models.checkpoints.reading import INDEX, SINGLE, check_files, load_checkpoint, read_tensors
from prl.models.checkpoints.writing import hf_tensors, save_checkpoint
from prl.models.families.hf_causal_lm import build_hf_model, check_empty
from prl.models.text.tokenizer import load_tokenizer

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}


def saved(path, **how):
    card = family_card("llama")
    save_checkpoint(hf_tensors(random_model(card)), path, card, **how)
    return card


@pytest.mark.parametrize("content", ["{}", "[]", "not JSON", '{"weight_map": {}}', '{"weight_map": ["model"]}'])
def test_an_index_that_lists_nothing_is_named(content, tmp_path):
    saved(tmp_path)
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(UserError, match=r"index\.json cannot be read") as caught:
        list(read_tensors(tmp_path))
    assert caught.value.where == str(tmp_path / INDEX)


def test_a_link_to_nothing_is_no_fault_of_an_index(tmp_path):
    os.symlink("/nonexistent/blob", tmp_path / SINGLE)
    with pytest.raises(UserError, match="is missing") as caught:
        check_files(tmp_path)
    assert "link" in caught.value.why
    assert INDEX not in caught.value.why


def test_two_sets_of_weights_are_one_or_refused(tmp_path):
    saved(tmp_path / "single")
    saved(tmp_path, shard_bytes=20_000)
    shutil.copy(tmp_path / "single" / SINGLE, tmp_path / SINGLE)
    assert dict(read_tensors(tmp_path)).keys() == load_file(tmp_path / SINGLE).keys()
    tensors = load_file(tmp_path / SINGLE)
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] + 1}, tmp_path / SINGLE)
    with pytest.raises(UserError, match="two sets of weights"):
        list(read_tensors(tmp_path))


def test_adapters_by_themselves_are_told(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "me/mine"}))
    with pytest.raises(UserError, match="adapters") as caught:
        check_card(tmp_path, family_card("llama"))
    assert "model.path=me/mine" in caught.value.fix
    with pytest.raises(ConfigError, match=r"model\.path=me/mine"):
        compose(["model=auto", f"model.path={tmp_path}", "model.tokenizer=byte"], "sft")


def test_numbers_by_themselves_cannot_be_sharded():
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES, vocab_size=100, intermediate_size=48))
    check_empty(lm, None)
    lm.model.register_parameter("scale", torch.nn.Parameter(torch.tensor(1.0)))
    with pytest.raises(UserError, match=r"no dimension: model\.scale"):
        check_empty(lm, None)


def test_a_checkpoint_whose_tokenizer_was_left_out_is_told(tmp_path):
    """transformers makes an empty one of config.json alone."""
    card = moe_card()
    save_checkpoint(hf_tensors(random_model(card)), tmp_path, card)
    config = compose(["model=auto", f"model.path={tmp_path}"]).model
    with pytest.raises(UserError, match=r"no tokenizer(?s:.*)it has no vocabulary"):
        load_tokenizer(config, tmp_path)


def test_a_place_beside_the_checkpoint_is_told_with_what_to_give_instead(tmp_path):
    for place in ("run/checkpoints/step_2", "run/export", "alone/adapter"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "run/plan.json").write_text("{}")
    (tmp_path / "alone/adapter/adapter_config.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    for place, told in (
        ("run", f"model.path={tmp_path}/run/export"),
        ("run/checkpoints/step_2", f"model.path={tmp_path}/run/export"),
        ("alone", "merge_and_unload"),
        ("config.json", f"model.path={tmp_path}"),
    ):
        with pytest.raises(UserError) as refused:
            compose(["model=auto", f"model.path={tmp_path / place}"])
        assert told in refused.value.fix, place


def test_an_index_that_is_not_of_the_files_beside_it_may_go(tmp_path):
    path = tmp_path
    saved(path)
    (path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(UserError) as refused:
        check_files(path)
    assert refused.value.fix.startswith(f"remove {INDEX}, if all weights are in model.safetensors; or ")


def test_weights_that_another_transformers_reads_are_told_with_its_version(tmp_path):
    config = AutoConfig.for_model("llama", **SIZES, vocab_size=64, intermediate_size=48)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    for version, told in (("5.0.0", True), (said["transformers_version"], False)):
        (tmp_path / "config.json").write_text(
            json.dumps(said | {"intermediate_size": 40, "transformers_version": version})
        )
        config = compose(["model=auto", f"model.path={tmp_path}", "model.impl=hf"])
        model = build_hf_model(tmp_path, config.model.card).to_empty(device="cpu")
        with pytest.raises(UserError) as refused:
            load_checkpoint(model, tmp_path)
        assert ("pip install transformers==5.0.0" in refused.value.fix) is told
