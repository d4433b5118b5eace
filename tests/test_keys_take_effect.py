"""No key without effect: changed, each changes what can be seen, is refused, or has a test of its own."""

import functools
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from key_contexts import COMPANIONS, CONTEXTS, OTHERS, PERMITS, REFUSED
from key_effects import differences, observe
from keys_measured import MEASURED

from prl.config import ConfigError, compose
from prl.config.keys import as_override, field_of, schema_keys
from prl.config.schema import Group

TESTS = Path(__file__).parent
ALL = set(schema_keys())
KEYS = sorted(key for key in ALL if not any(other.startswith(key + ".") for other in ALL))


def context_of(key: str) -> tuple[str, tuple[str, ...]]:
    return CONTEXTS[max((prefix for prefix in CONTEXTS if key.startswith(prefix)), key=len)]


@functools.cache
def base(job: str, overrides: tuple[str, ...]) -> tuple[Any, dict[str, Any]]:
    config = compose(list(overrides), job)
    return config, observe(config)


def value_at(config: Any, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)


def another(key: str, value: Any) -> str:
    """A value that the key's type takes and that is not this one."""
    if key in OTHERS:
        return OTHERS[key]
    if isinstance(value, bool):
        return as_override(not value)
    words = re.findall(r"Literal\[(.*?)\]", str(field_of(key).annotation))
    options = [word.strip(" '") for words_of in words for word in words_of.split(",")]
    if any(option != str(value) for option in options):
        return next(option for option in options if option != str(value))
    if isinstance(value, int):
        return str(value * 2 or 1)
    if isinstance(value, float):
        return str(value / 2 or 0.5)
    if isinstance(value, tuple):
        return as_override([item / 2 if isinstance(item, float) else item for item in value] or [1])
    numeric = any(kind in str(get_args(field_of(key).annotation)) for kind in ("int", "float"))
    return "1" if numeric else "other"


def effect_of(key: str) -> str | None:
    """What changes with the key; None for nothing that can be seen here, "refused" for a value that a rule refuses."""
    job, overrides = context_of(key)
    config, seen = base(job, overrides)
    value = another(key, value_at(config, key))
    force = "++" if value.startswith("{") else ""  # keys that the YAML has not
    try:
        other = compose([*overrides, f"{force}{key}={value}", *COMPANIONS.get(key, ())], job)
    except ConfigError as error:
        told = error.render()
        assert PERMITS.get(key, key) in told, f"refused, but not by name: {told}"
        assert "is not valid" not in told, f"the test has a value of another type: {told}"
        return "refused"
    assert not isinstance(value_at(other, key), Group)
    assert value_at(other, key) != value_at(config, key), "the test must change it"
    return next(differences(seen, observe(other)), None)


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_every_key_changes_something_that_is_seen_or_measured(key: str) -> None:
    """In a job in which it may be changed; refused are only those that nobody may set at all."""
    effect = effect_of(key)
    assert (effect == "refused") == (key in REFUSED or key in PERMITS), effect
    assert effect is not None or key in MEASURED, f"nothing changes with {key}"


@pytest.mark.parametrize("key", sorted(MEASURED))
def test_the_named_test_exists_and_has_to_do_with_the_key(key: str) -> None:
    file, _, name = MEASURED[key].partition("::")
    assert key in KEYS
    text = (TESTS / file).read_text()
    found = re.search(rf"((?:^@.*\n(?:^[ )\]].*\n)*)*)^\s*(async )?def {name}\(", text, re.MULTILINE)
    assert found, MEASURED[key]
    assert "exhaustive" not in found[1], f"{MEASURED[key]} does not run in CI"
