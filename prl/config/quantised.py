"""How the weights of a checkpoint are quantised, by its config.json: what can be read, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prl.config.block_fp8 import sends_blocks
from prl.config.cards import is_part_of_a_larger_model
from prl.config.errors import UserError
from prl.config.schema import RunConfig

SECTIONS = ("quantization_config", "compression_config")  # of config.json; the second is of older files
E4M3_BITS, INT4_BITS, MX_GROUP = 8, 4, 32


@dataclass(frozen=True)
class Quantisation:
    """Numbers of few bits, and a scale for each block of them. A matrix X is the tensors X + `stored` and X + `scale`.

    numbers: e4m3, eight bits each; int4, eight in an int32, the first in the lowest bits, each 8 too large; mxfp4
        (OCP Microscaling Formats 1.0), two in a byte, the first in the lower half.
    block: rows and columns that share a scale; 0: all there are.
    is_transposed: stacked matrices whose files have the other order of dimensions than the model (gpt-oss).
    """

    numbers: Literal["e4m3", "int4", "mxfp4"]
    block: tuple[int, int]
    stored: str = ""
    scale: str = "_scale"
    is_transposed: bool = False


def section_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a config.json says of quantisation, also of the text model within a larger one."""
    places = [place for place in (config, config.get("text_config")) if isinstance(place, Mapping)]
    found = [place[name] for place in places for name in SECTIONS if place.get(name)]
    return dict(found[0]) if found else None


def without_section(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of the same model in numbers that stand for themselves."""
    rest = {key: value for key, value in config.items() if key not in SECTIONS}
    return {key: without_section(value) if key == "text_config" and value else value for key, value in rest.items()}


def quantisation_of(config: Mapping[str, Any], file: Path) -> Quantisation | None:
    """None where weights are what they are.

    Args:
        file: where the config is from, for the message.

    Raises:
        UserError: for a quantisation that is not read.
    """
    try:
        section = section_of(config)
        return None if section is None else _read(section, file)
    except (AttributeError, TypeError, ValueError) as error:
        raise _refused(file, f"what is said of it is of another form: {error}") from error


def _read(section: Mapping[str, Any], file: Path) -> Quantisation:
    method = section.get("quant_method")
    if method == "fp8":
        return _block_fp8(section, file)
    if method == "compressed-tensors":
        return _compressed(section, file)
    if method == "mxfp4":
        return Quantisation("mxfp4", (1, MX_GROUP), stored="_blocks", scale="_scales", is_transposed=True)
    raise _refused(file, f"quant_method={method}")


def sends_weights(config: RunConfig) -> bool:
    """Whether vLLM's engines of this run begin with weights of a policy that is trained."""
    of_a_policy = config.job in ("rl", "inference") or (config.job == "eval" and config.eval.run is not None)
    return of_a_policy and config.inference.engine == "vllm" and not config.inference.urls


def wants_a_copy(run: RunConfig, config: Mapping[str, Any], directory: Path) -> bool:
    """Whether vLLM would load the checkpoint in `directory`, with this config.json, in another form than this run sends
    weights. Raises UserError for a quantisation that is not read.

    Where weights come in blocks of FP8, vLLM loads none, and goes by what it is told of their form.
    """
    is_quantised = quantisation_of(config, directory / "config.json") is not None
    return (is_quantised and not sends_blocks(run)) or is_part_of_a_larger_model(config)


def local_copy_wanted(config: RunConfig) -> Path | None:
    """model.path where it is a directory of which this run's engines want a copy in the form that they are sent."""
    directory = Path(config.model.path) if config.model.path else None
    if directory is None or not sends_weights(config) or not (directory / "config.json").is_file():
        return None
    try:
        said = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):  # the roles will say so
        return None
    return directory if isinstance(said, dict) and wants_a_copy(config, said, directory) else None


def _block_fp8(section: Mapping[str, Any], file: Path) -> Quantisation:
    """DeepSeek-V3's format (arXiv:2412.19437, section 3.3), which Qwen and GLM have taken over."""
    block = section.get("weight_block_size")
    known = {"fmt": ("e4m3", "float8_e4m3fn", None), "scale_fmt": ("ue8m0", None)}
    odd = [f"{key}={section[key]}" for key, values in known.items() if section.get(key) not in values]
    if not isinstance(block, list | tuple) or len(block) != 2 or min(map(int, block)) < 1:
        odd.append(f"weight_block_size={block}")
    if odd:
        raise _refused(file, f"quant_method=fp8 with {', '.join(odd)}")
    assert block is not None
    return Quantisation("e4m3", (int(block[0]), int(block[1])), scale="_scale_inv")


def _compressed(section: Mapping[str, Any], file: Path) -> Quantisation:
    """compressed-tensors: one scheme for all that is not in its list `ignore`."""
    groups = list((section.get("config_groups") or {}).values())
    formats = {group.get("format") or section.get("format") for group in groups}
    schemes = [dict(group.get("weights") or {}) for group in groups]
    shown = f"quant_method=compressed-tensors with format={' and '.join(sorted(map(str, formats)))}"
    odd = [key for key in ("kv_cache_scheme", "sparsity_config", "transform_config") if section.get(key)]
    odd += ["output_activations"] if any(group.get("output_activations") for group in groups) else []
    if odd or len(formats) != 1:
        raise _refused(file, f"{shown} and {', '.join(odd) or 'several formats'}")
    read = [_scheme(str(format), weights) for format in formats for weights in schemes]
    if None in read or len(set(read)) != 1:
        told = "; ".join(
            ", ".join(f"{key}={value}" for key, value in weights.items() if value is not None) for weights in schemes
        )
        raise _refused(file, f"{shown}, weights {told}")
    assert read[0] is not None
    return read[0]


def _scheme(form: str, weights: Mapping[str, Any]) -> Quantisation | None:
    """None for one that is not read."""
    kind = (form, weights.get("num_bits"), weights.get("type", "int"))
    if not weights.get("symmetric", True) or weights.get("actorder") or weights.get("dynamic"):
        return None
    strategy, group = weights.get("strategy"), int(weights.get("group_size") or 0)
    blocks: dict[Any, tuple[int, int]] = {"channel": (1, 0)} | ({"group": (1, group)} if group > 0 else {})
    if kind == ("pack-quantized", INT4_BITS, "int") and strategy in blocks:
        return Quantisation("int4", blocks[strategy], stored="_packed")
    if kind == ("mxfp4-pack-quantized", INT4_BITS, "float") and (strategy, group) == ("group", MX_GROUP):
        return Quantisation("mxfp4", (1, MX_GROUP), stored="_packed")
    block = weights.get("block_structure")
    blocks = {"channel": (1, 0), "tensor": (0, 0)}
    if isinstance(block, list | tuple) and len(block) == 2 and min(map(int, block)) > 0:
        blocks["block"] = (int(block[0]), int(block[1]))
    is_fp8 = form in ("float-quantized", "naive-quantized") and kind[1:] == (E4M3_BITS, "float")
    return Quantisation("e4m3", blocks[strategy]) if is_fp8 and strategy in blocks else None


def _refused(file: Path, what: str) -> UserError:
    return UserError(
        f"The checkpoint is quantised in a way that is not read here: {what}.",
        where=f"{file}, quantization_config",
        why="weights are trained and sent to engines in bfloat16 or float32. Dequantised on reading are FP8 (fp8 with "
        "weight_block_size; compressed-tensors' float-quantized), compressed-tensors' pack-quantized INT4, symmetric "
        "and in groups, and MXFP4",
        fix="model.path= the bfloat16 or block FP8 checkpoint of the same model; an engine may still quantise what it "
        "is sent: inference=vllm inference.quantization=fp8",
    )
