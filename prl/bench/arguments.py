"""Arguments of the benchmarks that are no runs of a configuration, and where `bench.output_json` may lie."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prl.config.errors import UserError
from prl.runtime.process.free_memory import available_bytes

GIB = 1 << 30


def parser_of(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Of `python -m prl.bench.<module>`, which the module's docstring describes."""
    kind = argparse.RawTextHelpFormatter
    return argparse.ArgumentParser(prog=f"python -m prl.bench.{module}", description=doc, formatter_class=kind)


def overrides_of(doc: str | None) -> list[str]:
    """The command line of a benchmark that takes overrides. Leaves with its docstring where help is asked for."""
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        print(doc)
        sys.exit(0)
    return words


@contextmanager
def user_errors_told() -> Iterator[None]:
    """As entry points do: in words, and exit code 2."""
    try:
        yield
    except UserError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(2)


def refuse_beyond_memory(parser: argparse.ArgumentParser, said: str, gib: float) -> None:
    """Leave where this machine has not as much memory.

    Args:
        said: on the command line, what asks for so much.
    """
    free = available_bytes()
    if free is not None and gib > free / GIB:
        parser.error(f"{said}: takes {gib:,.1f} GiB or more, and {free / GIB:.1f} GiB of memory are free here")


def directory(text: str) -> Path:
    """Made if there is none, and one that files can be written to."""
    path = Path(text).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise argparse.ArgumentTypeError(f"nothing can be written to {path}: {error.strerror}") from error


def json_place(said: str | None) -> Path | None:
    """`bench.output_json`, whose directory is made. Raises UserError if no file can be written there."""
    if said is None:
        return None
    path, why = Path(said).expanduser(), "it is a directory"
    if not path.is_dir():
        try:
            directory(str(path.parent))
            return path
        except argparse.ArgumentTypeError as error:
            why = str(error)
    raise UserError(
        "The result cannot be written.",
        where=f"bench.output_json={said}",
        why=why,
        fix="a file in a directory that you can write to; result.json lies in the run's directory anyway",
    )
