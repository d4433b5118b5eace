"""What `prl.bench.node` runs on the GPUs of one node, in this order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Job = Literal["experts", "sft", "bench", "rl"]

RANDOM = ("model.path=null", "model.tokenizer=byte")
MIXTURE, DENSE, TINY = "qwen3_30b_a3b", "qwen3_4b", "tiny_qwen3_moe"
FULL_SIZE = ("memory=balanced", "memory_recipe.compile=true", "optim=adamw")
RECOMPUTED = (*FULL_SIZE, "memory_recipe.ac.mode=full")
MOE_AGAIN = (*FULL_SIZE, "memory_recipe.ac.mode=selective", "memory_recipe.ac.targets=[norm,act,attn_proj,moe]")
LAYERS = 48  # of the mixture
EQUAL = ("model.dtype=float32", "seq_len=512", "max_steps=3", "optim=adamw", "optim.eps=0.001", "memory=none")


@dataclass(frozen=True)
class Row:
    """One command. `part`: of the table; `words`: after the job's own; `kills`: a role that is killed in the middle."""

    part: str
    job: Job
    words: tuple[str, ...]
    kills: str = ""


def layouts(gpus: int) -> dict[str, tuple[str, ...]]:
    """Those that these GPUs can have."""
    fit = {
        "fsdp": (1, ("parallelism=auto",)),
        "hsdp": (4, ("parallelism=auto", "parallelism.dp_replicate=2", f"parallelism.dp_shard={gpus // 2}")),
        "ep2": (2, ("parallelism=ep2",)),
        "ep4": (4, ("parallelism=ep8", "parallelism.ep=4")),
        "ep8": (8, ("parallelism=ep8",)),
        "ep2_cp2": (2, ("parallelism=ep2_cp2",)),
        "ep8_cp2": (8, ("parallelism=ep8_cp2",)),
    }
    return {name: words for name, (least, words) in fit.items() if gpus % least == 0}


def rows_for(gpus: int, tiny: bool) -> list[Row]:
    """tiny: the same with a model that CPUs train, to try the script.

    Correctness first: experts by all ways, and each layout's losses beside those of one process.
    """
    mixture, dense = (TINY, "tiny_qwen3") if tiny else (MIXTURE, DENSE)
    lengths = (256, 512) if tiny else (16_384, 65_536)
    fit = layouts(gpus)
    widest = [name for name in fit if name.startswith("ep") and "cp" not in name][-1:]
    trained = ("deployment=colocated", f"deployment.num_train_gpus={gpus}")
    rows = [Row("experts", "experts", (mixture,) if tiny else (mixture, "deepseek_v3_2", "glm_5_1", "--ep", "8"))]
    rows += [
        Row("equality", "sft", (f"model={TINY}", *EQUAL, *words, *counts))
        for words, counts in ((("parallelism=single",), ()), *((words, trained[1:]) for words in fit.values()))
    ]
    for length in lengths:
        every = (f"model={mixture}", *RANDOM, f"bench.doc_len={length}", *trained)
        for name, words in fit.items():
            recipe = FULL_SIZE if tiny else fitting(gpus // 2 if name == "hsdp" else gpus, length == lengths[1])
            rows.append(Row(f"{mixture}, {length:,} tokens", "bench", (*every, *recipe, *words)))
        if tiny or not widest:
            continue
        # where the whole model leaves no room for it, a part of its layers, with nothing made again
        short = length == lengths[0]
        recipe = (*FULL_SIZE, *layers(gpus // 2)) if short else fitting(gpus, True)
        kept = [fit["fsdp"], fit[widest[0]]] if short and gpus < 8 else []
        levers = [
            (*fit[widest[0]], *more)
            for more in (
                ("parallelism.ep_comm_backend=deepep",),
                ("model.fp8=deep_gemm",),
                ("model.fp8=deep_gemm", "parallelism.ep_comm_backend=deepep"),
            )
        ]
        part = f"{mixture}, {length:,} tokens{', nothing made again' if kept else ''}"
        rows += [Row(part, "bench", (*every, *recipe, *words)) for words in (*kept, *levers)]
    of_dense = (f"model={dense}", *RANDOM, "parallelism=auto", f"bench.doc_len={lengths[0]}", *trained)
    rows += [
        Row(f"{dense}, {lengths[0]:,} tokens", "bench", (*of_dense, *recipe))
        for recipe in (FULL_SIZE, ("memory=lora", "optim=adamw", *(() if tiny else ("memory_recipe.compile=true",))))
    ]
    return rows + _rl(gpus, tiny, mixture, fit)


def fitting(ranks: int, long: bool) -> tuple[str, ...]:
    """What lets H200s hold a step of the mixture whose states are spread over `ranks` (`prl.plan --forecast`). long:
    65,536 tokens instead of 16,384.
    """
    if ranks >= 4:
        return RECOMPUTED if long else FULL_SIZE if ranks >= 8 else MOE_AGAIN
    return (*RECOMPUTED, *layers(ranks))


def layers(ranks: int) -> tuple[str, ...]:
    """Of the mixture: a GPU holds masters, moments and gradients of 12, and activations if they are made again."""
    return (f"model.card.num_hidden_layers={12 * ranks}",) if 12 * ranks < LAYERS else ()


def _rl(gpus: int, tiny: bool, mixture: str, fit: dict[str, tuple[str, ...]]) -> list[Row]:
    """Colocated with the widest layout, then half of the GPUs for each side: without and with replay, with an engine
    that is killed, and with prefill and decode apart.
    """
    steps = ("max_steps=3", "algo.batch_size=16", "algo.group_size=4") if tiny else ("max_steps=20",)
    every = (f"model={mixture}", *RANDOM, *steps, "warm_start=none", "eval=none", "ckpt=none", "optim=adamw")
    # 60 GB of weights are made first
    every += () if tiny else ("inference=vllm", "deployment.start_timeout_s=900", "seq_len=16384")
    every += () if tiny else ("inference.max_num_seqs=256",)  # the batch at once
    memory = "memory=none" if tiny else "memory=tight"
    together: tuple[str, ...] = (
        "deployment=colocated",
        f"deployment.num_train_gpus={gpus}",
        f"deployment.num_infer_gpus={gpus}",
    )
    # the host keeps moments, and an engine's weights while it sleeps: one engine, not one a GPU
    together += () if tiny else ("inference.tp=4", "inference.expert_parallel=true") if gpus >= 4 else layers(gpus)
    rows = [Row("RL, colocated", "rl", (*every, memory, *together, *list(fit.values())[-1]))]
    half = gpus // 2
    apart = layouts(half) if half else {}
    if apart:
        widest = [words for name, words in apart.items() if "cp" not in name][-1]
        sides = (f"deployment.num_train_gpus={half}", f"deployment.num_infer_gpus={1 if tiny else half}")
        wide = (f"inference.tp={half}", "inference.expert_parallel=true") if half > 1 else ()
        engines = () if tiny else ("weight_transport=nccl", *wide)
        recipe = ("memory=none",) if tiny else ("memory=balanced", "memory_recipe.ac.mode=full")
        every += () if tiny else layers(half)
        of_sides = (*every, *recipe, *sides, *widest, *engines)
        replays = [(*of_sides, f"inference.return_routed_experts={on}") for on in ("false", "true")]
        rows += [Row("RL, apart", "rl", words) for words in replays]
        longer = tuple("max_steps=40" if word.startswith("max_steps=") else word for word in replays[1])
        rows += [Row("RL, apart", "rl", longer if tiny else replays[1], kills="inference/0")]
        if not tiny and half > 1:  # two kinds of engines, each on a quarter of the node
            kinds = (f"inference.pd.num_prefill_gpus={half // 2}", f"inference.tp={half // 2}")
            spread = ("inference.expert_parallel=true",) if half > 2 else ()
            rows += [
                Row("RL, apart", "rl", (*every, *recipe, *sides, *widest, "weight_transport=nccl", *kinds, *spread))
            ]
    return rows
