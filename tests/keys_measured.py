"""Keys whose effect only shows in what runs, and the test that shows it. For test_keys_take_effect.

A test belongs here only if it fails where the key is not read: from the configuration on, not of a function that is
given its value.
"""

MEASURED = {
    "algo.adv_tau": "test_distillation.py::test_groups_without_signal_in_rewards_are_learnt_from",
    "algo.teacher.api_key_var": (
        "test_distillation.py::test_a_policy_comes_closer_to_its_teacher_and_a_teacher_that_dies_costs_no_step"
    ),
    "algo.teacher.served_model": (
        "test_distillation.py::test_another_tokenizer_and_a_short_context_are_told_before_anything_is_sampled"
    ),
    "algo.teacher.tau": ("test_distillation.py::test_each_token_is_told_how_much_more_probable_it_is_to_the_teacher"),
    "algo.teacher.urls": (
        "test_distillation.py::test_a_policy_comes_closer_to_its_teacher_and_a_teacher_that_dies_costs_no_step"
    ),
    "algo.advantage": "test_keys_orchestrator.py::test_advantages_are_those_asked_for",
    "algo.batch_size": "test_keys_orchestrator.py::test_a_batch_is_of_so_many_groups_of_so_many_rollouts",
    "algo.entropy_coef": "test_keys_trainer.py::test_entropy_coef_adds_the_gradient_of_the_entropy",
    "algo.filter_zero_signal": "test_orchestrator_producer.py::test_groups_without_signal_are_kept_when_told_so",
    "algo.group_size": "test_keys_orchestrator.py::test_a_batch_is_of_so_many_groups_of_so_many_rollouts",
    "algo.length_rule": "test_keys_orchestrator.py::test_advantages_are_those_asked_for",
    "algo.max_off_policy_steps": "test_orchestrator_producer.py::test_no_token_older_than_the_bound_is_ever_handed_out",
    "algo.max_replacement_ratio": (
        "test_orchestrator_producer.py::test_groups_without_signal_are_replaced_up_to_the_limit"
    ),
    "algo.overlong_buffer": "test_keys_orchestrator.py::test_advantages_are_those_asked_for",
    "bench.baseline_checkpointing": "test_keys_trainer.py::test_plain_transformers_recomputes_where_told_so",
    "bench.doc_len": "test_bench.py::test_document_lengths",
    "bench.lengths": "test_bench.py::test_document_lengths",
    "bench.micro_batches": "test_keys_trainer.py::test_a_benchmark_takes_as_many_rows_and_steps_as_told",
    "bench.output_json": "test_bench.py::test_stack",
    "bench.profile": "test_keys_trainer.py::test_a_benchmark_takes_as_many_rows_and_steps_as_told",
    "bench.random_weights": "test_keys_trainer.py::test_a_benchmark_draws_its_weights_or_reads_them",
    "bench.steps": "test_keys_trainer.py::test_a_benchmark_takes_as_many_rows_and_steps_as_told",
    "bench.target": "test_bench.py::test_stack",
    "bench.warmup_steps": "test_keys_trainer.py::test_a_benchmark_takes_as_many_rows_and_steps_as_told",
    "cache_dir": "test_keys_sft.py::test_models_made_here_are_kept_in_cache_dir",
    "ckpt.asynchronous": "test_keys_trainer.py::test_checkpoints_are_written_beside_training_where_told_so",
    "ckpt.at_end": "test_keys_sft.py::test_what_a_run_leaves_at_its_end",
    "ckpt.export_dtype": "test_keys_sft.py::test_an_export_is_in_the_dtype_that_is_asked_for",
    "ckpt.export_hf": "test_keys_sft.py::test_what_a_run_leaves_at_its_end",
    "ckpt.interval": "test_slow_commits.py::test_training_goes_on_while_a_checkpoint_is_committed",
    "ckpt.keep": "test_slow_commits.py::test_training_goes_on_while_a_checkpoint_is_committed",
    "debug.deterministic": "test_keys_trainer.py::test_deterministic_kernels_are_asked_for",
    "debug.keep_rollouts": "test_runs.py::test_colocated_takes_turns",
    "deployment.hang_timeout_s": "test_runtime_tree.py::test_a_hung_child_is_found_and_its_stack_shown",
    "deployment.start_timeout_s": "test_runtime_tree.py::test_a_child_that_never_comes_up_is_found",
    "deployment.stop_timeout_s": "test_runtime_tree.py::test_who_does_not_stop_in_time_is_named_and_killed",
    "env.args": "test_verifiers.py::test_the_command_line_names_environment_and_arguments",
    "env.id": "test_verifiers.py::test_the_command_line_names_environment_and_arguments",
    "env.max_turns": "test_keys_orchestrator.py::test_conversations_end_after_max_turns",
    "env.mix": "test_runs.py::test_misbehaving_rewards_cost_rollouts_not_the_run",
    "env.on_timeout": "test_env_outcomes.py::test_late_rollouts_count_as_zero_where_told_so",
    "env.reward_timeout_s": "test_env_outcomes.py::test_a_run_survives_every_misbehaviour_and_says_what_it_was",
    "env.rollout_timeout_s": "test_orchestrator_watch.py::test_aborted_requests_and_cancelled_rollouts_are_counted",
    "eval.at_end": "test_keys_orchestrator.py::test_evaluations_are_where_eval_says",
    "eval.at_start": "test_keys_orchestrator.py::test_evaluations_are_where_eval_says",
    "eval.interval": "test_keys_orchestrator.py::test_evaluations_are_where_eval_says",
    "eval.k": "test_keys_orchestrator.py::test_evaluations_take_num_tasks_and_k_and_pass_at_the_threshold",
    "eval.num_tasks": "test_keys_orchestrator.py::test_evaluations_take_num_tasks_and_k_and_pass_at_the_threshold",
    "eval.pass_threshold": "test_keys_orchestrator.py::test_evaluations_take_num_tasks_and_k_and_pass_at_the_threshold",
    "inference.served_model": "test_evaluator.py::test_of_several_served_models_one_is_named",
    "inference.api_key_var": "test_router.py::test_two_engines_are_served_at_one_address",
    "inference.concurrency.interval_s": "test_keys_orchestrator.py::test_engines_are_looked_at_every_interval",
    "inference.concurrency.kv_high": (
        "test_orchestrator_concurrency.py::test_the_marks_and_the_least_limit_do_what_they_say"
    ),
    "inference.concurrency.kv_low": (
        "test_orchestrator_concurrency.py::test_the_marks_and_the_least_limit_do_what_they_say"
    ),
    "inference.concurrency.min": (
        "test_orchestrator_concurrency.py::test_the_marks_and_the_least_limit_do_what_they_say"
    ),
    "inference.concurrency.mode": "test_runs.py::test_the_rollouts_in_flight_settle_near_what_the_engine_holds",
    "inference.concurrency.start": "test_orchestrator_concurrency.py::test_the_first_limit_is_what_the_engines_seat",
    "inference.dtype": "test_inference_vllm.py::test_every_key_of_ours_reaches_vllm",
    "inference.host": "test_router.py::test_the_router_has_the_port_that_people_know",
    "inference.control_key_var": "test_external_engines.py::test_a_run_trains_on_a_server_that_runs_already",
    "inference.max_concurrent_rollouts": "test_keys_orchestrator.py::test_no_more_rollouts_run_at_once_than_told",
    "inference.port": "test_router.py::test_the_router_has_the_port_that_people_know",
    "inference.request_timeout_s": (
        "test_orchestrator_engines.py::test_an_engine_that_is_gone_or_slow_is_an_engine_error"
    ),
    "inference.router.balance_abs_threshold": (
        "test_router_policy.py::test_a_prompt_follows_its_prefix_while_loads_are_balanced"
    ),
    "inference.router.balance_rel_threshold": "test_router.py::test_the_command_line_of_vllm_router_is_as_recorded",
    "inference.router.cache_threshold": (
        "test_router_policy.py::test_a_system_prompt_that_all_share_decides_only_where_it_is_most_of_the_prompt"
    ),
    "inference.router.policy": "test_router_policy.py::test_round_robin_looks_at_nothing",
    "inference.router.url": "test_keys_orchestrator.py::test_requests_go_to_the_router_whose_url_is_given",
    "inference.sampling.max_tokens": "test_keys_orchestrator.py::test_training_samples_as_inference_sampling_says",
    "inference.sampling.min_p": "test_keys_orchestrator.py::test_training_samples_as_inference_sampling_says",
    "inference.sampling.stop_token_ids": "test_keys_orchestrator.py::test_training_samples_as_inference_sampling_says",
    "inference.sampling.temperature": "test_keys_orchestrator.py::test_training_samples_as_inference_sampling_says",
    "inference.sampling.top_k": "test_keys_orchestrator.py::test_training_samples_as_inference_sampling_says",
    "inference.sampling.top_p": "test_keys_orchestrator.py::test_training_samples_as_inference_sampling_says",
    "logging.alarms.dropped_stale": "test_alarms.py::test_a_limit_of_null_is_silence",
    "logging.alarms.engines_idle": "test_alarms.py::test_a_limit_of_null_is_silence",
    "logging.alarms.entropy_ratio": "test_alarms.py::test_a_limit_of_null_is_silence",
    "logging.alarms.failed_rollouts": "test_alarms.py::test_a_limit_of_null_is_silence",
    "logging.alarms.length_ratio": "test_alarms.py::test_a_limit_of_null_is_silence",
    "logging.alarms.mismatch_kl_mean": "test_alarms.py::test_a_limit_of_null_is_silence",
    "logging.alarms.mismatch_kl_p999": "test_alarms.py::test_a_limit_of_null_is_silence",
    "logging.alarms.no_signal": "test_alarms.py::test_a_limit_of_null_is_silence",
    "logging.alarms.steps_skipped": "test_alarms.py::test_a_limit_of_null_is_silence",
    "logging.alarms.trainer_idle": "test_alarms.py::test_a_limit_of_null_is_silence",
    "logging.alarms.truncated": "test_alarms.py::test_a_limit_of_null_is_silence",
    "logging.alarms.weights_unchanged": "test_alarms.py::test_frozen_weights_may_be_meant",
    "logging.alarms.window": "test_alarms.py::test_each_is_told_once_by_name_and_is_over_when_all_is_well_again",
    "logging.level": "test_keys_records.py::test_roles_log_from_the_level_on",
    "logging.local_ranks": "test_nodes.py::test_the_console_shows_the_local_ranks_asked_for",
    "logging.progress": "test_keys_records.py::test_a_run_is_called_by_its_name_and_says_what_it_is_told_to",
    "logging.rollouts.groups": "test_kept_rollouts.py::test_groups_at_both_extremes_and_at_random",
    "logging.rollouts.held_out": "test_kept_rollouts.py::test_the_first_held_out_tasks_are_kept",
    "logging.rollouts.max_mib": "test_kept_rollouts.py::test_the_disk_is_bounded",
    "logging.wandb.entity": "test_keys_records.py::test_wandb_runs_are_put_where_told",
    "logging.wandb.group": "test_keys_records.py::test_wandb_runs_are_put_where_told",
    "logging.wandb.mode": "test_metrics.py::test_mode",
    "logging.wandb.name": "test_keys_records.py::test_wandb_runs_are_put_where_told",
    "logging.wandb.project": "test_keys_records.py::test_wandb_runs_are_put_where_told",
    "logging.wandb.tags": "test_keys_records.py::test_wandb_runs_are_put_where_told",
    "max_steps": "test_orchestrator_producer.py::test_nothing_starts_beyond_the_last_step",
    "memory_recipe.ac.freq": "test_trainer.py::test_activation_checkpointing_computes_chosen_layers_twice",
    "memory_recipe.ac.mode": "test_trainer.py::test_activation_checkpointing_computes_chosen_layers_twice",
    "memory_recipe.ac.targets": "test_recompute.py::test_each_target_drops_its_part",
    "memory_recipe.ac_offloading.enabled": (
        "test_keys_trainer.py::test_saved_tensors_wait_on_the_host_but_for_so_many_layers"
    ),
    "memory_recipe.ac_offloading.max_inflight_activations": (
        "test_keys_trainer.py::test_saved_tensors_wait_on_the_host_but_for_so_many_layers"
    ),
    "memory_recipe.compile": "test_keys_trainer.py::test_layers_are_compiled_where_told_so",
    "memory_recipe.fsdp_cpu_offload": "test_keys_trainer.py::test_fsdp_offloads_to_the_host_and_reshards_as_told",
    "memory_recipe.fused_lm_head_token_chunk_size": (
        "test_keys_trainer.py::test_the_head_makes_no_more_logits_than_its_chunk"
    ),
    "memory_recipe.lora.alpha": "test_keys_trainer.py::test_adapters_are_where_lora_says",
    "memory_recipe.lora.export_merged": "test_lora_runs.py::test_the_adapter_alone",
    "memory_recipe.lora.rank": "test_keys_trainer.py::test_adapters_are_where_lora_says",
    "memory_recipe.lora.targets": "test_keys_trainer.py::test_adapters_are_where_lora_says",
    "memory_recipe.optim_cpu_offload": "test_keys_trainer.py::test_the_optimizer_lives_where_optim_cpu_offload_says",
    "memory_recipe.share_prefixes": "test_keys_orchestrator.py::test_what_a_group_has_in_common_is_run_once_if_told_so",
    "model.attn": "test_keys_trainer.py::test_attn_asks_for_its_kernels",
    "model.card.family": "test_keys_records.py::test_impl_and_family_choose_whose_code_runs",
    "model.dtype": "test_trainer.py::test_bfloat16_is_near_float32",
    "model.fp8": "test_keys_trainer.py::test_fp8_takes_the_place_of_linears",
    "model.impl": "test_keys_records.py::test_impl_and_family_choose_whose_code_runs",
    "model.name": "test_keys_trainer.py::test_the_initial_weights_are_called_after_the_model",
    "model.path": "test_models.py::test_the_model_path_is_resolved",
    "model.indexer_loss_coef": "test_families_parallel.py::test_indexers_come_closer_to_the_attention",
    "model.router_bias_update_rate": "test_keys_trainer.py::test_router_bias_moves_at_its_rate",
    "model.tokenizer": "test_keys_records.py::test_tokenizers_are_where_told",
    "name": "test_keys_records.py::test_a_run_is_called_by_its_name_and_says_what_it_is_told_to",
    "optim.max_grad_norm": "test_keys_trainer.py::test_steps_are_no_longer_than_max_grad_norm",
    "optim.max_skipped_steps": "test_not_finite.py::test_several_bad_steps_in_a_row_are_a_failure_of_their_own",
    "output_dir": "test_keys_records.py::test_a_run_is_called_by_its_name_and_says_what_it_is_told_to",
    "parallelism.cp_style": "test_keys_trainer.py::test_context_groups_are_of_the_style_asked_for",
    "parallelism.deepep_num_sms": "test_keys_trainer.py::test_tokens_travel_to_experts_as_told",
    "parallelism.deepep_token_chunk_size": "test_keys_trainer.py::test_tokens_travel_to_experts_as_told",
    "parallelism.ep_comm_backend": "test_keys_trainer.py::test_tokens_travel_to_experts_as_told",
    "parallelism.ep_pieces": "test_keys_trainer.py::test_tokens_travel_to_experts_as_told",
    "parallelism.reduce_dtype": "test_reduce_dtype.py::test_gradients_differ_by_the_rounding_of_bfloat16",
    "parallelism.reshard_after_forward": "test_keys_trainer.py::test_fsdp_offloads_to_the_host_and_reshards_as_told",
    "seed": "test_runs.py::test_another_seed_is_another_run",
    "seq_len": "test_keys_orchestrator.py::test_rows_hold_seq_len_tokens",
    "sft.batch_size": "test_keys_sft.py::test_a_step_takes_batch_size_rows",
    "sft.data.args": "test_sft_data.py::test_an_environments_demonstrations",
    "sft.data.loss_roles": "test_sft_data.py::test_only_completions_are_trained",
    "sft.data.shuffle": "test_sft_data.py::test_each_epoch_holds_every_document_once",
    "sft.data.source": "test_sft_data.py::test_an_environments_demonstrations",
    "sft.data.split": "test_sft_data.py::test_a_hugging_face_dataset",
    "sft.data.val_fraction": "test_sft_data.py::test_splits_share_nothing",
    "sft.data.val_source": "test_sft_data.py::test_splits_share_nothing",
    "sft.target_val_loss": "test_keys_sft.py::test_training_ends_once_the_validation_loss_is_reached",
    "sft.val_interval": "test_keys_sft.py::test_validation_comes_every_val_interval_steps_and_at_the_end",
    "sft.val_rows": "test_keys_sft.py::test_validation_takes_val_rows_rows",
    "sweep": "test_keys_records.py::test_wandb_runs_are_put_where_told",
    "warm_start.seed": "test_keys_sft.py::test_a_warm_start_is_the_sft_job_of_its_keys",
    "weight_transport.bucket_mib": "test_keys_trainer.py::test_buckets_are_as_large_and_as_many_as_told",
    "weight_transport.keep": "test_keys_orchestrator.py::test_weights_travel_as_weight_transport_says",
    "weight_transport.stage_mib": "test_keys_trainer.py::test_buckets_are_as_large_and_as_many_as_told",
    "weight_transport.timeout_s": "test_keys_orchestrator.py::test_weights_travel_as_weight_transport_says",
    "weight_transport.type": "test_keys_orchestrator.py::test_weights_travel_as_weight_transport_says",
    "weight_transport.verify_checksum": "test_keys_orchestrator.py::test_engines_are_told_whether_to_verify",
}
# the warm start is an ordinary job of supervised fine-tuning: what its keys do there, they do here
# (test_keys_sft.py::test_a_warm_start_is_the_sft_job_of_its_keys)
MEASURED |= {key.replace("sft.", "warm_start.", 1): test for key, test in MEASURED.items() if key.startswith("sft.")}
MEASURED |= {f"warm_start.{key}": MEASURED[key] for key in ("optim.max_grad_norm", "optim.max_skipped_steps")}
