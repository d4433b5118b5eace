"""`python -m prl.compare TARGET ...`: the points of a sweep side by side, ranked where they can be."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prl.compare.curves import AXES
from prl.compare.markup import render_latex, render_markdown
from prl.compare.phases import ABOUT_PHASES, phase_table
from prl.compare.ranking import compare
from prl.compare.table import fill_note, render_csv, render_json, render_text
from prl.compare.targets import labels, read_targets
from prl.config.console import leave_told, one_line, shield_console
from prl.config.errors import UserError
from prl.config.place_names import a_path
from prl.runtime.directory.files import FULL_DISK, replace_file

if TYPE_CHECKING:
    from prl.compare.ranking import Comparison

PNG = "compare.png"
STDOUT = Path("-")


def main() -> None:
    """Leaves by SystemExit: 0, or 2 for a mistake of the user."""
    shield_console()
    arguments = _parser().parse_args()
    try:
        run(arguments)
        leave_told()
    except UserError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prl compare", description=__doc__)
    parser.add_argument(
        "target",
        nargs="+",
        type=lambda target: str(a_path(target)),
        help="directory of a sweep or run, wandb's own files (offline), or a group of wandb: [[ENTITY/]PROJECT/]GROUP",
    )
    parser.add_argument(
        "--by-target", action="store_true", help="tell points of different targets apart, as if target were swept"
    )
    parser.add_argument(
        "--at",
        choices=list(AXES),
        default="steps",
        help="the budget at which points are compared: the most that all finished ones reached (default: steps)",
    )
    parser.add_argument("--phases", action="store_true", help="show what the paid time of each attempt went into")
    parser.add_argument("--csv", type=a_path, metavar="PATH", help="write one line per point")
    parser.add_argument("--json", type=a_path, metavar="PATH", help="write groups and points")
    parser.add_argument("--markdown", type=a_path, metavar="PATH", help="write the tables for GitHub and the like")
    parser.add_argument("--latex", type=a_path, metavar="PATH", help="write the tables for a paper (booktabs)")
    parser.add_argument("--html", type=a_path, metavar="PATH", help="write a page with curves and sortable tables")
    parser.add_argument("--png", type=a_path, metavar="PATH", help=f"curves (default: {PNG} in the directory)")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Print the tables and write what is asked for."""
    targets = arguments.target
    points, notes = read_targets(targets, arguments.by_target)
    comparison = compare(" + ".join(labels(targets)), points, arguments.at)
    comparison.notes.extend(notes)
    print(render_text(comparison, (phase_table(comparison),) if arguments.phases else ()))
    if arguments.phases:
        print(fill_note(ABOUT_PHASES))
    alone = Path(targets[0]).expanduser()
    png = arguments.png or (alone / PNG if len(targets) == 1 and alone.is_dir() else None)
    try:
        written = _write_files(comparison, arguments, png)
    except BrokenPipeError:  # /dev/stdout, whose reader has seen enough
        return
    print("\n" + "\n".join(f"written {one_line(path)}" for path in written) if written else "")


def _write_files(comparison: Comparison, arguments: argparse.Namespace, png: Path | None) -> list[Path]:
    from prl.compare.figure import draw_png
    from prl.compare.page import render_page

    written = []
    page = partial(render_page, phases=arguments.phases)
    ways: tuple[tuple[Path | None, Callable[[Comparison], str]], ...] = (
        (arguments.csv, render_csv),
        (arguments.json, render_json),
        (arguments.markdown, render_markdown),
        (arguments.latex, render_latex),
        (arguments.html, page),
    )
    for path, render in ways:
        if path == STDOUT:
            print(render(comparison))
        elif path is not None:
            _write(path, render(comparison))
            written.append(path)
    if png is not None and (picture := draw_png(comparison)) is not None:
        _write(png, picture)
        written.append(png)
    return written


def _write(path: Path, content: str | bytes) -> None:
    """As a whole, so that what was there is not lost to a full disk; into devices and pipes as it comes. Raises
    UserError and BrokenPipeError.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        else:
            replace_file(path, content, sync=False)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}",
            where=str(path),
            fix="free space there, or name another place" if error.errno in FULL_DISK else "name another place",
        ) from error


if __name__ == "__main__":
    main()
