"""The code that a sweep runs: a copy made at submission, so that edits and upgrades while it waits change nothing."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import prl

SUFFIXES = (".py", ".json", ".jinja", ".txt")


def freeze_code(sweep_dir: Path) -> Path:
    """Copy the package `prl` to SWEEP/code/HASH/prl, unless it is there. Returns SWEEP/code/HASH, for PYTHONPATH.

    Beside it, where the checkout is a git repository: git.txt (commit and changed files) and diff.patch.
    """
    package = Path(prl.__file__).parent
    files = sorted(path for path in package.rglob("*") if path.suffix in SUFFIXES and "__pycache__" not in path.parts)
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    target = (sweep_dir / "code" / digest.hexdigest()[:12]).absolute()
    if target.is_dir():
        return target
    partial = target.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    for path in files:
        copy = partial / "prl" / path.relative_to(package)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    _describe_git(package.parent, partial)
    partial.rename(target)
    return target


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
