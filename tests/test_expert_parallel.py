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
from torch.utils.checkpoint import set_checkpoint_early_stop
from trainer_ranks import Job

from prl.config import compose
from prl.config.errors import ConfigError, UserError
from prl.models.checkpoints.writing import hf_tensors, save_checkpoint
from prl.models.experts.all_to_all import Route, count_pairs
from prl.models.experts.dispatch import LocalDispatch, collect, sort_by_expert, spread
from prl.models.experts.routing import Choice, route
from prl.models.experts.stacked import Experts
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
    order, positions, counts = sort_by_expert(experts, 4)
    assert torch.equal(counts, experts.flatten().bincount(minlength=4))
    assert torch.equal(experts.flatten()[order], experts.flatten().sort().values)
    rows = spread(x, order, positions)
    assert torch.equal(rows, x[order // k])
    scale = torch.randn(n * k, 1, generator=generator, dtype=torch.float64)
    y = collect(rows * scale, order, positions)
    plain = torch.zeros_like(x).index_add(0, order // k, x[order // k] * scale)
    torch.testing.assert_close(y, plain)
    grad = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(y, x, grad), torch.autograd.grad(plain, x, grad))


def test_rows_that_went_nowhere_add_nothing():
    positions = torch.tensor([[1, -1], [-1, -1], [0, 2]])
    order = torch.tensor([4, 0, 5])
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: collect(spread(x, order, positions) ** 2, order, positions), x)
    assert torch.equal(collect(spread(x, order, positions), order, positions), x * torch.tensor([[1.0], [0.0], [2.0]]))


@settings(max_examples=30, deadline=None)
@given(n=st.integers(0, 9), k=st.integers(1, 4), size=st.sampled_from([1, 2, 4]), seed=st.integers(0, 99))
def test_a_token_goes_once_to_each_rank_that_holds_any_of_its_experts(n, k, size, seed):
    experts = torch.rand(n, 8, generator=torch.Generator().manual_seed(seed)).topk(k).indices
    route = Route.choose(experts.int(), size, 8)
    wanted = [(rank, token) for rank in range(size) for token in range(n) if rank in experts[token] // (8 // size)]
    assert route.count_rows().tolist() == [sum(rank == r for r, _ in wanted) for rank in range(size)]
    assert torch.equal(count_pairs(experts, 8), experts.flatten().bincount(minlength=8))
    tokens = torch.arange(n, dtype=torch.float64)[:, None]
    rows = route.fan_out(tokens)[: len(wanted)]
    assert rows.flatten().tolist() == [token for _, token in wanted]
    assert torch.equal(route.add_up(rows), tokens * (route.positions >= 0).sum(1, keepdim=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton kernels need a GPU")
@pytest.mark.parametrize(("width", "dtype"), [(2048, torch.bfloat16), (2500, torch.bfloat16), (72, torch.float32)])
def test_kernels_move_rows_as_torch_does(width, dtype):
    experts = torch.randint(0, 5, (300, 4))
    order, positions, counts = sort_by_expert(experts, 5)
    held = int(counts[:4].sum())  # the last expert is elsewhere
    order, positions = order[:held], positions.masked_fill(positions >= held, -1)
    x = torch.randn(300, width, dtype=dtype, requires_grad=True)
    grad = torch.randn(300, width, dtype=dtype)

    def both_ways(device):
        x_there, order_there, positions_there = x.to(device), order.to(device), positions.to(device)
        rows = spread(x_there, order_there, positions_there)
        y = collect(rows, order_there, positions_there)
        return rows.cpu(), y.cpu(), torch.autograd.grad(y, x, grad.to(device))[0]

    for got, wanted in zip(both_ways("cuda"), both_ways("cpu"), strict=True):
        torch.testing.assert_close(got, wanted)


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
    torch.testing.assert_close(LocalDispatch()(x, weights, chosen, EXPERTS, experts.grouped_mlp), wanted)


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
