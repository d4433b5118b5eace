"""LoRA: what is trained, what is merged, any mesh, and adapters that PEFT reads."""

import json

import lora_ranks
import pytest
import torch
import torch.distributed as dist
from families import family_card, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_ranks import ATTENTION, CARDS, LORA, lora_model, sharded_model
from rank_processes import run_script
from test_recompute import N, gradients, hidden_of, kernel_attention
from tiny import dense_card, random_model
from torch.distributed.device_mesh import init_device_mesh

from prl.config.errors import UserError
from prl.config.schema import ActivationCheckpointing, ActivationOffloading, LoraConfig, OptimConfig
from prl.models.adapters.lora import LoraLinear, apply_lora, init_adapters, is_adapter, merge, merged_parameters
from prl.models.adapters.peft import export_adapter, import_adapter
from prl.models.checkpoints.writing import hf_tensors, save_checkpoint
from prl.models.experts.dispatch import ExpertWork, LocalDispatch
from prl.models.families.build import build_decoder
from prl.models.layers.documents import attend_documents
from prl.trainer.memory.activation_offload import apply_activation_offload
from prl.trainer.memory.recompute import apply_checkpointing
from prl.trainer.optim import build_optimizers


def merged_model(model):
    whole = build_decoder(model.card)
    whole.load_state_dict(dict(merged_parameters(model)) | model.checkpoint_buffers())
    return whole


@pytest.mark.parametrize("kind", CARDS)
def test_fresh_adapters_change_nothing(kind):
    with torch.no_grad():
        hidden = hidden_of(lora_model(kind, trained=False), kernel_attention())
        assert torch.equal(hidden, hidden_of(random_model(CARDS[kind](), std=0.1), kernel_attention()))


@pytest.mark.parametrize("kind", CARDS)
def test_merged_weights_are_the_same_model(kind):
    model = lora_model(kind)
    with torch.no_grad():
        adapted, merged = (hidden_of(m, kernel_attention()) for m in (model, merged_model(model)))
        plain = hidden_of(random_model(CARDS[kind](), std=0.1), kernel_attention())
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-5)
    assert (adapted - plain).abs().max() > 0.1


def test_latents_absorbed_into_queries_see_the_adapters():
    """The absorbed form takes kv_b_proj's matrix apart, adapters included, and indexers stay frozen."""
    model = random_model(family_card("glm_moe_dsa"), std=0.1)
    apply_lora(model, LoraConfig(rank=4, alpha=8.0, targets=("kv_b_proj",)), torch.float32)
    init_adapters(model, 0)
    ids = torch.arange(20)

    def logits(of):
        return of.logits(of(ids, ids, attend_documents(of.card, [20], torch.device("cpu"))))

    with torch.no_grad():
        before = logits(model)
        for name, param in model.named_parameters():
            if is_adapter(name):
                param.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
        after, merged = logits(model), logits(merged_model(model))
    assert (after - before).abs().max() > 1e-2
    torch.testing.assert_close(after, merged, rtol=1e-4, atol=1e-5)
    assert not any(param.requires_grad for name, param in model.named_parameters() if "indexer" in name)


@pytest.mark.parametrize("kind", CARDS)
def test_adapters_learn_and_nothing_else(kind):
    model = lora_model(kind, trained=False)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizers = build_optimizers(model, OptimConfig(lr=0.01))
    for _ in range(2):  # in the first step A has no gradient, because B is zero
        hidden_of(model, kernel_attention()).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name]) != is_adapter(name), name


@pytest.mark.parametrize("kind", CARDS)
def test_gradients_are_those_of_the_merged_weights(kind):
    """dA = scale * B^T dW and dB = scale * dW A^T, for dW of the merged model."""
    model, attend = lora_model(kind), kernel_attention()
    gradients(model, attend)
    whole = merged_model(model)
    gradients(whole, attend)
    layer, merged = model.layers[0], whole.layers[0]
    linear, d_weight, scale = layer.self_attn.q_proj, merged.self_attn.q_proj.weight.grad, 6.0 / 4
    torch.testing.assert_close(linear.lora_a.grad, scale * linear.lora_b.T @ d_weight, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(linear.lora_b.grad, scale * d_weight @ linear.lora_a.T, rtol=1e-3, atol=1e-4)
    if kind == "moe":
        experts, d_weight = layer.mlp.experts, merged.mlp.experts.down_proj.grad
        d_a = scale * d_weight.transpose(1, 2) @ experts.down_lora_b  # [E, I, r]
        torch.testing.assert_close(experts.down_lora_a.grad, d_a, rtol=1e-3, atol=1e-4)
        d_b = scale * d_weight @ experts.down_lora_a
        torch.testing.assert_close(experts.down_lora_b.grad, d_b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", CARDS)
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_with_recomputation_and_offloading(kind, mode):
    """The first layer's input needs no gradient here."""
    model = lora_model(kind)
    apply_checkpointing(model, ActivationCheckpointing(mode=mode))
    offloading = ActivationOffloading(enabled=True, max_inflight_activations=1)
    apply_activation_offload(model, offloading, torch.device("cpu"), min_bytes=1)
    for one, other in zip(
        gradients(model, kernel_attention()), gradients(lora_model(kind), kernel_attention()), strict=True
    ):
        assert torch.equal(one, other)


@given(
    out=st.integers(1, 9), features=st.integers(1, 9), rank=st.integers(1, 5), experts=st.integers(0, 4),
    scale=st.floats(0.1, 4),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_merging_any_shape(out, features, rank, experts, scale):
    lead = (experts,) if experts else ()
    weight, b = torch.randn(*lead, out, features), torch.randn(*lead, out, rank)
    a = torch.randn(*lead, features, rank) if experts else torch.randn(rank, features)
    x = torch.randn(*lead, 3, features)
    expected = x @ weight.mT + scale * (x @ (a if experts else a.T)) @ b.mT
    torch.testing.assert_close(x @ merge(weight, a, b, scale).mT, expected, rtol=1e-3, atol=1e-3)


def test_a_frozen_model_is_kept_in_the_compute_dtype():
    model = lora_model("moe", dtype=torch.bfloat16)
    assert {(p.dtype, p.requires_grad) for n, p in model.named_parameters() if is_adapter(n)} == {(torch.float32, True)}
    rest = {(p.dtype, p.requires_grad) for n, p in model.named_parameters() if not is_adapter(n)}
    assert rest == {(torch.bfloat16, False)}


def test_tied_parameters_stay_tied():
    module = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7, bias=False))
    module[1].weight = module[0].weight
    apply_lora(module, LoraConfig(rank=2, targets=("1",)), torch.bfloat16)
    assert module[1].weight is module[0].weight
    assert isinstance(module[1], LoraLinear)


def test_an_unknown_target_is_named_with_those_there_are():
    with pytest.raises(UserError, match="no LoRA target fc1") as caught:
        apply_lora(random_model(dense_card()), LoraConfig(rank=2, targets=("q_proj", "fc1")), torch.float32)
    assert "down_proj" in str(caught.value.fix)
    assert "lm_head" not in str(caught.value.fix)


# --- meshes -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("efsdp", "ep"))
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", CARDS)
def test_sharded_as_the_trainer_does(world, kind, dtype):
    """Meta device, experts over a group of their own, mixed precision: the same gradients, in float32."""
    grads = gradients(sharded_model(kind, dtype, world), kernel_attention())[1:]
    expected = gradients(lora_model(kind, trained=False), kernel_attention())[1:]
    tolerance = 1e-5 if dtype == torch.float32 else 0.2  # rounding sends some tokens to other experts
    for one, other in zip(grads, expected, strict=True):
        assert one.dtype == torch.float32
        assert (one.full_tensor() - other).norm() <= tolerance * (other.norm() + 1e-3)


@pytest.mark.slow
def test_on_two_ranks(tmp_path):
    for kind in CARDS:
        model = lora_model(kind)
        export_adapter(model, model.card, LORA[kind], tmp_path / kind, "base", write=True)
    run_script(lora_ranks.__file__, tmp_path, 2)


def test_initial_numbers_depend_on_the_seed_alone():
    first, again, other = (dict(lora_model("moe", seed, trained=False).named_parameters()) for seed in (1, 1, 2))
    name = "layers.1.mlp.experts.gate_up_lora_a"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
    bound = 32**-0.5
    assert 0.9 * bound < first[name].abs().max() < bound


# --- PEFT -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def exported(tmp_path):
    def export(kind, lora=None):
        model = lora_model(kind, lora=lora)
        base, adapter = tmp_path / "base", tmp_path / "adapter"
        save_checkpoint(hf_tensors(random_model(CARDS[kind](), std=0.1)), base, model.card)
        export_adapter(model, model.card, lora or LORA[kind], adapter, str(base), write=True)
        return model, base, adapter

    return export


@pytest.mark.slow
@pytest.mark.parametrize("kind", CARDS)
def test_peft_reads_the_adapter_to_the_same_logits(exported, kind):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model, base, adapter = exported(kind)
    loaded = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager"), adapter
    )
    ids = torch.arange(20) * 7 % 256
    with torch.no_grad():
        theirs = loaded(input_ids=ids[None]).logits[0]
        ours = merged_model(model)
        attend = single_document(len(ids))
        logits = ours.logits(ours(ids, torch.arange(len(ids)), attend))
        bare = loaded.get_base_model()
        with loaded.disable_adapter():
            untouched = bare(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(theirs, logits, rtol=1e-4, atol=1e-4)
    assert (theirs - untouched).abs().max() > 0.1


MLPS = ("gate_proj", "up_proj", "down_proj")
STATES = ("in_proj", "q_proj", "o_proj", "up_proj", "down_proj", "fc1_latent_proj", "fc2_latent_proj", "experts")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("nemotron_h", STATES),  # layers of one thing each, experts without a gate, and the latents of these
        ("glm4_moe", (*ATTENTION, "experts", *MLPS)),  # dense layers, shared and stacked experts
        ("glm_moe_dsa", ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "experts", *MLPS)),
        ("glm_moe_dsa", ("q_a_proj", "gate_proj", "down_proj")),  # PEFT would take them for experts', and miss up_proj
        ("deepseek_v3", ("experts", "up_proj")),
        ("glm4_moe_lite", MLPS),
    ],
)
def test_peft_reads_adapters_of_mixtures(tmp_path, family, targets):
    """All targets there are, and some of them; the merged weights are what PEFT computes."""
    peft = pytest.importorskip("peft")
    card = family_card(family)
    lora = LoraConfig(rank=4, alpha=6.0, targets=targets)
    model = random_model(card, std=0.1)
    save_checkpoint(hf_tensors(model), tmp_path / "base", card)
    apply_lora(model, lora, torch.float32)
    init_adapters(model, 3)
    for name, param in model.named_parameters():
        if name.endswith("lora_b"):
            param.data.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(5))
    export_adapter(model, card, lora, tmp_path / "adapter", "base", write=True)
    save_checkpoint(hf_tensors(merged_model(model)), tmp_path / "merged", card)
    loaded = peft.PeftModel.from_pretrained(reference(tmp_path / "base"), tmp_path / "adapter")
    ids = torch.arange(20) * 7 % 256
    with torch.no_grad():
        theirs = loaded(input_ids=ids[None]).logits[0].log_softmax(-1)
        ours = reference(tmp_path / "merged")(input_ids=ids[None]).logits[0].log_softmax(-1)
        with loaded.disable_adapter():
            untouched = loaded(input_ids=ids[None]).logits[0].log_softmax(-1)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
    assert (theirs - untouched).abs().max() > 0.01


def single_document(length):
    from prl.models.layers.packed_attention import packed_attention

    return packed_attention([length], torch.device("cpu"))


@pytest.mark.parametrize("kind", CARDS)
def test_an_exported_adapter_comes_back(exported, kind):
    model, _, adapter = exported(kind)
    other = lora_model(kind, seed=9, trained=False)
    import_adapter(other, other.card, LORA[kind], adapter)
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two), name


@pytest.mark.parametrize(
    ("lora", "why"),
    [
        ({"rank": 2}, "r=4"),
        ({"alpha": 1.0}, "lora_alpha"),
        ({"targets": ATTENTION}, "other targets"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(exported, lora, why):
    _, _, adapter = exported("dense")
    config = LORA["dense"].model_copy(update=lora)
    other = lora_model("dense", lora=config)
    with pytest.raises(UserError, match=why):
        import_adapter(other, other.card, config, adapter)


def test_an_adapter_that_is_not_there_is_refused(tmp_path):
    model = lora_model("dense")
    with pytest.raises(UserError, match="cannot be read"):
        import_adapter(model, model.card, LORA["dense"], tmp_path)


def test_dora_is_refused(exported):
    model, _, adapter = exported("dense")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(UserError, match="DoRA"):
        import_adapter(model, model.card, LORA["dense"], adapter)


def test_experts_without_tokens_get_a_zero_gradient():
    model = lora_model("moe")
    experts = model.layers[0].mlp.experts
    x, weights = torch.randn(N, 32), torch.ones(N, 1)
    y = LocalDispatch()(x, weights, torch.zeros(N, 1, dtype=torch.int64), 4, ExpertWork(experts.grouped_mlp))
    y.sum().backward()
    grad = experts.gate_up_lora_b.grad
    assert grad[0].abs().sum() > 0
    assert grad[1:].abs().sum() == 0
