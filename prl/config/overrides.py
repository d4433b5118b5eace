"""Command-line overrides before composition: which were given, which are swept, and what is wrong with them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from prl.config.errors import UserError
from prl.config.hydra_setup import OPEN_NODES
from prl.config.locate import config_groups


def parse(lines: Iterable[str]) -> list[Override]:
    """Parsed overrides. Raises UserError for a line that is no override."""
    parser = OverridesParser.create()
    parsed = []
    for line in lines:
        try:
            parsed.append(parser.parse_override(line))
        except HydraException as error:
            raise UserError(
                f"Cannot read the override {line!r}.",
                why=str(error).splitlines()[0],
                fix="write key=value, key=[a,b] for a list, or -m key=a,b to sweep; quote what the shell would eat",
            ) from error
    return parsed


def choices_of(override: Override) -> list[str]:
    """The group choices that an override names: of one value, of a list, of every point of a sweep."""
    values = [override.value()] if not override.is_sweep_override() else _sweep_values(override)
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return [str(item) for item in flat if item is not None]


def _sweep_values(override: Override) -> list[object]:
    return list(override.sweep_iterator()) if override.is_discrete_sweep() else []


def swept_keys(lines: Iterable[str]) -> list[str]:
    """Keys that take several values in a multirun, in the order given."""
    return [override.get_key_element() for override in parse(lines) if override.is_sweep_override()]


def alias_conflict(lines: Iterable[str]) -> list[UserError]:
    """`memory` and `memory_recipe` name the same thing: both at once is a mistake."""
    values = {o.key_or_group: ",".join(choices_of(o)) for o in parse(lines) if o.key_or_group in _ALIASES}
    if set(values) != _ALIASES:
        return []
    return [
        UserError(
            f"memory={values['memory']} and memory_recipe={values['memory_recipe']} are both given.",
            where="memory, memory_recipe",
            why="memory= is a short name of memory_recipe=",
            fix=f"keep one of them, say memory={values['memory']}",
        )
    ]


_ALIASES = {"memory", "memory_recipe"}


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known key that `word` most probably meant: the same last part elsewhere, or a similar spelling."""
    known = sorted(known)
    last = word.rsplit(".", 1)[-1]
    same_last = [key for key in known if key.rsplit(".", 1)[-1] == last]
    if same_last:
        return min(same_last, key=lambda key: (-difflib.SequenceMatcher(None, word, key).ratio(), len(key)))
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return close[0]
    by_last = {key.rsplit(".", 1)[-1]: key for key in known}
    close = difflib.get_close_matches(last, list(by_last), n=1, cutoff=0.8)  # short names are alike by chance
    return by_last[close[0]] if close else None


def unknown_key(key: str, known: Iterable[str]) -> UserError:
    guess = nearest(key, known)
    return UserError(
        f"There is no key {key!r}." + (f" Did you mean {guess!r}?" if guess else ""),
        where=key,
        why="every key must exist in the schema, so that a typo cannot pass unseen",
        fix=f"{guess}=..." if guess else "see all keys: python -m prl.rl --cfg job",
    )


def unknown_choice(group: str, choice: str, choices: list[str]) -> UserError:
    close = difflib.get_close_matches(choice, choices, n=1, cutoff=0.5)
    return UserError(
        f"There is no choice {choice!r} in group {group!r}." + (f" Did you mean {close[0]!r}?" if close else ""),
        where=f"{group}={choice}",
        why=f"conf/{group} has: {', '.join(choices)}",
        fix=f"{group}={close[0] if close else choices[0]}",
    )


def diagnose(lines: Iterable[str], known_keys: set[str], used_groups: set[str]) -> list[UserError]:
    """Everything wrong with overrides that Hydra refused, all at once.

    Args:
        lines: the overrides as typed.
        known_keys: dotted keys of the composed config of this job.
        used_groups: the groups in the defaults list of this job.
    """
    lines = list(lines)
    groups = config_groups()
    found: list[UserError] = []
    for override in parse(lines):
        key = override.key_or_group
        if key.split(".")[0] == "hydra" or key.startswith(("hydra/", *OPEN_NODES)):
            continue
        if key in used_groups:
            found += [unknown_choice(key, c, groups[key]) for c in choices_of(override) if c not in groups[key]]
        elif key not in known_keys:
            found.append(unknown_key(key, known_keys | used_groups))
    return found + alias_conflict(lines)
