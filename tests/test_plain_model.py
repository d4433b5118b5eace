"""Checkpoints that vLLM would load in another form than it is sent: the stage that writes them anew, and whole runs."""

import importlib.util
import json
import re
import signal
from pathlib import Path

import pytest
import torch
from families import family_card
from quantised import FP8, INT4, quantise, to_fp8, to_int4
from runs import SMALL, kill_root, rows, run, wait_for_checkpoint
from runs import start as begin
from runtime_tree import Start, start  # noqa: F401
from safetensors.torch import load_file, save_file
from terminals import terminals
from test_by_hand import SCRIPTED, frozen
from test_further_layers import all_tensors, config_of, with_further_layers
from test_quantised import not_attention
from tiny import random_model

from prl.config import compose
from prl.config.cards import card_to_hf_config, facts_of
from prl.config.config_json import check_card
from prl.config.errors import UserError
from prl.config.quantised import sends_weights, wants_a_copy
from prl.models.checkpoints.plain import write_plain
from prl.models.checkpoints.reading import load_model, open_tensors
from prl.models.checkpoints.writing import hf_tensors, save_checkpoint
from prl.models.families.build import build_decoder
from prl.models.text.tokenizer import save_byte_tokenizer
from prl.planning import make_plan
from prl.planning.commands import render_commands
from prl.runtime.warm_cache import missing_in_cache

CPU = torch.device("cpu")
TESTS = Path(__file__).parent
STAND_IN = {"PYTHONPATH": f"{TESTS.parent}:{TESTS}:{TESTS / 'stand_ins/engine'}"}  # a vllm that does nothing


def held_by(path, card):
    return dict(hf_tensors(load_model(path, card, torch.float32, CPU)))


def kimi(path):
    """A tiny checkpoint in the form of Kimi-K2.5: text model and quantisation within a larger one, which sees."""
    card = family_card("deepseek_v3 straight queries, biases, two dense")
    save_checkpoint(hf_tensors(random_model(card)), path, card)
    quantise(path, INT4, to_int4, lambda name: ".experts." in name and "shared" not in name)
    for file in path.glob("*.safetensors"):
        save_file({f"language_model.{name}": tensor for name, tensor in load_file(file).items()}, file)
    save_file({"vision_tower.patch_embed.proj.weight": torch.ones(2, 3), "mm_projector.linear_1.bias": torch.ones(2)},
              path / "model-00003-of-00003.safetensors")  # fmt: skip
    where = {key: file.name for file in path.glob("*.safetensors") for key in load_file(file)}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    text = card_to_hf_config(card) | {"model_type": "kimi_k2", "quantization_config": INT4}
    outer = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "vision_config": {"a": 1}}
    (path / "config.json").write_text(json.dumps(outer | {"text_config": text}))
    return card


def test_the_text_model_of_a_larger_one_is_read(tmp_path):
    card = kimi(tmp_path)
    config = config_of(tmp_path)
    said = facts_of(config)
    assert said["family"] == facts_of(config["text_config"])["family"] == "deepseek_v3"
    assert {key: getattr(card, key) for key in said} == said
    check_card(tmp_path, card)
    composed = compose(["model=auto", f"model.path={tmp_path}", "warm_start=none"]).model.card
    assert composed == card.model_copy(update={"ac_targets": composed.ac_targets, "cp_styles": composed.cp_styles})
    assert all(tensor.isfinite().all() for tensor in held_by(tmp_path, card).values())


def test_it_is_written_as_a_model_by_itself(tmp_path):
    from transformers import AutoModelForCausalLM

    source, target = tmp_path / "source", tmp_path / "plain"
    card = kimi(source)
    with torch.device("meta"):
        model = build_decoder(card)
    write_plain(model, source, target, torch.bfloat16)
    run = compose([])
    assert not wants_a_copy(run, config_of(target), target)
    blocks = compose(["inference.quantization=fp8_block"])
    assert wants_a_copy(run, config_of(source), source)
    assert wants_a_copy(blocks, config_of(source), source), "its tensors have other names"
    assert config_of(target)["architectures"] == ["DeepseekV3ForCausalLM"]
    plain, held = all_tensors(target), held_by(source, card)
    assert plain.keys() == held.keys()
    experts = {name for name in plain if ".experts." in name}
    assert {plain[name].dtype for name in experts} == {torch.bfloat16}
    for name, tensor in plain.items():
        assert torch.equal(tensor, held[name].to(tensor.dtype))
        assert name in experts or tensor.dtype == torch.float32  # as it was
    _, told = AutoModelForCausalLM.from_pretrained(str(target), output_loading_info=True)
    assert not any(told.values())


def test_layers_that_predict_further_tokens_are_written_too(tmp_path):
    source, target = tmp_path / "source", tmp_path / "plain"
    card, further = with_further_layers(source, "glm4_moe")
    quantise(source, FP8, to_fp8, not_attention)
    with torch.device("meta"):
        model = build_decoder(card)
    write_plain(model, source, target, torch.float32, shard_bytes=30_000)
    plain = all_tensors(target)
    with open_tensors(source) as said:
        assert plain.keys() == said.keys()
        assert all(torch.equal(plain[name], part[:]) for name, part in said.items())
    assert plain.keys() > further.keys()
    assert config_of(target)["num_nextn_predict_layers"] == 1


def test_who_wants_it():
    vllm = ["model=tiny_qwen3", "inference=vllm"]
    assert sends_weights(compose(vllm))
    assert sends_weights(compose(vllm, "inference"))
    assert not sends_weights(compose(vllm, "eval"))  # as it is published
    assert not sends_weights(compose(["model=tiny_qwen3"]))


def test_vllm_loads_no_checkpoint_where_weights_come_in_blocks(tmp_path):
    quantised_qwen3(tmp_path)
    assert wants_a_copy(compose([]), config_of(tmp_path), tmp_path)
    assert not wants_a_copy(compose(["inference.quantization=fp8_block"]), config_of(tmp_path), tmp_path)


def quantised_qwen3(path, **card):
    config = compose(["model=tiny_qwen3"]).model.card
    save_checkpoint(hf_tensors(random_model(config, std=0.02)), path, config)
    save_byte_tokenizer(path)
    quantise(path, FP8, to_fp8, not_attention)
    return config


def test_vllms_engines_begin_with_what_the_trainer_holds(start, tmp_path):  # noqa: F811
    """The stage is real, the roles are tiny; a second run finds what the first has written, until files change."""
    source = tmp_path / "quantised"
    card = quantised_qwen3(source)
    overrides = ["model=tiny_qwen3", f"model.path={source}", "inference=vllm", "deployment.device=cpu"]
    script = {name: {"print_model": True} for name in ("inference/0", "trainer/0", "orchestrator")}

    def begun(name):
        root = start(*overrides, name=name, script=script, environment=STAND_IN)
        code, output = root.wait()
        assert code == 0, output
        logs = [(tmp_path / name / "logs" / f"latest.{role}.log").read_text() for role in ("inference", "trainer")]
        (path,) = {re.search("MODEL (.*)$", log, re.MULTILINE)[1] for log in logs}
        return Path(path), output

    first, output = begun("first")
    assert "vLLM would load it in another form than it is sent" in output
    assert first.parent == tmp_path / "cache" / "plain"
    assert list(first.parent.iterdir()) == [first]  # and no claim
    assert "quantization_config" not in config_of(first)
    assert (first / "tokenizer.json").is_file()
    held = held_by(source, card)
    assert all(torch.equal(tensor, held[name]) for name, tensor in held_by(first, card).items())
    second, output = begun("second")
    assert second == first
    assert "its weights as engines want them are in" in output
    (source / "README.json").write_text("{}")
    third, _ = begun("third")
    assert third != first


def test_the_plan_shows_that_the_run_makes_it(tmp_path):
    quantised_qwen3(tmp_path / "quantised")
    config = compose(["model=tiny_qwen3", f"model.path={tmp_path / 'quantised'}", "inference=vllm", "warm_start=none",
                      f"cache_dir={tmp_path / 'cache'}"])  # fmt: skip
    assert "--model=$MODEL" in render_commands(make_plan(config))
    assert missing_in_cache(config).parent == tmp_path / "cache/plain"
    assert missing_in_cache(config.model_copy(update={"job": "eval"})) is None


def test_servers_for_other_runs_begin_with_it(start, tmp_path):  # noqa: F811
    source = tmp_path / "quantised"
    quantised_qwen3(source)
    root = start("model=tiny_qwen3", f"model.path={source}", "inference=vllm", "deployment.device=cpu",
                 config="inference", environment=STAND_IN)  # fmt: skip
    root.await_running()
    assert len(list((tmp_path / "cache/plain").iterdir())) == 1
    root.process.send_signal(signal.SIGTERM)
    code, output = root.wait()
    assert code == 143, output


def test_people_who_start_the_roles_begin_with_it(tmp_path):
    """The stage is in the terminal of the root."""
    source = tmp_path / "quantised"
    quantised_qwen3(source)
    point = frozen(tmp_path, "model=tiny_qwen3", f"model.path={source}", "inference=vllm", "deployment.device=cpu")
    with terminals(tmp_path) as opened:
        kinds = ("orchestrator", "trainer", "inference")
        all_of_them = [opened.open(SCRIPTED, kind, str(point), **STAND_IN) for kind in kinds]
        assert [opened.code(each) for each in all_of_them] == [0, 0, 0], opened.says(all_of_them[0])
    assert len(list((tmp_path / "cache/plain").iterdir())) == 1


def test_damage_is_told_as_the_users_to_mend(start, tmp_path):  # noqa: F811
    source = tmp_path / "quantised"
    quantised_qwen3(source)
    file = source / "model-00002-of-00002.safetensors"
    scales = load_file(file)
    save_file({name: scale for name, scale in scales.items() if "up_proj" not in name}, file)
    root = start("model=tiny_qwen3", f"model.path={source}", "inference=vllm", "deployment.device=cpu",
                 environment=STAND_IN)  # fmt: skip
    code, output = root.wait()
    assert code == 2, output
    assert "no scales of it are there" in output
    assert not list((tmp_path / "cache" / "plain").iterdir())


# --- whole runs -------------------------------------------------------------------------------------------------------

ON_CPU = [*SMALL[:-1], "deployment.device=cpu", "ckpt=none", "ckpt.export_hf=true", "debug.num_threads=1"]


def max_difference(first, second):
    return max((first[name].float() - second[name].float()).abs().max().item() for name in second)


@pytest.mark.slow
def test_sharded_trainers_read_quantised_files_and_export_all_of_them(tmp_path):
    """Two ranks, each with half of the experts and half of the rows, without a learning rate worth the name."""
    source = tmp_path / "source"
    card, further = with_further_layers(source, "deepseek_v3")
    quantise(source, FP8 | {"weight_block_size": [5, 7]}, lambda weight: to_fp8(weight, (5, 7)), not_attention)
    held = held_by(source, card)
    args = ["model=auto", f"model.path={source}", "model.dtype=float32", "deployment=disaggregated"]
    args += ["deployment.num_train_nodes=1", "deployment.num_train_gpus=2", "parallelism.ep=2", "seq_len=256"]
    args += ["deployment.device=cpu", "sft.batch_size=4", "max_steps=1", "logging=none", "optim.lr=1e-20"]
    args += ["sft.val_interval=0", "ckpt=none", "ckpt.export_hf=true", f"output_dir={tmp_path / 'run'}"]
    done = run(args, tmp_path, "prl.sft")
    assert done.code == 0, done.output
    exported = all_tensors(tmp_path / "run/export")
    assert exported.keys() == held.keys() | further.keys()
    assert max_difference(exported, held) < 1e-18
    with open_tensors(source) as said:
        assert all(torch.equal(exported[name], said[name][:]) for name in further)
    (row,) = rows(tmp_path / "run", "trainer.0")
    assert row["grad_norm"] > 0


@pytest.mark.slow
def test_the_built_in_engine_samples_from_a_quantised_checkpoint(tmp_path):
    source = tmp_path / "source"
    card = quantised_qwen3(source)
    args = ["model=auto", f"model.path={source}", "model.dtype=float32", *ON_CPU, "max_steps=1", "optim.lr=1e-20"]
    done = run([*args, f"output_dir={tmp_path}/run", f"cache_dir={tmp_path}/cache"], tmp_path)
    assert done.code == 0, done.output
    assert max_difference(all_tensors(tmp_path / "run/export"), held_by(source, card)) < 1e-18
    (row,) = rows(tmp_path / "run", "trainer.0")
    assert row["mismatch_kl_max"] < 1e-6
    assert not (tmp_path / "cache/plain").exists()


@pytest.mark.slow
def test_exports_of_resumed_adapters_have_the_further_layers(tmp_path):
    """From a quantised checkpoint, over an interruption, merged; and a step between is evaluated."""
    source, run_dir = tmp_path / "source", tmp_path / "run"
    _, further = with_further_layers(source, "glm4_moe")
    quantise(source, FP8, to_fp8, lambda name: not_attention(name) and "layers.3" not in name)
    args = ["model=auto", f"model.path={source}", "model.dtype=float32", "memory=lora", "memory_recipe.lora.rank=2"]
    args += ["deployment.device=cpu", "seq_len=256", "sft.batch_size=4", "max_steps=8", "logging.wandb.mode=disabled"]
    args += ["sft.val_interval=0", "ckpt.interval=1", "ckpt.keep=8", f"output_dir={run_dir}"]
    process = begin(args, tmp_path, "prl.sft")
    wait_for_checkpoint(process, run_dir, 1)
    kill_root(process)
    done = run(args, tmp_path, "prl.sft")
    assert done.code == 0, done.output
    assert "resuming from the checkpoint of step" in done.output
    exported = all_tensors(run_dir / "export")
    assert all(torch.equal(exported[name], tensor) for name, tensor in further.items())
    with open_tensors(source) as said:
        assert exported.keys() == said.keys()
    args = [f"eval.run={run_dir}", "eval.step=2", "deployment.device=cpu", "eval.num_tasks=2", "inference=torch"]
    args += ["inference.sampling.max_tokens=8", "inference.max_model_len=256", "logging=none"]
    done = run([*args, f"output_dir={tmp_path / 'eval'}"], tmp_path, "prl.eval")
    assert done.code == 0, done.output


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_samples_from_a_quantised_checkpoint(tmp_path):
    """Real engines: they load the copy, take what the trainer sends, and mean the same tokens by it."""
    source = tmp_path / "source"
    quantised_qwen3(source)
    args = ["model=auto", f"model.path={source}", "model.dtype=float32", *ON_CPU, "inference=vllm", "max_steps=2"]
    args += ["algo.max_off_policy_steps=0", "optim.lr=0.01"]
    done = run([*args, f"output_dir={tmp_path}/run", f"cache_dir={tmp_path}/cache"], tmp_path, timeout_s=600)
    assert done.code == 0, done.output
    mismatch = [row["mismatch_kl_max"] for row in rows(tmp_path / "run", "trainer.0")]
    assert max(mismatch) < 1e-6
    assert len(list((tmp_path / "cache/plain").iterdir())) == 1


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_refuses_one_that_was_not_written_anew(tmp_path):
    from prl.inference.vllm.server import check_form

    quantised_qwen3(tmp_path)
    with pytest.raises(UserError, match="in another form than it is sent"):
        check_form(compose([]), tmp_path)
