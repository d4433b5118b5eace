"""Numbers of ranks that divide neither the experts nor the rows of their matrices."""

from dataclasses import replace

import pytest
import torch
from tiny import moe_card, random_model
from trainer_ranks import Job, run_ranks

from prl.config import compose
from prl.config.world import expert_dimension
from prl.models.checkpoints.writing import hf_tensors, save_checkpoint
from prl.planning import make_plan
from prl.planning.render import render_plan
from prl.planning.sharding import expert_shares

EXPERTS = 8
# of matrices of 2 * moe_size x 32 and 32 x moe_size over 3 ranks: 16 leaves the experts, 24 the long side of each
SIZES = {"by experts": 16, "by rows and columns": 24}
LORA = ["memory=lora", "memory_recipe.lora.targets=[q_proj,experts]", "memory_recipe.lora.alpha=32"]
OPTIMS = {
    "adamw": {"type": "adamw", "lr": 0.01, "eps": 1e-5},
    "muon": {"type": "muon", "lr": 0.01, "eps": 1e-5},
}
CASES = {
    "by experts": ("by experts", "adamw", []),
    "by rows and columns": ("by rows and columns", "adamw", []),
    "by rows and columns, muon": ("by rows and columns", "muon", []),
    "by experts, lora": ("by experts", "adamw", LORA),
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    made = {}
    for name, (size, optim, overrides) in CASES.items():
        path = tmp_path_factory.mktemp("model")
        card = moe_card(num_experts=EXPERTS, moe_intermediate_size=SIZES[size])
        save_checkpoint(hf_tensors(random_model(card, std=0.1)), path, card)
        fields = {"experts": EXPERTS, "moe_size": SIZES[size], "optim": OPTIMS[optim], "overrides": overrides}
        made[name] = Job(str(path), steps=2, **fields)
    return made


@pytest.fixture(scope="module")
def alone(jobs, tmp_path_factory):
    results = run_ranks(tmp_path_factory.mktemp("alone") / "ranks", 1, list(jobs.values()))
    return dict(zip(jobs, results, strict=True))


@pytest.fixture(scope="module")
def six(jobs, tmp_path_factory):
    spread = [replace(job, dp_shard=6, ep=2) for job in jobs.values()]
    return dict(zip(jobs, run_ranks(tmp_path_factory.mktemp("six") / "ranks", 6, spread), strict=True))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["by experts", "by rows and columns"])
def test_a_rank_holds_as_many_bytes_as_the_plan_says(six, name):
    card = moe_card(num_experts=EXPERTS, moe_intermediate_size=SIZES[name])
    assert six[name]["expert_bytes"] == expert_shares(card, ep=2, ranks=3)[0] * 4 * len(card.sparse_layers)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_six_ranks_in_expert_groups_of_two_train_as_one_process_does(alone, six, name):
    torch.testing.assert_close(six[name]["history"], alone[name]["history"], rtol=1e-4, atol=1e-5)
    assert six[name]["weights"].keys() == alone[name]["weights"].keys()
    for key, weight in six[name]["weights"].items():
        torch.testing.assert_close(
            weight, alone[name]["weights"][key], rtol=1e-3, atol=2e-4, msg=lambda m, k=key: f"{k}: {m}"
        )


def test_experts_are_cut_along_what_the_ranks_divide():
    assert expert_dimension((16, 1536, 2048), 4) == 1
    assert expert_dimension((16, 2048, 768), 12) == 2
    assert expert_dimension((16, 1536, 2048), 28) == 0, "16 experts over 28 ranks: padded"


def plan_of(*overrides):
    return render_plan(make_plan(compose(["deployment=multi_node", "model=qwen3_30b_a3b", *overrides])))


@pytest.mark.parametrize(("nodes", "idle"), [(12, None), (28, "12 of 28"), (16, None)])
def test_the_plan_says_which_ranks_hold_no_experts(nodes, idle):
    told = plan_of(f"deployment.num_train_nodes={nodes}", "parallelism.ep=8")
    assert ("hold none" in told) == (idle is not None), told
    if idle:
        assert idle in told


def test_the_plan_says_so_without_expert_parallelism():
    told = plan_of("deployment.num_train_nodes=28")
    assert "96 of 224 ranks hold none" in told, told


def test_six_devices_and_automatic_expert_parallelism_pass():
    plan = make_plan(compose(["deployment.num_train_gpus=6", "parallelism.ep=auto"]))
    assert (plan.mesh.dp_shard, plan.mesh.ep) == (6, 2)
