"""`python -m prl.runtime.agent POINT`: run a frozen point from its plan.json; with `--list FILE`, that of this job.

What a SLURM job starts on its node, and what starts a point by hand. Each start is told in POINT/attempts.jsonl. Under
SLURM, a job that is warned of its end (SIGUSR2) saves, requeues itself and goes on from its checkpoint; so does one
that is preempted, and one whose failure may pass (a node, a hang, a collective), as long as it advances or has retries
left. scancel ends everything at once. Any other failure is one for SLURM too, by the exit code.

Of a point on several nodes, the first node's agent does all that; the others serve it (prl.runtime.node_agent). Without
SLURM, one command rehearses all nodes on one machine; `--node=0` here and `--node=1` and so on elsewhere are by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from prl.config.errors import UserError
from prl.planning.run_plan import RunPlan, plan_from_json
from prl.runtime.job_nodes import BY_HAND, KEY, Meeting, announce, host_name, job_key, node_of_this_process
from prl.runtime.ledger import record_failure
from prl.runtime.node_agent import serve_node
from prl.runtime.signals import StopSignals
from prl.runtime.status_file import read_status

ATTEMPTS = "attempts.jsonl"
PASSING = ("node", "hang", "collective")  # classes of failure worth another try
DEFAULT_RETRIES = 2
POLL_S = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(prog="prl agent", description=__doc__)
    parser.add_argument("point", type=Path, nargs="?", help="a run directory with its plan.json")
    parser.add_argument("--list", type=Path, help="a file of run directories, one line for each array element")
    parser.add_argument("--node", type=int, help="this node's index, where nobody else starts the agents")
    arguments = parser.parse_args()
    if arguments.node is not None:
        os.environ.setdefault(KEY, BY_HAND)
    if (arguments.point is None) == (arguments.list is None):
        parser.error("give a point or a list")
    try:
        path = (arguments.point or choose(arguments.list)).absolute()
        node = node_of_this_process() if arguments.node is None else arguments.node
        code = run_attempt(path) if node == 0 else take_part(path, node)
    except UserError as error:
        print(error.render(), file=sys.stderr)
        code = 2
    sys.exit(code)


def choose(listing: Path) -> Path:
    """The point of this array element; of a job that is no array, the first."""
    return Path(listing.read_text().splitlines()[int(os.environ.get("SLURM_ARRAY_TASK_ID", "0"))])


def take_part(path: Path, node: int) -> int:
    """One of the nodes that are not the first. Those that the point has no use for end at once."""
    plan = read_plan(path)
    if node >= plan.num_nodes:
        return 0
    return serve_node(path, node, plan.config.deployment.start_timeout_s)


def run_attempt(path: Path) -> int:
    """One attempt at a point, on its first node. Returns the exit code for SLURM.

    Raises UserError for what a user can mend.
    """
    plan = read_plan(path)
    before = read_attempts(path)
    number = len(before) + 1
    tell_lost_attempt(plan, path, before)
    job = os.environ.get("SLURM_JOB_ID")
    _write(
        path,
        {
            "attempt": number,
            "job": _job_name(),
            "node": host_name(),
            "started": time.time(),
        },
    )
    code, error = 2, None
    try:
        with StopSignals() as signals:
            if job is not None:
                threading.Thread(target=hasten_if_cancelled, args=(signals, job), daemon=True).start()
            try:
                code = run_job(plan, signals)
            finally:  # agents that still look for the root need not wait any longer
                if plan.num_nodes > 1 and job_key() != BY_HAND:  # by hand, all attempts have one key
                    announce(path, Meeting(job_key(), plan.num_nodes, ended=True))
            warned = signals.first == signal.SIGUSR2 or (signals.first == signal.SIGTERM and was_preempted(job))
    except UserError as raised:
        error, warned = raised, False
    again = conclude(plan, path, before, code, error, warned)
    if error is not None:
        raise error
    if again:
        subprocess.run(["scontrol", "requeue", str(job)], check=False)  # SLURM ends this job at once
        time.sleep(60)
    return code


def conclude(
    plan: RunPlan, path: Path, before: list[dict[str, Any]], code: int, error: UserError | None, warned: bool
) -> bool:
    """Tell how an attempt ended, after those before it. Returns whether its job is to be requeued."""
    status, job, number = read_status(path), os.environ.get("SLURM_JOB_ID"), len(before) + 1
    failure = (status.get("failure") or {}) if code not in (0, *_codes_of_signals()) else {}
    kind = failure.get("class") or ("config" if error is not None else "code" if failure or code == 1 else None)
    row = {"attempt": number, "ended": time.time(), "exit_code": code, "class": kind, "step": status.get("step", 0)}
    again = job is not None and (warned or kind in PASSING) and may_go_on([*before, row], status.get("step", 0))
    _write(path, row | {"requeued": again})
    if kind is not None and plan.config.sweep is not None:
        message = error.render() if error is not None else failure.get("message", f"exit code {code}")
        record_failure(
            path, attempt=number, kind=kind, message=message, node=host_name(), job=_job_name(), requeued=again
        )
    if again:
        print(f"requeueing job {job}: {kind or 'told to stop before its time is over'}", flush=True)
    return again


def run_job(plan: RunPlan, signals: StopSignals) -> int:
    if plan.config.job == "bench":
        from prl.bench.launch import run as run_bench

        return run_bench(plan.config, signals)
    from prl.runtime.launch import run

    return run(plan.config, signals=signals)


def read_plan(path: Path) -> RunPlan:
    try:
        return plan_from_json((path / "plan.json").read_text())
    except OSError as error:
        raise UserError(
            f"{path} holds no frozen point: {error.strerror}",
            where="plan.json",
            fix="python -m prl.rl -m hydra.launcher.dry_run=true ... freezes points without starting them",
        ) from error


# --- attempts ---------------------------------------------------------------------------------------------------------


def read_attempts(path: Path) -> list[dict[str, Any]]:
    """One row for each attempt so far. One that never told its end was killed with its node: class node."""
    attempts: dict[int, dict[str, Any]] = {}
    try:
        lines = (path / ATTEMPTS).read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # torn by a crash
            continue
        attempts.setdefault(row["attempt"], {"class": "node"}).update(row)
    return [attempts[number] for number in sorted(attempts)]


def tell_lost_attempt(plan: RunPlan, path: Path, attempts: list[dict[str, Any]]) -> None:
    """Into the sweep's ledger, if the last attempt could not tell its own end."""
    if attempts and "ended" not in attempts[-1] and plan.config.sweep is not None:
        last = attempts[-1]
        record_failure(
            path,
            attempt=last["attempt"],
            kind="node",
            message="killed with its node, or by SIGKILL",
            node=last.get("node", ""),
            job=last.get("job"),
            requeued=last.get("job") == _job_name(),
        )


def may_go_on(attempts: list[dict[str, Any]], step: int) -> bool:
    """Whether to try again: retries are left, counted from the attempt that last advanced the run."""
    limit = int(os.environ.get("PRL_MAX_RETRIES", DEFAULT_RETRIES))
    stuck = 0
    for earlier in reversed(attempts[:-1]):
        if earlier.get("step", 0) < step:
            break
        stuck += 1
    return stuck < limit


def _write(path: Path, row: dict[str, Any]) -> None:
    with (path / ATTEMPTS).open("a") as file:
        file.write(json.dumps(row) + "\n")


# --- SLURM ------------------------------------------------------------------------------------------------------------


def hasten_if_cancelled(signals: StopSignals, job: str) -> None:
    """SIGTERM is preemption, with time to save, or scancel, with none: SLURM is asked which."""
    while signals.first is None:
        time.sleep(POLL_S)
    if signals.first != signal.SIGTERM:
        return
    asked = subprocess.run(
        ["squeue", "--noheader", f"--jobs={job}", "--format=%T"], capture_output=True, text=True, check=False
    )
    if asked.stdout.strip() in ("COMPLETING", "CANCELLED", ""):
        signals.count += 1


def was_preempted(job: str | None) -> bool:
    """Whether SLURM is about to give the nodes to another job; one that ends by itself before is not requeued."""
    if job is None:
        return False
    asked = subprocess.run(["scontrol", "--oneliner", "show", "job", job], capture_output=True, text=True, check=False)
    found = re.search(r" PreemptTime=(\S+)", asked.stdout)
    return found is not None and found.group(1) not in ("None", "(null)")


def _job_name() -> str | None:
    """As squeue shows it: 123_4 for an array element."""
    array, index = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array and index else os.environ.get("SLURM_JOB_ID")


def _codes_of_signals() -> tuple[int, ...]:
    return tuple(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2))


if __name__ == "__main__":
    main()
