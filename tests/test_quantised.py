"""Quantised checkpoints: what they say, read back against formulas of others, into models and shards; and refusals."""

import json
from pathlib import Path

import pytest
import torch
from families import EACH, SIZES, family_card
from quantised import FP8, INT4, MXFP4, compressed, quantise, to_fp8, to_int4, to_mxfp4
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import random_model

from prl.config.cards import facts_of
from prl.config.config_json import check_card
from prl.config.errors import ConfigError, UserError
from prl.config.families import FAMILIES
from prl.config.quantised import Quantisation, quantisation_of, without_section
from prl.config.schema_model import ModelCard
from prl.models.checkpoints.dequantising import as_model_tensors
from prl.models.checkpoints.reading import load_checkpoint, load_model, open_tensors
from prl.models.checkpoints.writing import export_checkpoint, hf_tensors, save_checkpoint
from prl.models.families.hf_causal_lm import HFCausalLM, build_hf_model
from prl.models.layers.documents import attend_documents

CPU = torch.device("cpu")
FILE = Path("config.json")
HOW = {
    "fp8": (FP8, to_fp8),
    "fp8, powers of two": (FP8 | {"scale_fmt": "ue8m0"}, lambda weight: to_fp8(weight, power_of_two=True)),
    "fp8, small blocks": (FP8 | {"weight_block_size": [5, 7]}, lambda weight: to_fp8(weight, (5, 7))),
    "int4": (INT4, to_int4),
    "mxfp4": (MXFP4, to_mxfp4),
}


def slices_of(parts, section, path):
    """A quantised matrix `w` in a file, as it is read from there."""
    save_file({f"w{end}": part.contiguous() for end, part in parts.items()}, path / "one.safetensors")
    handle = safe_open(path / "one.safetensors", "pt")
    stored = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
    how = section if isinstance(section, Quantisation) else quantisation_of({"quantization_config": section}, FILE)
    ((name, part),) = as_model_tensors(stored, how)
    assert name == "w"
    return part


# --- formats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape", [(256, 384), (300, 200), (1, 129), (130, 5)])
def test_block_fp8_is_numbers_times_the_scale_of_their_block(shape, power_of_two, tmp_path):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    parts = to_fp8(weight, power_of_two=power_of_two)
    part = slices_of(parts, FP8, tmp_path)
    expected = torch.tensor([[parts[""][i, j].float() * parts["_scale_inv"][i // 128, j // 128]
                              for j in range(shape[1])] for i in range(shape[0])])  # fmt: skip
    assert part.get_shape() == list(shape)
    assert torch.equal(part[:], expected)
    assert (part[:] - weight).abs().max() < 0.3  # 1/16 of the largest, about 4


@pytest.mark.parametrize("how", HOW)
def test_a_slice_is_that_part_of_the_whole(how, tmp_path):
    section, to_parts = HOW[how]
    weight = torch.randn(300, 224, generator=torch.Generator().manual_seed(0))
    part = slices_of(to_parts(weight), section, tmp_path)
    whole = part[:]
    for rows in (slice(0, 1), slice(127, 129), slice(255, 300), slice(7, 7)):
        for columns in (slice(0, 224), slice(31, 33), slice(129, 222)):
            assert torch.equal(part[rows, columns], whole[rows, columns])
        assert torch.equal(part[rows], whole[rows])


def test_a_slice_reads_its_blocks_alone(tmp_path):
    class Watched:
        def __init__(self, inner):
            self.inner, self.read = inner, []

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def __getitem__(self, index):
            self.read.append(index)
            return self.inner[index]

    part = slices_of(to_fp8(torch.randn(512, 512)), FP8, tmp_path)
    part.stored, part.scales = Watched(part.stored), Watched(part.scales)
    part[130:140, 300:310]
    assert part.stored.read == [(slice(130, 140), slice(300, 310))]
    assert part.scales.read == [(slice(1, 2), slice(2, 3))]


def test_packed_int4_of_recorded_bytes(tmp_path):
    """What compressed-tensors 0.17 (pack_to_int32) makes of -8 ... 7 and their mirror image, and of seven numbers."""
    words = torch.tensor([[1985229328, -19088744], [-19088744, 1985229328]], dtype=torch.int32)
    parts = {"_packed": words, "_scale": torch.tensor([[0.5], [2.0]]), "_shape": torch.tensor([2, 16])}
    section = compressed("pack-quantized", group_size=16)
    numbers = torch.arange(-8.0, 8.0)
    expected = torch.stack((numbers * 0.5, numbers.view(2, 8).flip(0).flatten() * 2))
    assert torch.equal(slices_of(parts, section, tmp_path)[:], expected)
    short = {
        "_packed": torch.tensor([[106181136]], dtype=torch.int32),
        "_scale": torch.tensor([[1.0]]),
        "_shape": torch.tensor([1, 7], dtype=torch.int32),  # as Kimi-K2-Thinking has it
    }
    assert torch.equal(slices_of(short, INT4, tmp_path)[:], numbers[None, :7])


@pytest.mark.parametrize("shape", [(8, 64), (3, 45)])
def test_packed_int4_is_what_compressed_tensors_unpacks(shape, tmp_path):
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    parts = to_int4(torch.randn(shape))
    codes = helpers.unpack_from_int32(parts["_packed"], 4, torch.Size(shape))
    assert torch.equal(helpers.pack_to_int32(codes, 4), parts["_packed"])
    scales = parts["_scale"].float().repeat_interleave(32, 1)[:, : shape[1]]
    assert torch.equal(slices_of(parts, INT4, tmp_path)[:], codes.float() * scales)


def test_mxfp4_of_compressed_tensors_is_what_it_unpacks(tmp_path):
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    scaling = pytest.importorskip("compressed_tensors.compressors.mx_utils")
    parts = to_mxfp4(torch.randn(6, 96))
    values = helpers.unpack_fp4_from_uint8(parts["_packed"], 6, 96, torch.float32)
    scales = scaling.decompress_mx_scale(parts["_scale"]).float().repeat_interleave(32, 1)
    assert torch.equal(slices_of(parts, MXFP4, tmp_path)[:], values * scales)


def test_stacked_mxfp4_is_what_transformers_makes_of_it(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 140, (3, 10, 4), dtype=torch.uint8, generator=generator)
    part = slices_of({"_blocks": blocks, "_scales": scales}, {"quant_method": "mxfp4"}, tmp_path)
    whole = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert part.get_shape() == list(whole.shape) == [3, 128, 10]
    assert torch.equal(part[:], whole)
    assert torch.equal(part[1:3, 30:70, 2:5], whole[1:3, 30:70, 2:5])


def test_scales_of_rows_and_of_whole_matrices(tmp_path):
    """FP8 of compressed-tensors, as GLM-4.5-FP8 has it: `weight_scale` [O, 1]."""
    weight = torch.randn(6, 40)
    for strategy, scale in (("channel", torch.rand(6, 1)), ("tensor", torch.rand(1)), ("tensor", torch.rand(()))):
        section = compressed("float-quantized", type="float", num_bits=8, strategy=strategy, group_size=None)
        stored = (weight / scale).to(torch.float8_e4m3fn)
        part = slices_of({"": stored, "_scale": scale.bfloat16()}, section, tmp_path)
        assert torch.equal(part[2:5, 1:], stored.float()[2:5, 1:] * scale.bfloat16().float().expand(6, 40)[2:5, 1:])


def test_empty_matrices_are_read_as_such(tmp_path):
    """Of shared experts that are none, with scales of no rows or without any."""
    empty = torch.empty(0, 40, dtype=torch.float8_e4m3fn)
    channels = compressed("float-quantized", type="float", num_bits=8, strategy="channel", group_size=None)
    assert slices_of({"": empty, "_scale": torch.empty(0, 1)}, channels, tmp_path)[:].shape == (0, 40)
    assert (
        slices_of({"": torch.empty(40, 0).to(empty), "_scale": torch.ones(40, 1)}, channels, tmp_path)[:].numel() == 0
    )
    assert slices_of({"": empty}, FP8, tmp_path).get_shape() == [0, 40]


# --- checkpoints ------------------------------------------------------------------------------------------------------


def not_attention(name):
    return ".self_attn." not in name and "embed" not in name and "lm_head" not in name and "gate.weight" not in name


def linears(name):
    """As DeepSeek-V3.2, GLM-5 and MiniMax-M2 publish them: attention's and the indexers' too, but for their weights."""
    return not any(part in name for part in ("embed", "lm_head", ".gate.", "weights_proj"))


MODELS = [("deepseek_v3", "fp8", not_attention), ("deepseek_v3", "fp8, small blocks", linears),
          ("glm4_moe", "fp8, powers of two", not_attention), ("deepseek_v32", "fp8, small blocks", linears),
          ("glm_moe_dsa shared choices", "fp8", linears), ("minimax_m2", "fp8, small blocks", linears),
          ("qwen3", "int4", not_attention), ("deepseek_v3", "int4", not_attention), ("llama", "int4", linears),
          ("qwen3_moe", "fp8, small blocks", not_attention), ("glm4_moe_lite", "fp8, small blocks", linears),
          ("nemotron_h", "fp8, small blocks", linears)]  # fmt: skip
OTHERS = FAMILIES.keys() - {SIZES[name][0] for name, _, _ in MODELS}
MODELS += [(EACH[family], "fp8, small blocks", linears) for family in sorted(OTHERS)]


@pytest.fixture(params=MODELS, ids=lambda model: f"{model[0]} {model[1]}")
def checkpoint(request, tmp_path):
    """(card, a checkpoint of it of which some matrices are quantised, its tensors before that, and which they are)"""
    family, how, which = request.param
    card = family_card(family)
    path = tmp_path / "quantised"
    save_checkpoint(hf_tensors(random_model(card)), path, card)
    original = load_file(path / "model.safetensors")
    quantise(path, *HOW[how], which)
    return card, path, original, {name for name, tensor in original.items() if tensor.ndim == 2 and which(name)}


def test_a_model_is_read_from_it(checkpoint, tmp_path):
    card, path, original, quantised = checkpoint
    check_card(path, card)
    held = dict(hf_tensors(load_model(path, card, torch.float32, CPU)))
    changed = [name for name in original if not torch.equal(held[name], original[name])]
    assert set(changed) == quantised
    assert not card.index_topk or any(".indexer.wq_b." in name for name in changed)
    with open_tensors(path) as said:
        assert held.keys() == said.keys()
        for name, part in said.items():
            assert torch.equal(held[name], part[:])
            assert (held[name] - original[name]).norm() <= 0.15 * original[name].norm()
        narrow = dict(hf_tensors(load_model(path, card, torch.bfloat16, CPU)))
        assert all(torch.equal(narrow[name].float(), held[name].bfloat16().float()) for name in changed)


def test_its_exports_are_not_quantised(checkpoint, tmp_path):
    card, path, *_ = checkpoint
    model = load_model(path, card, torch.float32, CPU)
    export_checkpoint(model, hf_tensors(model), path, tmp_path / "export", card)
    assert "quantization_config" not in json.loads((tmp_path / "export/config.json").read_text())
    exported = load_file(tmp_path / "export/model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.float32}
    held = dict(hf_tensors(load_model(tmp_path / "export", card, torch.float32, CPU)))
    assert all(torch.equal(held[name], tensor) for name, tensor in hf_tensors(model))


def test_its_exports_may_be_bfloat16(checkpoint, tmp_path):
    """Read again and written again they are the same bytes; what is exact (corrections, norms) stays so."""
    card, path, *_ = checkpoint
    narrow, vectors = torch.bfloat16, dict(hf_tensors(load_model(path, card, torch.float32, CPU)))
    export, again = tmp_path / "export", tmp_path / "again"
    for source, target in ((path, export), (export, again)):
        model = load_model(source, card, torch.float32, CPU)
        export_checkpoint(model, hf_tensors(model, narrow), source, target, card, dtype=narrow)
        assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    assert (export / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    exported = load_file(export / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values() if tensor.ndim > 1} == {narrow}
    assert all(torch.equal(tensor, vectors[name]) for name, tensor in exported.items() if tensor.ndim < 2)
    assert all(torch.equal(tensor, vectors[name].to(tensor.dtype)) for name, tensor in exported.items())


@pytest.mark.parametrize("damage", ["no scales", "scales of another shape", "no section"])
def test_incomplete_ones_are_refused(damage, tmp_path):
    card, path = family_card("qwen3"), tmp_path / "quantised"
    save_checkpoint(hf_tensors(random_model(card)), path, card)
    quantise(path, *HOW["fp8"], not_attention)
    if damage == "no section":
        (path / "config.json").write_text(json.dumps(without_section(json.loads((path / "config.json").read_text()))))
    else:
        file = path / "model-00002-of-00002.safetensors"
        scales = load_file(file)
        save_file({name: scale.flatten() if damage != "no scales" else scale for name, scale in scales.items()
                   if damage != "no scales" or "up_proj" not in name}, file)  # fmt: skip
    with pytest.raises(UserError, match="the checkpoint cannot be loaded") as refused:
        load_model(path, card, torch.float32, CPU)
    assert "scale" in str(refused.value)
    assert (refused.value.where == str(path / "config.json")) == (damage == "no section")


def test_scales_of_activations_are_passed_over(tmp_path):
    """As GLM-4.5-FP8 has them."""
    card = family_card("glm4_moe")
    save_checkpoint(hf_tensors(random_model(card)), tmp_path, card)
    section = compressed("float-quantized", type="float", num_bits=8, strategy="channel", group_size=None)
    section["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "float", "dynamic": False}

    def to_channels(weight):
        scale = weight.abs().amax(1, keepdim=True) / 448
        return {"": (weight / scale).to(torch.float8_e4m3fn), "_scale": scale.bfloat16()}

    quantise(tmp_path, section, to_channels, not_attention)
    file = tmp_path / "model-00002-of-00002.safetensors"
    scales = load_file(file)
    inputs = {name.replace(".weight_scale", ".input_scale"): torch.ones(1) for name in scales}
    save_file(scales | inputs, file)
    load_model(tmp_path, card, torch.float32, CPU)


SIXTEEN = FP8 | {"weight_block_size": [16, 16]}


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "glm4_moe", "minimax_m2"])
def test_block_fp8_means_what_transformers_takes_it_for(family, tmp_path):
    """Logits of a quantised checkpoint, dequantised by transformers."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    card = family_card(family)
    save_checkpoint(hf_tensors(random_model(card)), tmp_path, card)
    quantise(tmp_path, SIXTEEN, lambda weight: to_fp8(weight, (16, 16)), not_attention)
    how = FineGrainedFP8Config(weight_block_size=(16, 16), dequantize=True)
    try:
        lm = AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype=torch.float32, quantization_config=how).eval()
    except ImportError as error:  # transformers 5.19, which vLLM brings
        pytest.skip(str(error))
    ids = torch.arange(40) * 5 % 264
    model = load_model(tmp_path, card, torch.float32, CPU)
    with torch.no_grad():
        ours = model.logits(model(ids, torch.arange(40), attend_documents(card, [40], CPU)))
        torch.testing.assert_close(ours, lm(input_ids=ids[None]).logits[0], rtol=1e-5, atol=1e-5)


def test_models_of_transformers_are_read_from_one_and_exported(tmp_path):
    card = family_card("qwen3")
    save_checkpoint(hf_tensors(random_model(card)), tmp_path, card)
    quantise(tmp_path, *HOW["fp8"], not_attention)
    model = build_hf_model(tmp_path, card).to_empty(device="cpu")
    load_checkpoint(model, tmp_path)
    own = dict(hf_tensors(load_model(tmp_path, card, torch.float32, CPU)))
    assert all(torch.equal(own[name], tensor) for name, tensor in hf_tensors(model))
    other = card.model_copy(update={"family": "other"})  # whose config.json is the source's
    export_checkpoint(model, hf_tensors(model), tmp_path, tmp_path / "export", other)
    config = json.loads((tmp_path / "export/config.json").read_text())
    assert config == without_section(json.loads((tmp_path / "config.json").read_text()))
    assert "quantization_config" not in config


def test_gpt_oss_is_read_as_transformers_dequantises_it_and_refused_for_its_sinks(tmp_path):
    from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config

    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 264, "num_local_experts": 4}  # fmt: skip
    config = GptOssConfig(**sizes, num_experts_per_tok=2, max_position_embeddings=256)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tensors = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        parts = [to_mxfp4(expert.float().T.contiguous()) for expert in tensor]
        scales = torch.stack([part["_scale"] for part in parts])
        blocks = torch.stack([part["_packed"] for part in parts]).view(*scales.shape, 16)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    how = Mxfp4Config(dequantize=True)
    lm = AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype=torch.float32, quantization_config=how)
    card = ModelCard(**facts_of(said))
    model = HFCausalLM(AutoModelForCausalLM.from_config(config), card)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(torch.nan)
    load_checkpoint(model, tmp_path)
    theirs = lm.state_dict()
    assert all(torch.equal(theirs[name], param) for name, param in model.named_parameters())
    with pytest.raises(UserError, match="gpt_oss has attention sinks"):
        build_hf_model(tmp_path, card)


# --- what is not read -------------------------------------------------------------------------------------------------

EIGHT = {"weights": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32}}
NOT_READ = {
    "gptq": {"quant_method": "gptq", "bits": 4},
    "awq": {"quant_method": "awq", "bits": 4},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "fp8 without blocks": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8 in blocks of less than nothing": FP8 | {"weight_block_size": [-128, 128]},
    "fp8 in empty blocks": FP8 | {"weight_block_size": [128, 0]},
    "fp8 e5m2": FP8 | {"fmt": "e5m2"},
    "int8": compressed("int-quantized", num_bits=8, strategy="channel"),
    "nvfp4": compressed("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16),
    "int4 asymmetric": compressed("pack-quantized", symmetric=False),
    "int4 reordered": compressed("pack-quantized", actorder="group"),
    "packed int8": compressed("pack-quantized", num_bits=8),
    "kv cache": INT4 | {"kv_cache_scheme": {"num_bits": 8}},
    "no groups": INT4 | {"config_groups": {}},
    "another form": INT4 | {"config_groups": [1, 2]},
    "two schemes": INT4 | {"config_groups": INT4["config_groups"] | {"group_1": EIGHT}},
}


@pytest.mark.parametrize("name", NOT_READ)
@pytest.mark.parametrize("nested", [False, True], ids=["at the top", "in text_config"])
def test_other_quantisations_are_refused(name, nested):
    section = {"quantization_config": NOT_READ[name]}
    config = {"text_config": section} if nested else section
    with pytest.raises(UserError, match="quantised in a way that is not read here") as refused:
        quantisation_of(config, FILE)
    assert "model.path= the bfloat16" in refused.value.fix
    assert "quantization_config" not in json.dumps(without_section(config))


def test_they_are_refused_before_any_weight_is_read(tmp_path):
    from prl.config import compose

    card = family_card("qwen3")
    save_checkpoint(hf_tensors(random_model(card)), tmp_path, card)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": NOT_READ["gptq"]}))
    for file in tmp_path.glob("*.safetensors"):
        file.write_bytes(b"")
    with pytest.raises(UserError, match="quant_method=gptq"):
        check_card(tmp_path, card)
    with pytest.raises(ConfigError, match="quant_method=gptq"):
        compose(["model=auto", f"model.path={tmp_path}", "warm_start=none"])
