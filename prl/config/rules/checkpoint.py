"""Rules about the config.json of model.path, where it is at hand: a directory, or what the hub's cache has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prl.config.auto_card import FREE
from prl.config.cards import card_to_hf_config, facts_of, text_config
from prl.config.config_json import OF_ALL, card_of_impl, check_card, read_config_json
from prl.config.errors import UserError
from prl.config.foreign import is_transformers_code, names_no_model, not_trainable
from prl.config.hub import cached_snapshot
from prl.config.keys import as_override
from prl.config.schema import RunConfig
from prl.config.schema_jobs import WHOLE_RUNS
from prl.config.world import World


def checkpoint_at_hand(config: RunConfig) -> Path | None:
    """The directory of model.path's config.json; None where nobody begins with it, or it is still to come."""
    path, bench = config.model.path, config.bench
    is_drawn = bench is not None and bench.random_weights and bench.target not in WHOLE_RUNS
    if path is None or is_drawn or (config.job == "eval" and config.eval.run is not None):
        return None
    if Path(path).is_dir():
        return Path(path)
    snapshot = cached_snapshot(path, "model")
    return snapshot if snapshot is not None and (snapshot / "config.json").is_file() else None


def names_no_family(config: RunConfig) -> bool:
    """Whether config.json is at hand and has no model_type."""
    directory = checkpoint_at_hand(config)
    try:
        return directory is not None and not read_config_json(directory).get("model_type")
    except UserError:  # told by `checkpoint_fits_the_card`
        return False


def checkpoint_fits_the_card(config: RunConfig, world: World) -> Iterator[UserError]:
    """As the roles will find it: engines of prl/models have to know every layer, whatever trains."""
    directory = checkpoint_at_hand(config)
    if directory is None:
        return
    ours = world.has_engines and config.inference.engine == "torch" and config.model.card.is_native
    try:
        check_card(directory, config.model.card if ours else card_of_impl(config.model))
    except UserError as error:
        yield error


def without_contradictions(found: list[UserError], config: RunConfig) -> list[UserError]:
    """The same errors without those remedies that would say of the checkpoint what its config.json denies."""
    directory = checkpoint_at_hand(config)
    if directory is None or not any("model.card." in error.fix for error in found):
        return found
    try:
        facts = facts_of(read_config_json(directory))
    except (UserError, ValueError, TypeError, KeyError):  # told by `checkpoint_fits_the_card`
        return found
    bound = {key: as_override(value) for key, value in facts.items() if key not in FREE}
    if not card_of_impl(config.model).is_native and config.choices.get("model") != "auto":
        bound = {key: value for key, value in bound.items() if key in OF_ALL}
    return [_of_this_checkpoint(error, bound, directory / "config.json") for error in found]


def _of_this_checkpoint(error: UserError, bound: Mapping[str, str], file: Path) -> UserError:
    def denies(word: str) -> bool:
        key, _, value = word.removeprefix("model.card.").partition("=")
        return word.startswith("model.card.") and bound.get(key, value) != value

    kept = [words for words in error.remedies if not any(map(denies, words))]
    if len(kept) == len(error.remedies):
        return error
    others = [" ".join(words) for words in kept]
    return UserError(
        error.what,
        where=f"{error.where}; {file}",
        why=error.why,
        fix=", or ".join([*others, "another checkpoint: model.path=/path/to/it"]),
    )


def transformers_layers_can_be_trained(config: RunConfig, world: World) -> Iterator[UserError]:
    """As far as config.json says so, or the card where it is not at hand."""
    model = config.model
    if not is_transformers_code(model) or model.impl == "custom":
        return
    directory = checkpoint_at_hand(config)
    where = f"model.impl={model.impl}, model.path={model.path}"
    row = max(config.seq_len, config.warm_start.seq_len if config.warm_start is not None else 0)
    fields: dict[str, Any] = {}
    if directory is not None:
        try:
            fields = dict(text_config(read_config_json(directory)))
        except UserError:  # told by `checkpoint_fits_the_card`
            return
        if not fields.get("model_type"):
            yield names_no_model(str(directory / "config.json"))
            return
    elif not model.card.is_native:
        return
    if model.card.is_native:
        fields = fields or card_to_hf_config(model.card)
        fields["hybrid_override_pattern"] = model.card.hybrid_override_pattern
    if (error := not_trainable(fields, where, row)) is not None:
        yield error
