"""Keys that the trainer and its benchmarks read, each by what a policy made with it does; one rank, in this process."""

from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from role_context import context_of
from runs import rows
from test_head import Largest
from tiny import VOCAB, moe_card, moe_checkpoint, random_model
from torch.distributed.fsdp import FSDPModule
from trainer_ranks import Job, build_policy, rows_of, train_step

from prl.bench.baseline import Baseline
from prl.bench.rows import make_row
from prl.bench.trainer import TrainerBench
from prl.config import compose
from prl.models.adapters.lora import LoraLinear, whole_tensor
from prl.models.checkpoints.sources import random_checkpoint
from prl.models.experts.stacked import Experts
from prl.trainer import parallelize
from prl.trainer import policy as policy_module
from prl.trainer.loops import publishing
from prl.trainer.loops.rl_step import backward_rl
from prl.trainer.loops.saving import Saving
from prl.trainer.parallelize import apply_expert_parallelism, expert_modules
from prl.trainer.policy import context_group, seed_everything
from prl.trainer.writer.process import WriterProcess
from prl.transport.documents import Document
from prl.transport.packing import build_micro_batch


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(moe_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture
def policy_of(world, model_path):
    def build(*overrides, **optim):
        chosen = {"optim": {"type": "sgd", "lr": 1.0, "momentum": 0.0, **optim}} if optim else {}
        return build_policy(Job(model_path, overrides=["optim=adamw", *overrides], **chosen), world)

    return build


# --- steps ------------------------------------------------------------------------------------------------------------


def test_steps_are_no_longer_than_max_grad_norm(policy_of):
    def length(limit):
        policy = policy_of(max_grad_norm=limit)
        before = {name: whole_tensor(param).clone() for name, param in policy.model.named_parameters()}
        _, norm = train_step(policy, 1)
        moved = sum((whole_tensor(p) - before[n]).square().sum().item() for n, p in policy.model.named_parameters())
        return moved**0.5, norm

    free, norm = length(0.0)
    assert free == pytest.approx(norm, rel=1e-3)
    assert length(norm / 4)[0] == pytest.approx(norm / 4, rel=1e-3)


def test_entropy_coef_adds_the_gradient_of_the_entropy(policy_of):
    gradients = []
    for coef in (0.0, 0.5, 1.0):
        policy, micro = policy_of(), rows_of(1)[0]
        algo = compose(["warm_start=none", f"algo.entropy_coef={coef}"]).algo
        backward_rl(algo, micro, policy.forward(micro), 10)
        gradients.append(torch.cat([whole_tensor(p.grad).flatten() for p in policy.model.parameters()]))
    none, half, whole = gradients
    assert (half - none).norm() > 1e-3
    torch.testing.assert_close(whole - none, 2 * (half - none), rtol=1e-3, atol=1e-6)


def test_router_bias_moves_at_its_rate(policy_of):
    for rate in (0.0, 0.25):
        config = compose(["seed=0", f"model.router_bias_update_rate={rate}"], "sft")
        policy = policy_of()
        policy.balance = type(policy.balance)(policy.model, policy.world, config.model.router_bias_update_rate)
        train_step(policy, 1)
        biases = [buffer for name, buffer in policy.model.named_buffers() if name.endswith("router_bias")]
        assert {round(abs(value), 3) for bias in biases for value in bias.tolist()} <= {0.0, rate}
        assert bool(rate) == any(bias.abs().max() > 0 for bias in biases)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chunk", "most"), [("disabled", 59), (40, 40)])
def test_the_head_makes_no_more_logits_than_its_chunk(policy_of, chunk, most):
    """A row of more tokens than the model is wide, for its weights are of the vocabulary's width, too."""
    policy = policy_of(f"memory_recipe.fused_lm_head_token_chunk_size={chunk}")
    zeros = [0.0] * 60
    micro = build_micro_batch([Document(list(range(60)), [i > 0 for i in range(60)], zeros, zeros, [-1] * 60)])
    with Largest(vocab=VOCAB) as seen:
        policy.forward(micro)
    assert seen.rows == most


@pytest.mark.parametrize("enabled", [False, True])
def test_layers_are_compiled_where_told_so(policy_of, enabled):
    layer = policy_of(f"memory_recipe.compile={str(enabled).lower()}").model.layers[0]
    assert hasattr(layer.project, "_torchdynamo_orig_callable") == enabled


def test_saved_tensors_wait_on_the_host_but_for_so_many_layers(policy_of, monkeypatch):
    from prl.trainer.memory import activation_offload

    made = []
    monkeypatch.setattr(activation_offload.ActivationOffload, "wrap", lambda self, i, layer: made.append(self.limit))
    for overrides in (["enabled=false"], ["enabled=true"], ["enabled=true", "max_inflight_activations=1"]):
        policy_of(*(f"memory_recipe.ac_offloading.{one}" for one in overrides))
    assert made == [5, 5, 1, 1]


def test_the_optimizer_lives_where_optim_cpu_offload_says(policy_of):
    kinds = [
        type(policy_of(f"memory_recipe.optim_cpu_offload={mode}").optimizers[0]).__name__
        for mode in ("false", "true", "full")
    ]
    assert len(set(kinds)) == 3, kinds


def test_fsdp_offloads_to_the_host_and_reshards_as_told(policy_of, monkeypatch):
    monkeypatch.setattr(parallelize, "goes_without_fsdp", lambda *_: False)  # one rank, but as several

    def states(*overrides):
        policy = policy_of(*overrides)
        groups = [m._get_fsdp_state()._fsdp_param_group for m in policy.model.modules() if isinstance(m, FSDPModule)]
        return type(groups[0].offload_policy).__name__, [group.post_forward_mesh_info is None for group in groups[:2]]

    usual = states()
    assert states("memory_recipe.fsdp_cpu_offload=true")[0] == "CPUOffloadPolicy" != usual[0]
    kept = states("parallelism.dp_shard=2", "parallelism.reshard_after_forward=false")[1]
    assert kept != usual[1], "the layers' weights stay whole after forward"


def test_adapters_are_where_lora_says(policy_of):
    def adapters(*overrides):
        model = policy_of("memory=lora", *overrides).model
        found = {n: m for n, m in model.named_modules() if isinstance(m, LoraLinear)}
        one = next(iter(found.values()))
        return {name.split(".")[-1] for name in found}, one.lora_a.shape[0], one.lora_scale

    names, rank, scale = adapters("memory_recipe.lora.rank=4", "memory_recipe.lora.alpha=8")
    assert (names, rank, scale) == ({"q_proj", "k_proj", "v_proj", "o_proj"}, 4, 2.0)
    names, rank, scale = adapters(
        "memory_recipe.lora.rank=2", "memory_recipe.lora.alpha=8", "memory_recipe.lora.targets=[q_proj]"
    )
    assert (names, rank, scale) == ({"q_proj"}, 2, 4.0)


def test_fp8_takes_the_place_of_linears(world, model_path):
    for kind, expected in (("none", False), ("emulated", True)):
        model = build_policy(Job(model_path, overrides=[f"model.fp8={kind}"]), world).model
        assert any(type(module).__module__ == "prl.models.fp8.linears" for module in model.modules()) == expected


# --- kernels, parallelism ---------------------------------------------------------------------------------------------


def test_attn_asks_for_its_kernels(policy_of, monkeypatch):
    asked = []
    monkeypatch.setattr(policy_module, "activate_attention", asked.append)
    monkeypatch.setattr(
        policy_module, "attend_documents", lambda card, lens, device, kind, prefixes: asked.append(kind)
    )
    monkeypatch.setattr(policy_module.Policy, "run_model", lambda *args: (None, None))
    for attn in ("auto", "sdpa"):
        policy_of(f"model.attn={attn}").forward(rows_of(1)[0])
    assert asked == ["auto", "auto", "sdpa", "sdpa"]


def test_context_groups_are_of_the_style_asked_for(world):
    mesh = SimpleNamespace(get_group=lambda: None, get_local_rank=lambda: 0, size=lambda: 2)
    three = ["model.card.num_attention_heads=3", "model.card.num_key_value_heads=3"]  # which two ranks cannot share
    for changes, style in (
        (["parallelism.cp_style=ulysses"], "ulysses"),
        (["parallelism.cp_style=ring"], "ring"),
        ([], "ulysses"),
        (three, "ring"),
        (["model=tiny_glm_moe_dsa"], "gather"),
    ):
        config = compose(["parallelism=cp2", *changes])
        assert context_group(config, SimpleNamespace(cp=2, data={"cp": mesh})).style == style


def test_tokens_travel_to_experts_as_told():
    class Mesh:
        def get_group(self):
            return SimpleNamespace(size=lambda: 2)

    def dispatch(**changes):
        parallelism = compose(["parallelism=ep2"]).parallelism.model_copy(update=changes)
        model = random_model(moe_card())
        for experts in expert_modules(model):  # what is looked at is who carries tokens, not what they become
            for name in dict(experts.named_parameters(recurse=False)):
                delattr(experts, name)
        apply_expert_parallelism(model, parallelism, SimpleNamespace(experts={"ep": Mesh()}))
        return expert_modules(model)[0].dispatch

    assert [dispatch(ep_pieces=n).pieces for n in (1, 3)] == [1, 3]
    one, other = (
        dispatch(ep_comm_backend="deepep", deepep_num_sms=sms, deepep_token_chunk_size=chunk)
        for sms, chunk in ((20, None), (24, 6))
    )
    assert type(one).__name__ == "DeepEPDispatch" != type(dispatch()).__name__
    assert [(d.num_sms, d.token_chunk_size) for d in (one, other)] == [(20, None), (24, 6)]


# --- around the steps -------------------------------------------------------------------------------------------------


def test_deterministic_kernels_are_asked_for():
    try:
        for said in (False, True):
            seed_everything(0, compose([f"debug.deterministic={str(said).lower()}"]).debug.deterministic)
            assert torch.are_deterministic_algorithms_enabled() == said
    finally:
        torch.use_deterministic_algorithms(False)


def test_checkpoints_are_written_beside_training_where_told_so(world, policy_of, tmp_path, monkeypatch):
    for said in (True, False):
        ctx = context_of(tmp_path / str(said), f"ckpt.asynchronous={str(said).lower()}")
        saving = Saving(ctx, world, lambda step, in_haste: None, lambda step: 0.0)
        assert saving.checkpointer.asynchronous == said
        begun = []
        monkeypatch.setattr(WriterProcess, "save", lambda *a, begun=begun: begun.append(1) or Future())
        saving.checkpointer.save(1, policy_of().model, [])
        assert bool(begun) == said


def test_the_initial_weights_are_called_after_the_model(tmp_path):
    for name in ("one", "other"):
        config = compose([f"model.name={name}", "model.card.num_hidden_layers=1"])
        assert random_checkpoint(config.model, tmp_path).name.startswith(f"{name}-")


def test_buckets_are_as_large_and_as_many_as_told(tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "NcclPublisher", lambda *args, **options: options)
    keys = ["deployment.device=cuda", "weight_transport=nccl", "weight_transport.verify_checksum=false"]
    sizes = {"bucket_mib": 64, "stage_mib": 640, "timeout_s": 7}
    told = (f"weight_transport.{key}={value}" for key, value in sizes.items())
    ctx = context_of(tmp_path / "run", *keys, *told)
    options = publishing.publisher_of(
        ctx, SimpleNamespace(is_main=True, device=None, rank=0, size=1), torch.nn.Module()
    )
    assert options.pop("beat")
    assert options == {"num_buckets": 10, "timeout_s": 7.0, "bucket_bytes": 64 << 20, "verify": False}


@pytest.mark.parametrize(
    ("rendezvous", "address"), [("192.0.2.1:29500", "towards 192.0.2.1"), ("127.0.0.1:29500", "192.0.2.7")]
)
def test_a_rank_on_another_host_serves_its_weights_at_an_address_of_its_own(monkeypatch, rendezvous, address):
    """And not at the first rank's, which no other host has."""
    monkeypatch.setattr(publishing, "address_towards", lambda urls, own: f"towards {urls[0][7:-6]}")
    assert publishing.own_address(rendezvous, "192.0.2.7") == address


# --- benchmarks -------------------------------------------------------------------------------------------------------

QUICK = ["bench.doc_len=[20,12]", "bench.steps=2", "bench.warmup_steps=1"]


def test_a_benchmark_takes_as_many_rows_and_steps_as_told(world, tmp_path):
    for warmup, steps, micro, profile in ((0, 1, 1, False), (2, 2, 3, True)):
        keys = {"warmup_steps": warmup, "steps": steps, "micro_batches": micro, "profile": str(profile).lower()}
        run_dir = tmp_path / str(steps)
        ctx = context_of(run_dir, *QUICK, *(f"bench.{k}={v}" for k, v in keys.items()), job="bench")
        bench = TrainerBench(ctx, world)
        report = bench.run()
        assert len(rows(run_dir, "trainer.0")) == warmup + steps
        assert len(report["steps"]) == steps
        assert {step["useful_tokens"] for step in report["steps"]} == {32 * micro}
        assert (bench.profile is not None) == profile


def test_documents_of_a_benchmark_begin_with_one_prompt(world, tmp_path):
    """It is run once, unless told otherwise, and not trained."""
    figures = []
    for told in ([], ["memory_recipe.share_prefixes=false"]):
        ctx = context_of(tmp_path / str(len(told)), *QUICK, "bench.prompt_len=8", *told, job="bench")
        (first, *_) = TrainerBench(ctx, world).run()["steps"]
        assert first["useful_tokens"] == 32
        figures.append((first["flops"], first["loss"]))
    (shared, loss), (whole, wanted) = figures
    assert shared < 0.8 * whole
    assert loss == pytest.approx(wanted, abs=1e-6)
    row = make_row(ctx.plan.config.bench, 32, ctx.plan.config.model.card, np.random.default_rng(0), share=True)
    assert row.shared_lens.tolist() == [0, 8]
    assert row.input_ids[:8].tolist() == row.input_ids[20:28].tolist()
    assert row.loss_mask.tolist() == [False] * 8 + [True] * 12 + [False] * 8 + [True] * 4


def test_experts_of_a_benchmark_are_chosen_evenly_where_told_so(world, tmp_path):
    """A row's record says so, and the trainer replays it."""
    loads, seen = {}, []

    def see(module, given):
        seen.append((module.num_experts, given[2]))

    for said in ("router", "even"):
        told = ["bench.doc_len=512", "bench.steps=1", "bench.warmup_steps=0", f"bench.experts={said}"]
        bench = TrainerBench(context_of(tmp_path / said, *told, job="bench"), world)
        for module in bench.policy.model.modules():
            if isinstance(module, Experts):
                module.register_forward_pre_hook(see)
        bench.run()
        counts = [torch.bincount(chosen.flatten(), minlength=experts) for experts, chosen in seen]
        loads[said] = max((count.max() / count.float().mean()).item() for count in counts)
        assert all((chosen.sort(dim=1).values.diff(dim=1) > 0).all() for _, chosen in seen)  # K different ones
        seen.clear()
    assert loads["even"] < 1.3 < loads["router"], loads


def test_a_benchmark_draws_its_weights_or_reads_them(world, tmp_path):
    def weights(said, name, *overrides):
        ctx = context_of(tmp_path / name, *QUICK, *overrides, f"bench.random_weights={said}", job="bench")
        return dict(TrainerBench(ctx, world).policy.model.named_parameters())["embed_tokens.weight"]

    assert not (tmp_path / "cache").exists()
    drawn = weights("true", "a")
    assert not (tmp_path / "cache" / "models").exists()
    read = weights("false", "b", "model.init_seed=7")
    assert list((tmp_path / "cache" / "models").iterdir())
    assert not torch.equal(drawn, read)


def test_plain_transformers_recomputes_where_told_so(tmp_path):
    for said in (True, False):
        overrides = [
            "bench.target=transformers",
            "model=tiny_qwen3",
            f"bench.baseline_checkpointing={str(said).lower()}",
        ]
        baseline = Baseline(context_of(tmp_path / str(said), *QUICK, *overrides, job="bench"))
        assert baseline.model.is_gradient_checkpointing == said
