"""Records that a disk, a person or another version may have damaged: what has the wrong type counts as not said."""

from __future__ import annotations

import sys
from typing import Any


def is_number(value: Any) -> bool:
    """A finite one that a float holds; true and false are none."""
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and -sys.float_info.max <= value <= sys.float_info.max


def shaped(value: Any, like: Any) -> Any:
    """`value` where it has the type of `like`, else `like`.

    Args:
        like: a value as it might be. A float also stands for whole numbers, None for a whole number or nothing; a list
            is like its one element, over and over, and what is not like it is left out. A dict names keys that are all
            there in the result; what `value` has beside them stays as it is.
    """
    if isinstance(like, dict):
        given = value if isinstance(value, dict) else {}
        return given | {key: shaped(given.get(key), own) for key, own in like.items()}
    if isinstance(like, list):
        kept = [one for one in value if _is_like(one, like[0])] if isinstance(value, list) else []
        return [shaped(one, like[0]) for one in kept]
    return value if _is_like(value, like) else like


def without_misfits(row: dict[str, Any], likes: dict[str, Any]) -> dict[str, Any]:
    """The row without those of the keys whose values are not like these; keys stay absent that were."""
    return {key: value for key, value in row.items() if key not in likes or _is_like(value, likes[key])}


def texts(value: Any) -> dict[str, str]:
    """A mapping of texts, such as what was swept; what is something else is left out."""
    given = value if isinstance(value, dict) else {}
    return {key: text for key, text in given.items() if isinstance(text, str)}


def _is_like(value: Any, like: Any) -> bool:
    if like is None:
        return value is None or (is_number(value) and isinstance(value, int))
    if isinstance(like, bool):
        return isinstance(value, bool)
    if isinstance(like, float):
        return is_number(value)
    if isinstance(like, int):
        return is_number(value) and isinstance(value, int)
    return isinstance(value, type(like))
