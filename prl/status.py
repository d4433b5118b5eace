"""`python -m prl.status DIR [--follow]`: what one run, or every point of a sweep, is doing, and why it failed."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prl.config.console import console_error, leave_interrupted, leave_told, one_line, shield_console
from prl.config.errors import UTF8, UserError, is_unread
from prl.config.place_names import a_path
from prl.metrics.held_out import lost_in
from prl.runtime.agent import read_attempts, read_plan
from prl.runtime.branching import told_origin
from prl.runtime.directory.files import find_directories, parse_object, refuse_unreadable
from prl.runtime.directory.ledger import summarise_failures
from prl.runtime.directory.rundir import is_locked
from prl.runtime.directory.status_file import FINAL_STATES, read_status, status_path
from prl.runtime.nodes.seats import commands_by_hand
from prl.runtime.people.faults import (
    MISSING,
    NOT_STARTED,
    UNREADABLE,
    find_faults,
    holds_run,
    last_lines,
    within,
)
from prl.runtime.people.view import clock
from prl.runtime.process.failures import how_points_go_on, some_names, waits_for_people

HEADER = ("run", "state", "step", "reward or loss", "tokens/s", "node", "attempt", "updated", "why")
WHY_WIDTH = 80
FOLLOW_S = 2.0
ALIVE = ("starting", "running", "stopping", "queued", "suspended")
IDLE = (*FINAL_STATES, "lost")
ALONE = "."  # how the record of a job that is no part of a sweep names its run


def main() -> None:
    shield_console()
    parser = argparse.ArgumentParser(prog="prl status", description=__doc__)
    parser.add_argument("directory", type=a_path, help="a run directory, or a directory of them (a sweep)")
    parser.add_argument(
        "--follow", action="store_true", help=f"every {FOLLOW_S:g} s again, until nothing runs or waits"
    )
    arguments = parser.parse_args()
    try:
        show(arguments.directory, arguments.follow)
    except UserError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        leave_interrupted()
    leave_told()


def show(directory: Path, follow: bool) -> None:
    """Print the status, and go on while anything runs or waits. Leaves by SystemExit where there is no run."""
    while True:
        text, alive = render(directory)
        if not text:
            refuse_unreadable(directory)
            unread = f": this locale does not know its letters; {UTF8}" if is_unread(str(directory)) else ""
            print(one_line(f"no run in {directory}{unread}"), file=sys.stderr)
            sys.exit(2)
        clear = "\x1b[2J\x1b[H" if follow and sys.stdout.isatty() else ""
        print(f"{clear}{text}", flush=True)
        if not (follow and alive) or console_error() is not None:
            return
        time.sleep(FOLLOW_S)


def render(directory: Path) -> tuple[str, bool]:
    """One run in full or a table of runs (nothing, if there is none), and whether any of them runs or waits."""
    if has_told(directory) or (holds_run(directory) and not os.path.exists(directory / "sweep.json")):
        state, told = state_alone(directory)
        return render_run(directory, state, told), state in ALIVE
    silent, damage = ask_record(directory)
    runs = find_runs(directory)
    rows = [_row(directory, run, silent) for run in runs]
    started = {run.relative_to(directory).as_posix() for run in runs}
    cells = [""] * (len(HEADER) - 3)
    silent_rows = [(name, state, *cells, within(directory, why)) for name, (state, why) in silent.items()]
    rows += [row for row in silent_rows if row[0] not in started]
    rows = [(directory.resolve().name, *row[1:]) if row[0] == ALONE else row for row in rows]
    if not rows:
        return "", False
    goes_on = how_sweep_goes_on(directory, [run.relative_to(directory).as_posix() for run in runs], silent)
    lines = [render_table(sorted(rows)), *map(one_line, [*goes_on, summarise_failures(directory)]), damage]
    return "\n".join(filter(None, lines)), any(row[1] in ALIVE for row in rows)


def ask_record(directory: Path) -> tuple[dict[str, tuple[str, str]], str]:
    """`silent_points`, and what is wrong with the sweep's record, if anything is: its runs are there none the less."""
    try:
        return silent_points(directory), ""
    except UserError as error:
        return {}, error.render()


def how_sweep_goes_on(directory: Path, names: Iterable[str], silent: Mapping[str, tuple[str, str]]) -> list[str]:
    """A line for each kind of points that failed or never started: what makes them go on. Nothing for a directory that
    is no sweep.

    Args:
        names: of the points that have told of themselves.
        silent: as of `silent_points`: what is there may be started by SLURM, and is not the sweep's command's.
    """
    told = []
    if os.path.exists(directory / "sweep.json"):
        told = how_points_go_on({name: read_status(directory / name) for name in names if name not in silent})
    if unstarted := sorted(name for name, (state, _) in silent.items() if state in (MISSING, "refused")):
        told.append(_how_it_starts(directory, unstarted))
    return told


def state_of_point(run: Path, name: str, silent: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    """State of a run, and what its sweep's record and SLURM's queue say of it: the one reader of all that show runs.

    Args:
        name: its name in the record.
        silent: as of `silent_points`; empty for a run that is no part of a sweep.
    """
    if not has_told(run):
        return silent.get(name, (NOT_STARTED if holds_run(run) else MISSING, ""))
    state, told = state_in(silent, name, true_state(run, read_status(run)))
    return UNREADABLE if state == "done" and find_faults(run) else state, told


def state_in(silent: Mapping[str, tuple[str, str]], name: str, state: str) -> tuple[str, str]:
    """State and why of a point that has told of itself ("": nothing more than that), with what its sweep's record and
    SLURM's queue know of it.
    """
    known, why = silent.get(name, (state, ""))
    if known in IDLE:  # as it was when the queue was asked; its own word is newer
        return state, why if known == state else ""
    if state in IDLE or known == "suspended" or (state == UNREADABLE and known == "queued"):
        return known, why
    return state, ""


def state_alone(run_dir: Path) -> tuple[str, str]:
    """The same of a run that is a job by itself, or a point whose sweep's record lies beside it."""
    for sweep_dir, name in ((run_dir, ALONE), (run_dir.absolute().parent, run_dir.absolute().name)):
        if os.path.exists(sweep_dir / "sweep.json"):
            with contextlib.suppress(UserError):
                return state_of_point(run_dir, name, silent_points(sweep_dir, name))
    return state_of_point(run_dir, ALONE, {})


def silent_points(sweep_dir: Path, only: str | None = None) -> dict[str, tuple[str, str]]:
    """Points of a sweep that do not run, with state and cause (`launch.ends`); of one only, if it is named. Raises
    UserError for a damaged record.
    """
    from launch.ends import points_without_word
    from launch.submitting import adopt_if_free
    from launch.sweep_file import read_sweep

    adopt_if_free(sweep_dir)
    sweep = read_sweep(sweep_dir)
    if only is not None:
        sweep["points"] = [point for point in sweep["points"] if point["dir"] == only]
        jobs = [row for row in sweep["submissions"] if only in row["points"]]
        sweep["submissions"] = jobs[-1:]
    return points_without_word(sweep_dir, sweep)


def why_lost(run: Path) -> str:
    """Of a run whose processes are gone: what SLURM knows of its job."""
    from launch import ends

    return ends.why_lost(run, str((read_attempts(run) or [{}])[-1].get("job") or ""))


def find_runs(directory: Path) -> list[Path]:
    """Run directories at any depth below, not looking into runs."""
    return find_directories(directory, has_told)


def has_told(path: Path) -> bool:
    """Whether a run has told of itself here, or would have if its files could be read."""
    return os.path.exists(status_path(path)) or (holds_run(path) and (is_locked(path) or bool(find_faults(path))))


def true_state(run_dir: Path, status: dict[str, Any]) -> str:
    """The state, or "lost" for a run that says it is alive and holds no lock: its machine went down."""
    if not status:
        return "running" if is_locked(run_dir) else UNREADABLE
    if status["state"] not in FINAL_STATES and not is_locked(run_dir):
        status = read_status(run_dir) or status  # it may have come to its end between the two looks
        return status["state"] if status["state"] in FINAL_STATES else "lost"
    return status["state"]


def render_run(run_dir: Path, state: str, told: str = "") -> str:
    """One run in full. `told`: what SLURM's queue says of it."""
    return "\n".join(map(one_line, _lines_of_run(run_dir, state, told)))


def _lines_of_run(run_dir: Path, state: str, told: str) -> list[str]:
    status, faults = read_status(run_dir), find_faults(run_dir)
    if not status:
        return [f"{run_dir}: {state}", *filter(None, [told]), *faults]
    lines = [
        f"{run_dir}: {state}, step {status['step']}/{status['max_steps']}",
        f"point {status['point_id']}, job {status['job']}, attempt {status['attempt']}, updated {_ago(status)}",
    ]
    lines += filter(None, [told_origin(run_dir), doing_of(run_dir, status, state)])
    if state == "running":
        lines += [f"serves at {url}" for url in status["urls"]]
    own_state = true_state(run_dir, status)
    for name, role in status["roles"].items():
        exit_code = "" if role["exit"] is None else f" with exit code {role['exit']}"
        lines.append(f"  {name:<20} {role_state(role, own_state)}{exit_code} (process {role['pid']})")
    lines += [f"engine {url} is left out: {why}" for url, why in status["lost_engines"].items()]
    lines += [f"alarm {alarm['kind']} since step {alarm['since']}: {alarm['message']}" for alarm in status["alarms"]]
    lines += filter(None, [str(lost_in(last_rows(run_dir)) or "")])
    lines += faults
    failure = status["failure"]
    if failure:
        lines.append(f"{failure['role']} failed, class {failure['class']}: {failure['message']}")
        lines += [f"  | {line}" for line in failure["log_tail"]]
    if told:
        lines.append(told)
    elif state in ("failed", "stopped"):
        lines.append(_how_it_goes_on(run_dir, status))
    elif state == "lost":
        lines += [why_lost(run_dir), _how_it_goes_on(run_dir, status)]
    return lines


def _how_it_goes_on(run_dir: Path, status: dict[str, Any]) -> str:
    place = shlex.quote(str(run_dir))
    if not os.path.exists(run_dir.parent / "sweep.json"):
        return f"to go on: {_commands_of_roles(run_dir, status) or f'the same command with output_dir={place}'}"
    why = "it may pass: the sweep's command tries it again"
    if status["state"] == "stopped":
        why = "the sweep's command goes on with it"
    elif waits_for_people(status):
        why = "it would fail again as it is: hydra.launcher.retry_failed=true in the sweep's command tries it again"
    return f"{why}; this point alone: python -m prl.runtime.agent {place}"


def _commands_of_roles(run_dir: Path, status: dict[str, Any]) -> str:
    """Of a run whose roles others have started; nothing for one that starts its own."""
    place = shlex.quote(str(run_dir))
    if status["started_by"] == "torchrun":
        return f"the same torchrun command, with output_dir={place} where it does not name {place} already"
    if status["started_by"] != "hand":
        return ""
    try:
        return "each in its terminal, " + "; ".join(commands_by_hand(read_plan(run_dir), run_dir))
    except UserError:  # its plan cannot be read: told by itself
        return f"the commands of its roles, each with {place}"


def _how_it_starts(directory: Path, names: list[str]) -> str:
    """Of points whose job was refused, or has ended before it began with them."""
    if names == [ALONE]:
        return f"not started: the same command with output_dir={shlex.quote(str(directory))} submits it again"
    return f"not started: {some_names(names)}; the sweep's command submits again"


def cause_of(run: Path, status: dict[str, Any]) -> str:
    """In one line: why it failed, and which of its files cannot be read."""
    failure = status.get("failure")
    why = [f"{failure['class']}: {failure['role']}: {failure['message']}"] if failure else []
    return "; ".join([*why, *find_faults(run)])


def doing_of(run: Path, status: dict[str, Any], state: str) -> str:
    """Before the roles of a run start: what it makes, and how far it is, or what it waits for; "" else."""
    if state != "starting" or not status.get("doing"):
        return ""
    stage = read_status(run / "warm_start") if status["doing"] == "warm start" else {}
    return status["doing"] + (f", step {stage['step']}/{stage['max_steps']}" if stage else "")


def role_state(role: dict[str, Any], state: str) -> str:
    """Of a role of a run in this state: no process outlives its run, whatever was the last that was written of it."""
    return "ended" if state in IDLE and role["state"] in ("starting", "ready") else str(role["state"])


def render_table(rows: list[tuple[str, ...]]) -> str:
    """One row per run."""
    rows = [HEADER, *(tuple(map(one_line, row)) for row in rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _row(directory: Path, run: Path, silent: Mapping[str, tuple[str, str]]) -> tuple[str, ...]:
    name, status = run.relative_to(directory).as_posix(), read_status(run)
    state, told = state_of_point(run, name, silent)
    why = "; ".join(filter(None, [told, cause_of(run, status)]))
    if not status:
        return (name, state, *[""] * (len(HEADER) - 3), _short(directory, why))
    alarms, lost = ", ".join(alarm["kind"] for alarm in status["alarms"]), ", ".join(status["lost_engines"])
    more = [f"alarms: {alarms}"] * bool(alarms) + [f"engines left out: {lost}"] * bool(lost)
    more += [why_lost(run)] * (state == "lost" and not told) + [doing_of(run, status, state)]
    last = last_rows(run)
    more += [str(lost_in(last) or "")]
    why = _short(directory, why or "; ".join(filter(None, more)))
    step = f"{status['step']}/{status['max_steps']}"
    reward = last.get("eval/reward", last.get("reward", last.get("val_loss", last.get("loss"))))
    figures = tuple(_figure(value) for value in (reward, last.get("tokens_per_s")))
    where = (read_attempts(run) or [{}])[-1].get("node", "")
    return (name, state, step, *figures, where, str(status["attempt"]), _ago(status), why)


def _short(directory: Path, why: str) -> str:
    """The same, cut: the run's own view has all of it."""
    why = within(directory, why)
    return why if len(why) <= WHY_WIDTH else f"{why[: WHY_WIDTH - 1]}…"


def _figure(value: Any) -> str:
    """What is not finite is written as a word."""
    return f"{value:.4g}" if isinstance(value, int | float) else str("" if value is None else value)


def last_rows(run: Path) -> dict[str, Any]:
    """The newest value of each metric, of the last rows that trainer and orchestrator wrote."""
    newest: dict[str, Any] = {}
    for role in ("orchestrator", "trainer.0"):  # the trainer's tokens_per_s is the one of the final table
        with contextlib.suppress(OSError):
            for line in last_lines(run / "metrics" / f"{role}.jsonl"):
                newest.update(parse_object(line) or {})  # the first one may be cut
    return newest


def _ago(status: dict[str, Any]) -> str:
    """Of a machine whose clock is ahead of ours, by how much."""
    age_s = time.time() - status["updated"]
    return f"{clock(age_s)} ago" if round(age_s) >= 0 else f"{clock(-age_s)} ahead"


if __name__ == "__main__":
    main()
