"""`model=auto`: the card of a checkpoint from its config.json."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from prl.config.cards import facts_of
from prl.config.errors import ConfigError, UserError
from prl.config.families import FAMILIES, Family
from prl.config.foreign import WITHOUT_ATTENTION, carries_state
from prl.config.hub import fetch_config_json
from prl.config.keys import as_override
from prl.config.quantised import quantisation_of
from prl.config.schema_model import OLD_CONTEXT

UNNAMED = "auto"
NO_PATH = UserError(
    "model=auto needs a checkpoint.",
    where="model.path=null",
    why="its config.json is the card",
    fix="model.path=/path/to/a/Hugging-Face/checkpoint, or a name on the hub",
)
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")  # those of every model
FREE = ("max_position_embeddings",)  # what a user may say otherwise than the checkpoint does


def complete_card(model: dict[str, Any]) -> None:
    """Fill what the card leaves to the checkpoint, null in conf/model/auto.yaml, in place.

    Args:
        model: group `model` as composed.

    Raises:
        ConfigError: for a config.json that is not to be had, and keys of the user's that contradict it.
    """
    card, path = model.get("card"), model.get("path")
    if not isinstance(card, dict) or (card.get("family") is not None and not _is_left(card, path)):
        return
    if not isinstance(path, str):
        raise ConfigError([NO_PATH])
    try:
        facts = _facts(path)
    except UserError as error:
        raise ConfigError([error]) from error
    said = {key: value for key, value in card.items() if value is not None}
    bound = {key for key in said if key in facts and key not in FREE}
    wrong = [key for key in said if key in bound and not _agrees(key, said[key], facts)]
    if wrong:
        raise ConfigError([_contradiction(key, said[key], facts[key], path) for key in wrong])
    if lacking := [key for key in SIZES if key not in said and key not in facts]:
        raise ConfigError([_silent(lacking, facts["family"], path, _kind(path))])
    family = FAMILIES.get(facts["family"], Family(""))
    usual = {"cp_styles": family.cp_styles, "ac_targets": family.ac_targets}
    model["card"] = {**usual, **facts, **{key: value for key, value in said.items() if key not in bound}}
    if model.get("name") == UNNAMED:
        model["name"] = Path(path).name


def _is_left(card: dict[str, Any], path: Any) -> bool:
    """Whether a card with a family leaves sizes to a checkpoint."""
    return isinstance(path, str) and any(card.get(key, 1) is None for key in ("num_hidden_layers", "hidden_size"))


def _file(path: str) -> Path:
    directory = Path(path).expanduser()
    return directory / "config.json" if directory.is_dir() else fetch_config_json(path)


def _kind(path: str) -> str:
    """model_type of a config.json that was read."""
    return str(json.loads(_file(path).read_text()).get("model_type"))


@functools.cache
def _facts(path: str) -> dict[str, Any]:
    file = _file(path)
    if (alone := adapters_alone(file.parent)) is not None:
        raise alone
    try:
        config = json.loads(file.read_text())
        if not isinstance(config, dict):
            raise TypeError(f"it is a {type(config).__name__}, where an object belongs")
        quantisation_of(config, file)
        return facts_of(config)
    except json.JSONDecodeError as error:
        raise _unreadable(file, str(error)) from error
    except ValueError as error:  # in words of ours
        raise cannot_be(file, str(error)) from error
    except (OSError, TypeError, KeyError, AttributeError) as error:
        raise _unreadable(file, f"{type(error).__name__}: {error}") from error


def adapters_alone(directory: Path) -> UserError | None:
    """Why a directory is no checkpoint, if it has adapters (PEFT) and not the model that they belong to."""
    file = directory / "adapter_config.json"
    if not file.is_file() or (directory / "config.json").exists():
        return None
    try:
        base = str(dict(json.loads(file.read_text()))["base_model_name_or_path"])
    except (OSError, ValueError, TypeError, KeyError):
        base = "THEIR_MODEL"
    return UserError(
        "There are adapters, and not the model that they belong to.",
        where=str(file),
        why="a run begins with whole weights",
        fix=f"model.path={base}; to begin with the adapters, add them to it with PEFT (merge_and_unload) and save that",
    )


def cannot_be(file: Path, why: str) -> UserError:
    return UserError(
        "config.json of the checkpoint says what cannot be.",
        where=str(file),
        why=why,
        fix="correct config.json, or model.path=/path/to/another/checkpoint",
    )


def _unreadable(file: Path, why: str) -> UserError:
    usual = "model.path=/path/to/a/Hugging-Face/checkpoint, or a card of yours: model=qwen3_4b model.card.KEY=VALUE"
    odd, instead = meant_by(file.parent) or (why, usual)
    return UserError("config.json of the checkpoint cannot be read.", where=str(file), why=odd, fix=instead)


def meant_by(directory: Path) -> tuple[str, str] | None:
    """What a directory is that has no config.json, and what to give instead; None where nobody knows."""
    for run in (directory, directory.parent.parent if directory.parent.name == "checkpoints" else directory):
        if (run / "plan.json").is_file():
            what = "the directory is a run's" if run == directory else "the directory is a checkpoint of a trainer"
            return what, f"model.path={run / 'export'}; to evaluate: eval.run={run} without model.path"
    if (directory / "adapter" / "adapter_config.json").is_file():
        merged = "memory_recipe.lora.export_merged=true leaves the whole model there"
        return "the export has an adapter alone", f"merge it by PEFT (merge_and_unload) and save that; {merged}"
    return None


def _silent(lacking: list[str], family: str, path: str, kind: str) -> UserError:
    if kind in WITHOUT_ATTENTION:
        odd = carries_state(kind, "", f"model.path={path}")
        numbers = " ".join(f"model.card.{key}=1" for key in lacking)
        return UserError(odd.what, where=odd.where, why=odd.why, fix=f"{odd.fix}; to sample alone: {numbers}")
    return UserError(
        f"config.json of the checkpoint does not say {', '.join(lacking)}.",
        where=f"model.path={path}",
        why="it is a card of sizes that must be known"
        + ("; of other families the names are those that transformers knows, at its top level" * (family == "other")),
        fix=f"{' '.join(f'model.card.{key}=NUMBER' for key in lacking)}, if it has them under other names; or a "
        "checkpoint of a language model alone",
    )


def _agrees(key: str, said: Any, facts: dict[str, Any]) -> bool:
    """Silence about the context from before a stretched one agrees with the checkpoint's."""
    fact = _plain(facts[key])
    if key == "rope_scaling" and isinstance(fact, dict) and isinstance(said, dict):
        said = {OLD_CONTEXT: fact.get(OLD_CONTEXT)} | said
        fact = {OLD_CONTEXT: None} | fact
    return bool(_plain(said) == fact)


def _plain(value: Any) -> Any:
    dumped = value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else value
    return list(dumped) if isinstance(dumped, tuple) else dumped


def _contradiction(key: str, said: Any, fact: Any, path: str) -> UserError:
    return UserError(
        f"The checkpoint has {key}={as_override(fact)}, not {as_override(said)}.",
        where=f"model.card.{key}={as_override(said)}, model.path={path}",
        why="its config.json says so, and its weights were trained with that",
        fix=f"model.card.{key}=null, which is what the checkpoint has",
    )
