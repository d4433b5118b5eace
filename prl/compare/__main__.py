"""`python -m prl.compare DIR_OR_WANDB_GROUP`: the points of a sweep side by side, ranked where they can be."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from prl.compare.curves import AXES
from prl.compare.points import read_directory
from prl.compare.ranking import compare
from prl.compare.table import render_csv, render_json, render_text
from prl.config.errors import UserError
from prl.config.pipe import until_the_reader_leaves

if TYPE_CHECKING:
    from prl.compare.points import Point
    from prl.compare.ranking import Comparison

PNG = "compare.png"


def main() -> None:
    """Leaves by SystemExit: 0, or 2 for a mistake of the user."""
    arguments = _parser().parse_args()
    try:
        run(arguments)
    except UserError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prl compare", description=__doc__)
    parser.add_argument("target", help="a sweep's directory, a run's, or a wandb group: [[ENTITY/]PROJECT/]GROUP")
    parser.add_argument(
        "--at",
        choices=list(AXES),
        default="steps",
        help="the budget at which points are compared: the most that all finished ones reached (default: steps)",
    )
    parser.add_argument("--csv", type=Path, metavar="PATH", help="write one line per point")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write groups and points")
    parser.add_argument("--html", type=Path, metavar="PATH", help="write a page with curves and sortable tables")
    parser.add_argument("--png", type=Path, metavar="PATH", help=f"curves (default: {PNG} in the directory)")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Print the tables and write what is asked for."""
    directory = Path(arguments.target).expanduser()
    is_directory = directory.is_dir()
    title = directory.absolute().name if is_directory else arguments.target
    points = read_directory(directory) if is_directory else _from_wandb(arguments.target)
    comparison = compare(title, points, arguments.at)
    with until_the_reader_leaves():
        print(render_text(comparison))
    png = arguments.png or (directory / PNG if is_directory else None)
    try:
        written = _write_files(comparison, arguments, png)
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}", fix="name another place") from error
    with until_the_reader_leaves():
        print("\n" + "\n".join(f"written {path}" for path in written) if written else "")


def _write_files(comparison: Comparison, arguments: argparse.Namespace, png: Path | None) -> list[Path]:
    from prl.compare.figure import write_png
    from prl.compare.page import render_page

    written = []
    for path, render in ((arguments.csv, render_csv), (arguments.json, render_json), (arguments.html, render_page)):
        if path is not None:
            path.write_text(render(comparison))
            written.append(path)
    if png is not None and write_png(comparison, png):
        written.append(png)
    return written


def _from_wandb(target: str) -> list[Point]:
    from prl.compare import wandb_source

    if not wandb_source.has_key():
        raise UserError(
            f"there is no directory {target}, and wandb cannot be asked for a group of that name",
            where=target,
            why="neither WANDB_API_KEY nor ~/.netrc holds a key",
            fix="name the directory of a sweep, say outputs/sweeps/NAME, or log in: wandb login",
        )
    return wandb_source.read_group(target, wandb_source.connect())


if __name__ == "__main__":
    main()
