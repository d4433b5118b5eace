"""Parameters in float32 that modules read in bfloat16, where one rank holds the whole model: as FSDP's mixed precision
has it, in every family, and without FSDP.
"""

import pytest
import torch
from families import EACH, family_card
from test_hf_causal_lm import plain_model
from tiny import random_model
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule
from trainer_ranks import Job, build_policy, rows_of

from prl.models.adapters.lora import is_adapter, whole_tensor
from prl.models.checkpoints.writing import hf_tensors, save_checkpoint
from prl.models.experts.routing import Router
from prl.models.experts.stacked import Experts
from prl.models.fp8.apply import apply_fp8
from prl.models.layers.latent_attention import LatentAttention
from prl.models.sharding import is_sharded
from prl.models.state_space.mixer import Decay
from prl.trainer import mixed_precision, parallelize
from prl.trainer.mixed_precision import compute_in
from prl.trainer.optim import GradientNorm


@pytest.fixture
def policies(world, tmp_path, monkeypatch):
    """(without FSDP, with it) of a family's tiny model."""

    def build(name, *overrides):
        path, card = tmp_path / "model", family_card(name)
        save_checkpoint(hf_tensors(random_model(card)), path, card)
        job = Job(str(path), family=name, overrides=["model.dtype=bfloat16", *overrides])
        plain = build_policy(job, world)
        with monkeypatch.context() as patch:
            patch.setattr(parallelize, "goes_without_fsdp", lambda *_: False)
            return plain, build_policy(job, world)

    return build


def gradients(policy):
    for row in rows_of(1):
        stats = policy.forward(row)
        (stats.logp.sum() + 0.1 * stats.entropy.sum()).backward()
    return {name: whole_tensor(p.grad) for name, p in policy.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", EACH.values())
def test_gradients_are_those_of_fsdp(policies, name):
    """But for rounding: what one tied parameter gets from both its uses is added up in float32 here."""
    plain, sharded = policies(name)
    assert not any(is_sharded(p) or isinstance(p, FSDPModule) for p in plain.model.parameters())
    assert any(isinstance(module, FSDPModule) for module in sharded.model.modules())
    found, wanted = gradients(plain), gradients(sharded)
    assert found.keys() == wanted.keys()
    for key, gradient in wanted.items():
        assert found[key].dtype == gradient.dtype == torch.float32
        assert gradient.abs().max() > 0 or "indexer" in key
        torch.testing.assert_close(found[key], gradient, rtol=1e-2, atol=1e-2 * float(gradient.abs().max()), msg=key)
    steps = [policy.optimizer_step(1).grad_norm for policy in (plain, sharded)]
    assert steps[0] == pytest.approx(steps[1], rel=1e-2)


def test_the_loss_is_asked_for_when_the_norm_is_on_its_way(policies, monkeypatch):
    """And the optimizer knows what it steps: what the host finds out then, the device does not wait for."""
    policy, _ = policies("qwen3", "optim=adamw")
    asked, norms = [], []
    ask = GradientNorm.__init__
    monkeypatch.setattr(GradientNorm, "__init__", lambda self, *args: (ask(self, *args), norms.append(self.both))[0])

    def loss():
        asked.append((len(norms), [optimizer.collected is not None for optimizer in policy.optimizers]))
        return 1.0

    for step in (1, 2):
        gradients(policy)
        done = policy.optimizer_step(step, loss)
        assert done.grad_norm == float(norms[-1].wait()[0])
    assert asked == [(1, [False]), (2, [True])]  # the first step makes the moments
    before = [param.clone() for param in policy.model.parameters()]
    gradients(policy)
    assert not policy.optimizer_step(3, lambda: float("nan")).applied
    assert all(torch.equal(*pair) for pair in zip(before, policy.model.parameters(), strict=True))


@pytest.mark.parametrize("recipe", ["balanced", "selective", "tight", "lora", "cpu_offload"])
def test_recipes_are_those_of_fsdp(policies, recipe):
    plain, sharded = policies("qwen3_moe", f"memory={recipe}")
    found, wanted = gradients(plain), gradients(sharded)
    assert {is_adapter(key) for key in found} == {recipe == "lora"}
    for key, gradient in wanted.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-2, atol=1e-2 * float(gradient.abs().max()), msg=key)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "glm_moe_dsa shared choices"])
def test_a_look_between_forward_and_backward_changes_nothing(policies, name, mode):
    """Layers are repeated after it, with what it left for them to read."""
    plain, sharded = policies(name, f"memory_recipe.ac.mode={mode}")
    for policy in (plain, sharded):
        first, second = rows_of(1)[:2]
        stats = policy.forward(first)
        with torch.no_grad():
            policy.forward(second)
        stats.logp.sum().backward()
    for found, wanted in zip(plain.model.parameters(), sharded.model.parameters(), strict=True):
        if wanted.grad is not None:
            torch.testing.assert_close(found.grad, whole_tensor(wanted.grad), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_latents_are_made_by_the_weight_itself(policies, name, monkeypatch):
    plain, _ = policies(name)
    monkeypatch.setattr(LatentAttention, "_measured", lambda self: pytest.fail("it is a linear of no other kind"))
    plain.forward(rows_of(1)[0])


@pytest.mark.parametrize("name", [*EACH.values(), "gpt2", "mixtral"])
def test_little_is_cast_before_the_model_runs(name):
    model = plain_model(name) if name in ("gpt2", "mixtral") else random_model(family_card(name))
    whole = sum(param.numel() for param in model.parameters())
    compute_in(model, torch.bfloat16)
    routers = sum(m.weight.numel() for m in model.modules() if isinstance(m, Router))
    vectors = sum(param.numel() for param in model.parameters() if param.dim() == 1)
    casts = []
    wanted = mixed_precision.CastTogether
    before = wanted.apply

    class Seen:
        @staticmethod
        def apply(dtype, *params):
            casts.extend(params)
            return before(dtype, *params)

    mixed_precision.CastTogether = Seen
    try:
        for hook in model._forward_pre_hooks.values():
            hook(model, ())
    finally:
        mixed_precision.CastTogether = wanted
    assert 0 < sum(param.numel() for param in casts) <= vectors + routers < whole / 5


def test_experts_in_fp8_round_their_weights_themselves():
    model = random_model(family_card("qwen3_moe"))
    apply_fp8(model, "emulated")
    compute_in(model, torch.bfloat16)
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    assert experts
    for module in experts:
        assert module.down_proj is module._parameters["down_proj"]
        assert module.down_proj.dtype == torch.float32


def test_parameters_that_were_replaced_are_read():
    model = random_model(family_card("qwen3"))
    compute_in(model, torch.bfloat16)
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)
    for hook in model._forward_pre_hooks.values():
        hook(model, ())
    for name, param in model.named_parameters():
        owner, _, attribute = name.rpartition(".")
        assert torch.equal(getattr(model.get_submodule(owner), attribute), param.to(torch.bfloat16)), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_compiled_layers_cast_inside(policies, name):
    """In one piece each: nothing breaks their graphs."""
    counters.clear()
    plain, sharded = policies(name, "memory=balanced", "memory_recipe.compile=true")
    found, wanted = gradients(plain), gradients(sharded)
    for key, gradient in wanted.items():
        torch.testing.assert_close(found[key], gradient, rtol=2e-2, atol=2e-2 * float(gradient.abs().max()), msg=key)
    assert not counters["graph_break"]


def test_fsdp_shards_what_moves_or_has_several_ranks(policies):
    for overrides in (
        ["memory_recipe.fsdp_cpu_offload=true", "optim=adamw"],
        ["memory_recipe.ac_offloading.enabled=true"],
    ):
        plain, _ = policies("qwen3", *overrides)
        assert any(isinstance(module, FSDPModule) for module in plain.model.modules())


def test_modules_read_what_they_compute_with_and_keep_what_they_are():
    model = random_model(family_card("nemotron_h"))
    before = {name: (id(param), param.clone()) for name, param in model.named_parameters()}
    compute_in(model, torch.bfloat16)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert {layer.weight.dtype for layer in layers} == {torch.bfloat16}
    assert len({type(layer) for layer in layers if layer.bias is None and type(layer).__name__ == "Linear"}) == 1
    for module in model.modules():
        if isinstance(module, Decay):
            assert {getattr(module, name).dtype for name, _ in module.named_parameters(recurse=False)} == {
                torch.float32
            }
    after = dict(model.named_parameters())
    assert {name: id(param) for name, param in after.items()} == {name: key for name, (key, _) in before.items()}
    assert all(torch.equal(after[name], value) for name, (_, value) in before.items())
    state = {name: value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    assert all(torch.equal(param, state[name]) for name, param in model.named_parameters())


def test_float32_is_left_alone():
    model = random_model(family_card("qwen3"))
    kinds = [type(module) for module in model.modules()]
    compute_in(model, torch.float32)
    assert [type(module) for module in model.modules()] == kinds
