"""Schedules, optimizers, clipping, memory recipes, and checkpoints of a world of one."""

import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from families import family_card
from tiny import moe_card, moe_checkpoint, random_model
from torch.testing._internal.distributed.fake_pg import FakeStore
from trainer_ranks import Job, build_policy, job_config, rows_of, run_job, save, train_step

from prl.config import compose
from prl.config.errors import UserError
from prl.config.schema import OptimConfig, ScheduleConfig
from prl.models.adapters.lora import whole_tensor
from prl.models.checkpoints.writing import hf_tensors, save_checkpoint
from prl.models.layers.packed_attention import activate_attention, packed_attention
from prl.models.layers.rope import rotary_tables
from prl.models.sharding import is_sharded
from prl.planning.run_plan import MeshPlan
from prl.runtime.directory.checkpoints import latest_valid, parts_of
from prl.trainer import parallelize
from prl.trainer.checkpoint import TrainerCheckpointer, no_space
from prl.trainer.memory.optimizer_offload import master_weights
from prl.trainer.optim import GradientNorm, build_optimizers, is_hidden_matrix, lr_factor, scale_gradients
from prl.trainer.parallelize import build_model
from prl.trainer.policy import make_room, seed_everything
from prl.trainer.world import build_world

ADAMW = {"type": "adamw", "lr": 0.01}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(moe_checkpoint(tmp_path_factory.mktemp("model")))


# --- schedules --------------------------------------------------------------------------------------------------------

SCHEDULES = [
    ({"type": "constant"}, 10, {1: 1.0, 5: 1.0, 10: 1.0}),
    ({"type": "constant", "warmup_steps": 4}, 10, {1: 0.25, 2: 0.5, 4: 1.0, 5: 1.0, 10: 1.0}),
    ({"type": "linear"}, 10, {1: 0.9, 5: 0.5, 10: 0.0}),
    ({"type": "linear", "warmup_steps": 2, "min_lr_ratio": 0.1}, 10, {1: 0.5, 2: 1.0, 6: 0.55, 10: 0.1}),
    ({"type": "linear", "decay_steps": 4}, 10, {2: 0.5, 4: 0.0, 10: 0.0}),
    ({"type": "cosine"}, 8, {2: 0.5 + 0.5 * math.cos(math.pi / 4), 4: 0.5, 8: 0.0}),
    ({"type": "cosine", "warmup_steps": 4, "min_lr_ratio": 0.2}, 12, {4: 1.0, 8: 0.6, 12: 0.2}),
    ({"type": "wsd", "warmup_steps": 2, "decay_steps": 4}, 12, {1: 0.5, 2: 1.0, 8: 1.0, 9: 0.75, 10: 0.5, 12: 0.0}),
    ({"type": "wsd", "decay_steps": 2, "min_lr_ratio": 0.5}, 6, {1: 1.0, 4: 1.0, 5: 0.75, 6: 0.5}),
]


@pytest.mark.parametrize(("schedule", "max_steps", "expected"), SCHEDULES)
def test_schedules_by_hand(schedule, max_steps, expected):
    got = {step: lr_factor(step, max_steps, ScheduleConfig(**schedule)) for step in expected}
    assert got == pytest.approx(expected)


@pytest.mark.parametrize(("schedule", "max_steps", "_"), SCHEDULES)
def test_schedules_stay_between_zero_and_one(schedule, max_steps, _):
    factors = [lr_factor(step, max_steps, ScheduleConfig(**schedule)) for step in range(1, max_steps + 5)]
    assert all(0.0 <= factor <= 1.0 for factor in factors)


def test_the_scheduled_rate_reaches_every_optimizer(world, model_path):
    schedule = {"type": "linear", "warmup_steps": 4}
    policy = build_policy(Job(model_path, optim={"type": "muon", "lr": 0.02, "schedule": schedule}), world)
    train_step(policy, 1)
    assert policy.lr == pytest.approx(0.005)
    assert {group["lr"] for o in policy.optimizers for group in o.param_groups} == {policy.lr}
    assert len(policy.optimizers) == 2


# --- optimizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optim", [ADAMW, {"type": "muon", "lr": 0.01}, {"type": "sgd", "lr": 0.3}], ids=lambda o: o["type"]
)
def test_every_optimizer_reduces_the_loss(world, model_path, optim):
    policy = build_policy(Job(model_path, optim=optim), world)
    losses = [train_step(policy, 1)[0] for _ in range(8)]
    assert losses[-1] < losses[0] - 0.5
    assert all(math.isfinite(loss) for loss in losses)


def test_muon_gets_hidden_matrices_and_adamw_the_rest():
    model = random_model(moe_card(tie_word_embeddings=False))
    muon, adamw = build_optimizers(model, OptimConfig(type="muon"))
    names = {id(p): n for n, p in model.named_parameters()}
    by_muon, by_adamw = ({names[id(p)] for p in o.param_groups[0]["params"]} for o in (muon, adamw))
    assert by_muon | by_adamw == set(names.values())
    assert not by_muon & by_adamw
    assert "layers.0.self_attn.q_proj.weight" in by_muon
    assert {"embed_tokens.weight", "lm_head.weight", "norm.weight", "layers.1.mlp.experts.gate_up_proj"} <= by_adamw
    assert all(is_hidden_matrix(n, p) == (n in by_muon) for n, p in model.named_parameters())


def test_weight_decay_alone_shrinks_weights():
    model = random_model(moe_card())
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    (adamw,) = build_optimizers(model, OptimConfig(type="adamw", lr=0.1, weight_decay=0.5))
    adamw.step()
    for old, new in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(new.detach(), old * 0.95)


@pytest.mark.parametrize("limit", [0.5, 100.0, 0.0])
@pytest.mark.parametrize("kind", ["sgd", "adamw", "muon"])
def test_clipping_keeps_the_direction(world, limit, kind):
    """The step is that of gradients that were small from the beginning, and the next one's are not scaled by it."""
    models = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [build_optimizers(model, OptimConfig(type=kind, lr=0.1)) for model in models]
    for size in (1.0, 0.01):
        for model in models:
            model.weight.grad, model.bias.grad = torch.tensor([[3.0, 0.0], [0.0, 0.0]]), torch.tensor([0.0, 4.0])
            for param in model.parameters():
                param.grad *= size
        norm, factor = GradientNorm([p.grad for p in models[0].parameters()], limit, dist.group.WORLD).wait()
        assert norm == pytest.approx(5.0 * size)
        assert factor == pytest.approx(0.1 if limit * size == 0.5 else 1.0, rel=1e-4)
        for param in models[1].parameters():
            param.grad *= factor
        for every, scale in zip(optimizers, (factor, 1.0), strict=True):
            for optimizer in every:
                scale_gradients(optimizer, scale)
                optimizer.step()
        for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["sgd", "adamw", "muon"])
def test_an_optimizer_may_have_nothing_to_clip(world, kind):
    """Muon's matrices, or what it leaves to AdamW; and that with nothing at all."""
    model = torch.nn.ModuleDict({"matrix": torch.nn.Linear(4, 4, bias=False), "norm": torch.nn.LayerNorm(4)})
    optimizers = build_optimizers(model, OptimConfig(type=kind, lr=0.1))
    for name in ("norm", "matrix", ""):
        before = {n: param.detach().clone() for n, param in model.named_parameters()}
        for n, param in model.named_parameters():
            param.grad = torch.ones_like(param) if name and n.startswith(name) else None
        for optimizer in optimizers:
            scale_gradients(optimizer, 0.5)
            optimizer.step()
        for n, param in model.named_parameters():
            assert torch.equal(param, before[n]) == (param.grad is None)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_are_not_scaled(world, bad):
    norm, factor = GradientNorm([torch.tensor([1.0, bad])], 1.0, dist.group.WORLD).wait()
    assert not math.isfinite(norm)
    assert factor == 1.0


# --- memory recipes ---------------------------------------------------------------------------------------------------

RECIPES = {
    "ac full": ["memory_recipe.ac.mode=full"],
    "ac every other layer": ["memory_recipe.ac.mode=full", "memory_recipe.ac.freq=2"],
    "chunked head": ["memory_recipe.fused_lm_head_token_chunk_size=5"],
    "both": ["memory_recipe.ac.mode=full", "memory_recipe.fused_lm_head_token_chunk_size=3"],
}


def gradients_of(model_path, world, overrides):
    policy = build_policy(Job(model_path, overrides=overrides), world)
    total, entropy = 0.0, 0.0
    for row in rows_of(1):
        stats = policy.forward(row, temperature=0.8)
        (stats.logp.sum() + 0.1 * stats.entropy.sum()).backward()
        total, entropy = total + stats.logp.sum().item(), entropy + stats.entropy.sum().item()
    grads = {n: whole_tensor(p.grad) for n, p in policy.model.named_parameters()}
    return total, entropy, grads


@pytest.mark.parametrize("recipe", RECIPES)
def test_memory_recipes_change_no_gradient(world, model_path, recipe):
    plain, other = (gradients_of(model_path, world, o) for o in ([], RECIPES[recipe]))
    assert other[:2] == pytest.approx(plain[:2], rel=1e-6)
    assert other[2].keys() == plain[2].keys()
    for name, grad in plain[2].items():
        assert grad.abs().max() > 0
        torch.testing.assert_close(other[2][name], grad, rtol=1e-4, atol=1e-6, msg=name)


def test_activation_checkpointing_computes_chosen_layers_twice(world, model_path):
    """Otherwise it would save no memory."""
    row = rows_of(1)[0]
    counts = []
    for overrides in ([], RECIPES["ac full"], RECIPES["ac every other layer"]):
        model, calls = build_policy(Job(model_path, overrides=overrides), world).model, []
        attend = packed_attention(row.doc_lens.tolist(), torch.device("cpu"))

        def counting(layer_idx, q, k, v, attend=attend, calls=calls):
            calls.append(layer_idx)
            return attend(layer_idx, q, k, v)

        model(torch.from_numpy(row.input_ids), torch.from_numpy(row.positions), counting).sum().backward()
        counts.append(sorted(calls))
    assert counts == [[0, 1], [0, 0, 1, 1], [0, 0, 1]]


def test_names_are_the_same_under_activation_checkpointing(world, model_path):
    """What is published and exported must not depend on the recipe."""
    plain, wrapped = (build_policy(Job(model_path, overrides=o), world) for o in ([], RECIPES["ac full"]))
    one, other = (dict(hf_tensors(p.model)) for p in (plain, wrapped))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_are_whole_only_where_they_are_used(world, tmp_path, monkeypatch, tied):
    """Untied, that is; a head's gradient is reduced while the layers still run backward."""
    monkeypatch.setattr(parallelize, "goes_without_fsdp", lambda *_: False)  # one rank, but as several
    card = family_card("llama").model_copy(update={"tie_word_embeddings": tied})
    save_checkpoint(hf_tensors(random_model(card)), tmp_path, card)
    config = job_config(Job(str(tmp_path), family="llama"))
    config = config.model_copy(update={"model": config.model.model_copy(update={"card": card})})
    model = build_model(config, tmp_path, world)
    seen = []

    def look(when):
        embedding, head = model.embed_tokens.weight, model.head_weight
        seen.append((when, not is_sharded(embedding), not is_sharded(head), head.grad is not None))

    class Looked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            look("forward")
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            look("backward")
            return grad

    layer = model.layers[0]
    layer.join = lambda x, attended, join=layer.join: Looked.apply(join(x, attended))
    row = rows_of(1)[0]
    attend = packed_attention(row.doc_lens.tolist(), torch.device("cpu"))
    ids = torch.from_numpy(row.input_ids)
    model(ids, torch.from_numpy(row.positions), attend, head=torch.nn.functional.linear).sum().backward()
    look("after")
    whole = tied
    assert seen == [
        ("forward", whole, whole, False),
        ("backward", whole, whole, not tied),
        ("after", False, False, True),
    ]


# --- bfloat16 ---------------------------------------------------------------------------------------------------------


def test_rotary_tables_reach_the_layers_in_float32(world, model_path):
    """At long positions a rounded cosine turns a query by another angle."""
    policy, micro = build_policy(Job(model_path, overrides=["model.dtype=bfloat16"]), world), rows_of(1)[0]
    micro.positions = micro.positions + 5000
    seen = []
    for layer in policy.model.layers:
        layer.project = lambda x, cos, sin, project=layer.project: seen.append((x, cos, sin)) or project(x, cos, sin)
    policy.forward(micro)
    card = policy.model.card
    cos, sin = rotary_tables(torch.from_numpy(micro.positions), card)
    assert len(seen) == card.num_hidden_layers
    for got in seen:
        assert got[0].dtype == torch.bfloat16
        assert torch.equal(got[1], cos)
        assert torch.equal(got[2], sin)


@pytest.mark.parametrize("overrides", [[], RECIPES["both"]], ids=["plain", "both"])
def test_bfloat16_is_near_float32(world, model_path, overrides):
    exact = run_job(Job(model_path, overrides=overrides, steps=4))
    rounded = run_job(Job(model_path, overrides=[*overrides, "model.dtype=bfloat16"], steps=4))
    losses, expected = (np.array(job["history"])[:, 0] for job in (rounded, exact))
    np.testing.assert_allclose(losses, expected, rtol=0.01)
    assert not np.array_equal(losses, expected)
    assert losses[-1] < losses[0]
    assert all(weight.dtype == torch.float32 for weight in rounded["weights"].values())


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overrides", [[], RECIPES["ac full"]], ids=["plain", "ac full"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_checkpoint_is_the_state_when_save_was_called(world, model_path, tmp_path, asynchronous, overrides):
    job = Job(model_path, optim={"type": "muon", "lr": 0.01}, overrides=overrides)
    seed_everything(3, deterministic=False)
    policy = build_policy(job, world)
    train_step(policy, 1)
    checkpointer = TrainerCheckpointer(tmp_path, asynchronous)
    checkpointer.save(1, policy.model, policy.optimizers)
    drawn = (torch.rand(2), np.random.rand(2))
    unbroken = [train_step(policy, step) for step in (2, 3)]  # while the save may still be running
    assert checkpointer.finish(wait=True) == 1
    assert checkpointer.saved_step == 1
    assert checkpointer.finish(wait=True) is None

    (tmp_path / "checkpoints" / "step_1.partial").rename(tmp_path / "checkpoints" / "step_1")
    fresh = build_policy(job, world)
    checkpointer.load(tmp_path / "checkpoints" / "step_1", fresh.model, fresh.optimizers)
    assert torch.equal(torch.rand(2), drawn[0])
    np.testing.assert_array_equal(np.random.rand(2), drawn[1])
    assert [train_step(fresh, step) for step in (2, 3)] == unbroken


def test_a_checkpoint_passes_between_memory_recipes(world, model_path, tmp_path):
    run_job(Job(model_path, save=str(tmp_path)))
    checkpoint = str(tmp_path / "checkpoints" / "step_3")
    plain, wrapped = (
        run_job(Job(model_path, load=checkpoint, start=3, overrides=overrides)) for overrides in ([], RECIPES["both"])
    )
    np.testing.assert_allclose(plain["history"], wrapped["history"], rtol=1e-4)


def test_no_space_is_found_wherever_it_stands():
    full = OSError(28, "No space left on device")
    wrapped = RuntimeError("writing failed")
    wrapped.__cause__ = full
    failures = dist.checkpoint.api.CheckpointException("save", {0: (full, None)})
    assert all(map(no_space, (full, wrapped, failures, OSError(122, "Disk quota exceeded"))))
    assert not any(map(no_space, (OSError(13, "Permission denied"), RuntimeError("x"), None)))


@pytest.fixture
def small_disk(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_full_disk_is_explained_and_the_older_checkpoint_survives(world, model_path, small_disk, asynchronous):
    policy = build_policy(Job(model_path, optim=ADAMW), world)
    train_step(policy, 1)
    save(policy, small_disk, 1, asynchronous)
    free = os.statvfs(small_disk)
    (small_disk / "ballast").write_bytes(b"x" * (free.f_bavail * free.f_bsize - 20_000))
    with pytest.raises(UserError, match=r"(?s)disk is full: the checkpoint of step 2 .*step 1 survives"):
        save(policy, small_disk, 2, asynchronous)
    assert latest_valid(small_disk, parts_of("sft"))[0] == 1
    assert [p.name for p in Path(small_disk, "checkpoints").iterdir()] == ["step_1"]
    (small_disk / "ballast").unlink()
    save(policy, small_disk, 3, asynchronous)
    assert latest_valid(small_disk, parts_of("sft"))[0] == 3


def test_masters_on_the_host_start_from_the_checkpoint_in_full(model_path, world):
    """Not from what is left of it in the compute dtype."""
    overrides = ["optim=adamw", "model.dtype=bfloat16", "memory_recipe.optim_cpu_offload=full"]
    policy = build_policy(Job(model_path, optim=ADAMW, overrides=overrides), world)
    masters = master_weights(policy.model, policy.optimizers)
    for name, param in random_model(moe_card(), std=0.1).named_parameters():
        assert torch.equal(whole_tensor(masters[name]), param), name
        held = whole_tensor(policy.model.get_parameter(name))
        assert held.dtype == torch.bfloat16
        assert torch.equal(held, param.bfloat16()), name


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="the kernels are installed")
def test_missing_attention_kernels_name_what_to_install():
    with pytest.raises(UserError, match="flash-attn-4") as error:
        activate_attention("flash_attention_4")
    assert error.value.fix.startswith('pip install -e ".[fa4]"')


def test_flash_attention_3_is_refused_where_it_has_no_kernels(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    with pytest.raises(UserError, match="does not run on this GPU") as error:
        activate_attention("flash_attention_3")
    assert error.value.fix == "model.attn=auto"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(UserError, match="cannot be activated"):
        activate_attention("flash_attention_3")


NEWER_KERNELS = """
def _flash_attn_fwd(q, k, v, **options):
    assert options["causal"] and options["return_lse"]
    return v + 1, q[..., 0].mT.float(), None, None, None


def _flash_attn_bwd(q, k, v, out, grad, lse, **options):
    return q, k, v
"""
RUN_THEM = """
import torch
from torch.nn.attention import _fa4, current_flash_attention_impl
from prl.models.layers.attention_kernels import width_of_values
from prl.models.layers.packed_attention import activate_attention

q, k, v = torch.zeros(5, 2, 192), torch.zeros(5, 2, 192), torch.zeros(5, 2, 128)
assert width_of_values(q, v) == 192
activate_attention("flash_attention_4")
assert current_flash_attention_impl() == "FA4"
assert width_of_values(q, v) == 128
assert width_of_values(q, torch.zeros(5, 2, 64)) == 192
ends = torch.tensor([0, 5], dtype=torch.int32)
out, lse = _fa4._fa4_run_forward(q, k, v, ends, ends, 5, 5, None, True, None, None, None)
assert torch.equal(out, v + 1) and lse.shape == (2, 5)
found = _fa4._fa4_run_backward(out, q, k, v, out, lse, ends, ends, None, True, None, None)
assert [x.shape for x in found] == [x.shape for x in (q, k, v)]

import pytest
from flash_attn.cute import interface
from prl.config.errors import UserError

def older(*args, **options):
    raise TypeError("make_kwargs_wrapper() got an unexpected keyword argument")

interface._flash_attn_fwd = older
with pytest.raises(UserError, match="cannot compile its kernels: TypeError") as error:
    _fa4._fa4_run_forward(q, k, v, ends, ends, 5, 5, None, True, None, None, None)
assert "quack-kernels (not installed), apache-tvm-ffi" in error.value.why
"""


def test_flash_attention_4_of_any_version_fits_torchs_registry(tmp_path):
    """Its forward has returned more than the two results that torch takes since 4.0.0b20."""
    package = tmp_path / "flash_attn/cute"
    package.mkdir(parents=True)
    (package / "interface.py").write_text(NEWER_KERNELS)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", RUN_THEM], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr


def test_replicas_draw_the_same_random_weights():
    """HSDP keeps replicas equal by their gradients alone, so they must start equal."""
    drawn = []
    for rank in range(4):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        world = build_world(MeshPlan(dp_replicate=2, dp_shard=2, cp=1, ep=1), torch.device("cpu"))
        model = build_model(job_config(Job("", overrides=["parallelism=hsdp2"])), None, world)
        drawn.append([param.to_local().clone() for param in model.parameters()])
        dist.destroy_process_group()
    first, second, *replica = drawn
    for one, other in zip((first, second), replica, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize(
    ("overrides", "free", "gives_back"),
    [
        (["inference=vllm"], 0.55, False),
        (["inference=vllm"], 0.09, True),
        (["inference=vllm", "model=qwen3_0_6b", "inference.max_num_seqs=4096"], 0.45, True),
        (["inference=vllm", "inference.vllm.gpu_memory_utilization=0.3"], 0.45, False),
        (["inference=vllm", "inference.sleep_level=0"], 0.1, False),
        (["inference=vllm", "deployment=disaggregated"], 0.1, False),
        ([], 0.09, True),
        (["model=qwen3_0_6b"], 0.15, False),  # a tenth, 1.2 GB of weights, 3.8 of keys and values
        (["model=qwen3_0_6b"], 0.13, True),
        (["model=tiny_nemotron_h"], 0.9, True),
        (["inference=vllm", "model=qwen3_0_6b"], 0.17, False),  # a tenth, 1.2 GB of weights, 7.5 of keys and values
        (["inference=vllm", "model=qwen3_0_6b"], 0.15, True),
    ],
)
def test_a_waking_engine_finds_its_part_of_the_gpu(monkeypatch, overrides, free, gives_back) -> None:
    calls, total = [], 143771 << 20
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * total), total))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("gave back"))
    make_room(compose(["deployment=colocated", *overrides]), torch.device("cuda", 0))
    make_room(compose(["deployment=colocated", *overrides]), torch.device("cpu"))
    assert bool(calls) == gives_back
