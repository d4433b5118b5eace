"""Every family against transformers: logits, losses and gradients over packed documents, checkpoints there and back."""

import json
import re
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from families import EACH, ROUTED, SIZES, family_card, reference, reference_logits
from safetensors.torch import load_file
from tiny import END, VOCAB, random_model

from prl.config import compose
from prl.config.cards import card_to_hf_config, facts_of, not_built
from prl.config.config_json import check_card
from prl.config.errors import UserError
from prl.config.families import FAMILIES
from prl.config.locate import config_groups
from prl.config.schema import InferenceConfig, OptimConfig
from prl.config.schema_model import FamilyName, ModelCard
from prl.inference.engine import TorchEngine
from prl.inference.sampling import SamplingParams
from prl.inference.sequences import Request
from prl.models.checkpoints.reading import load_checkpoint, load_model, load_weights
from prl.models.checkpoints.writing import hf_tensors, save_checkpoint
from prl.models.families.build import DECODERS, build_decoder
from prl.models.layers.documents import attend_documents
from prl.models.names.decoder import single_mixers
from prl.planning import make_plan
from prl.planning.model_size import parameter_count
from prl.trainer.optim import build_optimizers

CPU = torch.device("cpu")
LENGTHS = (40, 1, 23)
DOCUMENTS = [torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(length)) for length in LENGTHS]


@pytest.fixture(scope="module", params=SIZES)
def family(request, tmp_path_factory):
    """(card, our model, the checkpoint that we wrote of it)"""
    card = family_card(request.param)
    model = random_model(card)
    for index, buffer in enumerate(model.checkpoint_buffers().values()):
        buffer.normal_(0, 0.1, generator=torch.Generator().manual_seed(index))
    path = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(hf_tensors(model), path, card)
    return card, model, path


def logits_of(model):
    ids = torch.cat(DOCUMENTS)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return model.logits(model(ids, positions, attend_documents(model.card, list(LENGTHS), CPU)))


def test_logits_and_gradients_are_those_of_transformers(family):
    card, model, path = family
    lm = reference(path)
    targets = torch.cat(DOCUMENTS).roll(-1)
    ours, theirs = logits_of(model), reference_logits(lm, DOCUMENTS)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    model.zero_grad()
    F.cross_entropy(ours, targets).backward()
    F.cross_entropy(theirs, targets).backward()
    grads = {name: param.grad for name, param in lm.named_parameters()}
    for name, param in model.named_parameters():
        theirs_of = grads.get(name if name == "lm_head.weight" else f"model.{name}")
        if theirs_of is None:  # called otherwise there: MiniMax's expert blocks, Nemotron's mixers
            renamed = single_mixers(name) if card.hybrid_override_pattern else name
            theirs_of = grads[f"model.{renamed}".replace(".mlp.", ".block_sparse_moe.")]
        if theirs_of is None:  # indexers choose, and what is chosen has no derivative by them
            assert param.grad is None, name
            continue
        assert param.grad is not None, name
        apart = float((param.grad - theirs_of).abs().max() / theirs_of.abs().max())
        assert apart < 1e-5, f"{name}: {apart:.1e} of its largest element"


def test_the_built_in_engine_says_what_the_model_says(family):
    """Prompts of several lengths at once, a shared prefix, and a second turn on what the cache knows."""
    card, model, path = family
    engine = TorchEngine(
        load_model(path, card, torch.float32, CPU), InferenceConfig(max_num_seqs=4, max_model_len=128), (END,)
    )
    prompts = [document.tolist() for document in DOCUMENTS]
    for turn in range(2):
        params = SamplingParams(n=2, temperature=1.0, max_tokens=9, seed=turn, ignore_eos=True)
        sequences = [s for i, ids in enumerate(prompts) for s in engine.prepare(Request(f"{turn}-{i}", ids, params))]
        engine.submit(sequences)
        while engine.busy:
            engine.step()
        for s in sequences:
            ids = torch.tensor(s.token_ids)
            with torch.no_grad():
                logits = model.logits(model(ids, torch.arange(len(ids)), attend_documents(card, [len(ids)], CPU)))
            said = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[s.num_prompt - 1 :, 0]
            torch.testing.assert_close(torch.tensor(s.logprobs), said, rtol=1e-5, atol=1e-5)
        prompts = [[*s.token_ids, 7, 8, 9] for s in sequences[::2]]


def test_checkpoints_come_back_byte_for_byte(family, tmp_path):
    card, model, path = family
    check_card(path, card)
    again = load_model(path, card, torch.float32, CPU)
    save_checkpoint(hf_tensors(again), tmp_path / "again", card)
    first, second = load_file(path / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(logits_of(again), logits_of(model))


def test_names_are_those_that_transformers_saves(family, tmp_path):
    _, _, path = family
    reference(path).save_pretrained(tmp_path)
    ours = {name: tensor.shape for name, tensor in load_file(path / "model.safetensors").items()}
    theirs = {name: tensor.shape for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert ours == theirs


def test_the_card_is_read_from_config_json(family, tmp_path):
    """From ours, and from the one that this transformers writes."""
    from transformers import AutoConfig

    card, _, path = family
    AutoConfig.from_pretrained(str(path)).save_pretrained(tmp_path)
    for said in (card_to_hf_config(card), json.loads((tmp_path / "config.json").read_text())):
        facts = facts_of(said)
        assert {key: getattr(card, key) for key in facts} == facts
        assert type(card)(**facts, ac_targets=card.ac_targets, cp_styles=card.cp_styles) == card


def test_a_silent_config_json_means_what_transformers_takes_it_for():
    """Shape, biases, norms, dense layers, rotation and scaling of what is left to the defaults of a family."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
             "intermediate_size": 32, "vocab_size": VOCAB, "num_experts_per_tok": 2}  # fmt: skip
    routed = {"n_routed_experts": 16, "moe_intermediate_size": 16, "n_shared_experts": 1}
    named = {"qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16}, "minimax_m2": {"num_local_experts": 4},
             "nemotron_h": {}}  # fmt: skip
    for kind, family in FAMILIES.items():
        said = sizes | named.get(kind, routed if EACH[kind] in ROUTED else {})
        config = AutoConfig.for_model(kind, **said)
        facts = facts_of(said | {"model_type": kind})
        assert facts_of(config.to_dict()) | facts == facts_of(config.to_dict()), kind  # what it says in full
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(config)
            ours = build_decoder(ModelCard(**facts, ac_targets=family.ac_targets))
        assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in lm.parameters()), kind


@pytest.mark.parametrize("kind", [kind for kind, family in FAMILIES.items() if not family.is_latent])
def test_silence_about_heads_of_keys_means_what_transformers_takes_it_for(kind):
    """A number, or as many as of queries."""
    from transformers import AutoConfig

    said = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 64, "vocab_size": VOCAB}
    for heads in ({}, {"num_key_value_heads": 2}):
        taken = AutoConfig.for_model(kind, **said, **heads).num_key_value_heads
        assert facts_of(said | heads | {"model_type": kind})["num_key_value_heads"] == taken


@pytest.mark.parametrize("kind", FAMILIES)
def test_silence_of_what_layers_are_built_for_means_the_same_to_transformers(kind):
    """Or is known to mean something else (`Family.assumed`), which is then refused."""
    from transformers import AutoConfig

    family, taken = FAMILIES[kind], AutoConfig.for_model(kind).to_dict()
    others = {key: taken[key] for key, known in family.builds.items() if key in taken and taken[key] not in known}
    assert others == family.assumed
    silent = {"model_type": kind}
    assert others.items() <= not_built(silent).items()


def test_sizes_of_what_no_layer_does_are_not_the_models():
    """As Nemotron-H-8B's config.json, which says nothing of experts; transformers has defaults for them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    said = {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-",
            "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "attention_head_dim": 128,
            "intermediate_size": 21504, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128,
            "n_groups": 8, "conv_kernel": 4, "vocab_size": 131072, "max_position_embeddings": 8192,
            "mlp_hidden_act": "relu2", "residual_in_fp32": False, "time_step_limit": [0.0, float("inf")],
            "num_hidden_layers": 52, "layer_norm_epsilon": 1e-5}  # fmt: skip
    facts = facts_of(said)
    card = ModelCard(**facts)
    assert not not_built(said)
    assert (card.num_experts, card.sparse_layers, len(card.dense_layers), len(card.state_layers)) == (0, [], 24, 24)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(**said))
    assert parameter_count(card) == sum(p.numel() for p in lm.parameters())
    assert parameter_count(card) / 1e9 == pytest.approx(8.1, rel=0.01)
    assert not_built(said | {"time_step_limit": [0.001, 0.1]}) == {"time_step_limit": [0.001, 0.1]}


def test_every_family_has_layers_and_a_row():
    assert DECODERS.keys() == FAMILIES.keys()
    assert set(get_args(FamilyName)) == {*FAMILIES, "other"}
    assert {family for family, _ in SIZES.values()} == set(FAMILIES)


def test_only_layers_that_predict_further_tokens_are_passed_over():
    name = "model.layers.3.input_layernorm.weight"  # behind the last
    assert build_decoder(family_card("glm4_moe")).locate(name) is None
    assert build_decoder(family_card("nemotron_h")).locate("mtp.layers.0.eh_proj.weight") is None
    model = build_decoder(family_card("qwen3_moe"))
    with pytest.raises(ValueError, match="has no place"):
        load_weights(model, [*hf_tensors(model), (name, torch.ones(32))])


# --- sizes ------------------------------------------------------------------------------------------------------------

PUBLISHED = {  # billions, as model cards on the hub say; without layers that predict further tokens
    "qwen3_0_6b": 0.6,
    "qwen3_1_7b": 1.7,
    "qwen3_4b": 4.0,
    "qwen3_4b_instruct": 4.0,
    "qwen3_30b_a3b": 30.5,
    "qwen3_30b_a3b_thinking": 30.5,
    "qwen3_235b_a22b": 235,
    "llama_3_1_8b": 8.03,
    "glm_4_5_air": 106,
    "minimax_m2": 229,
    "deepseek_v3": 671,
    "kimi_k2": 1026,  # "1T"; 32.6 of them active
    "glm_4_7_flash": 30,
    "deepseek_v3_2": 672,
    "glm_5_1": 744,
    "glm_5_2": 744,
    "nemotron_3_nano": 31.6,  # "30B-A3B"; 3.2 of them active, 3.6 with embeddings
    "nemotron_3_super": 120.6,  # "120B-A12B"
}
CARDS = [name for name in config_groups()["model"] if name != "auto"]


@pytest.mark.parametrize("name", CARDS)
def test_shipped_cards_build_and_have_the_published_size(name):
    card = compose([f"model={name}"]).model.card
    with torch.device("meta"):
        count = sum(param.numel() for param in build_decoder(card).parameters())
    assert parameter_count(card) == count
    assert card.ac_targets == FAMILIES[card.family].ac_targets
    if not name.startswith("tiny_"):
        assert count / 1e9 == pytest.approx(PUBLISHED[name], rel=0.02)


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_counted(name):
    card = family_card(name)
    with torch.device("meta"):
        assert parameter_count(card) == sum(param.numel() for param in build_decoder(card).parameters())


@pytest.mark.parametrize(("model", "infer", "train"), [("glm_5_1", 12, 16), ("kimi_k2", 16, 16)])
def test_the_largest_are_planned_at_131072_tokens(model, infer, train):
    layout = ["deployment=multi_node", f"deployment.num_infer_nodes={infer}", f"deployment.num_train_nodes={train}",
              "parallelism=ep8", "parallelism.cp=8", "memory=tight", "optim=adamw", "inference=vllm", "inference.tp=8",
              "inference.dp=2", "inference.expert_parallel=true"]  # fmt: skip
    lengths = ["seq_len=131072", "inference.max_model_len=131072", "warm_start=none"]
    plan = make_plan(compose([f"model={model}", *layout, *lengths]))
    assert (plan.num_nodes, len(plan.roles_of("trainer"))) == (infer + train, train * 8)


DECIDES = re.compile(
    r"embed_tokens|lm_head|mlp\.gate$|\.indexer\.|norm|bias|decay|conv1d|\.experts\.(gate_up|up|down)_proj$"
)


@pytest.mark.parametrize("name", SIZES)
def test_muon_has_the_matrices_between_hidden_states(name):
    """And AdamW what decides, what is no matrix, and stacked experts."""
    model = random_model(family_card(name)).requires_grad_(True)  # indexers, too
    names = {id(param): name for name, param in model.named_parameters()}
    muon, adamw = build_optimizers(model, OptimConfig(type="muon", lr=1e-3))
    sorts = [{names[id(p)] for group in optimizer.param_groups for p in group["params"]} for optimizer in (muon, adamw)]
    assert sorts[0] == {name for name in names.values() if not DECIDES.search(name.removesuffix(".weight"))}
    assert sorts[0] | sorts[1] == set(names.values())
    assert sum(p.numel() for group in muon.param_groups for p in group["params"]) > 0


def test_what_old_files_have_besides_is_passed_over_and_what_does_not_fit_is_told(tmp_path):
    """Rotary frequencies, which are computed; an expert too many; a layer behind the last that is none of MTP's."""
    card = family_card("deepseek_v3")
    tensors = dict(hf_tensors(random_model(card)))
    old = tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    load_weights(random_model(card, seed=1), old.items())
    many = tensors | {"model.layers.1.mlp.experts.8.up_proj.weight": torch.zeros(16, 32)}
    with pytest.raises(ValueError, match=r"experts\.8\.up_proj\.weight has no place"):
        load_weights(random_model(card), many.items())
    shorter = family_card("deepseek_v3", num_hidden_layers=2)
    with pytest.raises(ValueError, match="layer 2 is behind the last of 2"):
        load_weights(random_model(shorter), tensors.items())


LINEAR = {"rope_type": "linear", "factor": 2.0}
OLD_LINEAR = {"rope_scaling": {"type": "linear", "factor": 2.0}}


@pytest.mark.parametrize(
    ("said", "scaling"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, None),
        ({"rope_parameters": LINEAR | {"rope_theta": 5e5}}, None),
        ({"rope_parameters": LINEAR, "rope_theta": 5e5}, 2.0),
    ],
    ids=["scaled in one", "theta in one", "the same"],
)
def test_rotary_embeddings_that_are_said_twice(said, scaling):
    config = {
        key: value for key, value in card_to_hf_config(family_card("llama")).items() if not key.startswith("rope")
    }
    if scaling is None:
        with pytest.raises(UserError, match="two things of rotary embeddings"):
            facts_of(config | said | OLD_LINEAR)
    else:
        facts = facts_of(config | said | OLD_LINEAR)
        assert (facts["rope_scaling"].factor, facts["rope_theta"]) == (scaling, 5e5)


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3", "glm_moe_dsa"])
def test_empty_tensors_of_shared_experts_that_are_none_are_passed_over(name, tmp_path):
    """As transformers saves n_shared_experts=0."""
    card = family_card(name, n_shared_experts=0)
    save_checkpoint(hf_tensors(random_model(card)), tmp_path / "ours", card)
    lm = reference(tmp_path / "ours")
    lm.save_pretrained(tmp_path / "theirs")
    empty = [tensor for tensor in load_file(tmp_path / "theirs/model.safetensors").values() if not tensor.numel()]
    assert len(empty) == 3 * len(card.sparse_layers)
    again = load_model(tmp_path / "theirs", card, torch.float32, CPU)
    torch.testing.assert_close(logits_of(again), reference_logits(lm, DOCUMENTS), rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match=r"shared_experts.* has shape"):  # they are no weights of any
        load_checkpoint(build_decoder(card.model_copy(update={"n_shared_experts": 1})), tmp_path / "theirs")
