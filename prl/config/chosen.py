"""What the chosen files of conf/ say, to tell it from what the user said beside them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from prl.config.keys import field_of
from prl.config.locate import SITE_GROUP, conf_dir, file_of_choice
from prl.config.schema import RunConfig

MISSING = object()
SITE = Path(SITE_GROUP, "default.yaml")  # in conf/, composed last


def said_by_user(config: RunConfig, key: str) -> bool:
    """Whether the value of a dotted key is none that the schema, the group's chosen file or the site's own says."""
    group, *path = key.split(".")
    value = functools.reduce(getattr, path, getattr(config, group))
    if value == field_of(key).default:
        return False
    conf = conf_dir()
    files = {conf / SITE: [group, *path]}
    if group in config.choices:
        files[file_of_choice(group, config.choices[group])] = path
    return all(value != _at(_file(file), place) for file, place in files.items())


def _at(content: Any, path: list[str]) -> Any:
    """What stands there, as a field of the schema holds it; MISSING where nothing does."""
    for name in path:
        content = content.get(name, MISSING) if isinstance(content, dict) else MISSING
    return tuple(content) if isinstance(content, list) else content


@functools.cache
def _file(path: Path) -> dict[str, Any]:
    """A file as plain data, with those that its defaults list names."""
    if not path.is_file():
        return {}
    own = OmegaConf.load(path)
    if not isinstance(own, DictConfig):  # a site's file in which nothing stands yet
        return {}
    names = [base for base in own.pop("defaults", []) if isinstance(base, str) and base != "_self_"]
    merged = OmegaConf.merge(*(OmegaConf.create(_file(path.parent / f"{name}.yaml")) for name in names), own)
    plain = OmegaConf.to_container(merged, resolve=False)
    assert isinstance(plain, dict), path
    return {str(key): value for key, value in plain.items()}
