"""Weights that travel, and that engines hold, in blocks of FP8 (inference.quantization=fp8_block)."""

import itertools
import json
import random

import pytest
import torch
from runs import rows, run
from safetensors import safe_open
from tiny import moe_card, random_model
from trainer_ranks import Job, run_ranks

from prl.config import compose
from prl.config.block_fp8 import SCALE, is_quantised, odd_sizes, quantization_config
from prl.config.errors import ConfigError
from prl.models.checkpoints import block_fp8
from prl.models.checkpoints.block_fp8 import Grid, fresh, restored, to_scales
from prl.models.checkpoints.writing import hf_tensors, save_checkpoint
from prl.models.fp8.cast import cast_blocks, restore_blocks
from prl.models.fp8.format import Scaled
from prl.planning import make_plan
from prl.planning.vllm_arguments import server_arguments

E4M3 = torch.float8_e4m3fn
BLOCKS = "inference.quantization=fp8_block"
WIDE = [f"model.card.{size}" for size in ("hidden_size=256", "moe_intermediate_size=128", "intermediate_size=256")]


def wide_model(choice="tiny_qwen3_moe"):
    card = compose([f"model={choice}", *WIDE], "inference").model.card
    return random_model(card)


def same_bits(one, other):
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("at_once", [1 << 26, 1])
@pytest.mark.parametrize(
    ("shape", "within"),
    [
        ((256, 256), 0),
        ((300, 200), 0),
        ((1, 129), 0),
        ((3, 140, 270), 0),
        ((127, 5), 0),
        ((3, 140, 270), 70),
        ((400, 9), 200),
    ],
)
def test_parts_cut_anywhere_give_the_blocks_of_the_whole(shape, within, at_once, monkeypatch):
    """within: rows of each of the matrices that lie in one parameter below one another."""
    monkeypatch.setattr(block_fp8, "AT_ONCE", at_once)
    rng, generator = random.Random(f"{shape}{within}"), torch.Generator().manual_seed(len(shape))
    whole = torch.randn(shape, generator=generator).to(torch.bfloat16)
    runs = [cast_blocks(rows) for rows in whole.split(within or shape[-2], -2)]
    expected = Scaled(*(torch.cat(kind, -2) for kind in zip(*runs, strict=True)))
    grid = Grid(tuple(shape), tuple(range(0, shape[-2], within)) if within else (0,))
    assert grid.shape == tuple(expected.scales.shape)
    cuts = [sorted({0, size, *(rng.randrange(size + 1) for _ in range(3))}) for size in shape]
    spans = [list(itertools.pairwise(cut)) for cut in cuts]
    parts = [((), ())]
    for dimension in spans:
        parts = [((*begin, low), (*end, high)) for begin, end in parts for low, high in dimension]
    largest = fresh([grid], torch.device("cpu")).view(grid.shape)
    local = {begin: whole[tuple(map(slice, begin, end))] for begin, end in parts}
    for begin, part in local.items():
        grid.note(part, begin, largest)
    assert torch.equal(to_scales(largest), expected.scales)
    for (begin, end), part in zip(parts, local.values(), strict=True):
        assert same_bits(grid.cast(part, begin, largest), expected.values[tuple(map(slice, begin, end))])


def test_what_is_multiplied_by_travels_in_blocks_and_nothing_else():
    model = wide_model()
    plain = dict(hf_tensors(model, torch.bfloat16))
    sent = dict(hf_tensors(model, torch.bfloat16, in_blocks=True))
    assert {name for name in sent if not name.endswith(SCALE)} == plain.keys()
    quantised = {name for name, tensor in sent.items() if tensor.dtype == E4M3}
    assert quantised == {name for name in plain if is_quantised(name)}
    kept = {name.split(".")[-2] for name in plain.keys() - quantised}
    assert kept == {"embed_tokens", "gate", "norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"}
    assert {name.removesuffix(SCALE) for name in sent if name.endswith(SCALE)} == quantised
    for name in quantised:
        expected = cast_blocks(plain[name])
        assert same_bits(sent[name], expected.values)
        assert torch.equal(sent[name + SCALE], expected.scales)
        error = (restore_blocks(expected) - plain[name].float()).abs().max()
        assert 0 < error <= plain[name].float().abs().max() / 16
    assert all(same_bits(sent[name], plain[name]) for name in plain.keys() - quantised)
    whole, halved = (sum(tensor.nbytes for tensor in one.values()) for one in (plain, sent))
    assert halved < 0.7 * whole  # of which embeddings are a quarter


@pytest.mark.parametrize("size", [64, 192, 256])
def test_matrices_within_one_parameter_have_blocks_of_their_own(size):
    """Gate and up of an expert: neither's scale knows of the other, whatever their sizes."""
    model = random_model(compose(["model=tiny_qwen3_moe", f"model.card.moe_intermediate_size={size}"]).model.card)
    plain, sent = dict(hf_tensors(model)), dict(hf_tensors(model, in_blocks=True))
    experts = [name for name in plain if ".experts." in name]
    assert len(experts) == 3 * 8 * model.card.num_hidden_layers
    for name in experts:
        expected = cast_blocks(plain[name])
        assert same_bits(sent[name], expected.values), name
        assert torch.equal(sent[name + SCALE], expected.scales)


@pytest.mark.parametrize("seed", range(3))
def test_an_engine_multiplies_in_any_order(seed):
    model = wide_model()
    sent = list(hf_tensors(model, torch.bfloat16, in_blocks=True))
    random.Random(seed).shuffle(sent)
    got, given = dict(restored(sent)), dict(sent)
    assert got.keys() == {name for name, _ in hf_tensors(model)}
    for name, tensor in got.items():
        if is_quantised(name):
            assert torch.equal(tensor, restore_blocks(Scaled(given[name], given[name + SCALE])))
        else:
            assert same_bits(tensor, given[name])


def test_a_matrix_without_its_scales_is_told():
    values, scales = cast_blocks(torch.randn(130, 40))
    with pytest.raises(ValueError, match=r"a\.weight came without a\.weight_scale_inv"):
        list(restored([("a.weight", values)]))
    with pytest.raises(ValueError, match=r"a\.weight_scale_inv came without a\.weight"):
        list(restored([("a.weight_scale_inv", scales), ("b.weight", scales)]))
    with pytest.raises(ValueError, match=r"needs scales of shape \[2, 1\], and has \[1, 1\]"):
        list(restored([("a.weight", values), ("a.weight_scale_inv", scales[:1])]))


@pytest.mark.parametrize("size", [96, 128])
def test_ranks_hold_the_blocks_of_the_whole(tmp_path, size):
    """`check_owned` of `trainer_ranks.py` compares; experts of whole blocks and others, over FSDP, and EP."""
    model = tmp_path / "model"
    card = moe_card(moe_intermediate_size=size)
    save_checkpoint(hf_tensors(random_model(card)), model, card)
    jobs = [Job(str(model), dp_shard=2, ep=ep, moe_size=size, steps=1) for ep in (1, 2)]
    run_ranks(tmp_path / "two", 2, jobs)


# --- vLLM and rules ---------------------------------------------------------------------------------------------------


def test_vllm_is_told_which_matrices_are_in_blocks():
    config = compose(
        ["model=qwen3_30b_a3b", "model.path=null", "model.tokenizer=byte", "inference=vllm", BLOCKS, "warm_start=none"]
    )
    role = make_plan(config).roles_of("inference")[0]
    arguments = server_arguments(config, role, "/m", {}, on_cpu=False)
    assert "quantization" not in arguments
    assert arguments["load_format"] == "dummy"
    told = arguments["hf_overrides"]["quantization_config"]
    assert told == quantization_config(config.model.card)
    kept = set(told["modules_to_not_convert"])
    names = {name for name, _ in hf_tensors(wide_model())}
    left = {name.removesuffix(".weight") for name in names if name.count("proj") == 0 and "norm" not in name}
    assert left - {"model.embed_tokens"} <= kept
    assert not any(is_quantised(f"{name}.weight") for name in kept)


@pytest.mark.parametrize(
    ("model", "tp", "expert_tp", "odd"),
    [
        ("qwen3_0_6b", 1, 1, {}),
        ("qwen3_235b_a22b", 4, 4, {}),
        ("deepseek_v3", 8, 1, {}),
        ("glm_5_1", 8, 8, {}),
        ("qwen3_30b_a3b", 8, 8, {"an expert's part on a device": 96}),
        ("qwen3_30b_a3b", 8, 1, {}),
        ("tiny_qwen3", 1, 1, {"keys of a device": 64}),
    ],
)
def test_sizes_that_vllm_cannot_cut(model, tp, expert_tp, odd):
    card = compose([f"model={model}", "model.path=null", "model.tokenizer=byte"], "inference").model.card
    assert odd.items() <= odd_sizes(card, tp, expert_tp).items()
    assert bool(odd) == bool(odd_sizes(card, tp, expert_tp))


@pytest.mark.parametrize(
    ("job", "overrides", "message"),
    [
        ("inference", [BLOCKS], "Nothing brings weights"),
        ("rl", [BLOCKS, "inference.urls=[http://h:1]"], "say themselves how they hold"),
        ("rl", [BLOCKS, "inference=vllm", "memory=lora", "weight_transport=lora"], "Adapters do not travel"),
        ("rl", [BLOCKS, "model=tiny_nemotron_h"], "cannot travel in blocks"),
        ("rl", [BLOCKS, "model.impl=hf"], r"Models of transformers do not travel(.|\n)*model\.impl=auto"),
        ("rl", [BLOCKS, "inference=vllm", "model=qwen3_0_6b", "inference.dtype=float32"], "inference.dtype=bfloat16"),
        ("rl", [BLOCKS, "inference=vllm", "model=qwen3_0_6b", "+inference.vllm.load_format=auto"], "load_format out"),
        ("rl", [BLOCKS, "inference.deep_gemm=false"], r"inference\.deep_gemm=null, or inference=vllm$"),
        *(
            ("rl", [f"inference={engine}", f"inference.quantization={typed}"], "quantization=fp8_block, or null")
            for engine in ("torch", "vllm")
            for typed in ("fp8_blocks", "FP8_BLOCK", "fp8-blocks", "''")
        ),
        ("rl", [BLOCKS, "inference=vllm"], "cannot cut tiny_qwen3_moe into blocks of 128"),
        (
            "rl",
            [
                BLOCKS,
                "inference=vllm",
                "model=qwen3_0_6b",
                "+inference.vllm.hf_overrides={quantization_config: {a: 1}}",
            ],
            "said twice",
        ),
    ],
)
def test_what_cannot_be_sent_in_blocks_is_refused(job, overrides, message):
    with pytest.raises(ConfigError, match=message):
        compose(overrides, job)


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(
            ["weight_transport=filesystem", "deployment.num_train_gpus=2", "parallelism=ep2"], id="filesystem"
        ),
        pytest.param(["weight_transport=nccl", "deployment.num_train_gpus=2"], id="nccl"),
        pytest.param(["weight_transport=tcp", "memory=lora"], id="tcp lora", marks=pytest.mark.slow),
        pytest.param(["weight_transport=shared_memory"], id="shared memory", marks=pytest.mark.slow),
    ],
)
def test_a_run_whose_engines_get_blocks(tmp_path, more):
    args = [BLOCKS, "model=tiny_qwen3_moe", *WIDE, "max_steps=2", "eval=none", "ckpt=none", "warm_start=none"]
    args += ["algo.batch_size=16", "algo.group_size=4", f"output_dir={tmp_path}/run", *more]
    done = run(args, tmp_path)
    assert done.code == 0, done.output
    first, second = rows(tmp_path / "run", "trainer.0")
    assert 1e-7 < first["mismatch_kl_mean"] < 0.01, "of weights in FP8 and in float32"
    assert second["step"] == 2
    if "weight_transport=filesystem" in more:
        version = tmp_path / "run/weights/step_2"
        dtypes = {
            name: dtype for name, (dtype, *_) in json.loads((version / "manifest.json").read_text())["tensors"].items()
        }
        assert {dtype for name, dtype in dtypes.items() if is_quantised(name)} == {"float8_e4m3fn"}
        with safe_open(sorted(version.glob("rank-1*.safetensors"))[0], framework="pt") as file:
            assert any(file.get_slice(name).get_dtype() == "F8_E4M3" for name in file.keys())  # noqa: SIM118
