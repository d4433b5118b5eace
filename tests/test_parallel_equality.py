"""Every layout and every memory recipe trains as one plain process does: losses, gradient norms and parameters."""

import pytest
import torch
import torch.distributed as dist
from tiny import moe_card, random_model
from trainer_ranks import Job, job_mesh, run_job, run_ranks

from prl.config.locate import config_groups
from prl.models.checkpoints.writing import hf_tensors, save_checkpoint
from prl.trainer.busy import of_data_ranks, unevenness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first case waits for all worlds

EXPERTS, LAYERS = 8, 4  # with two layers nothing would be offloaded
# dp_shard=auto takes what the deployment gives: ep2 x cp2 over four ranks, so that experts are sharded as well
LAYOUTS = {
    "fsdp": [],
    "hsdp2": [],
    "ddp": ["deployment.num_train_gpus=4"],
    "ep2": [],
    "cp2": [],
    "cp2_ring": [],
    "ep2_cp2": ["deployment.num_train_gpus=4"],
    "ep8_cp2": [],
}


def nodes_of(nodes, per_node):
    """Experts beyond a node, by way of nodes."""
    several = ["deployment=multi_node", f"deployment.num_train_nodes={nodes}", f"deployment.gpus_per_node={per_node}"]
    return [*several, "parallelism.ep_comm_backend=hierarchical"]


# expert groups that leave their node; of the last there are two, so that experts are sharded as well
NODES = {
    "ep4 cp2, 2 nodes of 2": ("ep2_cp2", ["parallelism.ep=4", *nodes_of(2, 2)]),
    "ep8, 2 nodes of 4": ("ep8", nodes_of(2, 4)),
    "ep4 cp2 tight, 4 nodes of 2": ("ep8_cp2", ["parallelism.ep=4", "memory=tight", *nodes_of(4, 2)]),
}
# what goes without FSDP, and what keeps it
REPLICAS = {
    "balanced, compiled": ["memory=balanced", "memory_recipe.compile=true"],
    "optim_cpu_offload": ["memory_recipe.optim_cpu_offload=true"],
    "optim_cpu_offload=full": ["memory_recipe.optim_cpu_offload=full"],
    "fsdp_cpu_offload": ["memory_recipe.fsdp_cpu_offload=true"],
    "ac_offloading": ["memory=tight"],
}
TWO_LAYERS = 20_000  # parameters: more than one layer has, and less than two
UNITS = [
    ("one layer", 0, []),
    ("two layers", TWO_LAYERS, []),
    ("two layers, tight", TWO_LAYERS, ["memory=tight"]),
    (
        "two layers, fsdp_cpu_offload",
        TWO_LAYERS,
        ["memory_recipe.fsdp_cpu_offload=true", "memory_recipe.ac={mode: full, freq: 3}"],
    ),
]
RECIPES = ["balanced", "selective", "tight", "cpu_offload"]
LEVERS = {
    "optim_cpu_offload=full": "memory_recipe.optim_cpu_offload=full",
    "fsdp_cpu_offload": "memory_recipe.fsdp_cpu_offload=true",
    "ac.freq=2": "memory_recipe.ac={mode: full, freq: 2}",
}
# attention and experts; alpha: adapters start at zero, and three steps shall matter
LORA = [
    "memory=lora",
    "memory_recipe.lora.targets=[q_proj,k_proj,v_proj,o_proj,experts]",
    "memory_recipe.lora.alpha=32",
]
LORA_LAYOUTS = ("fsdp", "hsdp2", "ddp", "ep2", "cp2", "ep2_cp2")
LORA_LEVERS = {
    "lora ac full": ["memory_recipe.ac.mode=full"],
    "lora selective, offloading": ["memory_recipe.ac.mode=selective", "memory_recipe.ac_offloading.enabled=true"],
    "lora optim_cpu_offload": ["memory_recipe.optim_cpu_offload=true"],
    "lora optim_cpu_offload=full": ["memory_recipe.optim_cpu_offload=full"],
    "lora fsdp_cpu_offload": ["memory_recipe.fsdp_cpu_offload=true"],
    "lora compile": ["memory_recipe.compile=true"],
}
FULL_AC, OFFLOAD = (
    "memory_recipe.ac.mode=full",
    "memory_recipe.ac_offloading={enabled: true, max_inflight_activations: 1}",
)
COMPILE, FULL_HOST = "memory_recipe.compile=true", "memory_recipe.optim_cpu_offload=full"
TOGETHER = {
    "ep2_cp2": ["memory=tight", COMPILE, "parallelism.ep_pieces=2", "deployment.num_train_gpus=4"],
    "cp2_ring": ["memory=selective", OFFLOAD, FULL_HOST],
    "hsdp2": ["memory=selective", OFFLOAD, "memory_recipe.fsdp_cpu_offload=true", COMPILE],
}
LORA_TOGETHER = {
    "ep2_cp2": [FULL_AC, OFFLOAD, FULL_HOST, COMPILE, "deployment.num_train_gpus=4"],
    "cp2_ring": ["memory_recipe.ac.mode=selective", OFFLOAD, "memory_recipe.fsdp_cpu_offload=true"],
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    card = moe_card(num_experts=EXPERTS, num_hidden_layers=LAYERS)
    save_checkpoint(hf_tensors(random_model(card, std=0.1)), path, card)
    return str(path)


def make_job(model_path, layout, *overrides, **fields):
    # eps: with 1e-8 AdamW makes a full step of an element whose gradient is nothing but rounding
    optim = {"type": "adamw", "lr": 0.01, "weight_decay": 0.1, "eps": 1e-5}
    return Job(
        model_path, layout=layout, experts=EXPERTS, layers=LAYERS, optim=optim, overrides=list(overrides), **fields
    )


@pytest.fixture(scope="module")
def alone():
    """A world of one in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def plain(alone, model_path):
    """One process, no recipe."""
    return run_job(make_job(model_path, "single"))


@pytest.fixture(scope="module")
def plain_lora(alone, model_path):
    return run_job(make_job(model_path, "single", *LORA))


@pytest.fixture(scope="module")
def parallel(model_path, tmp_path_factory):
    """Results by (layout, recipe)."""
    jobs = {(layout, "none"): make_job(model_path, layout, *more) for layout, more in LAYOUTS.items()}
    for recipe in RECIPES:
        jobs["fsdp", recipe] = make_job(model_path, "fsdp", f"memory={recipe}")
    for name, overrides in REPLICAS.items():
        jobs["ddp", name] = make_job(model_path, "ddp", "deployment.num_train_gpus=2", *overrides)
    jobs["ep2", "tight"] = make_job(model_path, "ep2", "memory=tight")
    jobs["cp2_ring", "tight"] = make_job(model_path, "cp2_ring", "memory=tight")
    for layout in LORA_LAYOUTS:
        jobs[layout, "lora"] = make_job(model_path, layout, *LORA, *LAYOUTS[layout])
    jobs |= {("nodes", name): make_job(model_path, layout, *more) for name, (layout, more) in NODES.items()}
    jobs["ep2", "bfloat16"] = make_job(model_path, "ep2", "model.dtype=bfloat16")
    for name, least, more in UNITS:
        jobs["units", name] = make_job(model_path, "fsdp", *more, unit_parameters=least)
    jobs["ep2_cp2", "slow"] = make_job(model_path, "ep2_cp2", *LAYOUTS["ep2_cp2"], slow=True)
    return run_worlds(jobs, tmp_path_factory.mktemp("worlds"))


@pytest.fixture(scope="module")
def combined(model_path, tmp_path_factory):
    """As `parallel`: single levers, and several at once."""
    jobs = {("ep2", lever): make_job(model_path, "ep2", override) for lever, override in LEVERS.items()}
    jobs["fsdp", "compile"] = make_job(model_path, "fsdp", "memory_recipe.compile=true")
    for lever, overrides in LORA_LEVERS.items():
        jobs["ep2", lever] = make_job(model_path, "ep2", *LORA, *overrides)
    for layout, overrides in TOGETHER.items():
        jobs[layout, "together"] = make_job(model_path, layout, *overrides)
    for layout, overrides in LORA_TOGETHER.items():
        jobs[layout, "lora together"] = make_job(model_path, layout, *LORA, *overrides)
    return run_worlds(jobs, tmp_path_factory.mktemp("combined"))


def run_worlds(jobs, directory):
    """One launch of processes for each world size."""
    sizes = {key: job_mesh(job).world_size for key, job in jobs.items()}
    results = {}
    for size in sorted(set(sizes.values())):
        keys = [key for key in jobs if sizes[key] == size]
        results |= dict(zip(keys, run_ranks(directory / str(size), size, [jobs[k] for k in keys]), strict=True))
    return results


CASES = [(layout, "none") for layout in LAYOUTS]
CASES += [("nodes", name) for name in NODES] + [("ddp", name) for name in REPLICAS]
CASES += [("fsdp", recipe) for recipe in RECIPES] + [("ep2", "tight"), ("cp2_ring", "tight")]
COMBINED = [("ep2", lever) for lever in LEVERS] + [(layout, "together") for layout in TOGETHER] + [("fsdp", "compile")]
LORA_COMBINED = [("ep2", lever) for lever in LORA_LEVERS] + [(layout, "lora together") for layout in LORA_TOGETHER]


@pytest.mark.parametrize(("layout", "recipe"), CASES)
def test_three_steps_equal_one_process(plain, parallel, layout, recipe):
    assert_equal(parallel[layout, recipe], plain)


@pytest.mark.parametrize(("name", "least", "_"), UNITS)
def test_layers_are_gathered_together_or_one_by_one(plain, parallel, name, least, _):
    got = parallel["units", name]
    assert got["fsdp_units"] == (LAYERS if least == 0 else LAYERS / 2)
    assert parallel["fsdp", "none"]["fsdp_units"] == 1  # they are small
    assert parallel["ep2", "none"]["fsdp_units"] == 1  # FSDP has nothing to do with their experts
    assert parallel["ep2_cp2", "none"]["fsdp_units"] == LAYERS  # here it has
    assert_equal(got, plain)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("layout", "recipe"), COMBINED)
def test_levers_and_their_combinations_equal_one_process(plain, combined, layout, recipe):
    assert_equal(combined[layout, recipe], plain)


@pytest.mark.parametrize("layout", LORA_LAYOUTS)
def test_adapters_learn_as_in_one_process(plain_lora, parallel, layout):
    """The weights that are compared are merged."""
    assert_equal(parallel[layout, "lora"], plain_lora)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("layout", "recipe"), LORA_COMBINED)
def test_adapters_under_levers_and_their_combinations_learn_as_in_one_process(plain_lora, combined, layout, recipe):
    assert_equal(combined[layout, recipe], plain_lora)


def test_adapters_change_what_they_should(plain_lora, model_path):
    before = dict(hf_tensors(random_model(moe_card(num_experts=EXPERTS, num_hidden_layers=LAYERS), std=0.1)))
    adapted = {name.split(".")[-2] for name, weight in plain_lora["weights"].items() if not weight.equal(before[name])}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    losses = [loss for loss, _ in plain_lora["history"]]
    assert losses[0] != pytest.approx(losses[2], abs=0.03)


def assert_equal(got, plain):
    torch.testing.assert_close(torch.tensor(got["history"]), torch.tensor(plain["history"]), rtol=1e-4, atol=0)
    assert got["weights"].keys() == plain["weights"].keys()
    for name, weight in got["weights"].items():
        torch.testing.assert_close(
            weight, plain["weights"][name], rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_ranks_that_share_rows_are_busy_as_one(parallel):
    """One of four is slow, and its neighbour waits for it: of two data ranks one computes and the other hardly does."""
    assert 1.3 < parallel["ep2_cp2", "slow"]["figures"]["busy_imbalance"] <= 2
    assert 1 <= parallel["ep2_cp2", "none"]["figures"]["busy_imbalance"] <= 2
    seconds = torch.tensor([[1.0, 4.0], [3.0, 1.0], [2.0, 2.0], [2.0, 0.0]], dtype=torch.float64)
    together = of_data_ranks(seconds, torch.tensor([0, 0, 1, 1]))
    assert together.tolist() == [[3, 4], [2, 2]]
    assert unevenness(together) == pytest.approx((3 + 4) * 2 / (3 + 4 + 2 + 2))


def test_experts_in_bfloat16(plain, parallel):
    """They are FSDP units of their own, into which tokens and mixing weights go as they are."""
    got = parallel["ep2", "bfloat16"]["history"]
    torch.testing.assert_close(torch.tensor(got)[:, 0], torch.tensor(plain["history"])[:, 0], rtol=0.01, atol=0)


def test_world_sizes_are_those_of_the_layouts(model_path):
    sizes = {name: job_mesh(make_job(model_path, name, *more)).world_size for name, more in LAYOUTS.items()}
    over = {name: job_mesh(make_job(model_path, layout, *more)) for name, (layout, more) in NODES.items()}
    assert [(mesh.world_size, mesh.ep, mesh.cp) for mesh in over.values()] == [(4, 4, 2), (8, 8, 1), (8, 4, 2)]
    assert sizes == {"fsdp": 4, "hsdp2": 4, "ddp": 4, "ep2": 2, "cp2": 2, "cp2_ring": 2, "ep2_cp2": 4, "ep8_cp2": 8}


def test_every_shipped_choice_is_covered():
    groups = config_groups()
    assert set(groups["memory_recipe"]) == {"none", "lora", *RECIPES}
    assert set(groups["parallelism"]) - {"auto", "single", "ep8", "cp4"} == set(
        LAYOUTS
    )  # the last two: as ep8_cp2, cp2
