"""YAML that cannot be read, of the user's own directories or of conf/: which file, which line, and why.

Hydra lets pass what the YAML parser and the decoder raise.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import yaml
from yaml.reader import ReaderError

from prl.config.errors import ConfigError, UserError
from prl.config.locate import conf_dir, sweeps_dir
from prl.config.search_path import directories, yaml_files

UNREADABLE = (yaml.YAMLError, UnicodeDecodeError, OSError)


def unreadable(error: BaseException, path: Path | None = None) -> ConfigError | None:
    """What to tell of one of UNREADABLE; None for an error that no configuration file is to blame for.

    Args:
        path: the file that was read, where that is known.
    """
    if isinstance(error, UnicodeDecodeError):
        files = [path for root in _roots() for path in yaml_files(root)] if path is None else [path]
        return _undecodable(error, files)
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        why = ", ".join(part.strip() for part in (error.context, error.problem) if part)
        return None if mark is None else _told(mark.name, mark.line + 1, why)
    if isinstance(error, ReaderError):
        line = _bytes(Path(error.name)).decode(errors="replace")[: error.position].count("\n") + 1
        return _told(error.name, line, str(error.reason))
    if isinstance(error, OSError) and error.filename is not None:
        return _told(error.filename, None, str(error.strerror), "make it readable for you")
    return None


def _undecodable(error: UnicodeDecodeError, files: list[Path]) -> ConfigError | None:
    """The error has the bytes, and not the name of the file that they are of."""
    for path in files:
        start = (data := _bytes(path)).find(error.object)
        if error.object and start >= 0:
            line = data[: start + error.start].count(b"\n") + 1
            byte = error.object[error.start]
            fix = f"save it as UTF-8 (of Latin-1: iconv -f latin1 -t utf-8 {shlex.quote(str(path))})"
            return _told(str(path), line, f"it is not UTF-8: {error.reason} (0x{byte:02x})", fix)
    return None


def _told(name: object, line: int | None, why: str, fix: str = "mend it") -> ConfigError | None:
    path = Path(str(name))
    if path.suffix != ".yaml" or not any(path.resolve().is_relative_to(root.resolve()) for root in _roots()):
        return None
    where = str(path) if line is None else f"{path}, line {line}"
    return ConfigError(
        [UserError(f"{path.name} cannot be read.", where=where, why=why, fix=f"{fix}, or choose another")]
    )


def _roots() -> tuple[Path, ...]:
    return (*directories(), conf_dir(), sweeps_dir())


def _bytes(path: Path) -> bytes:
    """Nothing, if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
