"""What must hold after a round, whatever was hit."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from rounds import STEPS, Round
from runs import rows, series

from prl.runtime.directory.checkpoints import find_damage, parts_of

if TYPE_CHECKING:
    from play import Told

EVALUATIONS = [0, 3, 6]
GROUPS = 4  # of a batch
ACCIDENTS = {"retried_requests", "retried_rollouts", "engine_restarts"}
SIGNALS = {"TERM": 143, "TERM twice": 143, "INT": 130, "HUP": 129, "terminal closed": 129, "KILL": -9}


def points_of(drawn: Round, home: Path) -> list[Path]:
    """The run directories of a round."""
    if drawn.deployment.points == 1 and not drawn.deployment.slurm:
        return [home / "run"]
    return sorted(path.parent for path in (home / "outputs/sweeps/s").glob("*/plan.json"))


def check_truth(drawn: Round, home: Path, told: Told) -> None:
    """Whether exit code and status say what happened, as far as it is known."""
    statuses = [
        json.loads(path.read_text()) for run in points_of(drawn, home) if (path := run / "status.json").exists()
    ]
    told.state = ", ".join(sorted({status["state"] for status in statuses})) or "none"
    failures = [status["failure"] for status in statuses if status.get("failure")]
    if failures:
        told.failure, told.role = failures[0]["class"], failures[0]["role"]
    told.problems += [problem for problem in expectations(drawn, told, statuses) if problem]


def expectations(drawn: Round, told: Told, statuses: list[dict]) -> list[str | None]:
    """Problems, where exit code, state, class and the role that is blamed are not those of what happened."""
    code = told.code
    if code == 0:
        complete = [s["state"] == "done" and s["step"] == STEPS for s in statuses]
        whole = len(complete) == drawn.deployment.points and all(complete)
        return [None if whole else f"exit code 0, but the status says {told.state}"]
    if not told.hit:
        return [f"nobody was hit, and it ended with {code}"]
    if drawn.victim == "root":
        wanted = SIGNALS.get(drawn.signal)
        killed = {"failed", "done", "none"}
        if drawn.deployment.slurm:  # which ends the reaper before it may write a word
            killed |= {"running"}
        states = {"KILL": killed, "TERM twice": {"stopped", "failed", "done", "none"}}
        allowed = states.get(drawn.signal, {"stopped", "done", "none"})
        wrong = not set(told.state.split(", ")) <= allowed
        return [
            f"exit code {code}, not {wanted}" if code != wanted else None,
            f"the status says {told.state} ({told.failure})" if wrong else None,
        ]
    if drawn.victim == "job":
        allowed = {143: {"stopped", "done", "none"}, -9: {"starting", "running", "none"}}  # -9: SLURM gave it no time
        wrong = told.state not in allowed.get(code, ())
        return [f"exit code {code}, state {told.state}, class {told.failure}" if wrong else None]
    if drawn.victim in ("reaper", "http"):
        return [f"exit code {code}, though nothing that matters was hit: {told.failure}, {told.role}"]
    if drawn.victim == "disk":
        true = code in (1, 2) and (told.failure in ("node", "config") or told.state == "none")
        return [None if true else f"exit code {code}, state {told.state}, class {told.failure}"]
    if drawn.signal == "STOP":
        return [f"exit code {code} after a pause of two seconds: {told.failure}, {told.role}"]
    role = drawn.victim.split("/")[0]
    if drawn.signal in ("KILL", "ABRT") and role in drawn.deployment.restarts and told.role != drawn.victim:
        return [f"exit code {code}, though {drawn.victim} can be started again: {told.failure}, {told.role}"]
    wrong = told.role != drawn.victim
    return [
        f"exit code {code}" if code != 1 else None,
        f"{told.role} is blamed ({told.failure}), not {drawn.victim}" if wrong else None,
    ]


def check_points(drawn: Round, home: Path, reference: Path | None) -> list[str]:
    """Problems of the finished runs."""
    runs = points_of(drawn, home)
    problems = [] if len(runs) == drawn.deployment.points else [f"{len(runs)} points"]
    for run in runs:
        problems += [f"{run.name}: {problem}" for problem in check_run(run)]
        if drawn.deployment.synchronous and reference is not None:
            problems += compare(run, reference)
    return problems


def check_run(run: Path) -> list[str]:
    steps = list(range(1, STEPS + 1))
    mine, theirs = rows(run, "trainer.0"), rows(run, "orchestrator")
    problems = []
    if (found := [row["step"] for row in mine]) != steps:
        problems.append(f"the trainer's rows are of steps {found}")
    if (found := [row["step"] for row in theirs if "reward" in row]) != steps:
        problems.append(f"the orchestrator's rows are of steps {found}")
    if (found := [row["step"] for row in theirs if "eval/reward" in row]) != EVALUATIONS:
        problems.append(f"evaluations are of steps {found}")
    trained = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    places = {(row["step"], row["group"]) for row in trained}
    twice = [group for group, times in Counter(group for _, group in places).items() if times > 1]
    if twice:
        problems.append(f"groups {twice} were trained in two steps")
    if (found := dict(Counter(step for step, _ in places))) != dict.fromkeys(steps, GROUPS):
        problems.append(f"groups of the steps: {found}")
    if (damage := find_damage(run / "checkpoints" / f"step_{STEPS}", parts_of("rl"))) is not None:
        problems.append(f"the last checkpoint: {damage}")
    problems += [f"left behind: {path.name}" for path in (run / "checkpoints").glob("*.partial")]
    if not (run / "export" / "model.safetensors").exists():
        problems.append("no export")
    return problems


def compare(run: Path, reference: Path) -> list[str]:
    """Against the run that nobody disturbed, bit by bit."""
    problems = []
    if (run / "export/model.safetensors").read_bytes() != (reference / "export/model.safetensors").read_bytes():
        problems.append("other weights than those of the undisturbed run")
    for role in ("trainer.0", "orchestrator"):
        if undisturbed(run, role) != undisturbed(reference, role):
            problems.append(f"another series of {role}")
    return problems


def undisturbed(run: Path, role: str) -> list[dict]:
    """The series without what counts accidents."""
    return [{key: value for key, value in row.items() if key not in ACCIDENTS} for row in series(run, role)]
