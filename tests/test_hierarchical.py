"""Experts over several nodes: each token once to a node, and the same results as by all-to-all. Whole training steps
against one process: test_parallel_equality.py, test_families_parallel.py.
"""

from collections import Counter

import pytest
import torch
from hierarchical_ranks import CASES, EXPERTS, TRAINED, run_ranks
from tiny import moe_card, random_model

from prl.bench.expert_dispatch import CASES as BENCH_CASES
from prl.bench.expert_dispatch import NODE, ROUTINGS, WAYS, choices, count_rows, measure, work_out
from prl.config import compose
from prl.config.errors import ConfigError
from prl.config.world import world_of
from prl.models.checkpoints.writing import hf_tensors, save_checkpoint
from prl.models.experts.all_to_all import Route, reached
from prl.planning import make_plan
from prl.planning.render import render_plan

NODES = {"two nodes of two": (4, 2), "two nodes of four": (8, 2)}
SEVERAL = ["parallelism=ep8", "deployment=multi_node", "parallelism.ep_comm_backend=hierarchical"]
TWO_NODES = ["deployment.num_train_nodes=2", "deployment.gpus_per_node=4"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Results of each of NODES."""
    card = moe_card(num_experts=8)
    path = tmp_path_factory.mktemp("model")
    save_checkpoint(hf_tensors(random_model(card, std=0.1)), path, card)
    directory = tmp_path_factory.mktemp("ranks")
    return {name: run_ranks(directory / name.replace(" ", "_"), *sizes, str(path)) for name, sizes in NODES.items()}


@pytest.mark.slow
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_those_of_all_to_all(ran, nodes, case):
    """Gradients of inputs, of mixing weights (from which the router learns) and of the experts."""
    for results in ran[nodes]["dispatch"]:
        wanted = results[case, "all_to_all"]
        for name in ("y", "x", "weights", "gate_up_proj", "down_proj"):
            for dispatch in ("hierarchical", "pieces"):
                got = results[case, dispatch][name]
                torch.testing.assert_close(got, wanted[name], rtol=1e-5, atol=1e-5 * largest(wanted[name]), msg=name)
            assert torch.equal(results[case, "again"][name], results[case, "hierarchical"][name])


def largest(values):
    return values.abs().max().item() if values.numel() else 0.0


@pytest.mark.slow
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("case", CASES)
def test_a_token_crosses_to_each_node_once_and_comes_back_once(ran, nodes, case):
    """In forward, and its gradients again in backward."""
    size, count = NODES[nodes]
    for dispatch, places in (("hierarchical", count), ("all_to_all", size)):
        crossings: Counter[str] = Counter()
        rows = 0
        for rank, results in enumerate(ran[nodes]["dispatch"]):
            crossings.update(results[case, dispatch]["sent"])
            reached = (results[case, dispatch]["experts"] // (EXPERTS // places)).tolist()
            rows += sum(place * count // places != rank * count // size for token in reached for place in set(token))
        assert crossings["between"] == 4 * rows
        assert rows > 0 or case == "nobody"


@pytest.mark.slow
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("job", [name for name in TRAINED if name != "all_to_all"])
def test_replayed_routing_trains_alike_with_and_without_recomputation(ran, nodes, job):
    wanted, got = ran[nodes]["trained"]["all_to_all"], ran[nodes]["trained"][job]
    assert got.keys() == wanted.keys()
    assert any("gate.weight" in name for name in wanted)
    for name, value in wanted.items():
        assert largest(value) > 0, name
        if name != "between":
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5 * largest(value), msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", NODES)
def test_recomputation_repeats_the_way_out_alone(ran, nodes):
    """Four ways without it: out and back, and the gradients'."""
    rows = {name: int(results["between"]) for name, results in ran[nodes]["trained"].items()}
    assert 0 < rows["plain"] < rows["all_to_all"]
    assert rows["ac full"] == rows["ac moe, pieces"] == rows["plain"] * 5 // 4


def test_experts_elsewhere_reach_nobody():
    experts = torch.tensor([[-3, 1, 9], [8, 5, 2], [-1, -2, 11]], dtype=torch.int32)
    route = Route.choose(experts, 4, 8, rows=3)
    assert route.counts.tolist() == [[1, 0, 1], [1, 1, 0], [1, 0, 1], [0, 0, 0]]
    assert route.fan_out(torch.arange(3)[:, None]).flatten().tolist() == [0, 1, 1]


# --- what it saves ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_bench_works_out_which_rows_leave(routing):
    chosen = choices("DeepSeek-V3", routing, 40, rank=11)
    ranks = reached(chosen, 4 * NODE, 256)
    ways = {way: count_rows(ranks.view(-1, 4, NODE), 11, way) for way in WAYS}
    hops = {way: Counter() for way in WAYS}
    for token in chosen.tolist():
        owners = {expert // 8 for expert in token}
        hops["all-to-all"].update("between" if owner // NODE != 1 else "inside" for owner in owners if owner != 11)
        hops["hierarchical"].update("between" for node in {owner // NODE for owner in owners} if node != 1)
        hops["hierarchical"].update("inside" for owner in owners if owner % NODE != 3)
    assert {way: vars(sent) for way, sent in ways.items()} == {way: dict(count) for way, count in hops.items()}
    assert len({expert // 32 for expert in chosen.flatten().tolist()}) == 8
    groups = max(len({expert // 32 for expert in token}) for token in chosen.tolist())
    assert groups <= 4 if routing != "free" else groups > 4


@pytest.mark.slow
def test_processes_send_what_the_bench_works_out():
    assert measure(2, 3) == [work_out(*case, 3, 2) for case in BENCH_CASES]


# --- where the nodes are ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 4), (4, 2), (4, 4)])
def test_nodes_are_those_of_the_plan(nodes, per_node):
    config = compose([*SEVERAL, f"deployment.num_train_nodes={nodes}", f"deployment.gpus_per_node={per_node}"])
    world, plan = world_of(config), make_plan(config)
    trainers = plan.roles_of("trainer")
    first = trainers[0].node
    assert [role.node - first for role in trainers] == [role.rank // world.node_ranks for role in trainers]
    assert world.ep_nodes == 8 // per_node
    assert f"experts     over {8 // per_node} nodes, hierarchical: a token goes once to a node" in render_plan(plan)
    assert "experts     over" not in render_plan(make_plan(compose(["parallelism=ep8"])))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["deployment=disaggregated", "deployment.device=cpu"], "leaves its node(.|\n)*a node holds 8 ranks"),
        ([*TWO_NODES, "parallelism.ep=1"], "No expert group leaves its node"),
        ([*TWO_NODES, "deployment.gpus_per_node=8"], "No expert group leaves its node"),
        ([*TWO_NODES, "deployment.gpus_per_node=6", "parallelism.ep=4"], "do not consist of whole nodes"),
    ],
)
def test_groups_that_do_not_span_whole_nodes_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        compose([*SEVERAL, *overrides])
