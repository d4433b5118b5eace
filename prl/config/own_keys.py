"""Keys in a file of the user's own, or of a site, that the schema has not: which line of which file says them.

Told before composition, for afterwards nobody knows which file a key came from, and the remedy is there.
"""

from __future__ import annotations

from collections.abc import Iterator

import yaml
from omegaconf._utils import get_yaml_loader

from prl.config.hydra_keys import refused_hydra_key
from prl.config.overrides import nearest

LAUNCHER_SLURM = "hydra.launcher.slurm"


def unknown_keys(text: str, package: str) -> Iterator[tuple[str, str | None, int]]:
    """Each, in full, with the key that was probably meant, and its line.

    Args:
        text: of a file that can be read and holds a mapping.
        package: dotted, below which its keys go; "" for the top.
    """
    root = yaml.compose(text, Loader=get_yaml_loader())
    if not isinstance(root, yaml.MappingNode):
        return
    said = [part for part in _below(root, package) if part[1].value != "defaults" and part[0].split(".")[0] != "hydra"]
    if said:
        yield from _not_in_the_schema(said, package)
    yield from _of_the_launcher(root, package)


def refused_keys_of_hydra(text: str, package: str) -> Iterator[tuple[str, str, str, int]]:
    """Key, why it is refused, what to say instead and its line, of those below `hydra` that do nothing in prl.

    Args:
        text, package: as of `unknown_keys`.
    """
    root = yaml.compose(text, Loader=get_yaml_loader())
    said = _below(root, package) if isinstance(root, yaml.MappingNode) else []
    while said:
        key, name, value = said.pop(0)
        told = refused_hydra_key(key) if key.startswith("hydra.") else None
        if told is not None:
            yield key, *told, name.start_mark.line + 1
        elif key.split(".")[0] == "hydra" and isinstance(value, yaml.MappingNode):
            said = [*_below(value, key), *said]


def _not_in_the_schema(
    said: list[tuple[str, yaml.Node, yaml.Node]], package: str
) -> Iterator[tuple[str, str | None, int]]:
    from prl.config.keys import is_group, schema_keys  # pydantic: a file without keys of a run does without it

    known = set(schema_keys())
    takes_any = package and not (package in known and is_group(package))
    while said and not takes_any:
        key, name, value = said.pop(0)
        if key not in known:
            yield key, nearest(key, known), name.start_mark.line + 1
        elif is_group(key) and isinstance(value, yaml.MappingNode):
            said = [*_below(value, key), *said]


def _of_the_launcher(root: yaml.MappingNode, package: str) -> Iterator[tuple[str, str | None, int]]:
    """Below hydra.launcher.slurm, whatever the launcher: the other keys of the launcher depend on its choice."""
    found = [(root, package)]
    for name in LAUNCHER_SLURM.split("."):
        found = [
            (value, key)
            for node, place in found
            if isinstance(node, yaml.MappingNode)
            for key, _, value in _below(node, place)
            if key.rsplit(".", 1)[-1] == name
        ]
    said = [
        line
        for node, key in found
        if key == LAUNCHER_SLURM and isinstance(node, yaml.MappingNode)
        for line in _below(node, key)
    ]
    if said:
        from prl.config.schema import SlurmConfig  # as above

        known = {f"{LAUNCHER_SLURM}.{field}" for field in SlurmConfig.model_fields}
        for key, name, _ in said:
            if key not in known:
                yield key, nearest(key, known), name.start_mark.line + 1


def _below(node: yaml.MappingNode, place: str) -> list[tuple[str, yaml.Node, yaml.Node]]:
    """Dotted key, its node and the one of its value."""
    prefix = f"{place}." if place else ""
    return [(f"{prefix}{name.value}", name, value) for name, value in node.value if name.tag == "tag:yaml.org,2002:str"]
