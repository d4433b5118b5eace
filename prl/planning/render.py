"""A plan as a table for people. The machine-readable form is `plan_to_json`."""

from __future__ import annotations

from prl.config.point import warm_start_key
from prl.config.world import world_of
from prl.planning.run_plan import RolePlan, RunPlan
from prl.planning.sharding import uneven_experts
from prl.planning.sharing import devices_taking_turns

HEADER = ("role", "node", "device", "rank", "world size")


def render_plan(plan: RunPlan) -> str:
    """The summary lines, then one row per process."""
    rows = [HEADER, *(_row(role) for role in plan.roles)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*_summary(plan), "", *lines])


def mixed_environments(plan: RunPlan) -> str:
    """Which environments share the rollouts, and how to leave out those that were not asked for; "" of one alone."""
    mix, chosen = plan.config.env.mix, plan.config.choices.get("env", "")
    if not plan.roles_of("env") or len(mix) < 2:
        return ""
    whole = sum(source.weight for source in mix.values())
    shares = ", ".join(f"{name} {source.weight / whole:.0%}" for name, source in mix.items())
    added = mix.keys() - set(chosen.split("+"))
    told = f"{shares} of the rollouts"
    return f"{told}; '~env' leaves env={chosen} out" if chosen and added and len(added) < len(mix) else told


def experts_over_nodes(plan: RunPlan) -> str:
    """How tokens travel to experts on other nodes; "" where none are there."""
    nodes = world_of(plan.config).ep_nodes
    if not plan.roles_of("trainer") or nodes == 1:
        return ""
    backend = plan.config.parallelism.ep_comm_backend
    way = {
        "torch": "all-to-all: a token goes once to each rank of its experts; see parallelism.ep_comm_backend",
        "hierarchical": "hierarchical: a token goes once to a node",
        "deepep": "DeepEP: a token goes once to a node",
    }
    return f"over {nodes} nodes, {way[backend]}"


def _row(role: RolePlan) -> tuple[str, ...]:
    devices = ",".join(map(str, role.devices)) or "-"
    return (role.name, str(role.node), devices, str(role.rank), str(role.world_size))


def _summary(plan: RunPlan) -> list[str]:
    config, mesh = plan.config, plan.mesh
    nodes = f"{plan.num_nodes} node{'s' if plan.num_nodes > 1 else ''}"
    lines = [
        f"point       {plan.point_id}",
        f"job         {config.job}, model {config.model.name}, seed {config.seed}",
        f"deployment  {config.deployment.type}, {nodes} with {plan.gpus_per_node} device slots",
    ]
    if (share := config.deployment.infer_memory_fraction) is not None:
        lines.append(f"overlapped  engines have {share:g} of each device's memory (deployment.infer_memory_fraction)")
    if plan.roles_of("trainer"):
        sizes = f"dp_replicate {mesh.dp_replicate} x dp_shard {mesh.dp_shard} x cp {mesh.cp}"
        lines.append(f"mesh        {sizes} = {mesh.world_size} ranks; ep {mesh.ep}; {mesh.data_ranks} data ranks")
    if told := experts_over_nodes(plan):
        lines.append(f"experts     {told}")
    if config.inference.urls:
        lines.append(f"engines     {', '.join(config.inference.urls)}: they run already, on devices of their own")
    if config.job == "rl" and config.algo.teacher.urls:
        lines.append(f"teacher     {', '.join(config.algo.teacher.urls)}: runs already, and gets no weights")
    if mixed := mixed_environments(plan):
        lines.append(f"mix         {mixed}")
    if uneven := uneven_experts(plan):
        lines.append(f"uneven      {uneven}")
    turns = devices_taking_turns(plan) if plan.num_nodes > 1 else None
    if turns is not None and turns <= config.deployment.gpus_per_node:
        lines.append(f"one node    has {turns} devices for it if trainer and engines take turns: deployment=colocated")
    if config.warm_start is not None:
        lines.append(f"warm start  {config.warm_start.max_steps} steps at most, cached as {warm_start_key(config)}")
    return lines
