"""The code that a sweep runs: a copy made at submission, so that edits and upgrades while it waits change nothing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import prl
from launch.points import Point
from prl.config.errors import UserError
from prl.config.search_path import directories, yaml_files
from prl.runtime.directory.inputs import package_files, package_hash
from prl.runtime.directory.own_modules import (
    LARGEST_MODULE_BYTES,
    describe_modules,
    files_of,
    find_own_modules,
    size_of,
)
from prl.runtime.process.python_path import FROZEN_RECORD

CONFIGS = "configs"  # copies of the user's own YAML: configs/0 of the first directory, and so on


@dataclass(frozen=True)
class FrozenCode:
    """SWEEP/code/HASH, which holds `prl` and the user's own modules; and what those are, as `describe_modules` says."""

    path: Path
    modules: dict[str, dict[str, str]]

    @property
    def python_path(self) -> str:
        """PYTHONPATH of what runs it: this, then what is set already, less the checkout, whose place this takes."""
        return os.pathsep.join([str(self.path), *_further_paths()])


def freeze_code(sweep_dir: Path, points: Iterable[Point]) -> FrozenCode:
    """Copy the package `prl`, and what the points' configurations name of the user's own modules, unless it is there.

    Beside them modules.json says what was copied from where and, where the checkout is a git repository, git.txt
    (commit and changed files) and diff.patch. Directories of the user's own YAML are copied for the record: a job reads
    its plan.json. Raises UserError for a module that is too large to be code.
    """
    package = Path(prl.__file__).parent
    files = package_files(package)
    digest = hashlib.sha256(package_hash(package).encode())
    modules = {name: path for point in points for name, path in find_own_modules(point.config).items()}
    for name, path in modules.items():
        _refuse_too_large(name, path)
    described = describe_modules(dict(sorted(modules.items())))
    digest.update(json.dumps({name: about["sha256"] for name, about in described.items()}).encode())
    yaml = {path: f"{CONFIGS}/{number}" for number, path in enumerate(directories())}
    for directory, name in yaml.items():
        for path in yaml_files(directory):
            digest.update(f"{name}/{path.relative_to(directory)}".encode() + b"\0" + path.read_bytes() + b"\0")
    target = (sweep_dir / "code" / digest.hexdigest()[:12]).absolute()
    if target.is_dir():
        return FrozenCode(target, described)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")  # somebody else may be at the same
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _copy(files, package, partial / "prl")
        for path in modules.values():
            _copy(files_of(path), path.parent, partial)
        for path, name in yaml.items():
            _copy(yaml_files(path), path, partial / name)
        (partial / FROZEN_RECORD).write_text(json.dumps(described, indent=1) + "\n")
        _describe_git(package.parent, partial)
        partial.rename(target)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        if not target.is_dir():  # else somebody was faster
            raise
    return FrozenCode(target, described)


def _copy(files: Iterable[Path], root: Path, target: Path) -> None:
    for path in files:
        copy = target / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)


def _refuse_too_large(name: str, path: Path) -> None:
    size = size_of(path)
    if size > LARGEST_MODULE_BYTES:
        raise UserError(
            f"The module {name} has {size / 1e6:.0f} MB and would be copied with the code of the sweep.",
            where=str(path),
            why="jobs run copies of the user's own modules, so that edits while they wait change nothing",
            fix="keep data outside of the package's directory, and give its path as an argument",
        )


def _further_paths() -> Iterator[str]:
    checkout = Path(prl.__file__).parent.parent.resolve()
    for part in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if part and Path(part).resolve() != checkout:
            yield str(Path(part).absolute())


def _describe_git(checkout: Path, target: Path) -> None:
    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(checkout), *arguments], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return done.stdout if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is not None:
        (target / "git.txt").write_text(commit + (git("status", "--short") or ""))
        (target / "diff.patch").write_text(git("diff", "HEAD") or "")
