"""Rules of how inference engines lie on their devices and nodes, and of what they hand each other."""

from __future__ import annotations

import math
from collections.abc import Iterator

from prl.config.engines import EngineGroup, engine_groups
from prl.config.errors import UserError
from prl.config.rules.rule import Refuse, first_of
from prl.config.schema import RunConfig
from prl.config.world import World


def engines_fill_their_devices(config: RunConfig, world: World) -> Iterator[UserError]:
    """Each group of engines, and each engine the nodes that it touches."""
    if not world.has_engines or world.infer_devices == 0:
        return
    if not 0 <= config.inference.pd.num_prefill_gpus < world.infer_devices:
        yield UserError(
            f"Nobody decodes: all {world.infer_devices} inference devices are for prefill.",
            where=f"inference.pd.num_prefill_gpus={config.inference.pd.num_prefill_gpus}",
            fix=f"inference.pd.num_prefill_gpus={world.infer_devices // 2}, or more inference devices",
        )
        return
    first = 0
    for group in engine_groups(config, world):
        yield from _group_fits(config, world, group, first)
        first += group.devices


def _group_fits(config: RunConfig, world: World, group: EngineGroup, first: int) -> Iterator[UserError]:
    per_node, width = config.deployment.gpus_per_node, group.width
    who = "Engines" if group.kind == "both" else f"{group.kind.capitalize()} engines"
    where = f"inference.tp={group.tp}, inference.dp={group.dp}, {group.devices} devices"
    if group.devices % width:
        yield UserError(
            f"{who} of {width} devices do not fill {group.devices}.",
            where=where,
            why="each engine takes tp * dp devices",
            fix=f"{_more_devices(config, world, width)}, or inference.tp=1 inference.dp=1",
        )
    if not world.spans_nodes:
        return
    if per_node % group.tp:
        yield UserError(
            f"A tensor-parallel group of {group.tp} devices does not fill a node of {per_node}.",
            where=f"inference.tp={group.tp}, deployment.gpus_per_node={per_node}",
            why="its all-reduce in every layer must stay within a node",
            fix="inference.tp=1, or a divisor of deployment.gpus_per_node",
        )
    elif (per_node % width and width % per_node) or first % min(width, per_node):
        yield UserError(
            f"{who} of {width} devices do not lie on whole nodes of {per_node}.",
            where=f"{where}, deployment.gpus_per_node={per_node}",
            why="several fill a node, or one fills several",
            fix=f"inference.dp={max(1, per_node // group.tp)}",
        )


def _more_devices(config: RunConfig, world: World, width: int) -> str:
    """The least number of inference devices, or of nodes, that engines of `width` devices fill."""
    deployment = config.deployment
    if deployment.type == "multi_node":
        whole = width // math.gcd(width, deployment.gpus_per_node)
        return f"deployment.num_infer_nodes={-(-deployment.num_infer_nodes // whole) * whole}"
    return f"deployment.num_infer_gpus={-(-world.infer_devices // width) * width}"


ranks_are_served_apart_only_with_experts = first_of(
    Refuse(
        lambda c, w: all(group.dp == 1 for group in engine_groups(c, w)),
        "There is nothing to balance {inference.dp_load_balancing}ly.",
        where="{inference.dp_load_balancing=}, {inference.dp=}",
        why="it says who spreads requests over the data-parallel ranks of one engine",
        fix="inference.dp_load_balancing=internal, or inference.dp=8",
    ),
    Refuse(
        lambda c, w: c.model.card.num_experts == 0,
        "{model.name} is dense: its ranks have nothing in common.",
        where="{inference.dp_load_balancing=}",
        why="vLLM serves data-parallel ranks one by one only for mixtures of experts",
        fix="inference.dp=1: engines of their own, side by side",
    ),
    given=lambda c, w: c.inference.dp_load_balancing != "internal",
)


def experts_can_be_spread(config: RunConfig, world: World) -> Iterator[UserError]:
    inference, card = config.inference, config.model.card
    wide = [group for group in engine_groups(config, world) if group.width > 1]
    if inference.expert_parallel and (card.num_experts == 0 or not wide):
        unknown = wide and not card.is_native
        yield UserError(
            f"The card of {config.model.name} counts no experts that could be spread."
            if unknown
            else "There are no experts to spread, or nothing to spread them over.",
            where=f"inference.expert_parallel=true, {card.num_experts} experts, "
            f"inference.tp={inference.tp}, inference.dp={inference.dp}",
            why="expert parallelism puts the experts of one engine on all its tp * dp devices",
            fix="inference.expert_parallel=false, or "
            + ("model.card.num_experts=AS_MANY_AS_IT_HAS" if unknown else "inference.dp=8"),
        )
    for group in wide if inference.expert_parallel else []:
        if card.num_experts % group.width:
            yield UserError(
                f"{card.num_experts} experts do not divide over {group.width} devices.",
                where=f"inference.tp={group.tp}, inference.dp={group.dp}",
                why="each device of an engine holds the same number of experts",
                fix=f"inference.expert_parallel=false, or a tp * dp that divides {card.num_experts}",
            )
    pd = inference.pd
    backends = [inference.all2all_backend, pd.prefill.all2all_backend, pd.decode.all2all_backend]
    if any(backends) and not inference.expert_parallel:
        yield UserError(
            "Nothing goes to experts elsewhere.",
            where=f"inference.all2all_backend={next(filter(None, backends))}, inference.expert_parallel=false",
            fix="inference.expert_parallel=true, or leave all2all_backend out",
        )


def prefill_and_decode_apart_fit(config: RunConfig, world: World) -> Iterator[UserError]:
    inference = config.inference
    pd = inference.pd
    if pd.num_prefill_gpus == 0:
        for name, group in (("prefill", pd.prefill), ("decode", pd.decode)):
            if said := group.model_dump(exclude_defaults=True):
                yield UserError(
                    f"There are no {name} engines of their own.",
                    where=f"inference.pd.{name}={said}, inference.pd.num_prefill_gpus=0",
                    fix="inference.pd.num_prefill_gpus=8",
                )
        return
    for wrong, what, where, why, fix in (
        (
            world.takes_turns,
            "Engines that take turns with the trainer prefill and decode themselves.",
            "deployment.type=colocated",
            "KV that travels between engines would be lost when they sleep",
            "deployment=disaggregated, or inference.pd.num_prefill_gpus=0",
        ),
        (
            config.algo.max_off_policy_steps == 0,
            "A synchronous run does not know which engine has decoded what.",
            "algo.max_off_policy_steps=0",
            "its requests go to engines in lockstep, one engine a request",
            "algo.max_off_policy_steps=1, or inference.pd.num_prefill_gpus=0",
        ),
        (
            inference.return_routed_experts,
            "Routing of the prompt stays with the prefill engine.",
            "inference.return_routed_experts=true",
            "the decode engine never forwards the prompt, so it cannot return which experts that took",
            "inference.return_routed_experts=false, or inference.pd.num_prefill_gpus=0",
        ),
    ):
        if wrong:
            yield UserError(
                what, where=f"{where}, inference.pd.num_prefill_gpus={pd.num_prefill_gpus}", why=why, fix=fix
            )


def offloaded_kv_has_a_place(config: RunConfig, world: World) -> Iterator[UserError]:
    offload = config.inference.kv_offload
    native, mooncake = offload.type == "native", offload.type == "mooncake"
    if native != (offload.cpu_gib > 0) or (offload.disk_path is not None and not native):
        yield UserError(
            "KV is offloaded natively to host memory, and from there to disk."
            if native
            else "No KV is offloaded there.",
            where=f"inference.kv_offload.type={offload.type}, inference.kv_offload.cpu_gib={offload.cpu_gib:g}, "
            f"inference.kv_offload.disk_path={offload.disk_path}",
            why="vLLM's disk tier lies behind the one in host memory",
            fix="inference.kv_offload.type=native inference.kv_offload.cpu_gib=64",
        )
    if mooncake != (offload.mooncake_config is not None):
        yield UserError(
            "Mooncake's store is described by a JSON file of its own.",
            where=f"inference.kv_offload.type={offload.type}, "
            f"inference.kv_offload.mooncake_config={offload.mooncake_config}",
            why="it says where its master and its metadata are, and how much memory and disk each node gives",
            fix="inference.kv_offload.type=mooncake inference.kv_offload.mooncake_config=/path/to/mooncake.json",
        )
