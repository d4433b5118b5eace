"""For test_keys_take_effect: under which job each key means something, and another value for it."""

from __future__ import annotations

from prl.config.families import HYBRID, INDEX, LATENT, OWN_EXPERTS
from prl.config.keys import schema_keys

VLLM = ("inference=vllm", "deployment.num_infer_gpus=4")
APART = (*VLLM, "inference.pd.num_prefill_gpus=2")
NODES = ("deployment=multi_node", "deployment.num_train_nodes=2")
MOONCAKE = ("inference.kv_offload.type=mooncake", "inference.kv_offload.mooncake_config=x.json")
DEEPEP = ("parallelism=ep2", "parallelism.ep_comm_backend=deepep", "model.dtype=bfloat16")
NCCL = ("deployment.device=cuda", "weight_transport=nccl")
# prefix of keys -> the job and the overrides under which they may be changed; the longest prefix counts
CONTEXTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "": ("rl", ()),
    "sft.": ("sft", ()),
    "bench.": ("bench", ()),
    "bench.baseline_checkpointing": ("bench", ("bench.target=transformers",)),
    "eval.run": ("eval", ()),
    "eval.step": ("eval", ()),
    "deployment.num_train_nodes": ("rl", NODES),
    "deployment.num_infer_nodes": ("rl", NODES),
    "deployment.gpus_per_node": ("rl", NODES),
    "deployment.nodes_per_fsdp_group": ("rl", NODES),
    "algo.clip_": ("rl", ("algo=ppo_clip",)),
    "algo.teacher.": ("rl", ("algo.teacher.urls=['http://h:1']",)),
    "algo.teacher.urls": ("rl", ()),
    "algo.overlong_buffer": ("rl", ("algo.length_rule=dapo_overlong", "algo.overlong_buffer=16")),
    "env.id": ("rl", ("env=verifiers", "env.id=vf_letters")),
    "env.args": ("rl", ("env=verifiers", "env.id=vf_letters")),
    "model.card.intermediate_size": ("rl", ("model=tiny_qwen3",)),
    "model.card.mlp_only_layers": ("rl", ("model.card.intermediate_size=64",)),
    "model.card.family": ("rl", ("model=tiny_qwen3", "inference=vllm", "model.path=/a/checkpoint")),
    "model.card.attention_bias": ("rl", ("model=tiny_glm4_moe",)),
    "model.card.use_qk_norm": ("rl", ("model=tiny_glm4_moe",)),
    "model.card.n_shared_experts": ("rl", ("model=tiny_glm4_moe",)),
    "model.card.routed_scaling_factor": ("rl", ("model=tiny_glm4_moe",)),
    "model.card.n_group": ("rl", ("model=tiny_glm4_moe",)),
    "model.card.topk_group": ("rl", ("model=tiny_glm4_moe", "model.card.n_group=4", "model.card.topk_group=2")),
    "model.card.router_dtype": ("rl", ("model.dtype=bfloat16",)),
    "model.card.partial_rotary_factor": ("rl", ("model=tiny_glm4_moe",)),
    **{f"model.card.{key}": ("rl", ("model=tiny_deepseek_v3",)) for key in LATENT},
    **{f"model.card.{key}": ("rl", ("model=tiny_nemotron_h",)) for key in (*HYBRID, *OWN_EXPERTS)},
    **{f"model.card.{key}": ("rl", ("model=tiny_glm_moe_dsa",)) for key in (*INDEX, "shared_index_layers")},
    "model.card.cp_styles": ("rl", ("parallelism=cp2", "parallelism.cp_style=ulysses")),
    "model.card.ac_targets": ("rl", ("memory_recipe.ac.mode=selective", "memory_recipe.ac.targets=[moe]")),
    "model.router_bias_update_rate": ("sft", ()),
    "model.indexer_loss_coef": ("sft", ("model=tiny_glm_moe_dsa",)),
    "memory_recipe.ac.freq": ("rl", ("memory_recipe.ac.mode=full",)),
    "memory_recipe.ac.targets": ("rl", ("memory_recipe.ac.mode=selective",)),
    "memory_recipe.ac_offloading.max_": ("rl", ("memory_recipe.ac_offloading.enabled=true",)),
    "memory_recipe.fsdp_cpu_offload": ("rl", ("optim=adamw",)),
    "memory_recipe.lora.": ("rl", ("memory=lora",)),
    "parallelism.allow_cp_across_nodes": (
        "rl", (*NODES, "deployment.gpus_per_node=2", "parallelism.cp=4", "parallelism.allow_cp_across_nodes=true"),
    ),
    "parallelism.cp_style": ("rl", ("parallelism=cp2",)),
    "parallelism.ep_comm_backend": ("rl", DEEPEP),
    "parallelism.deepep_": ("rl", DEEPEP),
    "parallelism.ep_pieces": ("rl", ("parallelism=ep2",)),
    "parallelism.reduce_dtype": ("rl", ("parallelism.dp_shard=2",)),
    "parallelism.reshard_after_forward": ("rl", ("parallelism.dp_shard=2",)),
    "weight_transport.bucket_mib": ("rl", NCCL),
    "weight_transport.stage_mib": ("rl", NCCL),
    "optim.momentum": ("rl", ("optim=muon",)),
    "optim.schedule.": ("rl", ("optim=adamw", "optim.schedule.type=linear")),
    "optim.schedule.decay_steps": ("rl", ("optim=adamw", "optim.schedule.type=wsd", "optim.schedule.decay_steps=5")),
    "warm_start.optim.schedule.": ("rl", ("warm_start.optim.schedule.type=linear",)),
    "warm_start.optim.schedule.decay_steps": (
        "rl", ("warm_start.optim.schedule.type=wsd", "warm_start.optim.schedule.decay_steps=5"),
    ),
    "inference.max_num_seqs": ("rl", VLLM),
    "inference.max_model_len": ("rl", VLLM),
    "inference.dtype": ("rl", VLLM),
    "inference.prefix_caching": ("rl", VLLM),
    "inference.return_routed_experts": ("rl", VLLM),
    "inference.tp": ("rl", VLLM),
    "inference.dp": ("rl", VLLM),
    "inference.dp_load_balancing": ("rl", (*VLLM, "inference.dp=2")),
    "inference.expert_parallel": ("rl", (*VLLM, "inference.dp=2")),
    "inference.all2all_backend": ("rl", (*VLLM, "inference.dp=2", "inference.expert_parallel=true")),
    "inference.quantization": ("rl", VLLM),
    "inference.deep_gemm": ("rl", (*VLLM, "inference.quantization=fp8", "inference.dtype=bfloat16")),
    "inference.env": ("rl", VLLM),
    "inference.vllm": ("rl", VLLM),
    "inference.concurrency.": ("rl", ("inference.concurrency.mode=adaptive",)),
    "inference.pd.": ("rl", APART),
    "inference.pd.prefill.all2all_backend": (
        "rl", (*APART, "inference.dp=2", "inference.expert_parallel=true"),
    ),
    "inference.pd.decode.all2all_backend": (
        "rl", (*APART, "inference.dp=2", "inference.expert_parallel=true"),
    ),
    "inference.kv_offload.": ("rl", (*VLLM, "inference.kv_offload.type=native", "inference.kv_offload.cpu_gib=4")),
    "inference.kv_offload.type": ("rl", (*VLLM, *MOONCAKE)),
    "inference.kv_offload.mooncake_config": ("rl", (*VLLM, *MOONCAKE)),
    "deployment.infer_memory_fraction": (
        "rl", ("inference=vllm", "deployment=colocated_overlapped", "deployment.device=cuda"),
    ),
    "inference.sleep_level": ("rl", ("inference=vllm", "deployment=colocated", "deployment.device=cuda")),
    "inference.control_key_var": ("inference", ()),
    "inference.served_model": ("eval", ("inference.urls=['http://h:1']",)),
    "inference.router.": ("rl", (*VLLM, "inference.router.type=builtin")),
    "inference.router.url": ("rl", ("inference.router.type=url", "inference.router.url=http://h:1")),
}  # fmt: skip
# where another value cannot be made up from the key's type
OTHERS = {
    "model.name": "other",
    "model.card.num_key_value_heads": "4",
    "model.card.num_experts": "16",
    "model.card.head_dim": "64",
    "model.card.mlp_only_layers": "[0]",
    "model.card.qk_nope_head_dim": "16",
    "model.card.qk_rope_head_dim": "32",
    "model.card.v_head_dim": "16",
    "model.card.shared_index_layers": "[1]",
    "model.card.hybrid_override_pattern": "MM*EME",
    "model.card.mamba_num_heads": "4",
    "model.card.mamba_n_groups": "2",
    "model.card.rope_scaling": "{rope_type: linear, factor: 2.0}",
    "model.card.cp_styles": "[ring]",
    "model.card.ac_targets": "[norm]",
    "model.card.max_position_embeddings": "255",
    "parallelism.dp_replicate": "2",
    "parallelism.dp_shard": "4",
    "parallelism.ep": "2",
    "deployment.num_train_gpus": "2",
    "deployment.infer_gpu_ids": "[1]",
    "deployment.infer_memory_fraction": "0.5",
    "deployment.train_gpu_ids": "[3]",
    "inference.pd.num_prefill_gpus": "1",
    "inference.host": "localhost",
    "inference.urls": "['http://h:1']",
    "algo.teacher.urls": "['http://h:1']",
    "inference.vllm": "{block_size: 32}",
    "inference.pd.prefill.vllm": "{block_size: 32}",
    "inference.pd.decode.vllm": "{block_size: 32}",
    "inference.env": "{A: b}",
    "inference.pd.prefill.env": "{A: b}",
    "inference.pd.decode.env": "{A: b}",
    "inference.kv_offload.mooncake_config": "y.json",
    "inference.max_model_len": "128",
    "inference.sampling.top_p": "0.5",
    "slurm.time": "5",
    "slurm.mem": "5G",
    "slurm.sbatch": "[--exclusive]",
    "slurm.setup": "[module]",
    "algo.batch_size": "128",
    "env.mix": "{reverse_text: {id: countdown}}",
    "choices": "{a: b}",
    "swept": "{a: b}",
    "inference.kv_offload.type": "native",
    "inference.deep_gemm": "true",
    "inference.sampling.top_k": "5",
    "inference.router.balance_rel_threshold": "3",
    "inference.router.url": "http://h:2",
    "inference.concurrency.start": "7",
    "inference.concurrency.kv_high": "0.9",
    "env.args": "{num_rows: 7}",
    "sft.data.args": "{max_chars: 9}",
    "warm_start.data.args": "{max_chars: 9}",
    "sft.data.loss_roles": "[user]",
    "warm_start.data.loss_roles": "[user]",
    "logging.wandb.tags": "[a]",
    "memory_recipe.ac.targets": "[norm]",
    "model.fp8": "emulated",
    "job": "inference",
    "algo.length_rule": "dapo_filter",
    "eval.temperature": "0.5",
    "eval.top_p": "0.5",
    "inference.dp_load_balancing": "external",
    "inference.pd.prefill.tp": "2",
    "inference.pd.prefill.dp": "2",
    "inference.pd.decode.tp": "2",
    "inference.pd.decode.dp": "2",
    "model.card.family": "other",
    "memory_recipe.lora.targets": "[q_proj]",
}
# keys of the schema that nobody may set, and how what they say is said; see the tests of their rules
REFUSED = {
    key: f"in this job `{key.removeprefix('sft.')}` says it" for key in schema_keys() if key.startswith("sft.optim.")
}
REFUSED |= {key: f"in this job `{key.removeprefix('sft.')}` says it" for key in ("sft.max_steps", "sft.seq_len")}
REFUSED |= {"choices": "made of the groups chosen", "swept": "made of what a multirun sweeps"}
# of keys that permit something: what a rule says that the job asks for it in vain
PERMITS = {
    "parallelism.allow_cp_across_nodes": "parallelism.allow_cp_across_nodes=true",
    "eval.run": "eval.run=",  # of a directory that holds a run; what it does then: test_evaluator.py
    "eval.step": "eval.step has no effect",  # without one
    "ckpt.from_run": "ckpt.from_run=",  # of a directory that holds a run; what it does then: test_branching.py
    "ckpt.from_step": "ckpt.from_step has no effect",  # without one
    "model.card.cp_styles": "its card allows: ring",
    "model.card.ac_targets": "its card allows: norm",
    "model.card.max_position_embeddings": "The model knows 255 positions",
}
# what has to change together with a key
COMPANIONS = {
    "model.card.qk_nope_head_dim": ("model.card.head_dim=32",),
    "model.card.qk_rope_head_dim": ("model.card.head_dim=64",),
    "inference.urls": ("inference.control_key_var=KEY",),
    "inference.kv_offload.type": ("inference.kv_offload.mooncake_config=null", "inference.kv_offload.cpu_gib=4"),
}
