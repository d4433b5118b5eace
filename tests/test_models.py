"""Our decoder against transformers, names and checkpoints in both directions, damaged files."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import VOCAB, dense_card, moe_card, random_model

from prl.config.cards import card_to_hf_config
from prl.config.config_json import check_card
from prl.config.errors import UserError
from prl.config.schema import ModelConfig
from prl.models.checkpoints.reading import load_checkpoint, load_model, load_weights, read_tensors
from prl.models.checkpoints.sources import random_checkpoint, resolve_model_path
from prl.models.checkpoints.writing import copy_tokenizer, hf_tensors, save_checkpoint
from prl.models.experts.routing import RoutingRecorder
from prl.models.families.build import build_decoder
from prl.models.layers.packed_attention import packed_attention
from prl.models.names.decoder import locate, to_hf

CARDS = {
    "dense": dense_card(),
    "dense tied": dense_card(tie_word_embeddings=True),
    "moe": moe_card(tie_word_embeddings=False),
    "moe tied": moe_card(),
    "moe without renormalised top-k": moe_card(norm_topk_prob=False),
    "moe behind a dense layer": moe_card(
        num_experts=300, num_hidden_layers=3, mlp_only_layers=(0,), intermediate_size=48
    ),
    "one key-value head": dense_card(num_key_value_heads=1),
}
CPU = torch.device("cpu")


@pytest.fixture(params=CARDS)
def card(request):
    return CARDS[request.param]


def logits_of(model, ids):
    """[T] -> [T, V]"""
    with torch.no_grad():
        hidden = model(ids, torch.arange(len(ids)), packed_attention([len(ids)], CPU))
        return model.logits(hidden)


def transformers_logits(path, ids):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
    with torch.no_grad():
        return model(ids[None]).logits[0]


IDS = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(1))


# --- names ------------------------------------------------------------------------------------------------------------


def test_locate_and_to_hf_are_inverse(card):
    """Every element of every parameter comes back to its place, and no checkpoint name is made twice."""
    model = random_model(card)
    names = set()
    for name, param in model.named_parameters():
        rebuilt = torch.full_like(param, torch.nan)
        for hf_name, tensor in to_hf(name, param.detach(), card):
            assert hf_name not in names
            names.add(hf_name)
            region = locate(hf_name, card)
            assert region.param == name
            target = rebuilt.data if region.expert is None else rebuilt.data[region.expert]
            (target[slice(*region.rows)] if region.rows else target).copy_(tensor)
        assert torch.equal(rebuilt, param)


def test_names_are_those_that_transformers_uses(card):
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    config_class = Qwen3MoeConfig if card.family == "qwen3_moe" else Qwen3Config
    config = config_class(**{k: v for k, v in card_to_hf_config(card).items() if k != "model_type"})
    theirs = {k: tuple(v.shape) for k, v in AutoModelForCausalLM.from_config(config).state_dict().items()}
    ours = {name: tuple(t.shape) for name, t in hf_tensors(build_decoder(card))}
    same = set(ours) & set(theirs)
    assert {n: ours[n] for n in same} == {n: theirs[n] for n in same}
    # transformers 5 stacks experts in memory and splits them in files; a tied head is not stored
    assert all(".experts." in name for name in set(ours) - same)
    assert all(".experts." in name or name == "lm_head.weight" for name in set(theirs) - same)


def test_matrices_are_given_in_the_dtype_asked_for_and_vectors_as_they_are(card):
    model = random_model(card)
    for (name, given), (_, own) in zip(hf_tensors(model, torch.bfloat16), hf_tensors(model), strict=True):
        assert given.dtype == (torch.bfloat16 if own.ndim > 1 else torch.float32), name
        assert torch.equal(given, own.to(given.dtype)), name


# --- logits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_bytes", [5 << 30, 20_000], ids=["one file", "several shards"])
def test_an_exported_checkpoint_gives_the_same_logits_in_transformers(card, shard_bytes, tmp_path):
    model = random_model(card)
    save_checkpoint(hf_tensors(model), tmp_path, card, shard_bytes)
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) == 1) == (shard_bytes > 1 << 30)
    assert not list(tmp_path.glob("*.tmp"))
    ours = logits_of(model, IDS)
    assert ours.std() > 0.1  # a flat distribution would agree with anything
    torch.testing.assert_close(ours, transformers_logits(tmp_path, IDS), rtol=1e-4, atol=1e-4)
    check_card(tmp_path, card)
    again = load_model(tmp_path, card, torch.float32, CPU)
    assert torch.equal(logits_of(again, IDS), ours)


def test_a_checkpoint_written_by_transformers_loads(card, tmp_path):
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    config_class = Qwen3MoeConfig if card.family == "qwen3_moe" else Qwen3Config
    torch.manual_seed(0)
    config = config_class(**{k: v for k, v in card_to_hf_config(card).items() if k != "model_type"})
    config.initializer_range = 0.2
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    check_card(tmp_path, card)
    ours = logits_of(load_model(tmp_path, card, torch.float32, CPU), IDS)
    torch.testing.assert_close(ours, transformers_logits(tmp_path, IDS), rtol=1e-4, atol=1e-4)


def test_replayed_routing_gives_the_same_logits_and_another_routing_others():
    model, positions = random_model(CARDS["moe"]), torch.arange(len(IDS))
    attend = packed_attention([len(IDS)], CPU)
    recorder = RoutingRecorder()
    with torch.no_grad():
        free = model(IDS, positions, attend, recorder=recorder)
        chosen = recorder.stacked(model.card)
        replayed = model(IDS, positions, attend, recorder=RoutingRecorder(given=chosen))
        other = model(IDS, positions, attend, recorder=RoutingRecorder(given=(chosen + 1) % 4))
    assert chosen.shape == (40, 2, 2)
    torch.testing.assert_close(replayed, free)
    assert (other - free).abs().max() > 0.1


# --- checkpoints that do not fit, are damaged, or are not there -------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    card = CARDS["moe"]
    save_checkpoint(hf_tensors(random_model(card)), tmp_path, card, shard_bytes=20_000)
    return tmp_path


def test_a_card_that_does_not_describe_the_checkpoint_is_refused(saved):
    with pytest.raises(UserError, match=r"num_experts: card 8, checkpoint 4; rope_theta: card 1\.0"):
        check_card(saved, moe_card(tie_word_embeddings=False, num_experts=8, rope_theta=1.0))
    with pytest.raises(UserError, match="family: card qwen3, checkpoint qwen3_moe"):
        check_card(saved, dense_card())


def test_rope_theta_is_compared_where_transformers_5_writes_it(saved):
    config = json.loads((saved / "config.json").read_text())
    config["rope_parameters"] = {"rope_theta": config.pop("rope_theta"), "rope_type": "default"}
    (saved / "config.json").write_text(json.dumps(config))
    check_card(saved, CARDS["moe"])
    with pytest.raises(UserError, match="rope_theta"):
        check_card(saved, moe_card(tie_word_embeddings=False, rope_theta=1.0))


@pytest.mark.parametrize("content", [None, "{"], ids=["absent", "not JSON"])
def test_config_json_that_cannot_be_read_is_named(saved, content):
    (saved / "config.json").unlink() if content is None else (saved / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json"):
        check_card(saved, CARDS["moe"])


def test_a_damaged_shard_is_named(saved):
    victim = sorted(saved.glob("*.safetensors"))[1]
    victim.write_bytes(victim.read_bytes()[:-100])
    with pytest.raises(UserError, match=f"(?s){victim.name} is damaged.*fetch the file again"):
        load_model(saved, CARDS["moe"], torch.float32, CPU)
    victim.write_bytes(b"\xff" * 64)
    with pytest.raises(UserError, match=f"{victim.name} is damaged"):
        load_model(saved, CARDS["moe"], torch.float32, CPU)


def test_a_missing_shard_is_noticed(saved):
    victim = sorted(saved.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(UserError, match=f"{victim.name} is missing"):
        load_model(saved, CARDS["moe"], torch.float32, CPU)
    (saved / "model.safetensors.index.json").unlink()
    with pytest.raises(UserError, match=r"tensors are missing from the checkpoint, among them for layers\.\d"):
        load_model(saved, CARDS["moe"], torch.float32, CPU)


def test_no_safetensors_at_all_is_explained(tmp_path):
    with pytest.raises(UserError, match=r"no .*safetensors"):
        list(read_tensors(tmp_path))


def test_a_tensor_without_a_place_is_named(saved):
    save_file({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}, saved / "zz.safetensors")
    (saved / "model.safetensors.index.json").unlink()
    with pytest.raises(UserError, match=r"self_attn\.q_proj\.bias has no place"):
        load_model(saved, CARDS["moe"], torch.float32, CPU)


def test_a_tensor_of_another_shape_is_named(saved):
    shard = next(f for f in saved.glob("*.safetensors") if "model.norm.weight" in load_file(f))
    for size in (31, 33):
        save_file(load_file(shard) | {"model.norm.weight": torch.ones(size)}, shard)
        with pytest.raises(UserError, match=rf"model\.norm\.weight has shape \[{size}\].*needs \[32\]"):
            load_model(saved, CARDS["moe"], torch.float32, CPU)


def test_the_lm_head_of_a_tied_checkpoint_is_ignored():
    card = CARDS["moe tied"]
    model = random_model(card)
    tensors = [*hf_tensors(model), ("lm_head.weight", torch.zeros(VOCAB, 32))]
    target = build_decoder(card)
    load_weights(target, tensors)
    assert all(torch.equal(a, b) for a, b in zip(target.parameters(), model.parameters(), strict=True))


# --- which checkpoint -------------------------------------------------------------------------------------------------


def model_config(**changes):
    return ModelConfig(**{"name": "tiny", "tokenizer": "byte", "card": CARDS["moe tied"], **changes})


def test_random_checkpoints_are_made_once_per_card_and_seed(tmp_path):
    one = random_checkpoint(model_config(), tmp_path)
    written = (one / "model.safetensors").stat().st_mtime_ns
    assert random_checkpoint(model_config(), tmp_path) == one
    assert (one / "model.safetensors").stat().st_mtime_ns == written
    other = random_checkpoint(model_config(init_seed=1), tmp_path)
    assert other != one
    assert not torch.equal(*(load_file(p / "model.safetensors")["model.embed_tokens.weight"] for p in (one, other)))
    assert {p.name for p in tmp_path.glob("models/*")} == {one.name, other.name}
    check_card(one, CARDS["moe tied"])


def test_the_model_path_is_resolved(tmp_path):
    assert resolve_model_path(model_config(path=str(tmp_path)), tmp_path) == tmp_path
    assert resolve_model_path(model_config(), tmp_path, init_model_path="/warm").as_posix() == "/warm"
    assert resolve_model_path(model_config(), tmp_path).parent == tmp_path / "models"


def test_a_model_that_is_nowhere_is_explained(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"(?s)neither a directory nor could it be fetched.*model.path"):
        resolve_model_path(model_config(path="no/such-model"), tmp_path)


def test_an_export_with_its_tokenizer_stands_alone(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = random_checkpoint(model_config(), tmp_path / "cache")
    target = tmp_path / "export"
    save_checkpoint(hf_tensors(random_model(CARDS["moe tied"])), target, CARDS["moe tied"])
    copy_tokenizer(source, target)
    tokenizer = AutoTokenizer.from_pretrained(str(target))
    model = AutoModelForCausalLM.from_pretrained(str(target))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert out.shape[1] <= prompt["input_ids"].shape[1] + 4


def test_weights_are_those_that_the_index_lists(tmp_path):
    """Some checkpoints bring the same weights a second time under other names, for other programs."""
    card = CARDS["moe tied"]
    model = random_model(card)
    save_checkpoint(hf_tensors(model), tmp_path, card, shard_bytes=20_000)
    save_file({"layers.0.attention.wq.weight": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    again = build_decoder(card)
    load_checkpoint(again, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    "field",
    [
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
    ],
    ids=["transformers 4", "transformers 5"],
)
def test_scaled_rotary_embedding_is_not_passed_over(field, tmp_path):
    card = CARDS["moe tied"]
    save_checkpoint(hf_tensors(random_model(card)), tmp_path, card)
    config = json.loads((tmp_path / "config.json").read_text())
    check_card(tmp_path, card)
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": None}))
    check_card(tmp_path, card)
    (tmp_path / "config.json").write_text(json.dumps(config | field))
    with pytest.raises(UserError, match="rope_type"):
        check_card(tmp_path, card)
    (tmp_path / "config.json").write_text(json.dumps(config))
    scaled = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(UserError, match=r"rope_scaling: card .rope_type:linear,factor:2\.0., checkpoint null"):
        check_card(tmp_path, moe_card(rope_scaling=scaled))
    check_card(tmp_path, card.model_copy(update={"family": "other"}))


def test_others_may_read_a_checkpoint_as_far_as_the_umask_lets_them(tmp_path):
    before = os.umask(0o027)
    try:
        card = dense_card()
        save_checkpoint(hf_tensors(random_model(card)), tmp_path / "model", card)
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "model").iterdir()}
    assert modes == {"config.json": "0o640", "model.safetensors": "0o640"}
