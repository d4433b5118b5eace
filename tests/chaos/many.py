"""`PYTHONPATH=tests python tests/chaos/many.py FIRST COUNT FILE`: many rounds, and the tables of all that FILE has.

FILE gets a JSON line for each round; those that it has already are not played again, so it may be stopped and started.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from jobs import LocalJob
from play import play
from rounds import DEPLOYMENTS, KINDS, SMALL, draw
from runs import environment


def reference_in(folder: Path, cache: Path) -> Path:
    """The synchronous job, undisturbed."""
    folder.mkdir()
    (synchronous,) = (d for d in DEPLOYMENTS if d.synchronous)
    arguments = [*SMALL, f"cache_dir={cache}", *synchronous.overrides, f"output_dir={folder}/run"]
    code = LocalJob(arguments, folder, environment()).wait()
    assert code == 0, (folder / "console.log").read_text()
    return folder / "run"


def play_all(seeds: list[int], kind: str, file: Path, beside: int) -> None:
    writing = threading.Lock()
    with tempfile.TemporaryDirectory(prefix="chaos-") as home, ThreadPoolExecutor(beside) as pool:
        base = Path(home)
        reference = reference_in(base / "reference", base / "cache") if kind == "local" else None

        def play_one(seed: int) -> None:
            told = play(draw(seed, kind), base / str(seed), base / "cache", reference)
            with writing, file.open("a") as lines:
                lines.write(json.dumps({"seed": seed, "kind": kind} | asdict(told)) + "\n")
            print(f"{told.name}: {'; '.join(told.problems) or 'held'}", flush=True)
            if told.problems:
                shutil.copytree(base / str(seed), file.parent / f"round-{seed}", dirs_exist_ok=True, symlinks=True)
            shutil.rmtree(base / str(seed), ignore_errors=True)

        list(pool.map(play_one, seeds))


def table(rows: list[dict], head: str, cell: Callable[[dict], str]) -> str:
    """Markdown: the rounds by what `cell` says of them."""
    cells = defaultdict(list)
    for row in rows:
        cells[cell(row)].append(row)
    heads = (head, "rounds", "hit", "resumed", "steps again, at most", "s to a step, median and most", "lost")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for name, found in sorted(cells.items()):
        resumed = [row for row in found if row["resumed"]]
        seconds = [row["resume_s"] for row in resumed if row["resume_s"] is not None]
        time = f"{statistics.median(seconds):.0f}, {max(seconds):.0f}" if seconds else ""
        again = max((row["again"] for row in resumed), default="")
        lost = "; ".join(problem for row in found for problem in row["problems"]) or "nothing"
        line = (name, len(found), sum(row["hit"] for row in found), len(resumed), again, time, lost[:80])
        lines.append(f"| {' | '.join(map(str, line))} |")
    return "\n".join(lines)


def tables(rows: list[dict]) -> str:
    """By deployment, by victim, and by moment."""
    drawn = {(row["kind"], row["seed"]): draw(row["seed"], row["kind"]) for row in rows}
    by = {
        "deployment": lambda d: d.deployment.name,
        "victim and signal": lambda d: f"{d.victim.split('/')[0]} {d.signal}",
        "moment": lambda d: "after some seconds" if d.moment is None else d.moment.rpartition(":")[0],
    }
    return "\n\n".join(
        table(rows, head, lambda row, of=of: of(drawn[row["kind"], row["seed"]])) for head, of in by.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("file", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="local", help="slurm: on the cluster of SLURM_CONF")
    parser.add_argument("--beside", type=int, default=1, help="rounds at once")
    told = parser.parse_args()
    rows = [json.loads(line) for line in told.file.read_text().splitlines()] if told.file.exists() else []
    played = {row["seed"] for row in rows if row["kind"] == told.kind}
    seeds = [seed for seed in range(told.first, told.first + told.count) if seed not in played]
    play_all(seeds, told.kind, told.file.absolute(), told.beside)
    print(tables([json.loads(line) for line in told.file.read_text().splitlines()]))


if __name__ == "__main__":
    main()
