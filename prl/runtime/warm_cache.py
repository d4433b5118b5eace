"""What a run finds in cache_dir, or has to make there: by its configuration, and by the files that this names."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prl.config.place_names import as_file_name
from prl.config.point import UNTRAINED, random_checkpoint_dir, short_hash, warm_start_key
from prl.config.quantised import local_copy_wanted
from prl.config.schema import RunConfig
from prl.runtime.directory.own_modules import files_of, find_own_modules, hash_of

PLAIN_FORMAT = 2  # of a checkpoint as engines want it; another number makes it anew
TARGET = "target.json"  # in the directory of the stage that writes it: where to


def warm_start_dir(config: RunConfig) -> Path:
    """Where the checkpoint of the warm start is kept, and found by later runs."""
    inputs = _describe_inputs(config)
    key = warm_start_key(config)
    return Path(config.cache_dir).expanduser() / "warm_start" / (f"{key}-{short_hash(inputs)}" if inputs else key)


def missing_in_cache(config: RunConfig) -> Path | None:
    """What a run has to make in cache_dir before it can begin; None where all is there, or nothing is needed."""
    if config.warm_start is not None:
        path = warm_start_dir(config)  # the model that it begins with is needed only to make it
    elif config.model.path is None:
        path = random_checkpoint_dir(config.model, config.cache_dir)
    elif (directory := local_copy_wanted(config)) is not None:
        path = plain_dir(config, directory)
    else:
        return None
    return None if path.is_dir() else path


def plain_dir(config: RunConfig, directory: Path) -> Path:
    """Where the checkpoint in `directory` is kept as engines want it: by the model's card and dtype, and its files, or
    the hub's commit of them.
    """
    if directory.parent.name == "snapshots":
        files: list[object] = [directory.parent.parent.name, directory.name]
    else:
        stats = [(file.name, file.stat()) for file in sorted(directory.iterdir()) if file.is_file()]
        files = [str(directory.resolve()), *([name, stat.st_size, stat.st_mtime_ns] for name, stat in stats)]
    card = config.model.card.model_dump(mode="json", exclude=UNTRAINED)
    key = short_hash([PLAIN_FORMAT, card, config.model.dtype, config.model.impl, files])
    return Path(config.cache_dir).expanduser() / "plain" / f"{as_file_name(config.model.name)}-{key}"


def _describe_inputs(config: RunConfig) -> list[Any]:
    """The files behind the names in a configuration: a relative path is another file elsewhere, and a file may be
    written anew. Data by names, sizes and times; modules of the user's own by what is in them.
    """
    assert config.warm_start is not None
    modules = find_own_modules(config.warm_start)
    described: list[Any] = [[name, hash_of(path)] for name, path in modules.items()]
    for name in _named_paths(config):
        for path in map(Path, sorted(glob.glob(os.path.expanduser(name))) or [os.path.expanduser(name)]):
            for file in files_of(path) if path.exists() else ():
                status = file.stat()
                inner = str(file.relative_to(path)) if path.is_dir() else file.name
                described.append([name, inner, status.st_size, status.st_mtime_ns])
    return described


def _named_paths(config: RunConfig) -> Iterator[str]:
    """Strings that may name files or directories here: of `args`, those that look like a path."""
    assert config.warm_start is not None
    data = config.warm_start.data
    plain = (config.model.path, config.model.tokenizer, data.source, data.val_source)
    yield from (name for name in plain if name is not None and not name.startswith("env:"))
    yield from (text for text in _strings(data.args) if os.sep in text)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)
