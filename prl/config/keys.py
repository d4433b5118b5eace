"""The dotted keys of the schema."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from prl.config.schema import Group, RunConfig


def _group_in(annotation: Any) -> type[Group] | None:
    """The Group class of an annotation such as `SftConfig | None`, or None."""
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return next((option for option in options if isinstance(option, type) and issubclass(option, Group)), None)


def field_of(key: str) -> FieldInfo:
    """The schema's field of a dotted key. Raises KeyError for a key that it has not."""
    *path, last = key.split(".")
    group: type[Group] | None = RunConfig
    for name in path:
        group = None if group is None else _group_in(group.model_fields[name].annotation)
    if group is None:
        raise KeyError(key)
    return group.model_fields[last]


def as_override(value: Any) -> str:
    """A value as Hydra's command line takes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return f"[{','.join(map(as_override, value))}]"
    if isinstance(value, BaseModel) and not isinstance(value, Group):  # one value, though of several numbers
        value = value.model_dump(exclude_none=True)
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{as_override(inner)}' for key, inner in value.items())}}}"
    return str(value) or "''"


def is_group(key: str) -> bool:
    """Whether there are keys below a dotted key."""
    return _group_in(field_of(key).annotation) is not None


def schema_keys(group: type[Group] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Dotted keys, those of groups included: `optim`, `optim.lr`, `optim.schedule.type`, ..."""
    for name, field in group.model_fields.items():
        yield prefix + name
        nested = _group_in(field.annotation)
        if nested is not None:
            yield from schema_keys(nested, f"{prefix}{name}.")
