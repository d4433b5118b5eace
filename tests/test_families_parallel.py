"""Every family: each layout and recipe that it can have trains as one plain process does. Qwen3's mixtures are in
test_parallel_equality.py.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from families import EACH, family_card
from test_parallel_equality import LORA, assert_equal, nodes_of, run_worlds
from tiny import random_model
from torch.distributed.checkpoint import FileSystemReader
from trainer_ranks import Job, build_policy, job_mesh, run_job, train_step

from prl.models.checkpoints.writing import hf_tensors, save_checkpoint
from prl.models.state_space.mixer import Decay
from prl.trainer.world import build_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first case waits for all worlds

FAMILIES = (
    *(name for family, name in EACH.items() if family != "qwen3_moe"),
    "glm4_moe normed, two shared, in groups",
    "nemotron_h without latents, in groups",
)
FOUR = ["deployment.num_train_gpus=4"]
OFFLOAD = "memory_recipe.ac_offloading={enabled: true, max_inflight_activations: 1}"
DENSE = {
    "fsdp": ("fsdp", []),
    "hsdp2 selective": ("hsdp2", ["memory=selective", OFFLOAD]),
    "cp2": ("cp2", ["memory=tight", "memory_recipe.compile=true"]),  # compiled in two ranks: seconds of CPU each
    "cp2_ring": ("cp2_ring", []),
    "lora": ("cp2", ["memory=lora", "memory_recipe.lora.targets=[q_proj,up_proj]", "memory_recipe.lora.alpha=32"]),
}
SPARSE = DENSE | {
    "ep2": ("ep2", ["memory=selective"]),
    "ep2_cp2": ("ep2_cp2", ["memory=tight", *FOUR]),
    "lora": ("ep2_cp2", [*LORA, *FOUR]),
}
LATENT_LORA = ["memory=lora", "memory_recipe.lora.targets=[q_b_proj,kv_b_proj,o_proj,experts]",
               "memory_recipe.lora.alpha=32"]  # fmt: skip
GATHER = "parallelism.cp_style=gather"
HOST = "memory_recipe.optim_cpu_offload=full"  # where gradients are, too
LATENT = SPARSE | {
    "lora": ("ep2_cp2", [*LATENT_LORA, *FOUR, GATHER]),
    "cp2_gather": ("cp2", [GATHER, "memory=selective", OFFLOAD]),
    "cp3_gather": ("cp2", [GATHER, "parallelism.cp=3", "deployment.num_train_gpus=3", "seq_len=768"]),
}
# keys are gathered, whatever cp_style is said: there is no other way
GATHERED = {case: job for case, job in LATENT.items() if not case.startswith("cp2_")} | {
    "ep2": ("ep2", ["memory=selective", HOST]),  # of which indexers are no part
}
STATE_LORA = ["memory=lora", "memory_recipe.lora.targets=[in_proj,q_proj,up_proj,experts]",
              "memory_recipe.lora.alpha=32"]  # fmt: skip
SCAN = ["memory=selective", "memory_recipe.ac.targets=[norm,attn_proj,scan]"]
STATES = {case: job for case, job in SPARSE.items() if case != "cp2_ring"} | {
    "ep2_cp2": ("ep2_cp2", [*SCAN, *FOUR]),
    "lora": ("ep2_cp2", [*STATE_LORA, *FOUR]),
}


SAME_LAYERS = {"glm4_moe_lite": LATENT, "deepseek_v32": GATHERED}  # as deepseek_v3 and glm_moe_dsa: not compiled anew


def cases(name):
    card = family_card(name)
    if name in SAME_LAYERS:
        return {case: job for case, job in SAME_LAYERS[name].items() if case != "cp2"}
    if card.index_topk:
        return GATHERED
    if card.state_layers:
        return STATES
    return LATENT if card.kv_lora_rank else SPARSE if card.num_experts else DENSE


INDEXERS = ["model.indexer_loss_coef=0.5"]  # of one family, whose layers share choices
LEARNING = {
    "fsdp": ("fsdp", ["memory=tight", *INDEXERS]),
    "ep2_cp2": ("ep2_cp2", ["memory=selective", *FOUR, *INDEXERS]),
}
FP8 = ["model.fp8=emulated", "memory_recipe.share_prefixes=false"]  # sums of what is shared are rounded once
EMULATED = {
    "fsdp": ("fsdp", ["memory=selective", *FP8]),
    "ep2_cp2": ("ep2_cp2", ["memory=tight", "memory_recipe.compile=false", *FOUR, *FP8]),
}
SHARING = "glm_moe_dsa shared choices"
OVER_NODES = ("ep2_cp2", ["memory=tight", "parallelism.ep=4", *nodes_of(2, 2)])  # experts, by way of nodes
CROSSING = ("glm4_moe normed, two shared, in groups", "deepseek_v3", "minimax_m2", "nemotron_h")
JOBS = {(name, case): job for name in FAMILIES for case, job in cases(name).items()}
JOBS |= {(name, "over nodes"): OVER_NODES for name in CROSSING}
REPLICAS = ("ddp", ["memory=balanced", "deployment.num_train_gpus=2"])
JOBS |= {(name, "ddp"): REPLICAS for name in ("nemotron_h", "deepseek_v3", SHARING, "qwen3")}  # parameters of all kinds
JOBS |= {(name, "ep8_cp2"): ("ep8_cp2", []) for name in ("deepseek_v3", "nemotron_h", SHARING)}
FULL_GRADIENTS = [key for key, (_, more) in JOBS.items() if key[1] != "lora" and HOST not in more]
MUON = ("deepseek_v3", "glm_moe_dsa shared choices", "nemotron_h", "minimax_m2")  # whose matrices are of all kinds
SHIPPED = {"lr": 0.01, "eps": 1e-8}  # AdamW's own eps


def adapters(name):
    return [line for line in cases(name)["lora"][1] if line not in (*FOUR, GATHER)]


def make_job(root, name, layout, overrides, **fields):
    path = root / name.replace(" ", "_")
    if not path.exists():
        model = random_model(family_card(name), std=0.1)
        for index, buffer in enumerate(model.checkpoint_buffers().values()):
            buffer.normal_(0, 0.1, generator=torch.Generator().manual_seed(index))
        save_checkpoint(hf_tensors(model), path, model.card)
    # eps: with 1e-5 two of 8,448 elements of an embedding, whose gradients are rounding, differ by 2.5e-5
    optim = {"type": "adamw", "lr": 0.01, "weight_decay": 0.1, "eps": 1e-3}
    return Job(str(path), family=name, layout=layout, optim=optim, overrides=list(overrides), **fields)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def results(root, tmp_path_factory):
    jobs = {key: make_job(root, key[0], *job, gradients=key in FULL_GRADIENTS) for key, job in JOBS.items()}
    jobs |= {("learning", case): make_job(root, SHARING, *job, gradients=True) for case, job in LEARNING.items()}
    shipped = make_job(root, SHARING, *JOBS[SHARING, "ep2_cp2"])
    jobs |= {("fp8", case): make_job(root, "deepseek_v3", *job) for case, job in EMULATED.items()}
    jobs["shipped"] = replace(shipped, steps=1, optim={**shipped.optim, **SHIPPED})
    return run_worlds(jobs, tmp_path_factory.mktemp("worlds"))


def muon_job(root, name, layout, overrides):
    job = make_job(root, name, layout, overrides)
    return replace(job, optim={"type": "muon", "lr": 0.01, "weight_decay": 0.1, "eps": 1e-3})


@pytest.fixture(scope="module")
def muon(root, tmp_path_factory):
    jobs = {name: muon_job(root, name, "ep2_cp2", FOUR) for name in MUON}
    return run_worlds(jobs, tmp_path_factory.mktemp("muon"))


@pytest.fixture(scope="module")
def alone(root):
    """What one process makes of each family, without recipe; and with adapters."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    plain = {name: run_job(make_job(root, name, "single", [], gradients=True)) for name in FAMILIES}
    lora = {name: run_job(make_job(root, name, "single", adapters(name))) for name in FAMILIES}
    yield plain, lora
    dist.destroy_process_group()


@pytest.mark.parametrize(("name", "case"), JOBS)
def test_three_steps_equal_one_process(results, alone, name, case):
    plain, lora = alone
    assert_equal(results[name, case], (lora if case == "lora" else plain)[name])


@pytest.mark.parametrize("name", MUON)
def test_muon_steps_as_in_one_process(muon, alone, root, name):
    """Its matrices are whole with one rank each, wherever their rows lie; `alone` has the process group."""
    assert_equal(muon[name], run_job(muon_job(root, name, "single", [])))


@pytest.mark.parametrize(("name", "case"), FULL_GRADIENTS)
def test_every_gradient_equals_that_of_one_process(results, alone, name, case):
    """Also those that AdamW's eps hides in the test above."""
    assert_same_gradients(results[name, case]["gradients"], alone[0][name]["gradients"])


@pytest.mark.parametrize("case", EMULATED)
def test_fp8_is_as_near_to_one_process_as_its_rounding(results, alone, root, case):
    """A number that rounds to another of its 256 neighbours here and there: steps part by what that is worth."""
    losses, norms = zip(*results["fp8", case]["history"], strict=True)
    plain = run_job(make_job(root, "deepseek_v3", "single", FP8))
    expected = list(zip(*plain["history"], strict=True))
    exact = alone[0]["deepseek_v3"]["history"]
    assert abs(expected[0][0] - exact[0][0]) > 1e-4, "nothing was rounded"
    assert losses[0] == pytest.approx(expected[0][0], rel=1e-5)
    assert norms[0] == pytest.approx(expected[1][0], rel=1e-3)
    assert losses == pytest.approx(expected[0], rel=0.01)
    assert norms == pytest.approx(expected[1], rel=0.1)


@pytest.mark.parametrize("case", LEARNING)
def test_indexers_learn_as_in_one_process(results, alone, root, case):
    plain = run_job(make_job(root, SHARING, "single", INDEXERS, gradients=True))
    assert_equal(results["learning", case], plain)
    assert any("indexer" in name for name in plain["gradients"])
    assert_same_gradients(results["learning", case]["gradients"], plain["gradients"])


def assert_same_gradients(got, plain):
    """To the rounding of float32: each element to 1e-5 of the largest of its parameter."""
    assert got.keys() == plain.keys()
    for name, grad in plain.items():
        largest = grad.abs().max().item()
        assert largest > 0, name
        torch.testing.assert_close(got[name], grad, rtol=0, atol=1e-5 * largest, msg=name)


def test_layouts_part_where_adamw_divides_rounding_by_its_eps(results, alone, root):
    """With the eps of 1e-8 of conf/optim: an element whose gradient is as small as the rounding of its sum takes a
    step of a size of its own in each layout. No other element does.
    """
    job = make_job(root, SHARING, "single", [], gradients=True)
    plain = run_job(replace(job, steps=1, optim={**job.optim, **SHIPPED}))
    norm = plain["history"][0][1]
    gradients = {name: grad / max(norm, 1.0) for name, grad in plain["gradients"].items() if ".experts." not in name}
    for name, grad in gradients.items():
        saved = name if name == "lm_head.weight" else f"model.{name}"
        far = (results["shipped"]["weights"][saved] - plain["weights"][saved]).abs() > 1e-6
        assert not far.any() or grad[far].abs().max() < 3e-7, name


def test_what_indexers_learn_changes_nothing_else(alone, root):
    """In the step in which they learn it; later they choose other keys."""
    learned, frozen = (
        run_job(replace(job, steps=1, optim={**job.optim, "max_grad_norm": 1e9}))["weights"]
        for job in (make_job(root, SHARING, "single", overrides) for overrides in (INDEXERS, []))
    )
    moved = {name for name, weight in learned.items() if not torch.equal(weight, frozen[name])}
    assert moved == {name for name in frozen if "indexer" in name}


def test_indexers_come_closer_to_the_attention(alone, root):
    job = make_job(root, SHARING, "single", ["model.indexer_loss_coef=10"])
    policy = build_policy(job, build_world(job_mesh(job), torch.device("cpu")))
    divergences = []
    for _ in range(12):
        train_step(policy, 1)
        divergences.append(policy.figures["indexer_kl"])
    assert 0 < divergences[-1] < 0.5 * divergences[0]


def test_decays_compute_in_float32_beside_weights_in_bfloat16(root, alone):
    job = make_job(root, "nemotron_h", "single", ["model.dtype=bfloat16", "memory=balanced"])
    policy = build_policy(job, build_world(job_mesh(job), torch.device("cpu")))
    seen = set()
    for module in policy.model.modules():
        if isinstance(module, Decay):
            module.register_forward_pre_hook(lambda decay, args: seen.add((decay.A_log.dtype, args[0].dtype)))
    loss, norm = train_step(policy, 1)
    assert seen == {(torch.float32, torch.bfloat16)}
    assert loss > 0
    assert norm > 0


def test_frozen_indexers_are_in_no_checkpoint_and_training_goes_on_without(alone, root, tmp_path):
    plain, _ = alone
    name = SHARING
    job = make_job(root, name, "single", [])
    run_job(replace(job, steps=2, save=str(tmp_path)))
    (trainer,) = tmp_path.rglob("trainer")
    saved = FileSystemReader(str(trainer)).read_metadata().state_dict_metadata
    assert saved
    assert not any("indexer" in key for key in saved)
    rest = run_job(replace(job, steps=1, start=2, load=str(trainer.parent)))
    assert rest["history"][-1] == plain[name]["history"][-1]
    assert all(torch.equal(rest["weights"][key], weight) for key, weight in plain[name]["weights"].items())
