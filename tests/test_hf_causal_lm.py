"""transformers' models behind our interface: logits on packed documents, names, ties, FSDP, whole runs."""

import functools
import json

import pytest
import runs
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from prl.config import compose
from prl.config.config_json import check_card
from prl.config.errors import ConfigError, UserError
from prl.config.schema import ModelCard, OptimConfig
from prl.models.adapters.lora import whole_tensor
from prl.models.checkpoints.reading import load_checkpoint, read_tensors
from prl.models.checkpoints.writing import copy_tokenizer, hf_tensors, save_checkpoint
from prl.models.families.hf_causal_lm import HFCausalLM, build_hf_model
from prl.models.layers.packed_attention import packed_attention
from prl.models.names import transformers as hf_names
from prl.models.names.transformers import checkpoint_regions
from prl.trainer import parallelize
from prl.trainer.memory.activation_offload import apply_activation_offload
from prl.trainer.optim import build_optimizers
from prl.trainer.parallelize import build_model

DOCS = [7, 1, 12, 5]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 100,
}
# family -> what differs from SIZES in its config
FAMILIES = {
    "llama": {},
    "llama3_rope": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    },
    "qwen2": {"tie_word_embeddings": True},
    "gemma": {"head_dim": 16, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 16, "sliding_window": 4, "query_pre_attn_scalar": 50, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 3},
    "olmo2": {},
    "apertus": {"pad_token_id": 0},
    "phi3": {"pad_token_id": 0},
    "qwen3_moe": {**EXPERTS, "tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
        "pad_token_id": 0,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
}


def plain_model(family: str, **changes: object):
    fields = {**SIZES, **FAMILIES.get(family, {}), **changes}
    torch.manual_seed(0)
    config = AutoConfig.for_model(fields.pop("model_type", family), **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():  # away from the defaults: norms and biases too, and what buffers correct a router's choice
        for tensor in (*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("correction_bias"))):
            tensor.add_(torch.randn_like(tensor), alpha=0.1)
    return model


def card_of(model) -> ModelCard:
    config = model.config
    sizes = {key: getattr(config, key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")}
    heads = sizes["num_attention_heads"]
    return ModelCard(
        family="other", **sizes, vocab_size=config.vocab_size, tie_word_embeddings=config.tie_word_embeddings,
        num_key_value_heads=config.to_dict().get("num_key_value_heads", heads), head_dim=sizes["hidden_size"] // heads,
        max_position_embeddings=config.max_position_embeddings,
    )  # fmt: skip


def test_matrices_are_told_from_vectors_where_transformers_squeezes(monkeypatch):
    """5.19 does so to each part of what it takes apart; later ones only to the dimension that it splits."""
    model = plain_model("qwen3_moe")
    expected = checkpoint_regions(model)
    revert = hf_names.revert_weight_conversion

    def squeezed(lm, tensors):
        return {name: tensor.squeeze() for name, tensor in revert(lm, tensors).items()}

    monkeypatch.setattr(hf_names, "revert_weight_conversion", squeezed)
    assert checkpoint_regions(model) == expected
    assert len([region for region in expected.values() if region.expert is not None]) > 4


def adapt(model, path) -> HFCausalLM:
    """Through its checkpoint, as a run loads it."""
    model.save_pretrained(path, max_shard_size="20KB")
    card = card_of(model)
    check_card(path, card)
    ours = build_hf_model(path, card)
    assert all(param.is_meta for param in ours.parameters())
    ours = ours.to_empty(device="cpu")
    load_checkpoint(ours, path)
    return ours.eval()


def packed() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, SIZES["vocab_size"], (sum(DOCS),), generator=generator)
    return ids, torch.cat([torch.arange(n) for n in DOCS])


@torch.no_grad()
def check_packed(ours: HFCausalLM, model) -> torch.Tensor:
    """That packed documents have the logits of each alone, which are returned."""
    ids, positions = packed()
    logits = ours.logits(ours(ids, positions, packed_attention(DOCS, ids.device)))
    alone = torch.cat([model(doc[None], use_cache=False).logits[0] for doc in ids.split(DOCS)])
    torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)
    return alone


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_packed_documents_are_those_of_each_document_alone(family, tmp_path):
    model = plain_model(family)
    ours = adapt(model, tmp_path)
    assert check_packed(ours, model).std() > 0.01


def hf_config(card, *overrides):
    config = compose(["model.impl=hf", "warm_start=none", "optim=adamw", *overrides])
    return config.model_copy(update={"model": config.model.model_copy(update={"card": card})})


@pytest.mark.parametrize("family", FAMILIES)
def test_trained_in_bfloat16(family, tmp_path, world):
    """Sharded as the trainer does; nothing is cast at the layers' doors."""
    model = plain_model(family)
    model.save_pretrained(tmp_path)
    ids, positions = packed()
    losses = []
    for dtype in ("float32", "bfloat16"):
        ours = build_model(hf_config(card_of(model), f"model.dtype={dtype}"), tmp_path, world)
        attend = packed_attention(DOCS, ids.device)
        loss = ours(ids, positions, attend, head=lambda h, w: (h @ w.t()).float().logsumexp(-1)).mean()
        loss.backward()
        assert all(param.grad.dtype == torch.float32 for param in ours.parameters())
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_those_of_the_checkpoint_there_and_back(family, tmp_path):
    model = plain_model(family)
    ours = adapt(model, tmp_path / "source")
    save_checkpoint(hf_tensors(ours), tmp_path / "export", card_of(model))
    copy_tokenizer(tmp_path / "source", tmp_path / "export")
    assert saved_names(tmp_path / "export") == saved_names(tmp_path / "source")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.pop(name)), name
    assert not again


def saved_names(path) -> set[str]:
    return {name for name, _ in read_tensors(path)}


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_and_ties(tied, tmp_path):
    model = plain_model("llama", tie_word_embeddings=tied)
    ours = adapt(model, tmp_path)
    assert (ours.head_weight is ours.get_parameter("model.embed_tokens.weight")) == tied
    ids, positions = packed()
    ours(
        ids, positions, packed_attention(DOCS, ids.device), head=lambda h, w: (h @ w.t()).logsumexp(-1)
    ).sum().backward()
    sum(model(doc[None], use_cache=False).logits.logsumexp(-1).sum() for doc in ids.split(DOCS)).backward()
    for name, param in ours.named_parameters():
        torch.testing.assert_close(param.grad, model.get_parameter(name).grad, rtol=1e-3, atol=1e-4, msg=name)


def test_qwen3_is_built_from_its_card(tmp_path):
    card = tiny.dense_card()
    model = tiny.random_model(card)
    save_checkpoint(hf_tensors(model), tmp_path, card)
    theirs = build_hf_model(None, card).to_empty(device="cpu")
    load_checkpoint(theirs, tmp_path)
    ids, positions = packed()
    attend = packed_attention(DOCS, ids.device)
    torch.testing.assert_close(theirs(ids, positions, attend), model(ids, positions, attend), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "changes", "what"),
    [
        ("gemma2", {"head_dim": 16}, "final_logit_softcapping"),
        ("qwen3_next", {"head_dim": 16, "num_experts": 2, "num_experts_per_tok": 1}, "linear_attention"),
        ("mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1}, "carry state"),
        ("jamba", {"num_experts": 2, "mamba_d_state": 4, "use_mamba_kernels": False, "pad_token_id": 0}, "carry state"),
        ("nemotron_h", {"layers_block_type": ["mamba", "attention"], "num_hidden_layers": 2}, "carry state"),
        ("rwkv", {"attention_hidden_size": 32}, "carry state"),
    ],
)
def test_models_that_cannot_be_packed_are_refused(family, changes, what, tmp_path):
    AutoConfig.for_model(family, **{**SIZES, **changes}).save_pretrained(tmp_path)
    card = ModelCard(family="other", head_dim=8, **{k: v for k, v in SIZES.items() if k != "intermediate_size"})
    with pytest.raises(UserError, match=what):
        build_hf_model(tmp_path, card)


def test_capped_scores(tmp_path):
    """gemma2 without its capped logits, but with capped scores and windows."""
    model = plain_model(
        "gemma2", head_dim=16, final_logit_softcapping=None, attn_logit_softcapping=2.0, sliding_window=4
    )
    ours = adapt(model, tmp_path)
    check_packed(ours, model)


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["memory_recipe.compile=true"], "memory_recipe.compile=false"),
        (["model.card.family=other"], "inference=vllm"),
        (["parallelism=ep2"], "parallelism.ep=1"),
    ],
    ids=" ".join,
)
def test_what_needs_our_own_code_is_refused(overrides, fix):
    with pytest.raises(ConfigError) as error:
        compose(["model.impl=hf", *overrides])
    assert any(fix in violation.fix for violation in error.value.violations)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", pytest.param("mixtral", marks=pytest.mark.exhaustive)])
def test_an_sft_run_of_another_family_over_two_ranks(family, tmp_path):
    """FSDP, checkpointing and export; the same losses as on one rank."""
    model = plain_model(family, vocab_size=tiny.VOCAB)
    source = tmp_path / family
    model.save_pretrained(source)
    tiny.byte_tokenizer(source)
    data = tmp_path / "squares.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}^2", "completion": str(i * i)}) + "\n" for i in range(300)))
    card = [f"model.card.{key}={value}" for key, value in SIZES.items() if key != "vocab_size"]
    losses = []
    for ranks in (1, 2):
        run_dir = tmp_path / f"run{ranks}"
        overrides = [
            f"output_dir={run_dir}", f"model.path={source}", "model.tokenizer=null", "model.impl=hf",
            "model.card.family=other", "model.card.head_dim=8", "model.card.num_experts=0",
            "model.card.num_experts_per_tok=0", "model.card.tie_word_embeddings=false", *card,
            f"parallelism.dp_shard={ranks}", "memory_recipe.ac.mode=full", "data=jsonl",
            f"sft.data.source={data}", "max_steps=3",
            "sft.batch_size=4", "sft.val_interval=3", "seq_len=128", "logging.wandb.mode=disabled",
        ]  # fmt: skip
        finished = runs.run(overrides, tmp_path, "prl.sft")
        assert finished.code == 0, finished.output
        losses.append([row["loss"] for row in runs.rows(run_dir, "trainer.0")])
        again = AutoModelForCausalLM.from_pretrained(run_dir / "export")
        assert not torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]


def test_dropout_is_off_so_that_recomputation_repeats_itself(tmp_path):
    """gpt2 drops a tenth by default; an engine does not, and a repeated forward pass would drop others."""
    plain_model("gpt2", resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1).save_pretrained(tmp_path)
    ids, positions = packed()
    card = card_of(AutoModelForCausalLM.from_pretrained(tmp_path))
    model = build_hf_model(tmp_path, card).to_empty(device="cpu")
    load_checkpoint(model, tmp_path)
    attend = packed_attention(DOCS, ids.device)
    assert torch.equal(model(ids, positions, attend), model(ids, positions, attend))


def test_a_family_with_names_of_its_own_trains_by_its_config_json(tmp_path, world):
    """gpt2: n_layer, n_embd, n_head; nobody writes a card."""
    model = plain_model("gpt2")
    model.save_pretrained(tmp_path)
    auto = ["model=auto", f"model.path={tmp_path}", "model.tokenizer=byte", "model.dtype=float32", "memory=none"]
    ours = build_model(compose(auto, "sft"), tmp_path, world)
    assert len(ours.layers) == 2
    ids, positions = packed()
    logits = ours(ids, positions, packed_attention(DOCS, ids.device), head=lambda hidden, weight: hidden @ weight.t())
    alone = torch.cat([model(doc[None], use_cache=False).logits[0] for doc in ids.split(DOCS)])
    torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)


def test_a_head_with_a_bias_is_refused(tmp_path):
    """Losses are computed from the head's weight alone."""
    AutoConfig.for_model("phi", **SIZES).save_pretrained(tmp_path)
    card = ModelCard(family="other", head_dim=8, **{k: v for k, v in SIZES.items() if k != "intermediate_size"})
    with pytest.raises(UserError, match="bias"):
        build_hf_model(tmp_path, card)


@pytest.mark.parametrize("memory", ["optim_cpu_offload=full", "fsdp_cpu_offload=true", "lora.rank=2"])
def test_buffers_stay_float32(memory, tmp_path, world):
    """bfloat16 frequencies would turn queries and keys by other angles."""
    model = plain_model("llama")
    model.save_pretrained(tmp_path)
    config = hf_config(card_of(model), "model.dtype=bfloat16", f"memory_recipe.{memory}")
    buffers = dict(build_model(config, tmp_path, world).named_buffers())
    expected = dict(model.named_buffers())
    assert buffers.keys() == expected.keys()
    for name, buffer in buffers.items():
        assert torch.equal(buffer, expected[name]), name


def test_muon_leaves_embeddings_alone_whatever_they_are_called(tmp_path, world):
    model = plain_model("gpt2")
    model.save_pretrained(tmp_path)
    ours = build_model(hf_config(card_of(model)), tmp_path, world)
    muon, adamw = build_optimizers(ours, OptimConfig(type="muon"))
    names = {param: name for name, param in ours.named_parameters()}
    of_muon = {names[param] for group in muon.param_groups for param in group["params"]}
    assert all(".attn." in name or ".mlp." in name for name in of_muon), of_muon
    assert len(of_muon) == 8
    assert {"transformer.wte.weight", "transformer.wpe.weight"} <= {names[p] for p in adamw.param_groups[0]["params"]}


@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma3_text", "gpt2"])
def test_recomputed_and_offloaded_gradients(family, tmp_path, world):
    """Layers have tuples, dictionaries and experts inside."""
    model = plain_model(family, num_hidden_layers=4, **({"n_layer": 4} if family == "gpt2" else {}))
    model.save_pretrained(tmp_path)
    ids, positions = packed()
    grads = []
    for levers in ([], ["ac.mode=full", "ac_offloading={enabled: true, max_inflight_activations: 1}"]):
        config = hf_config(card_of(model), *(f"memory_recipe.{lever}" for lever in levers))
        ours = build_offloading(config, tmp_path, world)
        ours(
            ids, positions, packed_attention(DOCS, ids.device), head=lambda h, w: (h @ w.t()).logsumexp(-1)
        ).sum().backward()
        grads.append({name: whole_tensor(param.grad) for name, param in ours.named_parameters()})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-5, atol=1e-6, msg=name)


def build_offloading(config, path, world):
    """`build_model` whose activations are offloaded however small they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallelize, "apply_activation_offload", functools.partial(apply_activation_offload, min_bytes=0))
        return build_model(config, path, world)


@pytest.mark.parametrize("family", ["stablelm", "falcon"])
def test_models_that_attend_by_themselves_are_refused(family, tmp_path):
    """One fails where it is built, the other at the first step."""
    AutoConfig.for_model(family, **SIZES).save_pretrained(tmp_path)
    card = ModelCard(family="other", head_dim=8, **{k: v for k, v in SIZES.items() if k != "intermediate_size"})
    with pytest.raises(UserError, match="attention itself"):
        build_hf_model(tmp_path, card)


def test_empty_parameters_are_refused(tmp_path):
    """FSDP would fail on them in the first backward pass."""
    model = plain_model("glm4_moe", n_shared_experts=0)
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="empty parameters") as caught:
        build_hf_model(tmp_path, card_of(model))
    assert caught.value.fix == "model.impl=custom"


def test_values_wider_than_queries(tmp_path):
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 20,
             "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 2,
             "n_group": 1, "topk_group": 1, "num_key_value_heads": 4}  # fmt: skip
    model = plain_model("deepseek_v3", **sizes)  # and no layer has experts
    ours = adapt(model, tmp_path)
    check_packed(ours, model)
    auto = ["model=auto", f"model.path={tmp_path}", "model.tokenizer=byte", "model.dtype=float32"]
    with pytest.raises(ConfigError) as error:
        compose([*auto, "sft=null"], config_name="rl")
    fixes = [violation.fix for violation in error.value.violations]
    assert sum("model.impl=hf" in fix for fix in fixes) == 2, fixes
    compose([*auto, "model.impl=hf", "inference=vllm", "memory=none", "model.card.vocab_size=null"])
