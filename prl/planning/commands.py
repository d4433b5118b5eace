"""Every process of a run as a command line with its environment, for people to read: nothing here starts anything.

Hosts and ports are only known when a run starts. Here node N is called nodeN, and its ports count up from FIRST_PORT.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping

from prl.config.quantised import local_copy_wanted
from prl.config.schema import RunConfig
from prl.config.world import takes_turns
from prl.planning.run_plan import RolePlan, RunPlan
from prl.planning.vllm_arguments import (
    address_environment,
    cpu_environment,
    engine_environment,
    kv_side_channel,
    meeting_point,
    server_arguments,
    to_argv,
    vllm_defaults,
)

FIRST_PORT = 20000
ALLOCATOR = "PYTORCH_ALLOC_CONF"
MODEL = "$MODEL"  # a checkpoint that the run itself makes
MIRROR = "wandb"  # a process of its own, without a role in the plan
HEAD = """\
# As an agent on each node starts them. $RUN_DIR is the run directory; node N is called nodeN, and ports, which are
# whichever are free at start, count up from {port}. A line of `vllm serve` is what runs within the process above it."""


def render_commands(plan: RunPlan, old: bool = False) -> str:
    """All nodes, all processes. `old`: for vLLM 0.23."""
    endpoints = example_endpoints(plan)
    lines = [HEAD.format(port=FIRST_PORT)]
    for node in range(plan.num_nodes):
        lines += ["", f"== node{node}"]
        for role in plan.roles:
            if role.node == node:
                lines += _process(plan, role, endpoints, old)
        if node == 0 and plan.config.logging.wandb.mode != "disabled" and plan.config.job != "inference":
            lines += [f"{MIRROR} (mirrors metrics)", f"  python -P -m prl.runtime.process.child $RUN_DIR {MIRROR}"]
    return "\n".join(lines) + "\n"


def example_endpoints(plan: RunPlan) -> dict[str, str]:
    """Endpoint name -> "nodeN:PORT", in the order in which a node leases its ports."""
    used: Counter[int] = Counter()
    endpoints: dict[str, str] = {}
    for role in plan.roles:
        for name, count in _ports_of(role):
            endpoints[name] = f"node{role.node}:{FIRST_PORT + used[role.node]}"
            used[role.node] += count
    return endpoints


def _ports_of(role: RolePlan) -> Iterator[tuple[str, int]]:
    engine = role.engine
    if role.role != "trainer":
        yield role.name, 1
    elif role.index == 0:
        yield "rendezvous", 1
    if engine is not None and engine.head == role.name and engine.dp_local < engine.dp:
        yield meeting_point(role.name), 1
    if engine is not None and engine.kind != "both":
        yield kv_side_channel(role.name), engine.dp_local


# OpenMP's threads sleep while they wait: spinning, they take the cores from processes that others have started beside
# these, and from each other
IDLE_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}


def computing_processes(plan: RunPlan, node: int | None) -> int:
    """Inference and trainer processes that share a node's cores at a time; None: all nodes are one machine."""
    engines, ranks = (
        sum(node in (None, role.node) for role in plan.roles_of(kind)) for kind in ("inference", "trainer")
    )
    return max(1, max(engines, ranks) if takes_turns(plan.config) else engines + ranks)


def trainer_environment(config: RunConfig) -> dict[str, str]:
    """Of a trainer process, unless the user's environment sets the allocator up.

    Expandable segments: batches differ in how many tokens have a loss, and so do the largest tensors of a step. In
    plain segments each new size leaves a hole of several GiB behind.
    """
    return {} if config.deployment.device == "cpu" else {ALLOCATOR: "expandable_segments:True"}


def _process(plan: RunPlan, role: RolePlan, endpoints: Mapping[str, str], old: bool) -> list[str]:
    environment = _environment(plan, role, endpoints)
    assignments = " ".join(f"{name}={value}" for name, value in environment.items())
    lines = [
        f"{role.name}{_about(role)}",
        f"  {assignments}",
        f"  python -P -m prl.runtime.process.child $RUN_DIR {role.name}",
    ]
    if role.engine is not None and plan.config.inference.engine == "vllm":
        config = plan.config
        is_made = config.warm_start is not None or local_copy_wanted(config) is not None
        path = config.model.path if config.model.path and not is_made else MODEL
        on_cpu = plan.config.deployment.device == "cpu"
        arguments = server_arguments(plan.config, role, path, endpoints, on_cpu=on_cpu, old=old)
        words = " ".join(word if MODEL in word else _quoted(word) for word in to_argv(arguments))
        lines.append(f"  vllm serve {words}")
    return lines


def _about(role: RolePlan) -> str:
    engine = role.engine
    if engine is None:
        return f" (rank {role.rank} of {role.world_size})" if role.role == "trainer" else ""
    kind = "engine" if engine.kind == "both" else f"{engine.kind} engine"
    ranks = f", ranks {engine.start_rank} to {engine.start_rank + engine.dp_local - 1} of {engine.dp}"
    return f" ({kind} {engine.index}{ranks if engine.dp > 1 else ''}{'' if engine.serves else ', headless'})"


def _environment(plan: RunPlan, role: RolePlan, endpoints: Mapping[str, str]) -> dict[str, str]:
    config = plan.config
    threads = "1"
    if role.devices:
        share = computing_processes(plan, role.node)
        threads = str(config.debug.num_threads) if config.debug.num_threads else f"$(($(nproc)/{share}))"
    on_cpu = config.deployment.device == "cpu"
    variables = {
        "CUDA_VISIBLE_DEVICES": "" if on_cpu else ",".join(map(str, role.devices)),
        "OMP_NUM_THREADS": threads,
        **IDLE_THREADS,
    }
    if role.role == "trainer":
        variables |= trainer_environment(config)
    if role.engine is not None and config.inference.engine == "vllm":
        variables |= vllm_defaults(config) | (cpu_environment(config) if on_cpu else {})
        variables |= engine_environment(config, role.engine)
        variables |= address_environment(role, endpoints)
    return variables


def _quoted(word: str) -> str:
    """For a shell, objects without the spaces of JSON."""
    name, _, value = word.partition("=")
    if value.startswith(("{", "[")):
        word = f"{name}={json.dumps(json.loads(value), separators=(',', ':'))}"
    return shlex.quote(word)
