"""Modules of the user's own that a configuration names (`env.mix.x.id=my_envs:Shout`), and what those import in turn.

Found without importing anything: where Python would look, from the directory of the command, and by reading the import
statements. The user's own are those outside of the standard library, of installed packages, and of prl.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from prl.config.schema import Group

# "package.module:Name", and what a prefix like that of sft.data.source="env:package.module:Name" leaves of it
NAMED = re.compile(r"(?:^|:)([A-Za-z_]\w*)(?:\.\w+)*:[A-Za-z_]\w*$")
BARE = re.compile(r"([A-Za-z_]\w*)(?:[.-]\w+)*$")
NO_CODE = {"__pycache__", ".git", ".venv", "node_modules"}
INSTALLED = {"site-packages", "dist-packages"}
LARGEST_MODULE_BYTES = 200_000_000  # what is larger is data
CHUNK_BYTES = 1 << 20
OURS = {"prl", "launch", "hydra_plugins"}


def find_own_modules(config: Group) -> dict[str, Path]:
    """Name -> its file, or the directory of a package; names are those of top-level modules.

    Args:
        config: a whole RunConfig, or a part of one.
    """
    found: dict[str, Path] = {}
    waiting = sorted(_named_in(config.model_dump(mode="json")))
    while waiting:
        name = waiting.pop(0)
        path = None if name in found else locate(name)
        if path is not None:
            found[name] = path
            waiting += sorted({imported for file in python_files(path) for imported in _imports(file)} - found.keys())
    return dict(sorted(found.items()))


def describe_modules(modules: dict[str, Path]) -> dict[str, dict[str, str]]:
    """Name -> where it lies, and the hash of what is in it; for records."""
    return {name: {"path": str(path), "sha256": hash_of(path)} for name, path in modules.items()}


def locate(name: str) -> Path | None:
    """A top-level module of the user's own; None for any other, and for one that does not exist."""
    if name in OURS or name in sys.stdlib_module_names:
        return None
    spec = PathFinder.find_spec(name, [os.getcwd(), *sys.path]) or _ask_finders(name)
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or ()) or [spec.origin or ""]
    path = Path(places[0]).absolute()
    is_code = path.is_dir() or path.suffix == ".py"
    return path if is_code and not _is_installed(path) else None


def _ask_finders(name: str) -> ModuleSpec | None:
    """Those of editable installations, for example."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _is_installed(path: Path) -> bool:
    library = Path(sysconfig.get_path("stdlib"))
    return bool(INSTALLED & set(path.parts)) or path.is_relative_to(library) or path.is_relative_to(library.resolve())


def _named_in(value: Any, key: str = "") -> set[str]:
    """Top-level modules that the strings of a configuration may name. A word alone counts only as an id, and only if it
    is that of a module or of a package with an __init__.py: many directories have names like that.
    """
    if isinstance(value, dict):
        return {name for inner, item in value.items() for name in _named_in(item, inner)}
    if isinstance(value, list | tuple):
        return {name for item in value for name in _named_in(item, key)}
    if not isinstance(value, str):
        return set()
    if match := NAMED.search(value):
        return {match[1]}
    match = BARE.fullmatch(value.replace("-", "_")) if key == "id" else None
    path = locate(match[1]) if match else None
    return {match[1]} if match and path and (path.is_file() or (path / "__init__.py").exists()) else set()


def files_of(path: Path) -> Iterator[Path]:
    """The files of a module, in a stable order: code, and the data that lies beside it in a package.

    Regular ones, or links to such: editors leave links that point nowhere, and programs pipes that nobody writes to.
    """
    if path.is_file():
        yield path
    else:
        yield from _files_below(str(path), frozenset())


def _files_below(folder: str, above: frozenset[str]) -> Iterator[Path]:
    """`above`: real paths of the directories that this one was reached through, to which links may lead back."""
    real = os.path.realpath(folder)
    try:
        paths = [os.path.join(folder, name) for name in sorted(set(os.listdir(folder)) - NO_CODE)]
    except OSError:  # may not be read, and so holds nothing that a run could use
        return
    yield from (Path(path) for path in paths if os.path.isfile(path))
    for inner in paths:
        if os.path.isdir(inner) and os.path.realpath(inner) not in above | {real}:
            yield from _files_below(inner, above | {real})


def python_files(path: Path) -> Iterator[Path]:
    return (file for file in files_of(path) if file.suffix == ".py")


def _imports(file: Path) -> set[str]:
    """Top-level names that a file imports, wherever in it; relative imports stay within its package."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # who imports it will be told
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module.partition(".")[0])
    return names


def size_of(path: Path) -> int:
    """Bytes of a module's files."""
    return sum(_status_of(file)[0] for file in files_of(path))


def hash_of(path: Path) -> str:
    """SHA-256 over the names and contents of a module's files. Where they are too large to be code alone, the times of
    those that are none stand for their contents.
    """
    digest, is_read_whole = hashlib.sha256(), size_of(path) <= LARGEST_MODULE_BYTES
    for file in files_of(path):
        size, changed = _status_of(file)
        digest.update(f"{file.relative_to(path.parent)}\0{size}\0".encode(errors="surrogateescape"))
        if is_read_whole or (file.suffix == ".py" and size <= LARGEST_MODULE_BYTES):
            _add_content(digest, file)
        else:
            digest.update(f"{changed}\0".encode())
    return digest.hexdigest()


def _status_of(file: Path) -> tuple[int, int]:
    """Bytes, and nanoseconds of the last change; of a file that has gone meanwhile none."""
    try:
        status = file.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _add_content(digest: hashlib._Hash, file: Path) -> None:
    try:
        with file.open("rb") as content:
            while chunk := content.read(CHUNK_BYTES):
                digest.update(chunk)
    except OSError:  # whoever needs it will be told
        digest.update(b"unreadable")
