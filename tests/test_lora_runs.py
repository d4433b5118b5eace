"""LoRA in the trainer: checkpoints, exports and whole runs."""

import json

import pytest
import runs
import tiny
import torch
from test_hf_causal_lm import card_of, plain_model
from tiny import moe_checkpoint
from torch.distributed.checkpoint import FileSystemReader
from trainer_ranks import Job, build_policy, run_job, run_ranks, train_step

from prl.config import compose
from prl.config.errors import UserError
from prl.config.schema import OptimConfig
from prl.models.adapters.lora import is_adapter, whole_tensor
from prl.models.checkpoints.reading import load_model
from prl.models.layers.packed_attention import packed_attention
from prl.planning import warm_start_key, warm_start_plan
from prl.planning.planner import make_plan
from prl.trainer.loops.export import base_name, export_policy
from prl.trainer.parallelize import build_model
from prl.trainer.policy import Policy

LORA = ["memory=lora", "memory_recipe.lora.targets=[q_proj,k_proj,v_proj,o_proj,experts]"]
IDS = torch.arange(30) * 7 % tiny.VOCAB


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return moe_checkpoint(tmp_path_factory.mktemp("model"))


def logits_of(model):
    """Of a prl model that is not sharded, for IDS."""
    with torch.no_grad():
        return model.logits(model(IDS, torch.arange(len(IDS)), packed_attention([len(IDS)], IDS.device)))


def trained_logits(policy):
    """Of the sharded model with its adapters, for IDS."""
    attend = packed_attention([len(IDS)], IDS.device)
    with torch.no_grad():
        return policy.model(IDS, torch.arange(len(IDS)), attend, head=torch.nn.functional.linear)


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optim", ["adamw", "adamw on the host", "muon"])
def test_resuming_is_exact_and_frozen_weights_are_not_saved(world, model_path, tmp_path, optim):
    host = ["memory_recipe.optim_cpu_offload=full"] if optim.endswith("host") else []
    kind = optim.split()[0]
    overrides = [*LORA, f"optim={kind}", *host]
    job = {"model_path": str(model_path), "optim": {"type": kind, "lr": 0.01}, "overrides": overrides}
    whole = run_job(Job(**job, steps=5))
    run_job(Job(**job, steps=3, save=str(tmp_path)))
    checkpoint = tmp_path / "checkpoints" / "step_3"
    resumed = run_job(Job(**job, load=str(checkpoint), start=3, steps=2))
    assert resumed["history"] == whole["history"][3:]
    assert all(torch.equal(resumed["weights"][name], weight) for name, weight in whole["weights"].items())
    saved = FileSystemReader(str(checkpoint / "trainer")).read_metadata().state_dict_metadata
    weights = [name for name in saved if name.startswith("model.")]
    assert weights
    assert all(is_adapter(name) for name in weights)


def test_muon_with_nothing_left_for_adamw(world, model_path):
    job = Job(str(model_path), optim={"type": "muon", "lr": 0.01}, overrides=["memory=lora"])
    policy = build_policy(job, world)
    assert len(policy.optimizers) == 1
    assert train_step(policy, 1) != train_step(policy, 1)


@pytest.mark.slow
def test_a_checkpoint_passes_to_another_mesh(world, model_path, tmp_path):
    job = {"model_path": str(model_path), "overrides": LORA}
    saved = Job(**job, dp_shard=2, ep=2, save=str(tmp_path / "run"))
    run_ranks(tmp_path / "ranks", 2, [saved])
    resumed = run_job(Job(**job, load=str(tmp_path / "run" / "checkpoints" / "step_3"), start=3, steps=2))
    whole = run_job(Job(**job, steps=5))
    torch.testing.assert_close(torch.tensor(resumed["history"]), torch.tensor(whole["history"][3:]), rtol=1e-4, atol=0)


# --- exports ----------------------------------------------------------------------------------------------------------


def test_the_export_is_the_adapter_and_the_merged_model(world, model_path, tmp_path):
    policy = build_policy(Job(str(model_path), overrides=LORA), world)
    before = trained_logits(policy)
    for step in (1, 2, 3):
        train_step(policy, step)
    expected = trained_logits(policy)
    export_policy(policy, model_path, tmp_path)
    merged = load_model(tmp_path, policy.config.model.card, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(logits_of(merged), expected, rtol=1e-4, atol=1e-4)
    assert (expected - before).abs().max() > 0.01
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(model_path)
    assert peft_logits(model_path, tmp_path / "adapter") == pytest.approx(expected.numpy(), rel=1e-3, abs=1e-4)


def peft_logits(base, adapter):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return peft.PeftModel.from_pretrained(model, adapter)(input_ids=IDS[None]).logits[0].numpy()


def test_the_adapter_alone(world, model_path, tmp_path):
    overrides = [*LORA, "memory_recipe.lora.export_merged=false"]
    export_policy(build_policy(Job(str(model_path), overrides=overrides), world), model_path, tmp_path)
    assert {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.*")} == {
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
    }


def test_base_is_named_so_that_others_find_it(tmp_path):
    cached = tmp_path / "snapshots" / "0123"
    config = compose(["warm_start=none", "model.path=owner/name"])
    assert base_name(config, cached) == "owner/name"
    assert base_name(compose(["warm_start=reverse_text", "model.path=owner/name"]), cached) == str(
        cached
    )  # what the warm start left
    here = compose(["warm_start=none", f"model.path={tmp_path / 'base'}"])
    (tmp_path / "base").mkdir()
    assert base_name(here, tmp_path / "base") == str(tmp_path / "base")


# --- transformers' models ---------------------------------------------------------------------------------------------


def hf_policy(card, path, world, *overrides):
    config = compose(["model.impl=hf", "warm_start=none", "memory_recipe.lora.rank=8", *overrides])
    config = config.model_copy(update={"model": config.model.model_copy(update={"card": card})})
    return Policy(config, OptimConfig(lr=0.01), 10, path, world)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_adapters_of_transformers_models(world, family, dtype, tmp_path):
    """Tied embeddings (qwen2) and biases, checkpointing and offloading: trained, exported, read by PEFT."""
    model = plain_model(family, vocab_size=tiny.VOCAB)
    model.save_pretrained(tmp_path / "base")
    levers = ["memory_recipe.ac.mode=full", "memory_recipe.ac_offloading.enabled=true"]
    policy = hf_policy(card_of(model), tmp_path / "base", world, f"model.dtype={dtype}", *levers)
    before = {name: param.detach().clone() for name, param in policy.model.named_parameters()}
    losses = [train_step(policy, 1)[0] for _ in range(6)]
    assert losses[-1] < losses[0]
    for name, param in policy.model.named_parameters():
        assert torch.equal(whole_tensor(param), whole_tensor(before[name])) != is_adapter(name), name
    export_policy(policy, tmp_path / "base", tmp_path / "export")
    expected = trained_logits(policy).float().numpy()
    tolerance = 1e-3 if dtype == "float32" else 0.1
    assert peft_logits(tmp_path / "base", tmp_path / "export" / "adapter") == pytest.approx(expected, abs=tolerance)


OF_TRANSFORMERS = ["model.dtype=float32", "memory_recipe.fused_lm_head_token_chunk_size=disabled"]


@pytest.mark.parametrize(
    ("family", "linears"),
    [
        ("phi3", ["qkv_proj", "o_proj"]),
        ("gpt_bigcode", ["c_attn"]),  # its MLP has a c_proj, too
        ("gpt_neox", ["query_key_value", "dense"]),
        ("opt", ["k_proj", "v_proj", "q_proj", "out_proj"]),
    ],
)
def test_adapters_around_attention_whatever_transformers_calls_it(world, family, linears, tmp_path):
    """As `memory=lora` has them, which knows nothing of these names: trained, exported, read by PEFT."""
    model = plain_model(family, vocab_size=tiny.VOCAB)
    model.save_pretrained(tmp_path / "base")
    chosen = ["model=auto", f"model.path={tmp_path / 'base'}", "model.tokenizer=byte", "memory=lora"]
    config = compose([*chosen, *OF_TRANSFORMERS, "memory_recipe.lora.rank=4"], "sft")
    assert config.memory_recipe.lora.targets == ("attention",)
    policy = Policy(config, OptimConfig(lr=0.01), 10, tmp_path / "base", world)
    adapted = {name.split(".")[-2] for name, _ in policy.model.named_parameters() if is_adapter(name)}
    assert adapted == set(linears)
    losses = [train_step(policy, 1)[0] for _ in range(6)]
    assert losses[-1] < losses[0]
    export_policy(policy, tmp_path / "base", tmp_path / "export")
    written = json.loads((tmp_path / "export/adapter/adapter_config.json").read_text())
    assert set(written["target_modules"]) == set(linears)
    expected = trained_logits(policy).float().numpy()
    assert peft_logits(tmp_path / "base", tmp_path / "export" / "adapter") == pytest.approx(expected, abs=1e-3)


def test_attention_without_linears_is_told(world, tmp_path):
    """GPT-2 has convolutions of width 1 in their place."""
    model = plain_model("gpt2", vocab_size=tiny.VOCAB)
    model.save_pretrained(tmp_path)
    chosen = ["model=auto", f"model.path={tmp_path}", "model.tokenizer=byte", "memory=lora"]
    with pytest.raises(UserError, match="no LoRA target attention") as caught:
        Policy(compose([*chosen, *OF_TRANSFORMERS], "sft"), OptimConfig(lr=0.01), 10, tmp_path, world)
    assert caught.value.fix == "memory_recipe.lora.rank=0"
    assert caught.value.why.endswith("Conv1D of transformers takes no adapters here")


def test_the_head_cannot_have_adapters(world, tmp_path):
    model = plain_model("llama", vocab_size=tiny.VOCAB)
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="head cannot have adapters"):
        hf_policy(card_of(model), tmp_path, world, "memory_recipe.lora.targets=[q_proj,lm_head]")


# --- whole runs -------------------------------------------------------------------------------------------------------


def test_random_weights_get_fresh_adapters(world):
    """As benchmarks build a model."""
    config = compose(["warm_start=none", *LORA])
    model = build_model(config, None, world)
    for name, param in model.named_parameters():
        assert (whole_tensor(param).abs().max() == 0) == name.endswith("lora_b"), name


def test_a_warm_start_trains_all_weights():
    """It is cached by a key that knows nothing of memory recipes."""
    plain, lora = compose([]), compose([*LORA, "memory_recipe.ac.mode=full"])
    stage = warm_start_plan(make_plan(lora))
    assert stage.config.memory_recipe.lora.rank == 0
    assert stage.config.memory_recipe.ac.mode == "full"
    assert warm_start_key(plain) == warm_start_key(lora)


@pytest.mark.slow
def test_a_run_over_two_trainers_resumes_and_exports(tmp_path):
    """The engine samples with the merged weights: what trainer and engine think of a token agrees."""
    args = [
        *runs.SMALL, *LORA, "max_steps=4", "ckpt.interval=2", "ckpt.export_hf=true", "algo.max_off_policy_steps=0",
        "optim.lr=0.01", "deployment.num_train_gpus=2", "parallelism=ep2", f"cache_dir={tmp_path / 'cache'}",
    ]  # fmt: skip
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = runs.run([*args, f"output_dir={whole}"], tmp_path)
    assert done.code == 0, done.output
    rows = runs.rows(whole, "trainer.0")
    assert len(rows) == 4
    assert all(row["mismatch_kl_mean"] < 1e-5 and row["grad_norm"] > 0 for row in rows)
    moment = runs.Moment("optimizer step:4", tmp_path / "moment")
    process = runs.start([*args, f"output_dir={broken}"], tmp_path, env=moment.env)
    moment.wait(process)
    runs.wait_for_checkpoint(process, broken, 2)
    runs.kill_root(process)
    done = runs.run([*args, f"output_dir={broken}"], tmp_path)
    assert done.code == 0, done.output
    assert "resuming from the checkpoint of step 2" in done.output
    assert runs.series(broken, "trainer.0") == runs.series(whole, "trainer.0")
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (whole / "export" / name).read_bytes() == (broken / "export" / name).read_bytes()


@pytest.mark.slow
def test_supervised_tuning_of_adapters(tmp_path):
    data = tmp_path / "squares.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}^2", "completion": str(i * i)}) + "\n" for i in range(300)))
    args = [
        "memory=lora", "data=jsonl", f"sft.data.source={data}", "max_steps=3", "sft.batch_size=4", "optim.lr=0.01",
        "logging.wandb.mode=disabled", f"cache_dir={tmp_path / 'cache'}", f"output_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    done = runs.run(args, tmp_path, "prl.sft")
    assert done.code == 0, done.output
    losses = [row["loss"] for row in runs.rows(tmp_path / "run", "trainer.0")]
    assert losses[-1] < losses[0]
    assert (tmp_path / "run" / "export" / "adapter" / "adapter_config.json").exists()
