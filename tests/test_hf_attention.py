"""What attention of transformers' models is trained as it is meant, and what is refused before weights are read."""

import json

import pytest
import torch
from test_hf_causal_lm import SIZES, adapt, plain_model
from transformers import AutoConfig

from prl.config import compose
from prl.config.cards import facts_of
from prl.config.config_json import check_card
from prl.config.errors import ConfigError, UserError
from prl.config.schema import ModelCard
from prl.models.families.hf_causal_lm import Packing, attend_packed, build_hf_model
from prl.models.layers.packed_attention import packed_attention


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_a_rope_of_transformers_alone_is_for_its_own_layers(rope, tmp_path):
    AutoConfig.for_model("llama", **SIZES, head_dim=8).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": rope, "factor": 2.0, "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    auto = ["model=auto", f"model.path={tmp_path}", "model.tokenizer=byte"]
    theirs = [*auto, "model.impl=hf", "inference=vllm"]
    if rope == "dynamic":
        with pytest.raises(ConfigError, match="longest document"):
            compose(theirs)
    else:
        with pytest.raises(ConfigError, match="longest document") as long:
            compose([*theirs, "seq_len=4096"])
        assert "seq_len=2048" in long.value.violations[0].fix
        compose(theirs)
    card = compose(theirs, "inference").model.card  # which vLLM alone runs
    assert card.family == "llama"
    with pytest.raises(UserError, match=f"rope_type={rope}"):
        check_card(tmp_path, card)
    with pytest.raises(ConfigError, match=f"rope_type={rope}"):
        compose(auto)


@pytest.mark.parametrize(
    ("family", "changes", "what"),
    [
        ("doge", {}, "attention of its own: it hands on attention_mask"),
        ("nemotron", {}, "keeps the bounds of documents"),
        ("gemma3_text", {"head_dim": 16, "use_bidirectional_attention": True}, "later tokens"),
    ],
)
def test_attention_of_another_kind_is_refused_before_weights_are_read(family, changes, what, tmp_path):
    AutoConfig.for_model(family, **SIZES, **changes).save_pretrained(tmp_path)
    card = ModelCard(family="other", head_dim=8, **{k: v for k, v in SIZES.items() if k != "intermediate_size"})
    with pytest.raises(UserError, match=what) as caught:
        build_hf_model(tmp_path, card)
    assert caught.value.where == str(tmp_path)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_every_layer_is_asked_before_weights_are_read(odd, tmp_path, monkeypatch):
    """A model whose layers are not alike is told by the one that is another."""
    from transformers.models.llama import modeling_llama

    class Odd(modeling_llama.LlamaAttention):
        def __init__(self, config, layer_idx):
            super().__init__(config, layer_idx)
            self.is_causal = layer_idx != odd

    monkeypatch.setattr(modeling_llama, "LlamaAttention", Odd)
    sizes = SIZES | {"num_hidden_layers": 3}
    AutoConfig.for_model("llama", **sizes, head_dim=8).save_pretrained(tmp_path)
    card = ModelCard(family="other", head_dim=8, **{k: v for k, v in sizes.items() if k != "intermediate_size"})
    with pytest.raises(UserError, match="later tokens"):
        build_hf_model(tmp_path, card)


@pytest.mark.parametrize("changes", [{"is_causal": False}, {"use_bidirectional_attention": True}])
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_encoders_are_told_by_planning(family, changes, tmp_path):
    AutoConfig.for_model(family, **SIZES, head_dim=8).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(json.loads((tmp_path / "config.json").read_text()) | changes))
    with pytest.raises(ConfigError, match="later tokens"):
        compose(["model=auto", f"model.path={tmp_path}", "model.tokenizer=byte"], "sft")


@pytest.mark.parametrize(
    ("given", "what"),
    [({"is_causal": False}, "later tokens"), ({"position_bias": torch.ones(1)}, "position_bias"),
     ({"s_aux": torch.ones(4)}, "s_aux"), ({"packing": None}, "bounds of documents")],
)  # fmt: skip
def test_what_a_layer_hands_to_attention_is_not_dropped(given, what):
    q = torch.randn(1, 4, 3, 8)
    packing = Packing(packed_attention([3], q.device), torch.arange(3), 3)
    attend_packed(torch.nn.Module(), q, q, q, None, packing=packing, position_ids=torch.arange(3))
    with pytest.raises(UserError, match=what):
        attend_packed(torch.nn.Module(), q, q, q, None, **{"packing": packing, **given})


def test_longrope_trains_while_its_frequencies_are_always_the_same(tmp_path):
    """Longer documents would change those of their neighbours."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8,
            "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}  # fmt: skip
    contexts = {"max_position_embeddings": 64, "original_max_position_embeddings": 8}
    model = plain_model("phi3", **contexts, rope_parameters=rope, pad_token_id=0)
    ours = adapt(model, tmp_path)
    ids = torch.arange(15)
    attend = packed_attention([8, 7], ids.device)
    with torch.no_grad():
        logits = ours.logits(ours(ids, torch.cat([torch.arange(8), torch.arange(7)]), attend))
        alone = torch.cat([model(doc[None], use_cache=False).logits[0] for doc in ids.split([8, 7])])
    torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="longest document"):
        ours(ids, torch.cat([torch.arange(6), torch.arange(9)]), packed_attention([6, 9], ids.device))
    auto = ["model=auto", f"model.path={tmp_path}", "model.tokenizer=byte", "memory=none", "model.card.vocab_size=null"]
    with pytest.raises(ConfigError) as caught:
        compose([*auto, "seq_len=16"], "sft")
    assert "seq_len=8" in caught.value.violations[0].fix


def test_dynamic_frequencies_are_refused_where_the_model_is_built(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    AutoConfig.for_model("mistral", **SIZES, rope_parameters=rope).save_pretrained(tmp_path)
    card = ModelCard(family="other", head_dim=8, **{k: v for k, v in SIZES.items() if k != "intermediate_size"})
    with pytest.raises(UserError, match="longest document"):
        build_hf_model(tmp_path, card)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_no_document_is_longer_than_a_table_of_positions(family, tmp_path):
    """Which transformers would tell of in the middle of a run, by an IndexError."""
    sizes = {
        "gpt2": {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
        "opt": {"max_position_embeddings": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                "ffn_dim": 64, "word_embed_proj_dim": 32},
    }  # fmt: skip
    config = AutoConfig.for_model(family, vocab_size=272, bos_token_id=1, eos_token_id=2, **sizes[family])
    config.save_pretrained(tmp_path)
    card = ModelCard(**facts_of(json.loads((tmp_path / "config.json").read_text())))
    assert card.max_position_embeddings == 64
    build_hf_model(tmp_path, card)
    with pytest.raises(UserError, match=f"{family} knows 64 positions, fewer than 128") as refused:
        build_hf_model(tmp_path, card.model_copy(update={"max_position_embeddings": 128}))
    assert refused.value.fix == "model.card.max_position_embeddings=64"
