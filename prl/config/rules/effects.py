"""Keys that nothing reads under what else was chosen. A key that the user set and that changes nothing is a mistake.

Keys of which a chosen file of conf/ says the value are left alone: `optim=muon optim.schedule.type=constant` is no
mistake, though conf/optim/muon.yaml has a least learning rate for its linear schedule.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from prl.config.block_fp8 import to_sixteen_bits
from prl.config.chosen import said_by_user
from prl.config.errors import UserError
from prl.config.keys import as_override, field_of
from prl.config.schema import OptimConfig, RunConfig
from prl.config.schema_jobs import WHOLE_RUNS
from prl.config.world import World

EVAL_TIMES = ("interval", "at_start", "at_end")


class Idle(NamedTuple):
    """Keys without effect: under which setting, why, and what would give them one."""

    keys: tuple[str, ...]
    where: str
    why: str
    otherwise: str = ""


def keys_take_effect(config: RunConfig, world: World) -> Iterator[UserError]:
    for idle in (
        *_deployment(config, world),
        *_memory(config),
        *_training(config, world),
        *_rl(config, world),
        *_bench(config),
    ):
        for key in idle.keys:
            if said_by_user(config, key):
                yield UserError(
                    f"{key} has no effect.",
                    where=f"{key}={as_override(_value(config, key))}, {idle.where}",
                    why=idle.why,
                    fix=f"{key}={as_override(field_of(key).default)}"
                    + (f", or {idle.otherwise}" if idle.otherwise else ""),
                )


def _value(config: RunConfig, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)


def _deployment(config: RunConfig, world: World) -> Iterator[Idle]:
    kind = f"deployment.type={config.deployment.type}"
    if config.deployment.type == "multi_node":
        keys = ("deployment.num_train_gpus",) * world.has_trainers + ("deployment.num_infer_gpus",)
        yield Idle(keys, kind, "whole nodes take part: num_train_nodes, num_infer_nodes and gpus_per_node say how many")
    else:
        keys = ("deployment.num_train_nodes", "deployment.num_infer_nodes")
        yield Idle(
            keys, kind, "devices are counted one by one: num_train_gpus and num_infer_gpus", "deployment=multi_node"
        )
    if config.deployment.type != "colocated":
        why = "engines and trainer share no GPU"
        yield Idle(("deployment.infer_memory_fraction",), kind, why, "deployment=colocated")
    if world.spans_nodes:
        keys = ("deployment.infer_gpu_ids", "deployment.train_gpu_ids")
        yield Idle(keys, kind, "nodes are filled one after another, each from its first device on")
    if not world.has_trainers:
        keys = ("deployment.num_train_gpus", "deployment.num_train_nodes", "deployment.train_gpu_ids")
        keys = (*keys, "deployment.infer_memory_fraction")
        yield Idle(keys, f"job={config.job}", "nobody trains in this job")
    if not world.has_engines:
        keys = ("deployment.num_infer_gpus", "deployment.num_infer_nodes", "deployment.infer_gpu_ids")
        keys = (*keys, "deployment.infer_memory_fraction")
        if config.inference.urls:
            yield Idle(keys, "inference.urls", "engines that run already have devices of their own")
        else:
            yield Idle(keys, f"job={config.job}", "nobody samples in this job")


def _memory(config: RunConfig) -> Iterator[Idle]:
    memory = config.memory_recipe
    if not memory.ac_offloading.enabled:
        key = "memory_recipe.ac_offloading"
        yield Idle(
            (f"{key}.max_inflight_activations",), f"{key}.enabled=false", "nothing is offloaded", f"{key}.enabled=true"
        )
    if memory.lora.rank == 0:
        keys = ("memory_recipe.lora.alpha", "memory_recipe.lora.targets", "memory_recipe.lora.export_merged")
        yield Idle(keys, "memory_recipe.lora.rank=0", "there are no adapters", "memory_recipe.lora.rank=8")


def _training(config: RunConfig, world: World) -> Iterator[Idle]:
    if not world.has_trainers:
        return
    mesh = world.mesh
    if mesh.cp == 1:
        keys = ("parallelism.cp_style", "parallelism.allow_cp_across_nodes")
        yield Idle(keys, "parallelism.cp=1", "each sequence is whole on one rank", "parallelism.cp=2")
    if mesh.fsdp_island == 1:
        yield Idle(
            ("parallelism.reshard_after_forward",), "1 rank in an FSDP island", "nothing is sharded", "parallelism=fsdp"
        )
    if mesh.size == 1:
        yield Idle(("parallelism.reduce_dtype",), "1 rank", "no gradients are added up", "parallelism=fsdp")
    yield from _optim(config.optim, "optim")
    if config.warm_start is not None:
        yield from _optim(config.warm_start.optim, "warm_start.optim")


def _optim(optim: OptimConfig, group: str) -> Iterator[Idle]:
    if optim.type == "adamw":
        yield Idle((f"{group}.momentum",), f"{group}.type=adamw", "it belongs to muon and sgd")
    if optim.type == "sgd":
        yield Idle((f"{group}.betas", f"{group}.eps"), f"{group}.type=sgd", "they belong to adamw and muon")
    if optim.schedule.type == "constant":
        keys = (f"{group}.schedule.decay_steps", f"{group}.schedule.min_lr_ratio")
        yield Idle(
            keys, f"{group}.schedule.type=constant", "the learning rate never falls", f"{group}.schedule.type=wsd"
        )


def _rl(config: RunConfig, world: World) -> Iterator[Idle]:
    if config.job == "sft":
        kept = tuple(f"logging.rollouts.{key}" for key in ("groups", "held_out", "max_mib"))
        keys = ("debug.keep_rollouts", *kept)
        yield Idle(keys, "job=sft", "there are no rollouts")
    if config.job == "eval":
        keys = ("debug.keep_rollouts", "logging.rollouts.groups")
        yield Idle(keys, "job=eval", "nothing is trained; logging.rollouts.held_out says how many rollouts are kept")
        yield Idle(tuple(f"eval.{key}" for key in EVAL_TIMES), "job=eval", "there is one evaluation, now")
        if config.eval.run is None:
            yield Idle(("eval.step",), "eval.run=null", "a model's directory has no steps", "eval.run=outputs/RUN")
    elif config.job == "rl":
        yield Idle(("eval.run", "eval.step"), "job=rl", "a run evaluates itself", "python -m prl.eval")
    yield from _random_weights(config)
    if world.samples and not world.takes_turns:
        where = f"deployment.type={config.deployment.type}"
        if (part := config.deployment.infer_memory_fraction) is not None:
            where += f", deployment.infer_memory_fraction={part:g}"
        yield Idle(("inference.sleep_level",), where, "only engines that take turns sleep", "deployment=colocated")
    quantized = config.inference.quantization is not None or config.inference.engine != "vllm"
    if config.inference.deep_gemm and not quantized:
        yield Idle(
            ("inference.deep_gemm",), "inference.quantization=null", "DeepGEMM's kernels multiply FP8 weights",
            "inference.quantization=fp8" + to_sixteen_bits(config),
        )  # fmt: skip
    if config.bench is not None:
        yield Idle(("ckpt.from_run", "ckpt.from_step"), f"job={config.job}", "a benchmark begins with fresh weights")
    elif config.ckpt.from_run is None:
        where, why = "ckpt.from_run=null", "the run begins with no checkpoint of another"
        yield Idle(("ckpt.from_step",), where, why, "ckpt.from_run=outputs/RUN")
    if config.job == "rl":
        yield from _algo(config)
        yield from _eval(config)
        yield from _transport(config)


def _random_weights(config: RunConfig) -> Iterator[Idle]:
    """model.init_seed: of the weights of a model without a path, and of those that an engine's benchmark draws."""
    key, bench = ("model.init_seed",), config.bench
    if bench is not None and bench.random_weights and bench.target not in WHOLE_RUNS:
        if bench.target != "inference":
            where = f"bench.target={bench.target}, bench.random_weights=true"
            yield Idle(key, where, "the trainer draws them with seed", "bench.target=inference")
    elif config.model.path is not None and config.eval.run is None:
        yield Idle(key, f"model.path={config.model.path}", "the checkpoint has the weights", "model.path=null")


def _eval(config: RunConfig) -> Iterator[Idle]:
    evaluation = config.eval
    if not (evaluation.interval or evaluation.at_start or evaluation.at_end):
        keys = tuple(f"eval.{key}" for key in type(evaluation).model_fields if key not in (*EVAL_TIMES, "run", "step"))
        where = "eval.interval=0, eval.at_start=false, eval.at_end=false"
        yield Idle(keys, where, "nothing is evaluated", "eval.at_end=true")


def _algo(config: RunConfig) -> Iterator[Idle]:
    algo = config.algo
    if algo.loss == "masked_importance":
        keys: tuple[str, ...] = ("algo.clip_low", "algo.clip_high")
    else:
        keys = ("algo.mask_low", "algo.mask_high", "algo.kl_tau")
    yield Idle(keys, f"algo.loss={algo.loss}", "this loss does not read it")
    if algo.length_rule != "dapo_overlong":
        where = f"algo.length_rule={algo.length_rule}"
        yield Idle(("algo.overlong_buffer",), where, "no reward falls with length", "algo.length_rule=dapo_overlong")
    if not algo.filter_zero_signal:
        yield Idle(("algo.max_replacement_ratio",), "algo.filter_zero_signal=false", "no group is replaced")


def _transport(config: RunConfig) -> Iterator[Idle]:
    kind = config.weight_transport.type
    where = f"weight_transport.type={kind}"
    if kind not in ("nccl", "ipc"):
        yield Idle(("weight_transport.bucket_mib",), where, "only nccl and ipc send buckets")
    if kind != "nccl":
        yield Idle(("weight_transport.stage_mib",), where, "only nccl stages buckets on the GPU")
    if kind not in ("filesystem", "lora"):
        yield Idle(("weight_transport.keep",), where, "only versions written to disk are kept")


def _bench(config: RunConfig) -> Iterator[Idle]:
    if config.bench is None:
        return
    target = config.bench.target
    where = f"bench.target={target}"
    if target != "transformers":
        keys: tuple[str, ...] = ("bench.baseline_checkpointing",)
        yield Idle(keys, where, "memory_recipe.ac says what our trainer recomputes", "bench.target=transformers")
    card, trains = config.model.card, target in ("trainer_rl", "trainer_sft")
    ours = card.num_experts and card.is_native and config.model.impl != "hf"
    if not ours:
        what = f"family {card.family}, model.impl={config.model.impl}"
        yield Idle(("bench.experts",), what, "there are no experts of ours to choose among")
    elif not trains:
        yield Idle(("bench.experts",), where, "rows are the trainer's", "bench.target=trainer_rl")
    elif config.bench.experts == "even":
        keys = ("model.router_bias_update_rate",)
        yield Idle(keys, "bench.experts=even", "no router chooses experts", "bench.experts=router")
    if target in ("inference", *WHOLE_RUNS):  # doc_len may stay: sweeps over targets say it for their trainers
        keys = ("bench.lengths", "bench.prompt_len", "bench.micro_batches", "bench.profile")
        yield Idle(keys, where, "they belong to the trainer alone", "bench.target=trainer_rl")
    if target in WHOLE_RUNS:
        keys = ("bench.random_weights",)
        yield Idle(keys, where, "engines and trainer start from the same checkpoint", "bench.target=trainer_rl")
