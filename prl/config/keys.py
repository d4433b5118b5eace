"""The dotted keys of the schema."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Any, Union, get_args, get_origin

from prl.config.schema import Group, RunConfig


def _group_in(annotation: Any) -> type[Group] | None:
    """The Group class of an annotation such as `SftConfig | None`, or None."""
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return next((option for option in options if isinstance(option, type) and issubclass(option, Group)), None)


def schema_keys(group: type[Group] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Dotted keys, those of groups included: `optim`, `optim.lr`, `optim.schedule.type`, ..."""
    for name, field in group.model_fields.items():
        yield prefix + name
        nested = _group_in(field.annotation)
        if nested is not None:
            yield from schema_keys(nested, f"{prefix}{name}.")
