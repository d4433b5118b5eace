"""`python -m prl.bench.node DIRECTORY`: what one node does, row by row: layouts, levers, FP8, RL, beside forecasts.

Every row is a command that a user could type; DIRECTORY keeps its output, its figures (rows.jsonl) and the table
(rows.md). Rows that are there are not run again, so that a node lent for minutes at a time gets on: `--minutes 9`
begins none that the row before it, or the least time of its job, says would not end in time. Rows that failed are told
with the end of what they said, and run again with `--again`. `--list` shows the commands; `--tiny` runs all of it with
tiny models, on CPUs too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from prl.bench.arguments import directory, parser_of
from prl.bench.node_rows import Job, Row, rows_for
from prl.config.arguments import a_count
from prl.metrics.reader import read_rows
from prl.runtime.directory.files import read_object

LIMIT_S: dict[Job, float] = {"experts": 300, "sft": 200, "bench": 400, "rl": 900}  # beyond it a row is given up
LEAST_S: dict[Job, float] = {"experts": 40, "sft": 25, "bench": 60, "rl": 240}  # what one is taken to need
MODULES: dict[Job, str] = {"experts": "prl.bench.experts", "sft": "prl.sft", "bench": "prl.bench", "rl": "prl.rl"}
GPUS = 8  # of a node
CLOSE = 1e-4  # of losses of layouts, relative
LOOK_S = 0.1  # between looks at how far a run is
HEAD = "| command | figures | forecast |\n|---|---|---|"


def command_of(row: Row, directory: Path) -> list[str]:
    """What is run: the row's words, and where its result belongs."""
    where = [] if row.job == "experts" else [f"output_dir={directory / 'run'}"]
    where += [f"bench.output_json={directory / 'result.json'}"] if row.job == "bench" else []
    return [sys.executable, "-m", MODULES[row.job], *row.words, *where]


def shown(row: Row) -> str:
    killed = f"  # {row.kills} is killed in the middle" if row.kills else ""
    return f"python -m {MODULES[row.job]} {shlex.join(row.words)}{killed}"


def figures_of(row: Row, directory: Path, output: str) -> dict[str, Any]:
    """Of a row that ended well. Raises OSError, KeyError or ValueError where what it should have left is not there."""
    if row.job == "experts":
        lines = [line for line in output.splitlines() if line.startswith("| ") and " | ms | " not in line]
        return {"rows": lines} if lines else {"failed": "it printed no row"}
    if row.job == "bench":
        result = json.loads((directory / "result.json").read_text())["result"]
        return {
            "tokens_per_s_per_gpu": result["tokens_per_s_per_gpu"],
            "mfu": result["mfu"],
            "peak_gib": result["peak_allocated_bytes"] / 2**30,
        }
    steps = read_rows(directory / "run", "trainer/0")
    if row.job == "sft":
        return {"losses": [step["loss"] for step in steps]}
    later = steps[1:] or steps  # the first compiles
    found = {key: statistics.median(step[key] for step in later) for key in ("step_s", "publish_s", "wait_for_batch_s")}
    mismatch = statistics.fmean(step["mismatch_kl_mean"] for step in steps)
    if row.kills:
        rounds = [step for step in read_rows(directory / "run", "orchestrator") if "engine_restarts" in step]
        found["restarts"] = rounds[-1]["engine_restarts"]
        if not found["restarts"]:
            return {"failed": f"{row.kills} was not killed, or did not come back"}
        found["longest_s"] = max(step["since_last_step_s"] for step in rounds[1:])
    return {**found, "idle": found["wait_for_batch_s"] / found["step_s"], "mismatch_kl": mismatch, "steps": len(steps)}


def told(row: Row, figures: dict[str, Any], reference: list[float] | None) -> str:
    """reference: losses of one process."""
    if "failed" in figures:
        return f"failed: {figures['failed']}"
    if row.job == "experts":
        return "; ".join(line.strip("| ").replace(" | ", ", ") for line in figures["rows"])
    if row.job == "bench":
        mfu = f"{figures['mfu']:.1%}" if figures["mfu"] is not None else "no peak known"
        return f"{figures['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU, MFU {mfu}, {figures['peak_gib']:.1f} GiB"
    if row.job == "sft":
        far = apart(figures["losses"], reference)
        return f"losses {', '.join(f'{loss:.6f}' for loss in figures['losses'])}" + (
            "" if far is None else f"; {far:.0e} from one process{'' if far <= CLOSE else ': TOO FAR'}"
        )
    killed = ""
    if row.kills:
        killed = f"; {row.kills} killed, {figures['restarts']} restart, longest step {figures['longest_s']:.1f} s"
    return (
        f"{figures['steps']} steps of {figures['step_s']:.2f} s, publication {figures['publish_s']:.2f} s, "
        f"trainer idle {figures['idle']:.0%}, mismatch KL {figures['mismatch_kl']:.1e}{killed}"
    )


def apart(losses: list[float], reference: list[float] | None) -> float | None:
    """The largest relative difference; infinite where one has fewer steps."""
    if reference is None or losses is reference:
        return None
    if len(losses) != len(reference) or not losses:
        return float("inf")
    return max(abs(one - other) / abs(other) for one, other in zip(losses, reference, strict=True))


def forecast_of(row: Row) -> str:
    """Of `prl.plan --forecast` for the same words; it is for CUDA devices, whatever is here."""
    if row.job in ("experts", "sft"):
        return ""
    job = ["-cn", "bench"] if row.job == "bench" else []
    words = [sys.executable, "-m", "prl.plan", "--forecast", "--json", *job, *row.words]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        return "none: " + (done.stderr.strip().splitlines() or ["?"])[0]
    said = json.loads(done.stdout)
    trainers = _ranks(row)
    low, high = said["interval_s"]
    if row.job == "bench":
        rates = [said["tokens_per_step"] / seconds / trainers for seconds in (said["step_s"], high, low)]
        return "{:,.0f} tokens/s per GPU ({:,.0f} to {:,.0f})".format(*rates)
    return f"{said['step_s']:.2f} s ({low:.2f} to {high:.2f}), bound by {said['bound_by']}"


def _ranks(row: Row) -> int:
    prefix = "deployment.num_train_gpus="
    return next((int(word.removeprefix(prefix)) for word in row.words if word.startswith(prefix)), 1)


def run_row(row: Row, directory: Path) -> dict[str, Any]:
    """Its figures, or {"failed": why}."""
    shutil.rmtree(directory, ignore_errors=True)  # of an attempt before: a run would resume it
    directory.mkdir(parents=True)
    log = directory / "output.txt"
    with log.open("w") as file:
        process = subprocess.Popen(command_of(row, directory), stdout=file, stderr=subprocess.STDOUT)
        if row.kills:
            threading.Thread(
                target=kill_in_the_middle, args=[row.kills, directory / "run", process], daemon=True
            ).start()
        try:
            code = process.wait(LIMIT_S[row.job])
        except subprocess.TimeoutExpired:
            process.terminate()  # prl.rl ends its whole tree
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return {"failed": f"not done after {LIMIT_S[row.job]:g} s; see {log}"}
    output = log.read_text(errors="replace")
    if code:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        return {"failed": f"exit {code}: {' / '.join(lines[-4:])[:400]}".replace("|", "/")}
    try:
        return figures_of(row, directory, output)
    except (OSError, KeyError, ValueError) as error:
        return {"failed": f"it left no figures: {type(error).__name__} {error}; see {log}"}


def kill_in_the_middle(role: str, run_dir: Path, process: subprocess.Popen[bytes]) -> None:
    """Once half of the run's steps are done; where it ends before, nothing."""
    while process.poll() is None:
        status = read_object(run_dir / "status.json") or {}
        if 2 * (status.get("step") or 0) >= (status.get("max_steps") or math.inf):
            with contextlib.suppress(ProcessLookupError):
                os.kill(status["roles"][role]["pid"], signal.SIGKILL)
            return
        time.sleep(LOOK_S)


def read_found(directory: Path) -> dict[str, dict[str, Any]]:
    """Figures by command, the last of each."""
    file = directory / "rows.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {entry["command"]: entry for entry in map(json.loads, lines)}


def table(rows: list[Row], found: dict[str, dict[str, Any]]) -> str:
    """Markdown, a table for each part; rows that were not run say so."""
    single = next((found[shown(row)] for row in rows if row.job == "sft" and shown(row) in found), None)
    reference = single["figures"].get("losses") if single else None
    lines: list[str] = []
    for part in dict.fromkeys(row.part for row in rows):
        lines += ["", f"{part}:", "", *HEAD.splitlines()]
        for row in (row for row in rows if row.part == part):
            entry = found.get(shown(row))
            figures = told(row, entry["figures"], reference) if entry else "not run"
            lines.append(f"| `{shown(row)}` | {figures} | {entry['forecast'] if entry else ''} |")
    return "\n".join(lines).strip() + "\n"


def main() -> None:
    parser = parser_of("node", __doc__)
    parser.add_argument("directory", type=Path, help="what is measured stays there")
    parser.add_argument(
        "--gpus", type=a_count, help=f"of this machine (default: all; where there are none, --list takes {GPUS})"
    )
    parser.add_argument("--only", default="", help="rows whose part or command has this text")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin what ends by then")
    parser.add_argument("--again", action="store_true", help="also what failed before")
    parser.add_argument("--tiny", action="store_true", help="with tiny models")
    parser.add_argument("--list", action="store_true", help="show commands, run nothing")
    arguments = parser.parse_args()
    rows = rows_for(arguments.gpus or _count_gpus(parser, arguments.list), arguments.tiny)
    chosen = [row for row in rows if arguments.only in row.part or arguments.only in shown(row)]
    if not chosen:
        parser.error(f"--only {arguments.only}: no row has that")
    if arguments.list:
        print("\n".join(f"{row.part}: {shown(row)}" for row in chosen))
        return
    try:
        directory(str(arguments.directory))
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    sys.exit(0 if run_all(rows, chosen, arguments) else 1)


def run_all(rows: list[Row], chosen: list[Row], arguments: argparse.Namespace) -> bool:
    """Whether all that ran has figures, and layouts agree."""
    directory: Path = arguments.directory
    began, least, well = time.monotonic(), dict(LEAST_S), True
    for row in chosen:
        before = read_found(directory).get(shown(row))
        if before and not (arguments.again and "failed" in before["figures"]):
            continue
        started = time.monotonic()
        if started - began + least[row.job] > 60 * arguments.minutes:
            print(f"no time is left for: {shown(row)}", flush=True)
            continue
        figures = run_row(row, directory / f"{rows.index(row):02d}-{row.job}")
        taken = time.monotonic() - started
        least[row.job] = taken if "failed" not in figures else least[row.job]
        entry = {"command": shown(row), "figures": figures, "forecast": forecast_of(row), "seconds": round(taken, 1)}
        with (directory / "rows.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        found = read_found(directory)
        (directory / "rows.md").write_text(table(rows, found))
        line = next(line for line in table(rows, found).splitlines() if f"`{shown(row)}`" in line)
        print(line, flush=True)
        well = well and "failed" not in figures and "TOO FAR" not in line
    return well


def _count_gpus(parser: argparse.ArgumentParser, starts_nothing: bool) -> int:
    import torch

    if not torch.cuda.is_available():
        if starts_nothing:
            return GPUS
        parser.error("there are no GPUs here; --gpus 2 --tiny tries it on CPUs")
    return torch.cuda.device_count()


if __name__ == "__main__":
    main()
