"""Directories with YAML of the user's own, beside conf/: `--config-dir DIR` and `hydra.searchpath=[DIR, ...]`.

Each may hold groups (`DIR/overlay/mine.yaml`: `+overlay=mine`), further choices of ours (`DIR/model/mine.yaml`:
`model=mine`) and sweeps (`DIR/sweeps/mine.yaml`: `-m +sweep=mine`). All that composes, completes and explains in this
process sees the same ones. A name that conf/ has is conf/'s.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from prl.config.errors import UserError

if TYPE_CHECKING:  # who reads runs has no need of Hydra
    from hydra.core.override_parser.types import Override

KEY = "hydra.searchpath"
MAX_DEPTH = 3  # of groups: a/b/c/choice.yaml
_added: list[Path] = []


def use_directories(config_dir: str | None, overrides: Iterable[Override]) -> None:
    """Of a command line: what --config-dir and hydra.searchpath say. Raises UserError for what is no directory."""
    overrides = list(overrides)
    asked = [] if config_dir is None else [("--config-dir", config_dir)]
    for override in overrides:
        if override.key_or_group == KEY and (value := override.value()) is not None:
            if not isinstance(value, list):
                raise _no_list(str(override.input_line), str(value))
            asked += [(KEY, str(entry)) for entry in value]
    found = [(where, _directory(where, name)) for where, name in asked]
    chosen = {override.key_or_group for override in overrides} | {"sweeps"}
    for where, path in found:
        _refuse_closed(where, path, chosen)
    _added[:] = dict.fromkeys(path for _, path in found)


def directories() -> tuple[Path, ...]:
    """Absolute paths, in the order in which they are searched; conf/, which comes first, is not among them."""
    return tuple(_added)


def yaml_files(root: Path) -> list[Path]:
    """The YAML files in a directory of configurations, no deeper than groups lie: it may be somebody's home."""
    found = []
    for folder, inner, names in os.walk(root):
        depth = len(Path(folder).relative_to(root).parts)
        inner[:] = [name for name in sorted(inner) if not name.startswith((".", "_")) and depth < MAX_DEPTH]
        found += [
            path for name in sorted(names) if name.endswith(".yaml") and os.path.isfile(path := Path(folder, name))
        ]
    return found


def state_of_files(conf: Path) -> tuple[object, ...]:
    """What differs once a file that may be composed is another: those in `conf` and in the directories beside it."""
    files = [(path, path.stat()) for root in (conf, *directories()) for path in yaml_files(root)]
    return directories(), *((path, stat.st_mtime_ns, stat.st_size) for path, stat in files)


def _directory(where: str, name: str) -> Path:
    if name.startswith("pkg://"):
        try:
            found = importlib.util.find_spec(name.removeprefix("pkg://"))
        except (ImportError, ValueError):  # of a package that it lies in, or of no name
            found = None
        places = [] if found is None else list(found.submodule_search_locations or [])
        path = Path(places[0]) if places else Path(name)
    else:
        path = Path(name.removeprefix("file://")).expanduser().absolute()
    scheme = name.partition("://")[0] if "://" in name else "file"
    if not path.is_dir():
        kinds = {"file": f"directory {path}", "pkg": f"Python package {name.removeprefix('pkg://')}"}
        raise UserError(
            f"There is no {kinds.get(scheme, f'reader of {scheme}:// here, only of file:// and pkg://')}.",
            where=f"{where}={name}",
            why="groups of configurations of your own are folders in it, their choices YAML files in those",
            fix="--config-dir /path/to/your/configs",
        )
    return path


def _refuse_closed(where: str, path: Path, groups: set[str]) -> None:
    """Raise UserError for a directory of configurations that may not be read, or a folder of these groups in it."""
    for folder in (path, *(path / group for group in sorted(groups))):
        if os.path.isdir(folder) and not os.access(folder, os.R_OK | os.X_OK):
            fix = f"make it readable for you; ls -ld {shlex.quote(str(folder))} says whose it is"
            raise UserError(f"{folder} cannot be read.", where=f"{where}={path}", why="Permission denied", fix=fix)


def _no_list(line: str, value: str) -> UserError:
    place = value if "://" in value else f"file://{Path(value).expanduser().absolute()}"
    return UserError(
        f"{KEY} is no list.",
        where=line,
        why="several directories may stand there",
        fix=f"'{KEY}=[{place}]', or --config-dir {place.removeprefix('file://')}",
    )
