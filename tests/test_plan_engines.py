"""Engines over nodes, prefill and decode apart, offloaded KV: their layout, their commands, what is refused."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from prl.config import compose
from prl.config.errors import ConfigError
from prl.planning import make_plan
from prl.planning.commands import example_endpoints, render_commands
from prl.planning.run_plan import RunPlan
from prl.planning.vllm_arguments import server_arguments
from prl.runtime.process import ports
from prl.runtime.process.ports import lease_ports
from prl.runtime.process.restarts import why_final

GOLDEN = Path(__file__).parent / "golden"
MOE = ["inference=vllm", "model=qwen3_30b_a3b", "model.path=/models/qwen3_30b_a3b", "warm_start=none",
       "inference.max_model_len=16384", "seq_len=16384"]  # fmt: skip
# 4 nodes of prefill, 12 of decode, 16 of training: wide EP over 32 GPUs, FP8, KV to host memory and disk
THIRTY_TWO_NODES = [
    *MOE, "deployment=multi_node", "deployment.num_infer_nodes=16", "deployment.num_train_nodes=16",
    "inference.pd.num_prefill_gpus=32", "inference.dp=32", "inference.dp_load_balancing=hybrid",
    "inference.expert_parallel=true", "inference.pd.prefill.all2all_backend=deepep_high_throughput",
    "inference.pd.decode.all2all_backend=deepep_low_latency", "inference.pd.decode.env.UCX_TLS='rc,cuda_copy'",
    "inference.pd.prefill.vllm.max_num_batched_tokens=32768", "inference.quantization=fp8", "inference.deep_gemm=true",
    "inference.kv_offload={type: native, cpu_gib: 512, disk_path: /local/kv}", "weight_transport=nccl",
    "parallelism.ep=8", "parallelism.dp_replicate=2", "inference.env.NCCL_IB_HCA=mlx5",
]  # fmt: skip
LAYOUTS = {
    "commands_32_nodes": THIRTY_TWO_NODES,
    # an engine over two small nodes, its second process without HTTP; KV in Mooncake's store
    "commands_headless": [
        *MOE,
        "deployment=multi_node",
        "deployment.gpus_per_node=2",
        "deployment.num_infer_nodes=2",
        "inference.dp=2",
        "inference.tp=2",
        "inference.kv_offload={type: mooncake, mooncake_config: /etc/mooncake.json}",
    ],
    # each rank an endpoint
    "commands_external": [
        *MOE,
        "deployment.num_infer_gpus=4",
        "inference.dp=4",
        "inference.dp_load_balancing=external",
        "inference.expert_parallel=true",
    ],
}


def plan_of(*overrides: str, job: str = "rl") -> RunPlan:
    return make_plan(compose(list(overrides), job))


@pytest.mark.parametrize("name", LAYOUTS)
def test_commands_are_as_recorded(name: str) -> None:
    """Record anew, after looking at the difference: PRL_RECORD=1 pytest tests/test_plan_engines.py."""
    path = GOLDEN / f"{name}.txt"
    text = render_commands(plan_of(*LAYOUTS[name]))
    if os.environ.get("PRL_RECORD"):
        path.write_text(text)
    assert text == path.read_text()


def test_thirty_two_nodes_are_filled_and_every_rank_is_there_once() -> None:
    plan = plan_of(*THIRTY_TWO_NODES)
    assert plan.num_nodes == 32
    assert {(role.node, device) for role in plan.roles for device in role.devices} == {
        (node, device) for node in range(32) for device in range(8)
    }
    engines: dict[int, list[int]] = {}
    for role in plan.roles_of("inference"):
        assert role.engine is not None
        assert role.engine.kind == ("prefill" if role.node < 4 else "decode")
        start = role.engine.start_rank
        engines.setdefault(role.engine.index, []).extend(range(start, start + role.engine.dp_local))
    assert engines == {index: list(range(32)) for index in range(4)}
    assert len(plan.servers()) == 16, "hybrid: each node answers for its own ranks"


@pytest.mark.parametrize(
    ("balancing", "local", "serving", "arguments"),
    [
        ("internal", [2, 2], [True, False], {"data_parallel_size_local": 2, "data_parallel_start_rank": 2}),
        ("hybrid", [2, 2], [True, True], {"data_parallel_hybrid_lb": True, "data_parallel_start_rank": 2}),
        ("external", [1, 1, 1, 1], [True] * 4, {"data_parallel_rank": 1}),
    ],
)
def test_who_balances_decides_which_processes_there_are(
    balancing: str, local: list[int], serving: list[bool], arguments: dict[str, object]
) -> None:
    plan = plan_of(
        *MOE, "deployment=multi_node", "deployment.gpus_per_node=2", "deployment.num_infer_nodes=2",
        "inference.dp=4", f"inference.dp_load_balancing={balancing}",
    )  # fmt: skip
    roles = plan.roles_of("inference")
    assert [role.engine.dp_local for role in roles if role.engine] == local
    assert [role.engine.serves for role in roles if role.engine] == serving
    given = server_arguments(plan.config, roles[1], "/m", example_endpoints(plan), on_cpu=False)
    assert given | arguments == given
    assert given.get("headless", False) is not serving[1]
    assert why_final(plan.config, "inference"), "a part of an engine is not started again alone"


def test_ports_of_engines_are_reserved_but_not_listening() -> None:
    plan = plan_of(*LAYOUTS["commands_external"], "inference.pd.num_prefill_gpus=2", "inference.dp=2")
    leases = lease_ports(plan)
    try:
        names = {"inference/0/dp", "inference/2/dp", *(f"inference/{i}/kv" for i in range(4))}
        assert names < set(leases.endpoints)
        ports = [leases.endpoints[name].rsplit(":", 1)[1] for name in leases.endpoints]
        assert len(set(ports)) == len(ports)
        assert len(leases.reserved) == 6
    finally:
        leases.close()


def test_a_reserved_port_is_refused_to_a_second_reservation_and_let_to_who_reuses_addresses() -> None:
    held = ports._reserve("127.0.0.1", 3)
    numbers = [one.getsockname()[1] for one in held]
    assert numbers == list(range(numbers[0], numbers[0] + 3))
    for number in numbers:
        with pytest.raises(OSError, match="in use"):
            ports._reusable("127.0.0.1", number)
        with socket.socket() as engine:  # as ZeroMQ binds
            engine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            engine.bind(("127.0.0.1", number))
            engine.listen()
    for one in held:
        one.close()


TWO = "deployment.num_infer_gpus=2"
APART = [TWO, "inference.pd.num_prefill_gpus=1"]
NODES = ["deployment=multi_node", "deployment.gpus_per_node=8", "deployment.num_infer_nodes=2"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([*MOE, TWO, "inference.pd.num_prefill_gpus=2"], "inference.pd.num_prefill_gpus=1"),
        ([*MOE, *APART, "inference.pd.decode.tp=2"], "Decode engines of 2 devices do not fill 1"),
        ([*MOE, "inference.pd.decode.tp=2"], "There are no decode engines of their own"),
        ([*MOE, *APART, "inference.return_routed_experts=true"], "never forwards the prompt"),
        ([*MOE, *APART, "algo=sync"], "algo.max_off_policy_steps=1"),
        ([*MOE, *APART, "deployment=colocated", "parallelism=fsdp"], "deployment=disaggregated"),
        ([*MOE, *NODES, "inference.tp=16"], "must stay within a node"),
        (
            [*MOE, *NODES, "inference.pd.prefill.tp=4", "inference.pd.decode.dp=3", "inference.pd.num_prefill_gpus=4"],
            "do not lie on whole nodes",
        ),
        ([*MOE, *NODES, "deployment.num_infer_nodes=3", "inference.dp=12"], "several fill a node, or one fills"),
        ([*MOE, TWO, "inference.dp=2", "inference.dp_load_balancing=hybrid", "model=qwen3_0_6b"], "is dense"),
        ([*MOE, "inference.dp_load_balancing=external"], "nothing to balance"),
        ([*MOE, "inference.expert_parallel=true"], "inference.dp=8"),
        ([*MOE, "deployment.num_infer_gpus=3", "inference.dp=3", "inference.expert_parallel=true"], "divides 128"),
        ([*MOE, "inference.all2all_backend=deepep_low_latency"], "inference.expert_parallel=true"),
        ([*MOE, "inference.kv_offload.type=native"], "inference.kv_offload.cpu_gib=64"),
        ([*MOE, "inference.kv_offload.disk_path=/d"], "inference.kv_offload.type=native"),
        ([*MOE, "inference.kv_offload.type=mooncake"], "mooncake_config=/path"),
        ([*MOE, *APART, "inference.vllm.kv_transfer_config={a: b}"], "remove inference.vllm.kv_transfer_config"),
        ([*MOE, *APART, "inference.pd.prefill.vllm.dtype=half"], "remove inference.pd.prefill.vllm.dtype"),
        ([*MOE, "inference.vllm.headless=true"], "remove inference.vllm.headless"),
        ([*APART], "inference=vllm, or leave inference.pd out"),
        (["inference.quantization=fp8"], "inference.quantization=null, or fp8_block, or inference=vllm"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_do(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    assert message in caught.value.render()
    assert len(caught.value.violations) == 1, caught.value.render()


@pytest.mark.parametrize(
    "overrides",
    [
        ["inference=vllm", "inference.tp=2", "deployment.num_infer_gpus=2"],
        ["deployment=multi_node", "inference=vllm", "inference.dp=16", "deployment.num_infer_nodes=2"],
        ["deployment=multi_node", "inference=vllm", "inference.tp=8", "deployment.num_infer_nodes=3"],
    ],
)
def test_one_engine_on_a_node_may_have_the_last_port(overrides):
    plan = make_plan(compose(["inference.port=65535", *overrides]))
    assert {role.local_rank for role in plan.roles_of("inference")} == {0}
