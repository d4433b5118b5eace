"""Host memory that a node's trainer ranks ask for, beside that of their processes: what the configuration puts there.

Limits of a cgroup, as SLURM sets them (`slurm.mem`), are enforced by killing. Everything here counts as the trainers'.
"""

from __future__ import annotations

from prl.config.block_fp8 import sends_blocks
from prl.config.schema import RunConfig
from prl.forecast.layers import layers_in_order, root_weights
from prl.forecast.memory import Bytes, moments_of
from prl.forecast.optimizing import trained_parameters
from prl.forecast.recipe import apply_recipe, offloaded
from prl.forecast.setting import BF16, FLOAT32, Setting

KEPT_BY_RANKS = ("tcp", "shared_memory")  # transports by which each rank keeps its part of a version
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def host_memory(s: Setting) -> Bytes:
    """Bytes of a node by what holds them; of checkpoints from the first save on, of the rest from the first step."""
    ranks = min(s.node_ranks, s.mesh.size)
    parts = {
        "optimizer on the host": _optimizer(s),
        "activations": _activations(s),
        "checkpoints in the background": _staged(s),
        "weights for engines": _published(s),
    }
    return {name: n * ranks for name, n in parts.items() if n}


def limit_of(config: RunConfig) -> float | None:
    """Bytes that SLURM gives a job on a node (`slurm.mem`); None: it is not said."""
    text = str(config.slurm.mem or 0).upper().removesuffix("B")
    number = float(text.rstrip("KMGT"))  # 0 is all of the node, as for sbatch
    return number * UNITS.get(text[-1], UNITS["M"]) or None


def _optimizer(s: Setting) -> float:
    """Masters and gradients in float32, where the host steps (`optimizer_offload.py`); moments, where it keeps them."""
    recipe, (mine, _) = s.config.memory_recipe, trained_parameters(s)
    if recipe.fsdp_cpu_offload or recipe.optim_cpu_offload == "full":
        return 2 * mine * FLOAT32 + moments_of(s)
    return moments_of(s) if recipe.optim_cpu_offload else 0.0


def _activations(s: Setting) -> float:
    layers = layers_in_order(s)
    first = offloaded(s.config.memory_recipe, len(layers))
    return sum(apply_recipe(s, layer).kept for layer in layers[:first]) * s.tokens


def _staged(s: Setting) -> float:
    """A copy of masters and moments (`prl/trainer/writer`), of which replicas hold a part each."""
    ckpt, (mine, _) = s.config.ckpt, trained_parameters(s)
    saves = ckpt.asynchronous and (ckpt.interval > 0 or ckpt.at_end) and s.config.job in ("rl", "sft")
    return (mine * FLOAT32 + moments_of(s)) / s.mesh.dp_replicate if saves else 0.0


def _published(s: Setting) -> float:
    """In the dtype that engines get; of what several ranks hold, one keeps it."""
    if s.config.job != "rl" or s.config.weight_transport.type not in KEPT_BY_RANKS:
        return 0.0
    everything = sum(layer.dense + layer.experts for layer in layers_in_order(s)) + root_weights(s.card)
    number = FLOAT32 if s.config.model.dtype == "float32" else BF16
    if sends_blocks(s.config):  # in blocks of FP8, but for embeddings and head
        return (everything - root_weights(s.card) + root_weights(s.card) * number) / s.mesh.size
    return everything / s.mesh.size * number
