"""One process against two: the same losses, norms and parameters; checkpoints pass from one world to another."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tiny import moe_card, moe_checkpoint, random_model
from trainer_ranks import Job, run_job, run_ranks

from prl.models.checkpoints.writing import hf_tensors

pytestmark = pytest.mark.slow

OPTIMIZERS = {
    "adamw": {"type": "adamw", "lr": 0.01, "weight_decay": 0.1},
    "muon": {"type": "muon", "lr": 0.01},
    "sgd": {"type": "sgd", "lr": 0.1},
}
MESHES = {
    "dp_shard=2": {"dp_shard": 2},
    "dp_replicate=2": {"dp_replicate": 2},
    "ep=2": {"dp_shard": 2, "ep": 2},
    "cp=2": {"cp": 2},
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(moe_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def alone():
    """A world of one in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def single(alone, model_path):
    """What one process gets in 3 and in 5 steps, by (optimizer, steps)."""
    jobs = {
        (name, steps): Job(model_path, optim=OPTIMIZERS[name], steps=steps) for name in OPTIMIZERS for steps in (3, 5)
    }
    return {key: run_job(job) for key, job in jobs.items()}


@pytest.fixture(scope="module")
def together(model_path, tmp_path_factory):
    """What two ranks got, by (optimizer, mesh), and by "resumed" after a checkpoint of their own."""
    tmp = tmp_path_factory.mktemp("ranks")
    keys = [(optimizer, mesh) for optimizer in OPTIMIZERS for mesh in MESHES]
    jobs = [Job(model_path, **MESHES[mesh], optim=OPTIMIZERS[o], save=str(tmp / f"{o}-{mesh}")) for o, mesh in keys]
    for optimizer, _ in keys[::2]:
        checkpoint = str(tmp / f"{optimizer}-dp_shard=2" / "checkpoints" / "step_3")
        jobs.append(Job(model_path, dp_shard=2, optim=OPTIMIZERS[optimizer], load=checkpoint, start=3, steps=2))
    recompute = ["memory_recipe.ac.mode=full", "memory_recipe.fused_lm_head_token_chunk_size=4"]
    jobs.append(Job(model_path, dp_shard=2, optim=OPTIMIZERS["adamw"], overrides=recompute))
    slow = Job(model_path, optim=OPTIMIZERS["adamw"], slow=True)
    jobs += [replace(slow, **mesh, overrides=recompute * again) for mesh in MESHES.values() for again in (0, 1)]
    results = run_ranks(tmp / "jobs", 2, jobs)
    names = [*keys, *((o, "resumed") for o, _ in keys[::2]), ("adamw", "recomputed")]
    names += [("slow", mesh, again) for mesh in MESHES for again in (0, 1)]
    return tmp, dict(zip(names, results, strict=True))


def assert_same(one, other, optimizer):
    """To float32 rounding; of Muon's weights their movement since the first step, to a thousandth."""
    torch.testing.assert_close(torch.tensor(one["history"]), torch.tensor(other["history"]), rtol=1e-3, atol=1e-5)
    initial = dict(hf_tensors(random_model(moe_card(), std=0.1)))
    assert one["weights"].keys() == other["weights"].keys() == initial.keys()
    for name, weight in one["weights"].items():
        if optimizer == "muon":
            error = (weight - other["weights"][name]).norm() / (weight - initial[name]).norm()
            # a router's gradient has a null direction (its rows sum to zero), in which rounding is all there is to see
            assert error < (0.5 if name.endswith("mlp.gate.weight") else 1e-3), (name, error)
        else:
            torch.testing.assert_close(weight, other["weights"][name], rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_processes_train_as_one(single, together, optimizer, mesh):
    history = single[optimizer, 3]["history"]
    assert history[2][0] < history[0][0] + 0.5
    assert_same(single[optimizer, 3], together[1][optimizer, mesh], optimizer)


def test_recomputation_changes_nothing_in_two_processes(together):
    assert_same(together[1]["adamw", "dp_shard=2"], together[1]["adamw", "recomputed"], "adamw")


@pytest.mark.parametrize("again", [0, 1], ids=["", "recomputed"])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_slow_rank_is_seen_where_all_wait_for_it(together, mesh, again):
    """Of two ranks of which one computes and the other hardly does: nearly 2."""
    figures = together[1]["slow", mesh, again]["figures"]
    if mesh == "cp=2":
        assert "busy_imbalance" not in figures
    else:
        assert 1.4 < figures["busy_imbalance"] <= 2


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_checkpoint_of_two_goes_on_in_one(single, together, model_path, optimizer, mesh):
    tmp, results = together
    checkpoint = str(tmp / f"{optimizer}-{mesh}" / "checkpoints" / "step_3")
    loaded = run_job(Job(model_path, optim=OPTIMIZERS[optimizer], load=checkpoint, start=3, steps=0))
    for name, weight in loaded["weights"].items():
        assert torch.equal(weight, results[optimizer, mesh]["weights"][name]), name
    # the optimizer's state shows in the next steps
    resumed = run_job(Job(model_path, optim=OPTIMIZERS[optimizer], load=checkpoint, start=3, steps=2))
    unbroken = single[optimizer, 5]
    assert_same({**unbroken, "history": unbroken["history"][3:]}, resumed, optimizer)
    if mesh == "dp_shard=2":
        assert_same(resumed, results[optimizer, "resumed"], optimizer)


def test_a_checkpoint_of_one_goes_on_in_two(single, model_path, tmp_path):
    unbroken = single["muon", 5]
    run_job(Job(model_path, optim=OPTIMIZERS["muon"], steps=3, save=str(tmp_path)))
    checkpoint = str(tmp_path / "checkpoints" / "step_3")
    job = Job(model_path, dp_shard=2, optim=OPTIMIZERS["muon"], load=checkpoint, start=3, steps=2)
    (resumed,) = run_ranks(tmp_path / "ranks", 2, [job])
    assert_same({**unbroken, "history": unbroken["history"][3:]}, resumed, "muon")
