"""World sizes with `auto`, for layouts that later versions will run: arithmetic only, so it is tested now."""

import pytest

from prl.config import compose
from prl.config.schema import DeploymentConfig, ModelCard, ModelConfig, ParallelismConfig, RunConfig
from prl.config.world import UNIT_PARAMETERS, Mesh, fsdp_units, largest_ep, world_of
from prl.planning import make_plan
from prl.planning.render import mixed_environments, render_plan

CARD = ModelCard(
    family="qwen3_moe", num_hidden_layers=2, hidden_size=8, num_attention_heads=4, num_key_value_heads=2, head_dim=2,
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=4, vocab_size=264,
)  # fmt: skip


def config(parallelism: dict[str, object], deployment: dict[str, object] | None = None) -> RunConfig:
    return RunConfig(
        job="rl",
        name="test",
        max_steps=1,
        seq_len=8,
        cache_dir="x",
        model=ModelConfig(name="tiny", tokenizer="byte", card=CARD),
        parallelism=ParallelismConfig.model_validate(parallelism),
        deployment=DeploymentConfig.model_validate(deployment or {}),
    )


@pytest.mark.parametrize(
    ("parallelism", "deployment", "mesh"),
    [
        ({}, {}, Mesh(1, 1, 1, 1)),
        ({"ep": 8, "cp": 2}, {}, Mesh(1, 4, 2, 8)),
        ({"ep": 2, "cp": 2}, {}, Mesh(1, 1, 2, 2)),
        ({"ep": 8, "dp_replicate": 2}, {}, Mesh(2, 8, 1, 8)),
        ({"cp": 2}, {"num_train_gpus": 8}, Mesh(1, 4, 2, 1)),
        ({"ep": "auto"}, {"num_train_gpus": 4}, Mesh(1, 4, 1, 4)),
        ({"ep": "auto"}, {"num_train_gpus": 6}, Mesh(1, 6, 1, 2)),
        ({"ep": "auto", "cp": 2}, {}, Mesh(1, 1, 2, 2)),
        ({"ep": "auto"}, {"type": "multi_node", "num_train_nodes": 2}, Mesh(1, 16, 1, 8)),
    ],
)
def test_auto_sizes(parallelism: dict[str, object], deployment: dict[str, object], mesh: Mesh) -> None:
    assert world_of(config(parallelism, deployment)).mesh == mesh


def test_largest_ep_divides_experts_and_island_and_holds_cp() -> None:
    for island in range(1, 33):
        for cp in (cp for cp in (1, 2, 4) if island % cp == 0):
            ep = largest_ep(8, island, cp)
            assert ep == 1 or (8 % ep == 0 and island % ep == 0 and ep % cp == 0)
    assert largest_ep(0, 8, 1) == 1


def test_multi_node_places_inference_nodes_first() -> None:
    deployment = {"type": "multi_node", "gpus_per_node": 2, "num_infer_nodes": 1, "num_train_nodes": 2}
    plan = make_plan(config({}, deployment))
    assert [(r.node, r.devices) for r in plan.roles_of("inference")] == [(0, (0,)), (0, (1,))]
    assert [(r.node, r.local_rank) for r in plan.roles_of("trainer")] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert (plan.num_nodes, plan.gpus_per_node) == (3, 2)


@pytest.mark.parametrize(
    ("overrides", "nodes"),
    [
        ({}, [(0, (0,)), *((1, (i,)) for i in range(8))]),
        ({"device": "cpu"}, [(0, (i,)) for i in range(9)]),
        ({"gpus_per_node": 9}, [(0, (i,)) for i in range(9)]),
        ({"num_infer_gpus": 10}, [*((i // 8, (i % 8,)) for i in range(10)), *((2, (i,)) for i in range(8))]),
    ],
    ids=["one too many", "CPU slots", "large nodes", "engines on two"],
)
def test_what_one_nodes_gpus_cannot_hold_goes_on_to_the_next(overrides: dict, nodes: list) -> None:
    plan = make_plan(config({"ep": 8, "dp_shard": 8}, {"type": "disaggregated", **overrides}))
    placed = [*plan.roles_of("inference"), *plan.roles_of("trainer")]
    assert [(role.node, role.devices) for role in placed] == nodes
    assert plan.num_nodes == 1 + nodes[-1][0]


SHOUT = '+env.mix={shout: {id: "my_envs:Shout", weight: 3}}'


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], ""),
        (["env=countdown"], ""),
        (["~env", SHOUT], ""),
        ([SHOUT], "reverse_text 25%, shout 75% of the rollouts; '~env' leaves env=reverse_text out"),
        (["env=[reverse_text,countdown]"], "reverse_text 50%, countdown 50% of the rollouts"),
        (["env=countdown", SHOUT], "countdown 25%, shout 75% of the rollouts; '~env' leaves env=countdown out"),
    ],
    ids=str,
)
def test_environments_that_are_mixed_are_told(overrides, told):
    plan = make_plan(compose(["warm_start=none", *overrides]))
    assert mixed_environments(plan) == told
    assert (f"mix         {told}" in render_plan(plan)) == bool(told)


def test_fsdp_units_hold_neighbours_until_they_have_enough():
    most = UNIT_PARAMETERS
    assert fsdp_units([most / 4] * 10, experts_apart=False) == [range(4), range(4, 8), range(8, 10)]
    assert fsdp_units([most / 4, most, most / 2, most / 2, 1], experts_apart=False) == [
        range(2),
        range(2, 4),
        range(4, 5),
    ]
    assert fsdp_units([2 * most] * 3, experts_apart=False) == [range(1), range(1, 2), range(2, 3)]
    assert fsdp_units([1, 1], experts_apart=True) == [range(1), range(1, 2)]
    assert fsdp_units([], experts_apart=False) == []
