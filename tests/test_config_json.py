"""What a checkpoint's config.json says against the card is told by planning, wherever the file is at hand."""

import json
import os
import subprocess
import sys

import pytest
from families import family_card
from transformers import AutoConfig

from prl.config import compose
from prl.config.cards import card_to_hf_config
from prl.config.config_json import check_card
from prl.config.errors import ConfigError, UserError
from prl.models.families.hf_causal_lm import build_hf_model


def written(directory, family, **changes):
    """A checkpoint directory without weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(card_to_hf_config(family_card(family)) | changes))
    return directory


def auto(path, *overrides, job="rl"):
    trains = {"rl": ["memory=none", "warm_start=none"], "sft": ["memory=none"]}.get(job, [])
    return compose(["model=auto", f"model.path={path}", "model.tokenizer=byte", *trains, *overrides], job)


def problems(path, *overrides, job="rl"):
    with pytest.raises(ConfigError) as caught:
        auto(path, *overrides, job=job)
    return caught.value.violations


@pytest.mark.parametrize("job", ["rl", "sft", "inference"])
def test_what_the_layers_have_not_is_told_by_planning(job, tmp_path):
    (problem,) = problems(written(tmp_path, "deepseek_v3", hidden_act="gelu"), job=job)
    assert "hidden_act=gelu" in problem.what
    assert problem.where == str(tmp_path / "config.json")
    assert "model.impl=hf" in problem.fix


def test_transformers_layers_and_vllm_are_not_asked_for_ours(tmp_path):
    path = written(tmp_path, "llama", mlp_bias=True)
    assert auto(path, "model.impl=hf", "inference=vllm").model.card.family == "llama"
    assert auto(path, "model.impl=hf", job="sft").model.card.family == "llama"
    (problem,) = problems(path, "model.impl=hf")
    assert "inference=vllm" in problem.fix, "the built-in engine has our layers, whatever trains"


def test_a_card_of_another_checkpoint_is_told_by_planning(tmp_path):
    path = written(tmp_path, "qwen3", hidden_size=48)
    with pytest.raises(ConfigError) as caught:
        compose(["model=tiny_qwen3", f"model.path={path}", "warm_start=none"])
    (problem,) = caught.value.violations
    assert "hidden_size: card" in problem.what
    assert "checkpoint 48" in problem.what


def test_a_directory_without_config_json_is_told_by_planning(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json of the checkpoint cannot be read"):
        compose(["model=tiny_qwen3", f"model.path={tmp_path}", "warm_start=none"])
    compose(["model=tiny_qwen3", f"model.path={tmp_path}/later", "warm_start=none"])


def test_a_name_of_the_hub_is_looked_up_in_its_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    line = ["model=tiny_qwen3", "model.path=me/mine", "warm_start=none"]
    compose(line)
    repository = tmp_path / "models--me--mine"
    written(repository / "snapshots/abc", "qwen3", hidden_size=48)
    compose(line)  # of an older commit, nobody knows which
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    with pytest.raises(ConfigError, match="checkpoint 48"):
        compose(line)


def test_weights_that_nobody_reads_are_not_looked_at(tmp_path):
    path = written(tmp_path, "qwen3", hidden_size=48)
    line = ["model=tiny_qwen3", f"model.path={path}"]
    compose(line, "bench")
    with pytest.raises(ConfigError, match="checkpoint 48"):
        compose([*line, "bench.random_weights=false"], "bench")


def test_plan_tells_it_without_torch_and_a_sweep_before_its_first_point(tmp_path):
    path = written(tmp_path / "odd", "deepseek_v3", hidden_act="gelu")
    line = ["model=auto", f"model.path={path}", "model.tokenizer=byte", "memory=none", "warm_start=none"]
    code = (
        "import sys\nfrom prl.plan import main\n"
        "try: main()\nexcept SystemExit as stop: print('CODE', stop.code)\n"
        "print('LOADED', [m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, *line], cwd=tmp_path, capture_output=True, text=True, env=os.environ, timeout=120
    )
    assert "CODE 2" in told.stdout, told.stdout + told.stderr
    assert "LOADED []" in told.stdout
    assert told.stderr.count("hidden_act=gelu") == 1
    swept = subprocess.run(
        [sys.executable, "-m", "prl.rl", "-m", *line, "seed=1,2"],
        cwd=tmp_path, capture_output=True, text=True, env=os.environ, timeout=120,
    )  # fmt: skip
    assert swept.returncode == 2, swept.stdout + swept.stderr
    assert "hidden_act=gelu" in swept.stderr
    assert not (tmp_path / "outputs").exists()


FOREIGN = (
    "gpt2",
    "gptj",
    "gpt_bigcode",
    "codegen",
    "gpt_neo",
    "bloom",
    "mpt",
    "dbrx",
    "opt",
    "falcon",
    "phi3",
    "olmo2",
    "xglm",
)
SIZES_OF_ALL = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


@pytest.mark.parametrize("family", FOREIGN)
def test_sizes_are_found_under_the_names_of_the_family(family, tmp_path):
    """transformers' `attribute_map` is the reference."""
    config = AutoConfig.for_model(family)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    card = auto(tmp_path, job="sft").model.card
    assert card.family == "other"
    assert {key: getattr(card, key) for key in SIZES_OF_ALL} == {key: getattr(config, key) for key in SIZES_OF_ALL}
    if "n_positions" in config.to_dict():
        assert card.max_position_embeddings == config.max_position_embeddings


def test_names_of_others_mean_nothing_in_families_of_ours(tmp_path):
    written(tmp_path, "llama", n_layer=7)
    assert auto(tmp_path).model.card.num_hidden_layers == family_card("llama").num_hidden_layers


@pytest.mark.parametrize(
    "changes", [{"model_type": "blt"}, {"model_type": "gemma3", "text_config": {"hidden_size": 8}}]
)
def test_a_config_json_without_sizes_is_one_problem(changes, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300, "hidden_size": 32} | changes))
    (problem,) = problems(tmp_path, job="sft")
    assert problem.what == "config.json of the checkpoint does not say num_hidden_layers, num_attention_heads."
    said = ["model.card.num_hidden_layers=2", "model.card.num_attention_heads=4"]
    card = auto(tmp_path, *said, "model.card.num_key_value_heads=4", "model.card.head_dim=8", job="sft").model.card
    assert card.num_hidden_layers == 2


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("llama", {"hidden_size": "32"}, '"hidden_size": "32"'),
        ("qwen3", {"rms_norm_eps": "1e-5"}, '"rms_norm_eps": "1e-5"'),
        ("qwen3", {"rope_theta": "1e4"}, '"rope_theta": "1e4"'),
        ("deepseek_v3", {"first_k_dense_replace": "1"}, '"first_k_dense_replace": "1"'),
        ("qwen3_moe", {"mlp_only_layers": ["0"]}, '"mlp_only_layers": ["0"]'),
        ("llama", {"tie_word_embeddings": "false"}, '"tie_word_embeddings": "false"'),
        ("llama", {"mlp_bias": "false"}, '"mlp_bias": "false"'),
        ("llama", {"max_position_embeddings": 2048.0}, '"max_position_embeddings": 2048.0'),
        ("other", {"model_type": "gpt2", "n_layer": 2.0, "n_embd": 8, "n_head": 2}, '"n_layer": 2.0'),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": "2.0"}}, '"rope_scaling.factor": "2.0"'),
        ("llama", {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}}, '"1e4"'),
        ("other", {"model_type": "gpt2", "n_layer": "2", "n_embd": 8, "n_head": 2}, '"n_layer": "2"'),
    ],
)  # fmt: skip
def test_what_is_no_number_or_no_whole_one_is_told_by_its_key(family, changes, told, tmp_path):
    if family == "other":
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300} | changes))
        card = None
    else:
        written(tmp_path, family, **changes)
        card = family_card(family)
    (problem,) = problems(tmp_path, job="sft")
    assert problem.where == str(tmp_path / "config.json")
    assert told in problem.why
    if card is not None:
        with pytest.raises(UserError) as caught:  # of a card that is not made from it
            check_card(tmp_path, card)
        assert told in caught.value.why
        assert caught.value.where == str(tmp_path / "config.json")


@pytest.mark.parametrize(("job", "engine"), [("sft", []), ("rl", []), ("rl", ["inference=vllm"])])
def test_a_config_json_that_names_no_family_is_one_problem(job, engine, tmp_path):
    written(tmp_path, "llama", model_type=None)
    (problem,) = problems(tmp_path, *engine, job=job)
    assert problem.what == "config.json of the checkpoint names no family (model_type)."
    assert problem.where == str(tmp_path / "config.json")
    assert "llama" in problem.fix


def test_a_family_that_transformers_does_not_know_is_told_by_the_trainer(tmp_path):
    """Not where the run is planned: only transformers itself knows, and reading it takes seconds."""
    written(tmp_path, "llama", model_type="foobar")
    card = auto(tmp_path, job="sft").model.card
    with pytest.raises(UserError, match=r"transformers cannot read config\.json") as caught:
        build_hf_model(tmp_path, card)
    assert "foobar" in caught.value.why


def test_what_is_advised_of_rotary_embeddings_that_go_by_the_row_can_be_followed(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    written(tmp_path, "llama", rope_parameters=rope)
    (problem,) = problems(tmp_path, job="sft")
    assert "model.impl=hf" not in problem.fix  # which is refused of it
    assert "remove it from config.json (rope_type=default)" in problem.fix
    written(tmp_path, "llama", rope_parameters={**rope, "rope_type": "default"})
    auto(tmp_path, job="sft")


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_attention_is_trained_by_our_layers_alone(family, tmp_path):
    path = written(tmp_path, family)
    (problem,) = problems(path, "model.impl=hf", job="sft")
    assert "sparse attention" in problem.what
    assert "recurrent" not in problem.why
    assert problem.fix == "model.impl=custom"
    auto(path, problem.fix, job="sft")
    AutoConfig.from_pretrained(path).save_pretrained(tmp_path / "theirs")
    with pytest.raises(UserError, match="sparse attention"):  # of transformers' own config, where it is built
        build_hf_model(tmp_path / "theirs", family_card(family))


def test_states_are_kept_apart_by_our_layers_alone(tmp_path):
    (problem,) = problems(written(tmp_path, "nemotron_h"), "model.impl=hf", job="sft")
    assert "carry state" in problem.what
    assert "model.impl=custom" in problem.fix


def test_experts_and_sinks_of_gpt_oss(tmp_path):
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    AutoConfig.for_model("gpt_oss", **sizes, head_dim=8, vocab_size=300, num_local_experts=4).save_pretrained(tmp_path)
    (sinks,) = problems(tmp_path, job="sft")
    assert "attention sinks, which are not supported" in sinks.what
    spread, again = problems(tmp_path, "parallelism=ep2", "deployment.num_train_gpus=2", job="sft")
    assert spread.what == "Hugging Face model code cannot spread experts over ranks."
    assert spread.fix == "parallelism.ep=1"
    assert again.what == sinks.what
    wide = ["inference=vllm", "inference.expert_parallel=true", "inference.dp=2", "deployment.num_infer_gpus=2"]
    auto(tmp_path, *wide, "model.card.num_experts=4", job="inference")
    (counted,) = problems(tmp_path, *wide, job="inference")
    assert "counts no experts" in counted.what
    assert "model.card.num_experts" in counted.fix


def test_transformers_layers_are_asked_for_what_config_json_says(tmp_path):
    """A card has no key for it."""
    path = written(tmp_path, "qwen3", final_logit_softcapping=3.0)
    (problem,) = problems(path, "model.impl=hf", job="sft")
    assert "final_logit_softcapping" in problem.what


@pytest.mark.parametrize("family", ["mamba", "rwkv"])
def test_what_carries_state_is_told_before_heads_are_asked_for(family, tmp_path):
    AutoConfig.for_model(family, num_hidden_layers=2, hidden_size=32, vocab_size=300).save_pretrained(tmp_path)
    (problem,) = problems(tmp_path, job="sft")
    assert "carry state" in problem.what
    assert "model.card.num_attention_heads=1" in problem.fix


def test_what_needs_our_layers_is_not_told_to_take_them_where_there_are_none(tmp_path):
    sizes = {**dict.fromkeys(SIZES_OF_ALL, 4), "hidden_size": 32, "num_key_value_heads": 4}
    AutoConfig.for_model("qwen2", **sizes).save_pretrained(tmp_path)
    (problem,) = problems(tmp_path, "memory_recipe.compile=true", job="sft")
    assert "model.impl=custom" not in problem.why
    assert "qwen3_moe" in problem.why
    (problem,) = problems(written(tmp_path / "ours", "qwen3"), "model.impl=hf", "memory_recipe.compile=true", job="sft")
    assert "model.impl=custom" in problem.why


def test_a_checkpoint_begins_without_a_warm_start_unless_one_is_asked_for(tmp_path):
    line = ["model=auto", f"model.path={written(tmp_path, 'llama')}", "model.tokenizer=byte"]
    assert compose(["model=tiny_llama"]).warm_start is not None
    assert compose(line).warm_start is None
    assert compose([*line, "warm_start=reverse_text"]).warm_start is not None
    assert compose([*line, "warm_start.max_steps=3"]).warm_start.max_steps == 3


@pytest.mark.parametrize("impl", ["custom", "hf"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek_v3", {"scoring_func": "softmax", "topk_method": "greedy"}),
        ("glm4_moe_lite", {"topk_method": "greedy"}),
        ("glm4_moe", {"scoring_func": "softmax"}),
        ("minimax_m2", {"use_qk_norm": False}),
    ],
)
def test_what_transformers_passes_over_is_no_way_out(family, changes, impl, tmp_path):
    """Its layers would train another model than config.json says, without a word."""
    (problem,) = problems(written(tmp_path, family, **changes), f"model.impl={impl}", job="sft")
    assert all(f"{key}={value}" in problem.what for key, value in changes.items())
    assert problem.fix == "another checkpoint"


@pytest.mark.parametrize(
    ("family", "changes", "what"),
    [
        ("llama", {"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ("deepseek_v3", {"n_group": 3}, "cannot be cut into 3 groups"),
    ],
)
@pytest.mark.parametrize("impl", ["custom", "hf"])
def test_a_remedy_is_never_what_the_checkpoint_denies(family, changes, what, impl, tmp_path):
    (problem,) = problems(written(tmp_path, family, **changes), f"model.impl={impl}", job="sft")
    assert what in problem.what
    assert problem.fix == "another checkpoint: model.path=/path/to/it"
    assert str(tmp_path / "config.json") in problem.where


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_a_factor_that_is_not_said_is_told(kind, tmp_path):
    (problem,) = problems(written(tmp_path, "llama", rope_scaling={"rope_type": kind}), job="sft")
    assert f"({kind}) by a factor that it does not say" in problem.why


@pytest.mark.parametrize(
    ("model", "targets"),
    [
        ("tiny_qwen3", ("q_proj", "k_proj", "v_proj", "o_proj")),
        ("tiny_deepseek_v3", ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")),
        ("tiny_nemotron_h", ("q_proj", "k_proj", "v_proj", "o_proj")),
    ],
)
def test_adapters_are_around_attention_whatever_the_family_calls_it(model, targets):
    assert compose([f"model={model}", "memory=lora"]).memory_recipe.lora.targets == targets
    both = compose([f"model={model}", "memory=lora", "memory_recipe.lora.targets=[up_proj,attention,o_proj]"])
    assert both.memory_recipe.lora.targets == ("up_proj", *targets)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("llama", {"num_attention_heads": -4}, "num_attention_heads"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers"),
        ("llama", {"rope_parameters": [1, 2]}, "rope_parameters is a list"),
        ("llama", {"num_hidden_layers": 10**6}, "less than or equal to 4096"),
        ("llama", {"num_attention_heads": 0, "head_dim": None}, "num_attention_heads"),
        ("deepseek_v3", {"norm_topk_prob": None}, "null stands where a value belongs: norm_topk_prob"),
        ("qwen3", {"rms_norm_eps": None, "tie_word_embeddings": None}, "tie_word_embeddings, rms_norm_eps"),
        ("llama", {"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ("llama", {"max_position_embeddings": 0}, "max_position_embeddings"),
        ("qwen3", {"rope_theta": 0}, "rope_theta"),
        ("deepseek_v3", {"n_group": 0}, "n_group"),
        ("nemotron_h", {"mamba_num_heads": -8}, "mamba_num_heads"),
        ("deepseek_v32", {"index_topk": -1}, "index_topk"),
        ("llama", {"rope_scaling": YARN | {"original_max_position_embeddings": 0}}, "original_max_position_embeddings"),
        ("llama", {"rope_scaling": YARN | {"beta_fast": 1.0, "beta_slow": 32.0}}, "beta_fast"),
        ("llama", {"rope_scaling": YARN | {"beta_fast": 0.5}}, "beta_fast"),
        ("llama", {"rope_scaling": LLAMA3}, "low_freq_factor"),
        ("llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 1.0}}, "low_freq_factor"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "foo", "sparse"]}, "foo"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ("qwen3_moe", {"num_experts_per_tok": 99}, "num_experts_per_tok is 99, and there are"),
        ("deepseek_v3", {"num_experts_per_tok": 99}, "(n_routed_experts)"),
        ("llama", {"sliding_window": 0}, "sliding_window is 0"),
        ("nemotron_h", {"chunk_size": -1}, "chunk_size is -1"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for"),
        ("glm4_moe", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1, where"),
        ("deepseek_v3", {"num_nextn_predict_layers": "one"}, 'num_nextn_predict_layers is "one", where'),
    ],
)
@pytest.mark.parametrize("impl", ["custom", "hf"])
def test_what_no_model_can_have_is_for_the_file_to_correct(family, changes, told, impl, tmp_path):
    """No override would help: the next message would say that the checkpoint has something else."""
    (problem,) = problems(written(tmp_path, family, **changes), f"model.impl={impl}", job="sft")
    assert problem.what == "config.json of the checkpoint says what cannot be."
    assert told in problem.why
    assert problem.where == str(tmp_path / "config.json")
    assert problem.fix.startswith("correct config.json")
    with pytest.raises(UserError) as caught:  # of a card that is not made from it
        check_card(tmp_path, family_card(family))
    assert str(caught.value) == str(problem)


def test_only_what_is_the_same_without_scaling_may_be_removed(tmp_path):
    """Longrope divides frequencies of short documents, too."""
    for kind, may in (("dynamic", True), ("longrope", False), ("mrope", False)):
        rope = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 64}
        (problem,) = problems(written(tmp_path, "llama", rope_scaling=rope), job="sft")
        assert ("remove it" in problem.fix) == may, problem.fix


def test_sizes_of_families_of_transformers_alone_are_looked_at_too(tmp_path):
    """They would end in a traceback at the first step."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 512}
    for said, told in (
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "there are 2 experts"),
        ({"model_type": "mistral", "sliding_window": -4}, "sliding_window is -4"),
        ({"model_type": "gpt_neox", "num_attention_heads": 0}, "num_attention_heads"),
        ({"model_type": "opt", "ffn_dim": -4}, "ffn_dim is -4, where"),
        ({"model_type": "gpt2", "n_inner": 1.5}, "n_inner is 1.5, where"),
        ({"model_type": "gemma3_text", "layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(sizes | said))
        (problem,) = problems(tmp_path, job="sft")
        assert told in problem.why
    off = {"model_type": "qwen2", "sliding_window": 0, "use_sliding_window": False}
    (tmp_path / "config.json").write_text(json.dumps(sizes | off))
    auto(tmp_path, job="sft")


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_more_dense_layers_first_than_there_are_is_a_dense_model(family, tmp_path):
    """prl/models has no mixtures without experts; transformers builds them."""
    path = written(tmp_path, family, first_k_dense_replace=99)
    (problem,) = problems(path, job="sft")
    assert problem.what == "No layer of this mixture has experts."
    card = auto(path, "model.impl=hf", job="sft").model.card
    assert card.dense_layers == list(range(card.num_hidden_layers))
    assert not any("experts" in name for name, _ in build_hf_model(path, card).named_parameters())


def test_layers_of_kinds_that_a_family_has_not_are_told(tmp_path):
    (problem,) = problems(
        written(tmp_path, "qwen3", layer_types=["full_attention", "sliding_attention", "full_attention"]), job="sft"
    )
    assert "layer_types=['sliding_attention']" in problem.what
    auto(written(tmp_path, "qwen3", layer_types=["full_attention"] * 3), job="sft")


@pytest.mark.parametrize(("kind", "begins"), [("phi3", "correct config.json"), ("wat", "a version of transformers")])
def test_what_transformers_cannot_read_is_for_the_file_to_correct_where_it_knows_the_family(kind, begins, tmp_path):
    said = AutoConfig.for_model("phi3").to_dict() | {"model_type": kind, "rope_parameters": {"rope_type": 7}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(UserError, match="transformers cannot read config") as caught:
        build_hf_model(tmp_path, family_card("llama").model_copy(update={"family": "other"}))
    assert caught.value.fix.startswith(begins)


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [("llama", {"hidden_act": "foo"}, "KeyError"), ("qwen3_moe", {"decoder_sparse_step": 0}, "ZeroDivisionError")],
)
def test_what_transformers_cannot_build_is_no_traceback(family, changes, why, tmp_path):
    written(tmp_path, family, **changes)
    with pytest.raises(UserError, match="transformers cannot") as caught:
        build_hf_model(tmp_path, family_card(family))
    assert caught.value.why.startswith(why)
    assert "config.json" in caught.value.where
