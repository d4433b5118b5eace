"""What Hydra must know before it composes: the groups `memory` and `sweep_file`, and the resolvers of our YAML.

`memory=tight` is a second name of `memory_recipe=tight`: the selector group `memory` has an empty node for each file of
`conf/memory_recipe/`, and the defaults list says `- memory_recipe: ${memory}`. The nodes go to the global package: a
group at package `memory` would add a key of that name.

`+sweep=seeds` chooses `sweeps/seeds.yaml`. Were the group called `sweep`, Hydra would take every `sweep=NAME` for a
choice of it, and the key `sweep`, which names a sweep, could not be set; were it called `sweeps`, as the folder, files
of a `sweeps/` of the user's own would be choices of it without the name. So `+sweep=` is a second name of
`+sweep_file=`.

`inference.vllm.ARGUMENT=value` sets any argument of vLLM without a `+`, and so does `env.args.ARGUMENT=value` of an
environment of verifiers.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf, open_dict

from prl.config.errors import ConfigError, UserError
from prl.config.locate import config_groups, sweep_files
from prl.config.overrides import OPEN_NODES, SWEEP_GROUP, choices_of, name_of_axis, parse, swept_keys
from prl.config.search_path import KEY
from prl.config.unreadable import UNREADABLE, unreadable

SWEEP_OPTION = "+sweep="
NAMES = {  # of the user -> of Hydra
    SWEEP_OPTION: f"+{SWEEP_GROUP}=",
    **{node: f"++{node}" for node in OPEN_NODES},
    **{f"{plus}{KEY}=": f"{KEY}=" for plus in ("+", "++")},  # which Hydra takes without only
}


def register() -> None:
    """Make all of it known to Hydra, which reads this process's arguments itself. Safe to call again."""
    # ${first_set:${sweep},...}: the first value that is not null (oc.select falls back for absent keys only)
    OmegaConf.register_new_resolver("first_set", _first_set, replace=True)
    OmegaConf.register_new_resolver("row_tokens", _row_tokens, replace=True)
    OmegaConf.register_new_resolver("sum", lambda *values: sum(values), replace=True)
    if not OmegaConf.has_resolver("sweep_id"):
        OmegaConf.register_new_resolver("sweep_id", lambda: "unnamed")
    store = ConfigStore.instance()
    for group in ("memory", SWEEP_GROUP):  # the store is the process's, and directories may be others by now
        store.repo.pop(group, None)
    for choice in config_groups()["memory_recipe"]:
        store.store(group="memory", name=choice, node={}, package="_global_", provider="prl")
    _register_sweeps()
    sys.argv = in_hydras_terms(sys.argv)


def in_hydras_terms(lines: list[str]) -> list[str]:
    """The overrides with `+sweep=NAME` as a choice of a group, and new keys of open nodes as additions."""
    return [_renamed(line) for line in lines]


def _renamed(line: str) -> str:
    return next((line.replace(old, new, 1) for old, new in NAMES.items() if line.startswith(old)), line)


def _register_sweeps() -> None:
    """Make the files of sweeps/ the choices of a group. Each names the sweep after itself."""
    for name, node in _read_sweeps(tuple(sweep_files().values())).items():
        if isinstance(node, DictConfig):
            ConfigStore.instance().store(group=SWEEP_GROUP, name=name, node=node, package="_global_", provider="prl")


def unreadable_sweep(lines: list[str]) -> ConfigError | None:
    """Of the file of a sweep that is chosen and cannot be read; files that are not chosen are let be."""
    files = sweep_files()
    chosen = [
        name
        for override in parse(lines)
        if override.get_key_element() in (SWEEP_OPTION.rstrip("="), f"+{SWEEP_GROUP}")
        for name in choices_of(override)
        if name in files
    ]
    read = _read_sweeps(tuple(files.values())) if chosen else {}
    return next((node for name in chosen if isinstance(node := read[name], ConfigError)), None)


@functools.cache
def _read_sweeps(files: tuple[Path, ...]) -> dict[str, DictConfig | ConfigError]:
    """Each, or why it cannot be read."""
    found: dict[str, DictConfig | ConfigError] = {}
    for path in files:
        try:
            node = OmegaConf.load(path)
        except UNREADABLE as error:
            found[path.stem] = unreadable(error, path) or ConfigError([_no_mapping(path)])
            continue
        if not isinstance(node, DictConfig):
            found[path.stem] = ConfigError([_no_mapping(path)])
            continue
        with open_dict(node):
            node["sweep"] = path.stem
        found[path.stem] = node
    return found


def _no_mapping(path: Path) -> UserError:
    why, fix = "it holds no keys with values", "hydra: {sweeper: {params: {seed: '1,2'}}}"
    return UserError(f"{path.name} is no sweep.", where=str(path), why=why, fix=fix)


def name_sweep(config_name: str, lines: list[str]) -> None:
    """Name this process's sweep after what it sweeps, for ${sweep_id:}: the same command finds its points again."""
    from prl.config.point import short_hash

    keys = "-".join(name_of_axis(key).rsplit(".", 1)[-1] for key in swept_keys(lines))
    identity = short_hash([config_name, sorted(lines)])
    name = f"{keys[:60]}-{identity}" if keys else identity
    OmegaConf.register_new_resolver("sweep_id", lambda: name, replace=True)


def _row_tokens(doc_len: int | list[int]) -> int:
    """Tokens of a row that holds one document of that length, or all documents of a list."""
    return doc_len if isinstance(doc_len, int) else sum(doc_len) or 1  # of an empty list, which is refused


def _first_set(*values: object) -> object:
    return next((value for value in values if value is not None), None)
