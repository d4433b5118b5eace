"""Bad configurations: all problems at once, each with its fix."""

import os
import re
import shlex

import pytest

from prl.config import ConfigError, UserError, compose
from prl.config.composing import problems as complaints
from prl.config.locate import conf_dir, config_groups
from prl.config.overrides import parse, unknown_choice
from prl.config.sweep import compose_points


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ("inference.urls=http://127.0.0.1:8100", "inference.urls=['http://127.0.0.1:8100']"),
        ("inference.urls=[127.0.0.1:8100]", "inference.urls=[http://127.0.0.1:8100]"),
        ("inference.urls=[http://localhost:8100/]", "inference.urls=[http://localhost:8100]"),
        ("deployment.infer_gpu_ids=3", "deployment.infer_gpu_ids=[3]"),
    ],
)
def test_one_where_a_list_is_meant_and_an_address_in_another_form(said: str, fix: str) -> None:
    (problem,) = problems([said])
    assert problem.fix.replace("'", "").startswith(fix.replace("'", ""))


@pytest.mark.parametrize(
    ("said", "why", "fix"),
    [
        ("http://127.0.0.1:99999", "'99999' is no port: ", "[http://127.0.0.1:8000] for instance"),
        ("http://host:0", "'0' is no port: ", "[http://host:8000] for instance"),
        ("http://host:http", "'http' is no port: ", "[http://127.0.0.1:8000] for instance"),
        ("http://10.0.0.7", "it names no port: ", "[http://127.0.0.1:8000] for instance"),
        ("host:8000", "it does not begin with http://: ", "[http://host:8000] as the address"),
        ("http://me:word@host:8000", "it names somebody: ", "[http://host:8000] as the address"),
        ("http://host:8000/v1", "an address is http://HOST:PORT, without a path", "[http://host:8000] as the address"),
    ],
)
def test_an_address_says_what_is_wrong_with_it_and_how_a_good_one_is_written(said: str, why: str, fix: str) -> None:
    (problem,) = problems([f"inference.urls=['{said}']", "inference.control_key_var=K"])
    assert problem.why.startswith(why)
    assert "an address is http://HOST:PORT" in problem.why
    assert problem.fix.startswith(f"inference.urls={fix}")


@pytest.mark.parametrize(
    ("said", "where", "fix"),
    [
        (["env.args.foo=1"], "env.args.foo=1", "env=verifiers env.id=NAME"),
        (["env.args.min_chars=3"], "env.args.min_chars=3", "env.mix.reverse_text.args.min_chars=3 instead of"),
        (["env.id=x", "env.args.gym=a"], "env.id=x, env.args.gym=a", "env=verifiers"),
        (["env.args=5"], "env.args", "env.args.NAME=VALUE"),
        (["env.arg.gym=a"], "env.arg.gym", "env.args.gym=..."),
        (["inference.vlm.seed=1"], "inference.vlm.seed", "inference.vllm.seed=..."),
        (["memory_recipe.ac=full"], "memory_recipe.ac", "memory_recipe.ac.mode=VALUE"),
    ],
    ids=str,
)
def test_keys_below_nodes_that_take_any_are_told_as_they_are_typed(said: list[str], where: str, fix: str) -> None:
    (problem,) = problems(said)
    assert problem.where == where
    assert problem.fix.startswith(fix)


def test_letters_that_the_locale_does_not_know_are_told_as_such() -> None:
    """As the system hands them to a process whose locale is C."""
    unread = os.fsdecode("outputs/ünï".encode()).encode().decode("ascii", "surrogateescape")
    (problem,) = problems([f'output_dir="{unread}"'])
    assert "locale" in problem.why
    assert "PYTHONUTF8=1" in problem.fix


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("env.args.x=a;b", "'env.args.x=\"a;b\"'"),
        ("slurm.sbatch=[--a=b]", "'slurm.sbatch=[\"--a=b\"]'"),
        ("slurm.sbatch=[--a=b,--c]", '\'slurm.sbatch=["--a=b","--c"]\''),
    ],
)
def test_signs_that_stand_in_quotation_marks_are_shown_in_them(line: str, fix: str) -> None:
    with pytest.raises(UserError) as refused:
        parse([line])
    assert refused.value.fix == fix
    (word,) = shlex.split(fix)
    assert parse([word])


def test_keys_of_submitting_and_objects_for_groups_are_shown_where_they_stand() -> None:
    (problem,) = problems(["dry_run=true"])
    assert problem.fix == "hydra.launcher.dry_run=..."
    (problem,) = problems(["memory_recipe={a: 1}"])
    assert problem.fix == "memory_recipe.NAME=VALUE"


def test_a_choice_as_the_value_of_its_node_is_told_with_its_group() -> None:
    (problem,) = problems(["sft.data=jsnl"], "sft")
    assert (problem.why, problem.fix) == ("it holds keys, and is no value itself", "data=jsonl")


@pytest.mark.parametrize("group", sorted(config_groups()))
def test_an_unknown_choice_names_the_folder_in_which_the_choices_lie(group: str) -> None:
    told = unknown_choice(group, "nothing_of_this_name", config_groups()[group])
    folder, _, choices = told.why.partition(" has: ")
    files = {path.stem for path in (conf_dir().parent / folder).glob("*.yaml")}
    assert files == set(choices.split(", "))


def test_choices_of_a_group_of_hydras_lie_in_no_folder_of_ours_alone() -> None:
    (problem,) = problems(["hydra/sweeper=zz"])
    assert problem.why.startswith("the group hydra/sweeper has: points, ")
    assert problem.fix == "hydra/sweeper=points"


def problems(overrides: list[str], job: str = "rl") -> list[UserError]:
    with pytest.raises(ConfigError) as info:
        compose(overrides, job)
    return info.value.violations


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("optim.lrr=1", "optim.lr=..."),
        ("paralelism=ep2", "parallelism=..."),
        ("+algo.los=gspo", "algo.loss=..."),
        ("lr=1", "optim.lr=..."),
        ("memory=tigth", "memory=tight"),
        ("algo=gropo", "algo=grpo"),
        ("parallelism=8", "parallelism=ep8"),
        ("optim=null", "optim=adamw"),
        ("env=[reverse_text,5]", "env=alphabet_sort"),
        ("~optim=5", "optim=adamw"),
        ("env=[reverse_text,{a: 1}]", "env=alphabet_sort"),
        ("memory={ac: {mode: selective}}", "memory_recipe=..."),
        ("sweeps=5", "sweep=..."),
        ("sweeps={seed: 1}", "sweep=..."),
        ("hydra/launcher=5", "hydra/launcher=local, hydra/launcher=slurm"),
        ("hydra.launcher=5", "hydra.sweep.dir=..., hydra/launcher=local"),
        ("hydra/launcher={a: 1}", "hydra/launcher=local, hydra/launcher=slurm"),
        ("hydra/launcher=5,6", "hydra/launcher=local, hydra/launcher=slurm"),
        ("hydra.launcher=5,6", "hydra.sweep.dir=..., hydra/launcher=local"),
        ("hydra/launcher=local,slurm", "hydra/launcher=..."),
        ("hydra.launcher.dry_run=true,false", "hydra.launcher.dry_run=..."),
        ("hydra=null", "hydra.sweep.dir=..., hydra/launcher=local"),
        ("hydra.verbose=5", "hydra.verbose=true"),
        ("env=[reverse_text,countdwn]", "env=countdown"),
        ("algo.loss=gsp", "algo.loss=gspo"),
        ("parallelism.dp_shard=many", "parallelism.dp_shard=auto"),
        ("algo.batch_size=0", "algo.batch_size=128"),
        ("inference.sampling.top_p=2", "inference.sampling.top_p=1.0"),
    ],
)
def test_a_bad_override_is_one_problem_with_the_nearest_fix(override: str, fix: str) -> None:
    found = problems([override])
    assert [violation.fix for violation in found] == [fix]


def test_unknown_keys_choices_and_groups_are_reported_together() -> None:
    found = problems(["memory=tigth", "algo.los=1", "paralelism=ep2", "+new.key=1"])
    assert [violation.where for violation in found] == ["memory=tigth", "algo.los", "paralelism", "new.key"]


def test_a_choice_that_is_a_number_hides_no_other_problem() -> None:
    assert [violation.where for violation in problems(["optim=5", "algo.los=1"])] == ["optim=5", "algo.los"]


def test_a_group_of_another_job_is_unknown() -> None:
    assert "algo" in problems(["algo=grpo"], "sft")[0].what


def test_impossible_ep_and_cp_are_both_reported() -> None:
    where = " ".join(
        violation.where
        for violation in problems(["parallelism.ep=3", "parallelism.cp=3", "parallelism.cp_style=ulysses"])
    )
    assert "parallelism.ep=3, model.card.num_experts=8" in where
    assert "parallelism.cp=3, model.card.num_attention_heads=4" in where


RULES = {
    "ep needs experts": (["model=tiny_qwen3", "parallelism.ep=2"], "parallelism.ep=1, or a model with experts"),
    "ep is a multiple of cp": (["parallelism.ep=2", "parallelism.cp=4"], "parallelism.ep=4"),
    "ep divides the island": (["parallelism.ep=4", "parallelism.dp_shard=2"], "parallelism.dp_shard=auto deployment"),
    "ulysses needs heads": (
        ["parallelism.cp=8", "parallelism.cp_style=ulysses", "parallelism.dp_shard=1"],
        "parallelism.cp=4 or parallelism.cp_style",
    ),
    "ring only": (
        ["parallelism.cp=2", "parallelism.cp_style=ulysses", "model.card.cp_styles=[ring]"],
        "parallelism.cp_style=ring",
    ),
    "rows over cp": (["parallelism.cp=4", "seq_len=1020"], "seq_len=1024"),
    "fp8 wants bfloat16": (["model=qwen3_4b", "model.fp8=deep_gemm", "model.dtype=float32"], "model.dtype=bfloat16"),
    "fp8 in blocks": (["model.fp8=deep_gemm", "model.dtype=bfloat16"], "model.fp8=none"),
    "mesh fills devices": (["parallelism=fsdp", "deployment.num_train_gpus=3"], "parallelism.dp_shard=auto"),
    "hf and chunked head": (
        ["model.impl=hf", "memory=balanced"],
        "memory_recipe.fused_lm_head_token_chunk_size=disabled",
    ),
    "two offloads": (
        ["memory_recipe.fsdp_cpu_offload=true", "memory_recipe.optim_cpu_offload=true"],
        "memory_recipe.optim_cpu_offload=false",
    ),
    "muon on the host": (["optim=muon", "memory_recipe.fsdp_cpu_offload=true"], "memory_recipe.fsdp_cpu_offload=false"),
    "ac target": (["memory_recipe.ac.targets=[mlpp]"], "memory_recipe.ac.targets=[norm,act,attn_proj,moe]"),
    "ac every second layer": (["memory=selective", "memory_recipe.ac.freq=2"], "memory_recipe.ac.freq=1"),
    "ac targets": (["memory=tight", "memory_recipe.ac.targets=[norm]"], "memory_recipe.ac.mode=selective"),
    "deepep without deepep": (["parallelism=ep2", "parallelism.deepep_num_sms=24"], "parallelism.deepep_num_sms=20"),
    "deepep in chunks": (["parallelism.deepep_token_chunk_size=8"], "parallelism.deepep_token_chunk_size=null"),
    "flash in float32": (["model.attn=flash_attention_3"], "model.dtype=bfloat16"),
    "flash on CPU": (["model.attn=flash_attention_2", "deployment.device=cpu"], "deployment.device=cuda"),
    "sdpa in a ring": (["model.attn=sdpa", "parallelism=cp2_ring"], "model.attn=auto"),
    "hf and fp8": (["model.impl=hf", "model.fp8=emulated"], "model.fp8=none"),
    "hf and routing": (["model.impl=hf", "inference.return_routed_experts=true"], "return_routed_experts=false"),
    "a card that claims a ring for states": (
        ["model=tiny_nemotron_h", "model.card.cp_styles=[ring]", "parallelism=cp2_ring"],
        "model.card.cp_styles=[ulysses]",
    ),
    "a card that claims a target": (
        ["model.card.ac_targets=[norm,mlp]"],
        "model.card.ac_targets=[norm,act,attn_proj,moe]",
    ),
    "indexers of dense attention": (["model.indexer_loss_coef=0.1"], "model.indexer_loss_coef=0"),
    "indexers beside adapters": (
        ["model=tiny_glm_moe_dsa", "memory=lora", "memory_recipe.lora.targets=[o_proj]", "model.indexer_loss_coef=0.1"],
        "model.indexer_loss_coef=0",
    ),
    "hf and router biases": (["model.impl=hf", "model.router_bias_update_rate=0.1"], "router_bias_update_rate=0"),
    "no code of ours": (["model.impl=custom", "model.card.family=other"], "model.impl=hf"),
    "fixed, with a least limit": (["inference.concurrency.min=4"], "inference.concurrency.mode=adaptive"),
    "fixed, with a mark": (["inference.concurrency.kv_high=0.9"], "inference.concurrency.mode=adaptive"),
    "synchronous and adaptive": (["algo=sync", "inference.concurrency.mode=adaptive"], "algo.max_off_policy_steps=1"),
    "adaptive from beyond": (
        ["inference.concurrency.mode=adaptive", "inference.concurrency.start=500"],
        "inference.max_concurrent_rollouts=500",
    ),
    "marks the wrong way round": (
        ["inference.concurrency.mode=adaptive", "inference.concurrency.kv_low=0.96"],
        "inference.concurrency.kv_low=0.8",
    ),
    "adaptive and blind": (
        ["inference=vllm", "inference.concurrency.mode=adaptive", "+inference.vllm.disable_log_stats=true"],
        "inference.vllm.disable_log_stats=false",
    ),
    "two sizes that fill the devices": (["parallelism=ddp", "parallelism.dp_shard=auto"], "parallelism.dp_shard=1"),
    "replicas that do not fill them": (
        ["parallelism=ddp", "parallelism.dp_shard=3", "deployment.num_train_gpus=4"],
        "parallelism.dp_replicate=1 parallelism.dp_shard=auto",
    ),
    "no replicas": (["parallelism.dp_replicate=0"], "parallelism.dp_replicate=1"),
    "replicas twice": (
        [
            "deployment=multi_node",
            "deployment.num_train_nodes=4",
            "deployment.nodes_per_fsdp_group=2",
            "parallelism.dp_replicate=4",
        ],
        "parallelism.dp_replicate=2",
    ),
    "muon steps on the device": (
        ["optim=muon", "memory_recipe.optim_cpu_offload=full"],
        "memory_recipe.optim_cpu_offload=true",
    ),
    "lora target": (
        ["memory=lora", "memory_recipe.lora.targets=[q_proj,up_proj]"],
        "memory_recipe.lora.targets=[q_proj,k_proj,v_proj,o_proj,experts]",
    ),
    "lora without targets": (["memory=lora", "memory_recipe.lora.targets=[]"], "memory_recipe.lora.targets=[q_proj"),
    "lora on foreign experts": (
        ["memory=lora", "model.impl=hf", "memory_recipe.lora.targets=[experts]"],
        "memory_recipe.lora.targets=[attention]",
    ),
    "lora and fp8": (["memory=lora", "model.fp8=emulated"], "model.fp8=none"),
    "lora rank in blocks": (
        ["memory=lora", "model.dtype=bfloat16", "memory_recipe.lora.rank=4", "memory_recipe.lora.targets=[experts]"],
        "memory_recipe.lora.rank=8",
    ),
    "too few GPUs": (
        ["deployment=colocated", "deployment.device=cuda", "parallelism.dp_shard=9", "deployment.num_train_gpus=9"],
        "gpus_per_node=9",
    ),
    "islands need nodes": (["deployment.nodes_per_fsdp_group=2"], "deployment.nodes_per_fsdp_group=null"),
    "no engine": (["deployment.num_infer_gpus=0"], "deployment.num_infer_gpus=1"),
    "colocated engines": (["deployment=colocated", "deployment.num_infer_gpus=2"], "deployment.num_infer_gpus=1"),
    "nothing to overlap": (["deployment=colocated_overlapped", "algo=sync"], "deployment.infer_memory_fraction=null"),
    "an engine's part said twice": (
        ["deployment=colocated_overlapped", "inference=vllm", "inference.vllm.gpu_memory_utilization=0.3"],
        "deployment.infer_memory_fraction=0.3 without",
    ),
    "a part of what is not shared": (["deployment.infer_memory_fraction=0.4"], "deployment=colocated"),
    "a whole part": (
        ["deployment=colocated", "deployment.infer_memory_fraction=1"],
        "deployment.infer_memory_fraction=null",
    ),
    "engines that never sleep": (
        ["deployment=colocated_overlapped", "inference=vllm", "inference.sleep_level=2"],
        "inference.sleep_level=1",
    ),
    "whole groups": (["algo.batch_size=20"], "algo.batch_size=16"),
    "group of one": (["algo.group_size=1"], "algo.group_size=8"),
    "room for a prompt": (["inference.max_model_len=64"], "inference.max_model_len=128"),
    "positions": (["inference.max_model_len=1024"], "inference.max_model_len=512"),
    "a rollout in a row": (["seq_len=128"], "seq_len=256"),
    "overlong buffer": (["algo.length_rule=dapo_overlong"], "algo.overlong_buffer="),
    "greedy pass@k": (["eval.k=4", "eval.temperature=0"], "eval.temperature=1.0"),
    "greedy pass@k by top_k": (["eval.k=4", "eval.top_k=1"], "eval.top_k=0"),
    "training on one token": (["inference.sampling.top_k=1"], "inference.sampling.top_k=0"),
    "training on the best": (["inference.sampling.min_p=1"], "inference.sampling.min_p=0"),
    "nothing but dense layers": (["model.card.mlp_only_layers=[0,1,2,3]"], "model.card.mlp_only_layers=[]"),
    "a layer that is not there": (["model.card.mlp_only_layers=[4]"], "model.card.mlp_only_layers=[]"),
    "a dense layer without size": (["model.card.mlp_only_layers=[0]"], "model.card.intermediate_size=256"),
    "dense experts": (["model=tiny_qwen3", "inference.return_routed_experts=true"], "return_routed_experts=false"),
    "NCCL on one GPU": (["deployment=colocated", "weight_transport=nccl"], "weight_transport=ipc"),
    "IPC between GPUs": (["weight_transport=ipc"], "weight_transport=nccl"),
    "IPC without a trainer": (
        ["deployment=colocated", "weight_transport=ipc", "deployment.num_infer_gpus=2"],
        "weight_transport=shared_memory",
    ),
    "NCCL on CPUs": (["deployment.device=cpu", "weight_transport=nccl"], "weight_transport=filesystem"),
    "segments and a second node": (["parallelism=ep8", "weight_transport=shared_memory"], "weight_transport=tcp"),
    "segments and nodes": (["deployment=multi_node", "weight_transport=shared_memory"], "weight_transport=filesystem"),
    "tokenizer": (["model.tokenizer=null"], "model.tokenizer=byte"),
    "head groups": (["model.card.num_key_value_heads=3"], "model.card.num_key_value_heads="),
}


@pytest.mark.parametrize("name", RULES)
def test_a_broken_rule_names_an_override_that_fixes_it(name: str) -> None:
    overrides, fix = RULES[name]
    assert any(fix in violation.fix for violation in problems(overrides)), [v.fix for v in problems(overrides)]


@pytest.mark.parametrize(
    "wrong",
    [
        ["inference.sampling.top_p=0.9"],
        ["inference.sampling.min_p=0.1"],
        ["inference.sampling.top_k=64", "+inference.vllm.max_logprobs=20"],
        ["inference.sampling.top_k=1"],
    ],
    ids=["top_p", "min_p", "max_logprobs", "one token"],
)
def test_remedies_for_what_vllm_cannot_say_work(wrong: list[str]) -> None:
    """Each alternative that is an override, one at a time. Evaluations truncate as they like."""
    (violation,) = problems(["inference=vllm", *wrong])
    remedies = [words for words in re.split(r"[;,] (?:or )?", violation.fix) if "=" in words.split()[0]]
    assert remedies
    for remedy in remedies:
        compose(["inference=vllm", *wrong, *remedy.split()])
    compose(["inference=vllm", "eval.top_p=0.9", "eval.min_p=0.1"])


def test_both_names_of_the_memory_group_at_once() -> None:
    assert problems(["memory=tight", "memory_recipe=none"])[0].where == "memory, memory_recipe"


def test_sft_keys_of_the_run_are_set_in_one_place() -> None:
    assert problems(["sft.max_steps=5"], "sft")[0].fix == "set max_steps instead of sft.max_steps"


def test_data_without_source_is_missing() -> None:
    assert problems(["data=jsonl"], "sft")[0].fix == "sft.data.source=VALUE on the command line"


@pytest.mark.parametrize("tags", ["['${nope}']", "[a,'${nope.deep}']"])
def test_the_remedy_for_an_element_of_a_list_is_an_override(tags: str) -> None:
    (violation,) = problems([f"logging.wandb.tags={tags}"])
    remedy = violation.fix.partition(", or")[0]
    assert remedy == "logging.wandb.tags=[]"
    compose([remedy])


def test_an_element_of_a_list_that_is_left_open_is_mended_by_its_list() -> None:
    (violation,) = problems(["logging.wandb.tags=[a,'???']"])
    assert violation.fix == "logging.wandb.tags=VALUE on the command line"


def test_the_points_of_a_sweep_are_checked_together() -> None:
    with pytest.raises(ConfigError) as info:
        compose_points(["parallelism.ep=1,3", "algo.batch_size=128,20"], "rl")
    where = [violation.where for violation in info.value.violations]
    assert sum("num_experts" in line for line in where) == 1, "a problem of two points is told once"
    assert any("first in the point parallelism.ep=1 algo.batch_size=20" in line for line in where)


@pytest.mark.parametrize("env", ["alphabet_sort", "[reverse_text,alphabet_sort]", "countdown,alphabet_sort"])
def test_a_sweep_may_set_what_only_a_chosen_group_has(env: str) -> None:
    overrides = [f"env={env}", "env.mix.alphabet_sort.args.turns=2,3", "optim=muon"]
    assert complaints(overrides, "rl") == []
    (wrong,) = complaints([*overrides, "env.mix.alphabet_sort.args.turnz=2"], "rl")
    assert wrong.fix == "env.mix.alphabet_sort.args.turns=..."
    assert [error.where for error in complaints(overrides[1:], "rl")] == ["env.mix.alphabet_sort.args.turns"]


def test_the_points_of_a_sweep_cannot_share_a_directory() -> None:
    with pytest.raises(ConfigError, match="share one output_dir"):
        compose_points(["seed=1,2", "output_dir=x"], "rl")
