"""`python -m prl.runtime.agent POINT`: run a frozen point from its plan.json; with `--list FILE`, that of this job.

What a SLURM job starts on its node, and what starts a point by hand. Each start is told in POINT/attempts.jsonl. A
job that a sweep has submitted and that is warned of its end (SIGUSR2) saves, requeues itself and goes on from its
checkpoint; so does one that is preempted, and one whose failure may pass (a node, a hang, a collective), as long as it
advances or has retries left. A job that is cancelled, or requeued by others, saves what fits into SLURM's KillWait; so
does a point by hand inside a job, which is its user's to requeue. Any other failure is one for SLURM too, by the exit
code.

Of a point on several nodes, the first node's agent does all that; the others serve it (prl.runtime.nodes.node_agent).
Without SLURM, one command rehearses all nodes on one machine; `--node=0` here, `--node=1` and so on elsewhere, by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from prl.config.console import shield_console
from prl.config.errors import PassingError, UserError
from prl.config.place_names import a_path
from prl.planning.run_plan import RunPlan, plan_from_json
from prl.runtime.directory.files import append_objects, as_user_error
from prl.runtime.directory.identity import describe_process, job_name
from prl.runtime.directory.ledger import record_failure
from prl.runtime.directory.rundir import claim, refuse_alive
from prl.runtime.directory.status_file import ATTEMPTS, read_attempts, read_status
from prl.runtime.nodes.job_nodes import BY_HAND, KEY, Meeting, announce, host_name, job_key, node_of_this_process
from prl.runtime.nodes.node_agent import serve_node
from prl.runtime.nodes.slurm_job import limit_by_kill_wait, requeue, was_preempted
from prl.runtime.process.failures import PASSING
from prl.runtime.process.guards import die_with_parent
from prl.runtime.process.signals import STOP_SIGNALS, StopSignals

DEFAULT_RETRIES = 2
TIME, PREEMPTED = "time", "preempted"  # what SLURM warns of


def main() -> None:
    shield_console()
    parser = argparse.ArgumentParser(prog="prl agent", description=__doc__)
    parser.add_argument("point", type=a_path, nargs="?", help="a run directory with its plan.json")
    parser.add_argument("--list", type=a_path, help="a file of run directories, one line for each array element")
    parser.add_argument("--node", type=int, help="this node's index, where nobody else starts the agents")
    parser.add_argument("--plan", type=a_path, help="the plan.json of the point, where its directory has none yet")
    parser.add_argument("--parent", type=int, help="the process with which to die: a sweep on this machine")
    parser.add_argument("--within", help="the SLURM job around that sweep: its end is ours, its requeueing is not")
    arguments = parser.parse_args()
    if arguments.parent is not None:
        die_with_parent(arguments.parent)
    if arguments.node is not None:
        os.environ.setdefault(KEY, BY_HAND)
    if (arguments.point is None) == (arguments.list is None):
        parser.error("give a point or a list")
    try:
        path = (arguments.point or choose(arguments.list)).absolute()
        frozen = arguments.plan or path / "plan.json"
        node = node_of_this_process() if arguments.node is None else check_node(arguments.node, frozen)
        if arguments.plan is not None and node == 0:
            freeze(path, read_plan_file(frozen))
        job, around = (job_name(), None) if arguments.list else (None, arguments.within or job_name())
        code = run_attempt(path, job, around) if node == 0 else take_part(path, node, frozen)
    except UserError as error:
        print(error.render(), file=sys.stderr)
        code = 2
    sys.exit(code)


def choose(listing: Path) -> Path:
    """The point of this array element; of a job that is no array, the first."""
    index = os.environ.get("SLURM_ARRAY_TASK_ID", "0")
    try:
        line = listing.read_text().splitlines()[int(index)]
    except (OSError, ValueError, IndexError) as error:
        line, why = "", str(error)
    else:
        why = f"line {index} is empty"
    if not line:
        raise UserError(
            f"{listing} names no point for element {index} of the array.",
            where="--list",
            why=why,
            fix="the command of the sweep again makes lists and jobs for what is not done",
        )
    return Path(line)


def check_node(node: int, frozen: Path) -> int:
    """A number given by hand. Raises UserError for one that no node has."""
    if node < 0:
        raise UserError(
            f"This point has no node {node}.",
            where=f"--node={node}",
            why="nodes are counted from 0",
            fix=f"--node=0 to --node={read_plan_file(frozen).num_nodes - 1}",
        )
    return node


def freeze(path: Path, plan: RunPlan) -> None:
    """Put a plan into its point's directory, made for it. Raises UserError if something else is there."""
    placed = plan.config.model_copy(update={"output_dir": str(path)})
    claim(plan.model_copy(update={"config": placed})).release()


def take_part(path: Path, node: int, frozen: Path) -> int:
    """One of the nodes that are not the first. Those that the point has no use for end at once."""
    plan = read_plan_file(frozen)
    if node >= plan.num_nodes:
        print(f"node {node} is not needed: the point has {plan.num_nodes}, counted from 0", flush=True)
        return 0
    return serve_node(path, node, plan.config.deployment.start_timeout_s)


def run_attempt(path: Path, job: str | None = None, within: str | None = None) -> int:
    """One attempt at a point, on its first node. Returns the exit code for SLURM.

    Args:
        job: the point's own, which may be requeued.
        within: a job that is not the point's, but whose end would be its end, too.

    Raises UserError for what a user can mend.
    """
    plan = read_plan(path)
    refuse_alive(path)  # its attempt is not lost, and this is none
    before = read_attempts(path)
    number = len(before) + 1
    tell_lost_attempt(plan, path, job, before)
    write_attempt(
        path,
        {
            "attempt": number,
            "job": job,
            "node": host_name(),
            "started": time.time(),
        },
    )
    code, error = 2, None
    try:
        ending = job or within
        with StopSignals(scheduled=ending is not None) as signals:
            if ending is not None:
                threading.Thread(target=limit_by_kill_wait, args=(signals, ending), daemon=True).start()
            try:
                code = run_job(plan, signals, own_job=job is not None)
            finally:  # agents that still look for the root need not wait any longer
                if plan.num_nodes > 1 and job_key() != BY_HAND:  # by hand, all attempts have one key
                    with contextlib.suppress(OSError):  # on a full disk they wait until srun ends them
                        announce(path, Meeting(job_key(), plan.num_nodes, ended=True))
            warned = TIME if signals.first == signal.SIGUSR2 else None
            if signals.first == signal.SIGTERM and was_preempted(job):
                warned = PREEMPTED
    except UserError as raised:
        error, warned = raised, None
    again = conclude(plan, path, job, before, code, error=error, warned=warned)
    if error is not None:
        raise error
    if again:
        requeue(str(job))
    return code


def conclude(
    plan: RunPlan,
    path: Path,
    job: str | None,
    before: list[dict[str, Any]],
    code: int,
    error: UserError | None = None,
    warned: str | None = None,
    failure: dict[str, Any] | None = None,
) -> bool:
    """Tell how an attempt ended, after those before it. Returns whether its job is to be requeued.

    Args:
        warned: of what SLURM has warned it: TIME or PREEMPTED.
        failure: `class` and `message`, of an attempt that could not write its status; None: what stands there.
    """
    status, number = read_status(path), len(before) + 1
    if failure is None:
        failure = {} if error is not None or code in (0, *_codes_of_signals()) else _failure_of_this_attempt(status)
    told = None if error is None else "node" if isinstance(error, PassingError) else "config"
    kind = failure.get("class") or told or ("code" if failure or code == 1 else None)
    row = {"attempt": number, "ended": time.time(), "exit_code": code, "class": kind, "step": status.get("step", 0)}
    row["saved"] = status.get("saved")  # step of the newest checkpoint
    if warned is not None:
        row["warned"] = warned
    attempts, passes = [*before, row], warned is not None or kind in PASSING
    again = job is not None and passes and may_go_on(attempts, status.get("step", 0)) and has_time_left(attempts)
    with contextlib.suppress(OSError):  # a full disk costs the line, and not what was decided
        append_objects(path / ATTEMPTS, [row | {"requeued": again}])
    if kind is not None and plan.config.sweep is not None:
        message = error.render() if error is not None else failure.get("message", f"exit code {code}")
        record_failure(path, attempt=number, kind=kind, message=message, node=host_name(), job=job, requeued=again)
    if again:
        print(f"requeueing job {job}: {kind or 'told to stop before its time is over'}", flush=True)
    return again


def run_job(plan: RunPlan, signals: StopSignals, own_job: bool) -> int:
    if plan.config.job == "bench":
        from prl.bench.launch import run as run_bench

        return run_bench(plan.config, signals, own_job)
    from prl.runtime.launch import run

    return run(plan.config, signals=signals, own_job=own_job)


def read_plan(path: Path) -> RunPlan:
    """That of a point. Raises UserError."""
    return read_plan_file(path / "plan.json")


def read_plan_file(frozen: Path) -> RunPlan:
    try:
        return plan_from_json(frozen.read_text())
    except OSError as error:
        raise UserError(
            f"{frozen.parent} holds no frozen point: {error.strerror}",
            where=frozen.name,
            fix="python -m prl.plan --freeze output_dir=POINT ... freezes a point without starting it; "
            "python -m prl.rl -m hydra.launcher.dry_run=true ... those of a sweep",
        ) from error
    except ValueError as error:
        raise UserError(
            f"{frozen} is damaged.",
            where=frozen.name,
            why="it is no plan of this version: " + str(error).splitlines()[0],
            fix=f": > {frozen}; the command that made the point (sweep.json has it) writes a new one",
        ) from error


# --- attempts ---------------------------------------------------------------------------------------------------------


def tell_lost_attempt(plan: RunPlan, path: Path, job: str | None, attempts: list[dict[str, Any]]) -> None:
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
            requeued=job is not None and last.get("job") == job,
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


def has_time_left(attempts: list[dict[str, Any]]) -> bool:
    """Whether the point may go on in further jobs: no limit to how often its time may be over, or not reached."""
    limit = os.environ.get("PRL_MAX_TIMEOUTS")
    if limit is None or attempts[-1].get("warned") != TIME:
        return True
    return sum(attempt.get("warned") == TIME for attempt in attempts) <= int(limit)


def write_attempt(path: Path, row: dict[str, Any]) -> None:
    """Add to POINT/attempts.jsonl. Raises UserError when the disk is full."""
    try:
        append_objects(path / ATTEMPTS, [row])
    except OSError as error:
        told = as_user_error(error, path)
        if told is not None:
            raise told from error
        raise


def _failure_of_this_attempt(status: dict[str, Any]) -> dict[str, Any]:
    """None if the attempt has ended before it wrote a status: what stands there is another one's."""
    return (status.get("failure") or {}) if status.get("root") == describe_process() else {}


def _codes_of_signals() -> tuple[int, ...]:
    return tuple(128 + number for number in STOP_SIGNALS)


if __name__ == "__main__":
    main()
