"""Rules across config groups. Each is a small function that yields what is broken; all of them are always asked."""

from __future__ import annotations

from prl.config.availability import not_available
from prl.config.errors import UserError
from prl.config.rules import (
    bench,
    block_fp8,
    checkpoint,
    concurrency,
    deployment,
    distillation,
    effects,
    engines,
    evaluation,
    external,
    memory,
    model,
    names,
    parallelism,
    rl,
    router,
    sft,
    vllm,
)
from prl.config.rules.rule import Rule
from prl.config.schema import RunConfig
from prl.config.world import world_of

COMMON_RULES: tuple[Rule, ...] = (
    names.names_stay_in_their_directory,
    model.card_is_complete,
    checkpoint.checkpoint_fits_the_card,
    model.expert_groups_are_even,
    model.random_model_names_its_tokenizer,
    model.vocabulary_holds_the_tokens,
    model.stop_tokens_exist,
    rl.every_server_has_a_port,
    model.engine_knows_the_model,
    deployment.gpus_suffice,
    deployment.gpu_ids_fit,
    deployment.nobody_takes_turns,
    deployment.overlapping_engines_fit,
    deployment.sbatch_lines_are_options,
    bench.there_is_a_benchmark,
    effects.keys_take_effect,
    rl.there_is_an_engine,
    vllm.vllm_keys_take_effect,
    block_fp8.formats_have_names,
    block_fp8.eight_bits_want_sixteen,
    block_fp8.blocks_can_be_sent,
    vllm.sleeping_fits_the_engine,
    vllm.routed_experts_are_cached,
    vllm.vllm_arguments_are_free,
    vllm.heads_are_tied_in_vllm,
    vllm.vllm_runs_on_cpus,
    engines.engines_fill_their_devices,
    engines.ranks_are_served_apart_only_with_experts,
    engines.experts_can_be_spread,
    engines.prefill_and_decode_apart_fit,
    engines.offloaded_kv_has_a_place,
    evaluation.served_model_is_a_servers,
    router.router_keys_take_effect,
    router.router_has_its_url,
    router.router_does_not_separate_prefill,
    router.router_keeps_strangers_out,
    external.engines_elsewhere_belong_to_rl,
    external.engines_elsewhere_can_be_told,
    external.weights_reach_engines_elsewhere,
    external.engines_elsewhere_keep_their_keys,
)
TRAIN_RULES: tuple[Rule, ...] = (
    model.fp8_fits_the_model,
    model.attention_kernels_fit,
    parallelism.ep_divides_experts,
    parallelism.ep_fits_the_fsdp_island,
    parallelism.deepep_fits_the_mesh,
    parallelism.hierarchy_has_its_nodes,
    parallelism.deepep_keys_take_effect,
    parallelism.pieces_travel,
    parallelism.deepep_can_run,
    parallelism.ulysses_divides_heads,
    parallelism.ulysses_divides_states,
    parallelism.card_claims_what_layers_can,
    parallelism.model_knows_cp_style,
    parallelism.cp_divides_rows,
    parallelism.cp_stays_in_a_node,
    parallelism.one_size_fills_the_devices,
    parallelism.mesh_fills_the_devices,
    parallelism.custom_code_is_there,
    checkpoint.transformers_layers_can_be_trained,
    model.router_bias_has_a_router,
    model.indexers_can_learn,
    memory.offloads_exclude_each_other,
    memory.the_host_steps_elementwise,
    memory.ac_targets_exist,
    memory.ac_keys_take_effect,
    memory.lora_targets_exist,
    memory.lora_fits_the_kernels,
    deployment.fsdp_groups_need_nodes,
)
RL_RULES: tuple[Rule, ...] = (
    rl.colocated_engines_have_a_trainer,
    rl.there_is_an_env,
    rl.env_id_has_its_env,
    rl.groups_fill_the_batch,
    rl.lengths_nest,
    rl.a_rollout_fits_a_row,
    rl.overlong_buffer_fits,
    rl.pass_at_k_needs_sampling,
    rl.sampling_leaves_a_choice,
    vllm.vllm_says_what_it_kept,
    rl.experts_to_return,
    rl.shared_memory_needs_one_node,
    rl.adapters_travel_alone,
    rl.device_transports_need_their_gpus,
    distillation.there_is_something_to_learn_from,
    distillation.teacher_keys_take_effect,
    distillation.teachers_can_be_learnt_from,
    concurrency.adaptive_keys_take_effect,
    concurrency.synchronous_runs_do_not_adapt,
    concurrency.adaptive_bounds_nest,
    concurrency.adapting_needs_metrics,
)
SFT_RULES: tuple[Rule, ...] = (sft.sft_follows_the_run,)
EVAL_RULES: tuple[Rule, ...] = (
    evaluation.one_policy_is_meant,
    rl.there_is_an_env,
    rl.env_id_has_its_env,
    rl.lengths_nest,
    rl.pass_at_k_needs_sampling,
)
BENCH_RULES: tuple[Rule, ...] = (
    bench.documents_fit_the_row,
    bench.documents_are_longer_than_their_prompt,
    bench.variable_lengths_have_one_maximum,
    bench.alternatives_have_one_device,
    bench.alternatives_stay_plain,
    bench.warm_starts_are_of_whole_runs,
)


def violations(config: RunConfig) -> list[UserError]:
    """Every broken rule, most basic first."""
    world = world_of(config)
    found = [violation for rule in COMMON_RULES for violation in rule(config, world)]
    if world.has_trainers:
        found += [violation for rule in TRAIN_RULES for violation in rule(config, world)]
    if config.job == "rl" or (config.bench is not None and config.bench.target == "stack"):
        found += [violation for rule in RL_RULES for violation in rule(config, world)]
    if config.job == "eval":
        found += [violation for rule in EVAL_RULES for violation in rule(config, world)]
    if config.job == "sft":
        found += [violation for rule in SFT_RULES for violation in rule(config, world)]
    if config.bench is not None:
        found += [violation for rule in BENCH_RULES for violation in rule(config, world)]
    return checkpoint.without_contradictions(found, config) + list(not_available(config, world))
