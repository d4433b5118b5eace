"""Experts: the tokens' way there and back, the load on each, its balance, and the rules around them."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from expert_ranks import EXPERTS, FAMILIES, HIDDEN, RATE, TESTS, TOKENS, TOP_K, load_biases, run_balance, run_ranks
from families import family_card
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import dense_card, moe_card, moe_checkpoint, random_model
from torch.distributed._composable import checkpoint
from torch.utils.checkpoint import checkpoint as recomputed_when_needed
from torch.utils.checkpoint import set_checkpoint_early_stop
from trainer_ranks import Job

from prl.config import compose
from prl.config.errors import ConfigError, UserError
from prl.models.checkpoints.writing import hf_tensors, save_checkpoint
from prl.models.experts.all_to_all import AllToAllDispatch, Route, join_labels, split_labels
from prl.models.experts.dispatch import ExpertWork, LocalDispatch, collect, spread, spread_scalars
from prl.models.experts.hierarchical import HierarchicalDispatch
from prl.models.experts.placement import Places, place
from prl.models.experts.routing import Choice, route
from prl.models.experts.stacked import Experts
from prl.models.layers.mlp import SparseMLP
from prl.models.layers.packed_attention import packed_attention
from prl.planning.run_plan import MeshPlan
from prl.runtime.preflight import check_machine
from prl.trainer.expert_balance import ExpertBalance
from prl.trainer.world import build_world

# --- moving rows ------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 9), k=st.integers(1, 3), seed=st.integers(0, 99))
def test_spread_and_collect_are_indexing_and_its_transpose(n, k, seed):
    generator = torch.Generator().manual_seed(seed)
    experts = torch.randint(0, 4, (n, k), generator=generator)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    places, counts = place(experts, 0, 4, n * k)
    assert torch.equal(counts, experts.flatten().bincount(minlength=4))
    assert torch.equal(experts.flatten()[places.order], experts.flatten().sort().values)
    rows = spread(x, places)
    assert torch.equal(rows, x[places.order // k])
    scale = torch.randn(n, k, generator=generator, dtype=torch.float64, requires_grad=True)
    y = collect(rows * spread_scalars(scale, places)[:, None], places)
    plain = (x[:, None] * scale[..., None]).sum(1)
    torch.testing.assert_close(y, plain)
    grad = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    for ours, theirs in zip(*(torch.autograd.grad(out, (x, scale), grad) for out in (y, plain)), strict=True):
        torch.testing.assert_close(ours, theirs)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 40),
    k=st.integers(1, 4),
    first=st.sampled_from([0, 3]),
    held=st.integers(1, 5),
    alignment=st.sampled_from([1, 4, 128]),
    seed=st.integers(0, 99),
)
def test_assignments_lie_by_expert_and_then_by_token(n, k, first, held, alignment, seed):
    """Those to experts elsewhere nowhere."""
    experts = torch.randint(-1, 9, (n, k), generator=torch.Generator().manual_seed(seed))
    flat = [(e - first, i) for i, e in enumerate(experts.flatten().tolist()) if first <= e < first + held]
    places, counts = place(experts, first, held, len(flat), alignment)
    assert counts.tolist() == [sum(e == expert for e, _ in flat) for expert in range(held)]
    assert places.num_rows % alignment == 0
    wanted, row = torch.full((n * k,), -1), 0
    for expert in range(held):
        for e, i in flat:
            if e == expert:
                wanted[i] = row
                row += 1
        row += -row % alignment
    assert row <= places.num_rows
    assert torch.equal(places.positions, wanted.view(n, k))
    assert all(places.order[position] == i for i, position in enumerate(wanted.tolist()) if position >= 0)


def test_rows_that_went_nowhere_add_nothing():
    places = Places(torch.tensor([[1, -1], [-1, -1], [0, 2]]), 3, torch.tensor([4, 0, 5]))
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: collect(spread(x, places) ** 2, places), x)
    assert torch.equal(collect(spread(x, places), places), x * torch.tensor([[1.0], [0.0], [2.0]]))


@settings(max_examples=30, deadline=None)
@given(n=st.integers(0, 9), k=st.integers(1, 4), size=st.sampled_from([1, 2, 4]), seed=st.integers(0, 99))
def test_a_token_goes_once_to_each_rank_that_holds_any_of_its_experts(n, k, size, seed):
    experts = torch.rand(n, 8, generator=torch.Generator().manual_seed(seed)).topk(k).indices
    route = Route.choose(experts.int(), size, 8)
    wanted = [(rank, token) for rank in range(size) for token in range(n) if rank in experts[token] // (8 // size)]
    assert route.counts[:, 0].tolist() == [sum(rank == r for r, _ in wanted) for rank in range(size)]
    assert torch.equal(route.counts[:, 1:].flatten(), experts.flatten().bincount(minlength=8))
    tokens = torch.arange(n, dtype=torch.float64)[:, None]
    rows = route.fan_out(tokens)[: len(wanted)]
    assert rows.flatten().tolist() == [token for _, token in wanted]
    assert torch.equal(route.add_up(rows), tokens * (route.places.positions >= 0).sum(1, keepdim=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton kernels need a GPU")
@pytest.mark.parametrize(("width", "dtype"), [(2048, torch.bfloat16), (2500, torch.bfloat16), (72, torch.float32)])
def test_kernels_move_rows_as_torch_does(width, dtype):
    experts = torch.randint(0, 5, (300, 4))
    x = torch.randn(300, width, dtype=dtype, requires_grad=True)
    scale = torch.randn(300, 4, dtype=dtype, requires_grad=True)
    grad = torch.randn(300, width, dtype=dtype)

    def both_ways(device):
        places, counts = place(experts.to(device), 0, 4, int((experts < 4).sum()))  # the last expert is elsewhere
        rows = spread(x.to(device), places)
        scales = spread_scalars(scale.to(device), places)
        y = collect(rows * scales[:, None], places)
        grads = torch.autograd.grad(y, (x, scale), grad.to(device))
        return rows.cpu(), scales.cpu(), y.cpu(), counts.cpu(), places.positions.cpu(), *grads

    for got, wanted in zip(both_ways("cuda"), both_ways("cpu"), strict=True):
        torch.testing.assert_close(got, wanted)


NUMBERED = [(1, 1, 4, 2), (300, 4, 8, 2), (5000, 8, 128, 2), (777, 8, 384, 64), (40000, 6, 160, 8), (33, 3, 6, 3)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton kernels need a GPU")
@pytest.mark.parametrize(("tokens", "top_k", "num_experts", "places"), NUMBERED)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_kernels_number_rows_as_torch_does(tokens, top_k, num_experts, places, dtype):
    """Also where experts are nobody's, or lie apart in memory."""
    experts = torch.randint(-1, num_experts + 1, (tokens, 2 * top_k), dtype=dtype)[:, top_k:]
    there = experts.cuda()
    for alignment in (1, 128):
        first, held = num_experts // places, num_experts // places
        number = int(((experts >= first) & (experts < first + held)).sum())
        got, counts = place(there, first, held, number, alignment)
        wanted, wanted_counts = place(experts, first, held, number, alignment)
        assert torch.equal(got.positions.cpu(), wanted.positions)
        assert torch.equal(counts.cpu(), wanted_counts)
        assert got.num_rows == wanted.num_rows
    got_route, wanted_route = (Route.choose(part, places, num_experts) for part in (there, experts))
    assert torch.equal(got_route.places.positions.cpu(), wanted_route.places.positions)
    assert torch.equal(got_route.counts.cpu(), wanted_route.counts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_labels_arrive_as_they_were(dtype):
    """Whatever floating-point numbers the experts' bits are; gradients belong to the weights alone."""
    weights = torch.randn(5, 3, dtype=dtype, requires_grad=True)
    experts = torch.tensor([[0, 1, 2], [383, 32000, 32767], [32640, 32641, 31744], [-1, 7, 9], [5, 5, 5]])
    scale, chosen = split_labels(join_labels(weights, experts))
    assert torch.equal(scale, weights)
    assert torch.equal(chosen.long(), experts)
    assert not chosen.is_floating_point()
    scale.sum().backward()
    assert torch.equal(weights.grad, torch.ones_like(weights))


def test_experts_are_the_weighted_sum_of_their_mlps():
    experts = Experts(EXPERTS, HIDDEN, 12).double()
    for param in experts.parameters():
        param.data.normal_()
    x, weights = torch.randn(7, HIDDEN, dtype=torch.float64), torch.rand(7, TOP_K, dtype=torch.float64)
    chosen = torch.rand(7, EXPERTS).topk(TOP_K).indices
    wanted = torch.zeros_like(x)
    for n in range(7):
        for weight, e in zip(weights[n], chosen[n], strict=True):
            gate, up = (experts.gate_up_proj[e] @ x[n]).chunk(2)
            wanted[n] += weight * (experts.down_proj[e] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(LocalDispatch()(x, weights, chosen, EXPERTS, ExpertWork(experts.grouped_mlp)), wanted)


# --- in two processes -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(moe_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def families(model_path):
    """Checkpoints beside the first."""
    for name in FAMILIES:
        model = random_model(family_card(name), std=0.1)
        save_checkpoint(hf_tensors(model), Path(model_path).parent / name, model.card)


@pytest.fixture(scope="module")
def together(families, model_path, tmp_path_factory):
    directory = tmp_path_factory.mktemp("ranks") / "two"
    return directory, run_ranks(directory, 2, model_path)


@pytest.fixture
def alone():
    """A world of one in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield build_world(MeshPlan(dp_replicate=1, dp_shard=1, cp=1, ep=1), torch.device("cpu"))
    dist.destroy_process_group()


DISPATCHES = {
    "local": LocalDispatch,
    "all_to_all": lambda: AllToAllDispatch(dist.group.WORLD),
    "all_to_all_3": lambda: AllToAllDispatch(dist.group.WORLD, pieces=3),
    "hierarchical": lambda: HierarchicalDispatch(dist.group.WORLD, dist.group.WORLD),
    "hierarchical_3": lambda: HierarchicalDispatch(dist.group.WORLD, dist.group.WORLD, pieces=3),
}


@pytest.mark.parametrize("name", DISPATCHES)
def test_while_tokens_travel_there_is_other_work(alone, name):
    """Once a pass, ahead of the experts' first product and of its backward."""
    seen = []

    def compute(rows, counts, scale):
        seen.append("experts")
        rows.register_hook(lambda _: seen.append("backward"))
        return rows * scale[:, None]

    work = ExpertWork(compute, 1, lambda: seen.append("ahead"), lambda: seen.append("behind"))
    x, weights = torch.randn(7, HIDDEN, requires_grad=True), torch.rand(7, TOP_K, requires_grad=True)
    chosen = torch.rand(7, EXPERTS).topk(TOP_K).indices
    y = DISPATCHES[name]()(x, weights, chosen, EXPERTS, work)
    torch.testing.assert_close(y, x * weights.sum(1, keepdim=True))
    y.sum().backward()
    assert seen[0] == "ahead"
    assert seen.count("ahead") == 1
    assert seen.count("behind") == (name != "local")
    if name != "local":
        assert seen.index("behind") < seen.index("backward")


def test_shared_experts_run_once_while_tokens_travel(alone):
    """And gradients are those of shared experts that run afterwards."""
    model = random_model(family_card("glm4_moe")).train()
    (mlp, *_) = (layer.mlp for layer in model.layers if getattr(layer.mlp, "shared_experts", None) is not None)
    x, runs = torch.randn(9, model.card.hidden_size), []
    mlp.shared_experts.register_forward_hook(lambda *_: runs.append(1))
    found = []
    for name in ("local", "all_to_all"):
        mlp.experts.dispatch = DISPATCHES[name]()
        mlp.zero_grad()
        leaf = x.clone().requires_grad_()
        y = mlp(leaf, None)
        y.square().sum().backward()
        found.append([y.detach(), leaf.grad, *(param.grad for param in mlp.parameters())])
    assert len(runs) == 2
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("family", "again"), [("qwen3_moe", 3), ("glm4_moe", 3), ("nemotron_h", 4)])
def test_recomputation_ends_before_the_way_back(alone, family, again, monkeypatch):
    """Counts, labels and rows go out again; only where latents follow the experts, they must come back, too."""
    model = random_model(family_card(family)).train()
    mlp = next(layer.mlp for layer in model.layers if isinstance(getattr(layer, "mlp", None), SparseMLP))
    mlp.experts.dispatch = AllToAllDispatch(dist.group.WORLD)
    trips, plain = [], dist.all_to_all_single
    monkeypatch.setattr(dist, "all_to_all_single", lambda *a, **k: (trips.append(1), plain(*a, **k))[1])
    y = recomputed_when_needed(
        mlp, torch.randn(9, model.card.hidden_size, requires_grad=True), None, use_reentrant=False
    )
    assert len(trips) == 4
    y.square().sum().backward()
    assert len(trips) == 4 + again + 3  # gradients: back, then of rows and of labels


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["all_to_all", "all_to_all_3", "deepep", "deepep_chunk4"])
@pytest.mark.parametrize("case", TOKENS)
def test_distributed_experts_equal_local_ones(together, case, dispatch):
    for results in together[1]["dispatch"]:
        got, wanted = results[case, dispatch], results[case, "local"]
        for name, value in wanted.items():
            torch.testing.assert_close(got[name], value, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
def test_deepep_pieces_overlap(together):
    """Each piece is on its way before the experts of the one before it are combined, in forward and in backward."""
    results = together[1]["dispatch"][1]  # rank 1 has 2 tokens, and takes part in as many pieces as rank 0 with its 11
    once = ["dispatch", "dispatch", "combine", "dispatch", "combine", "combine"]
    assert results["uneven", "deepep_chunk4"]["calls"] == once * 2
    assert results["uneven", "deepep"]["calls"] == ["dispatch", "combine"] * 2
    assert results["uneven", "deepep"]["bytes"] == 5 * 2 * HIDDEN * 8  # the larger hint, for rows of float64


@pytest.mark.slow
@pytest.mark.parametrize("other", [("torch", 3), ("deepep", 1)])
def test_backends_and_pieces_train_alike(together, other):
    """With recomputation, which leaves the exchange early once it has what it needs."""
    histories = together[1]["backends"]
    torch.testing.assert_close(torch.tensor(histories[other]), torch.tensor(histories["torch", 1]), rtol=1e-5, atol=0)
    assert histories["torch", 1][0] != histories["torch", 1][1]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_families_train_alike_by_both_backends(together, name):
    """Experts without a gate and on latents narrower than the model among them."""
    histories = together[1]["backends", name]
    got, wanted = (torch.tensor(histories[way]) for way in (("deepep", 1), ("torch", 1)))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=0)
    assert wanted[0, 0] != wanted[1, 0]


@pytest.mark.slow
def test_balance_in_two_processes_is_that_of_one(alone, together, model_path):
    single, double = run_balance(Job(model_path)), together[1]["balance"]
    for one, two in zip(single["counts"], double["counts"], strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one.sum(1), torch.tensor([52 * 2] * 2))  # once each in spite of recomputation and padding
    assert single["figures"] == double["figures"]
    assert torch.equal(single["biases"], double["biases"])
    assert single["biases"].abs().max() >= RATE


@pytest.mark.slow
def test_biases_pass_from_mesh_to_mesh(alone, together, model_path):
    directory, results = together
    saved = results["balance"]["biases"]
    assert torch.equal(results["loaded"], saved)  # ep=2 -> dp_shard=2
    loaded = load_biases(Job(model_path, load=str(directory / "run" / "checkpoints" / "step_3")))
    assert torch.equal(loaded, saved)


# --- load and balance -------------------------------------------------------------------------------------------------


def run_model(model, tokens=24):
    ids = torch.arange(tokens) * 7 % 200
    return model(ids, torch.arange(tokens), packed_attention([tokens], ids.device))


@pytest.mark.parametrize("recompute", [False, True])
def test_load_counts_trained_tokens_once(alone, recompute):
    model = random_model(moe_card())
    balance = ExpertBalance(model, alone)
    if recompute:
        for layer in model.layers:
            checkpoint(layer)
    with set_checkpoint_early_stop(False):  # recompute layers to their end, where the counting is
        for _ in range(2):
            run_model(model).sum().backward()
    run_model(model)  # no backward
    with torch.no_grad():
        run_model(model)
    balance.expect(trains=False)
    run_model(model).sum().backward()
    balance.expect(trains=True, times=2 * (torch.arange(24) < 5).long())
    run_model(model).sum().backward()
    assert torch.equal(balance.load.counts.sum(1), torch.tensor([(2 * 24 + 10) * 2] * 2))
    figures = balance.step()
    assert figures["expert_load_max_over_mean_worst"] >= figures["expert_load_max_over_mean"] > 1
    assert balance.load.counts.sum() == 0


def test_figures_are_of_the_layers(alone):
    balance = ExpertBalance(random_model(moe_card()), alone)
    balance.load.counts.copy_(torch.tensor([[2, 2, 2, 2], [8, 0, 0, 0]]))
    assert balance.step() == {"expert_load_max_over_mean": 2.5, "expert_load_max_over_mean_worst": 4.0}


def test_a_dense_model_has_no_load(alone):
    assert ExpertBalance(random_model(dense_card()), alone, RATE).step() == {}


def test_bias_evens_out_a_skewed_router(alone):
    model = random_model(moe_card())
    with torch.no_grad():
        model.embed_tokens.weight += 1  # what all tokens have in common, and two of the four experts like
        for layer in model.layers:
            layer.mlp.gate.weight[:2] += 0.1
    balance = ExpertBalance(model, alone, update_rate=0.005)
    ratios = []
    for _ in range(90):
        run_model(model, tokens=60).sum().backward()
        ratios.append(balance.step()["expert_load_max_over_mean"])
    assert ratios[0] == 2
    assert sum(ratios[-10:]) / 10 < 1.3


def test_bias_chooses_and_does_not_weigh():
    logits = torch.randn(50, 6, requires_grad=True)
    bias = torch.tensor([2.0, 0, 0, 0, 0, -2.0])  # beyond any difference of probabilities
    weights, experts = route(logits, Choice(2), bias=bias)
    assert (experts == 0).any(1).all()
    assert not (experts == 5).any()
    replayed, _ = route(logits, Choice(2), replayed=experts)
    assert torch.equal(weights, replayed)
    assert (route(logits, Choice(2))[1] == 5).any()
    weights[:, 0].sum().backward()
    assert logits.grad.abs().sum() > 0


def test_export_has_no_bias(alone):
    model = random_model(moe_card())
    names = {name for name, _ in hf_tensors(model)}
    ExpertBalance(model, alone, RATE)
    assert {name for name, _ in hf_tensors(model)} == names
    assert "layers.0.mlp.router_bias" in model.state_dict()


# --- rules ------------------------------------------------------------------------------------------------------------

DEEPEP = ["parallelism=ep2", "parallelism.ep_comm_backend=deepep", "model.dtype=bfloat16"]


@pytest.mark.parametrize(
    ("job", "overrides", "message"),
    [
        ("rl", [*DEEPEP, "model.dtype=float32"], "cannot carry float32"),
        ("rl", [*DEEPEP, "deployment.device=cpu"], "on GPUs only"),
        ("rl", [*DEEPEP, "parallelism.ep=1"], "nothing for DeepEP to carry"),
        ("rl", [*DEEPEP, "parallelism.deepep_num_sms=21"], "21 multiprocessors"),
        ("rl", [*DEEPEP, "model.card.num_experts=384"], "count 384 experts on 2 ranks"),
        ("rl", [*DEEPEP, "model.card.num_experts=64", "model.card.num_experts_per_tok=33"], "to 33 experts each"),
        ("rl", [*DEEPEP, "model.card.hidden_size=8192"], "rows of 8192 numbers"),
        ("rl", [*DEEPEP, "model.card.hidden_size=72"], "rows of 72 numbers"),
        ("rl", ["parallelism.ep_pieces=2"], "cannot travel in 2 pieces"),
        ("rl", [*DEEPEP, "parallelism.ep_pieces=2"], "DeepEP cuts by"),
        ("rl", ["model.router_bias_update_rate=0.001"], "other experts than the trainer"),
        ("sft", ["model.router_bias_update_rate=0.001", "model.card.num_experts=0"], "no experts whose load"),
    ],
)
def test_what_cannot_run_is_refused(job, overrides, message):
    with pytest.raises(ConfigError, match=message):
        compose(overrides, job)


def test_deepep_is_asked_for_where_the_job_starts(monkeypatch, tmp_path):
    """And not where it is planned: a login node has no kernels."""
    config = compose([*DEEPEP, f"cache_dir={tmp_path}"])
    with pytest.raises(UserError, match=r"DeepEP is not installed(.|\n)*DeepEP@v1") as refused:
        check_machine(config)
    assert ("parallelism.ep_comm_backend=torch",) in refused.value.remedies
    monkeypatch.syspath_prepend(str(TESTS / "stand_ins"))
    check_machine(config)


def test_what_can_run_is_not_refused():
    assert compose(DEEPEP).parallelism.ep_comm_backend == "deepep"
    assert compose([*DEEPEP, "model.card.num_experts=256"]).model.card.num_experts == 256
    assert compose(["model.router_bias_update_rate=0.001"], "sft").model.router_bias_update_rate == 0.001
