"""How evenly the stacked experts lie on the trainer's ranks. Arithmetic of FSDP2's chunks."""

from __future__ import annotations

from prl.config.schema import ModelCard
from prl.config.world import expert_dimension
from prl.planning.model_size import matrices_per_mlp
from prl.planning.run_plan import RunPlan

FLOAT32_BYTES = 4


def expert_shares(card: ModelCard, ep: int, ranks: int) -> list[int]:
    """Weights of one layer's experts on each of the `ranks` between which one place of the expert groups is sharded.

    Without expert parallelism FSDP shards whole layers along dimension 0, where it pads; with it, as
    `expert_dimension` says.
    """
    local, inner = card.num_experts // ep, card.moe_intermediate_size
    hidden = card.expert_width
    shapes = ((local, (matrices_per_mlp(card) - 1) * inner, hidden), (local, hidden, inner))
    return [sum(_numel(shape, ep, ranks, rank) for shape in shapes) for rank in range(ranks)]


def _numel(shape: tuple[int, int, int], ep: int, ranks: int, rank: int) -> int:
    dim = expert_dimension(shape, ranks) if ep > 1 else 0
    chunk = -(-shape[dim] // ranks)
    held = max(0, min(chunk, shape[dim] - rank * chunk))
    return shape[0] * shape[1] * shape[2] // shape[dim] * held


def uneven_experts(plan: RunPlan) -> str | None:
    """One line for people where some ranks hold more of the experts than others; None where all hold the same."""
    card, mesh = plan.config.model.card, plan.mesh
    if not card.num_experts or not plan.roles_of("trainer") or plan.config.model.impl == "hf":
        return None
    ranks = mesh.dp_shard * mesh.cp // mesh.ep
    shares = expert_shares(card, mesh.ep, ranks)
    if min(shares) == max(shares):
        return None
    idle = shares.count(0)
    scale = len(card.sparse_layers) * FLOAT32_BYTES / 2**30
    most, least, even = (value * scale for value in (max(shares), min(shares), sum(shares) / ranks))
    who = f"{card.num_experts // mesh.ep} experts over {ranks} ranks"
    none = f"{idle} of {ranks} ranks hold none; " if idle else ""
    of_groups = f", in each of {mesh.ep} places of an expert group" if mesh.ep > 1 else ""
    return (
        f"{who}{of_groups}: {none}float32 weights of {least:.3g} to {most:.3g} GiB a rank, {even:.3g} if they were even"
    )
