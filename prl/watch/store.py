"""What lies below a directory: its runs, their states, and an index of each that grows with its files."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prl.compare.curves import is_number
from prl.compare.points import SWEEP_FILE, find_runs
from prl.compare.stats import half_width, mean
from prl.config.errors import UserError
from prl.metrics.held_out import lost_in
from prl.runtime.directory.files import read_object, why_no_object
from prl.runtime.directory.shapes import texts
from prl.runtime.directory.status_file import read_status
from prl.runtime.people.faults import find_faults, holds_run
from prl.status import ALONE, cause_of, doing_of, last_rows, role_state, silent_points, state_of_point, true_state
from prl.watch.groups import groups_of
from prl.watch.rollout_index import RolloutIndex
from prl.watch.series import CHARTS, Series, thin

LOOK_S = 2.0  # between two looks for new runs
LOOK_SHARE = 0.05  # of the time, at most, goes into them
WAIT_S = 0.2  # a look that took longer goes on beside those who ask; they see what was found before
QUEUE_S = 10.0  # between two questions to SLURM


@dataclass
class Run:
    """One point. `lock` is held while its indices are read or grow."""

    name: str
    path: Path
    series: Series = field(init=False)
    rollouts: RolloutIndex = field(init=False)
    lock: threading.Lock = field(default_factory=threading.Lock)
    plan: dict[str, Any] = field(default_factory=dict)  # of plan.json, which never changes; empty until it is there

    def __post_init__(self) -> None:
        self.series, self.rollouts = Series(self.path), RolloutIndex(self.path)

    def config(self) -> dict[str, Any]:
        if not self.plan:
            found = read_object(self.path / "plan.json") or {}
            config = found.get("config")
            config = config if isinstance(config, dict) else {}
            kept = {key: config.get(key) for key in ("job", "max_steps", "seed")} | {
                "swept": texts(config.get("swept"))
            }
            self.plan = {**kept, "point_id": found.get("point_id")} if found else {}
        return self.plan

    def state(self, waiting: dict[str, tuple[str, str]]) -> dict[str, Any]:
        """What `prl.status` says of it."""
        config, status = self.config(), read_status(self.path)
        why = cause_of(self.path, status)
        own = true_state(self.path, status)
        state, told = state_of_point(self.path, ALONE if ALONE in waiting else Path(self.name).name, waiting)
        failure = status.get("failure") or {}
        newest = last_rows(self.path)
        keys = ("reward", "eval/reward", "loss", "val_loss", "tokens_per_s", "staleness_mean", "mismatch_kl_mean")
        return {
            "name": self.name,
            "sweep": str(Path(self.name).parent),
            "state": state,
            "why": "; ".join(filter(None, [told, why])),
            "doing": doing_of(self.path, status, state),
            "log_tail": failure.get("log_tail", []),
            "alarms": status.get("alarms") or [],
            "lost_rollouts": str(lost_in(newest) or ""),
            "lost_engines": status.get("lost_engines") or {},
            "roles": {name: role_state(role, own) for name, role in (status.get("roles") or {}).items()},
            "step": status.get("step", 0),
            "max_steps": config.get("max_steps"),
            "attempt": status.get("attempt"),
            "updated": status.get("updated"),
            "swept": config.get("swept") or {},
            "job": config.get("job"),
            "figures": {key: newest[key] for key in keys if is_number(newest.get(key))},
        }


class Store:
    """All runs below `root`, by their path below it; "." is a root that is a run itself."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs: dict[str, Run] = {}
        self.lock = threading.Lock()
        self.looked_s, self.took_s = -math.inf, 0.0
        self.looking: threading.Thread | None = None
        # sweep -> (its runs, and whether they have a plan; run -> curve and seed)
        self.grouped: dict[str, tuple[frozenset[tuple[str, bool]], dict[str, tuple[str, str]]]] = {}
        # sweep -> (when asked, point -> state and cause)
        self.waiting: dict[str, tuple[float, dict[str, tuple[str, str]]]] = {}

    def look(self) -> None:
        """Find runs that were not there before, and forget those that are gone: now and then, however often it is
        called, and in a thread of its own where that takes long.
        """
        with self.lock:
            is_fresh = time.monotonic() - self.looked_s < max(LOOK_S, self.took_s / LOOK_SHARE)
            if is_fresh or (self.looking is not None and self.looking.is_alive()):
                return
            if self.took_s > WAIT_S:
                self.looking = threading.Thread(target=self._look, daemon=True)
                self.looking.start()
            else:
                self._look()

    def _look(self) -> None:
        began = time.monotonic()
        with contextlib.suppress(OSError):  # a directory that went away while it was read: the next look
            paths = [self.root] if holds_run(self.root) else find_runs(self.root)
            names = {"." if path == self.root else path.relative_to(self.root).as_posix(): path for path in paths}
            self.runs = {name: self.runs.get(name) or Run(name, path) for name, path in names.items()}
        self.looked_s = time.monotonic()
        self.took_s = self.looked_s - began

    def run(self, name: str) -> Run:
        """Raises LookupError for one that is not there."""
        self.look()
        if name not in self.runs:
            raise LookupError(f"there is no run {name[:200]!r} here")
        return self.runs[name]

    def warm(self) -> None:
        """Read what is on disk once, so that no view has to wait for it."""
        self.look()
        for run in list(self.runs.values()):
            with run.lock:
                run.series.poll()
                run.rollouts.poll()

    # --- views --------------------------------------------------------------------------------------------------------

    def overview(self) -> dict[str, Any]:
        """Every run with its state and cause; points of a sweep that have not begun are among them."""
        self.look()
        runs = list(self.runs.values())
        waiting = {name: self._waiting(name) for name in sorted({str(Path(run.name).parent) for run in runs})}
        rows = [run.state(waiting[str(Path(run.name).parent)]) for run in runs]
        known = {row["name"] for row in rows}
        for sweep, points in waiting.items():
            for point, (state, cause) in points.items():
                name = (Path(sweep) / point).as_posix()
                if name not in known and point != ALONE:
                    told = {"name": name, "sweep": sweep, "state": state, "why": cause}
                    rows.append(told | {"figures": {}, "swept": {}})
        records = [self.root / sweep / SWEEP_FILE for sweep in waiting]
        damaged = [why for path in records if os.path.lexists(path) and (why := why_no_object(path))]
        return {"root": str(self.root), "runs": sorted(rows, key=lambda row: row["name"]), "faults": damaged}

    def state_of(self, run: Run) -> dict[str, Any]:
        """As the overview has it."""
        return run.state(self._waiting(str(Path(run.name).parent)))

    def _waiting(self, sweep: str) -> dict[str, tuple[str, str]]:
        directory = self.root / sweep
        if not os.path.exists(directory / SWEEP_FILE):
            return {}
        asked_s, found = self.waiting.get(sweep, (-QUEUE_S, {}))
        if time.monotonic() - asked_s > QUEUE_S:
            with contextlib.suppress(UserError):  # a record that is damaged: its runs are there none the less
                found = silent_points(directory)
            self.waiting[sweep] = time.monotonic(), found
        return found

    def sweep_charts(self, sweep: str) -> dict[str, Any]:
        """Mean curves of points that differ in their seed alone, with Student's 95 % interval over seeds; points whose
        files are damaged are named instead.
        """
        self.look()
        runs = [run for run in list(self.runs.values()) if str(Path(run.name).parent) == sweep]
        damaged = {run.name: why for run in runs if (why := "; ".join(find_faults(run.path)))}
        drawn = [run for run in runs if run.name not in damaged]
        for run in drawn:
            with run.lock:
                run.series.poll()
        groups: dict[str, dict[str, list[Run]]] = {}
        told = self._groups(sweep, drawn)
        for run in drawn:
            label, seed = told[run.name]
            groups.setdefault(label, {}).setdefault(seed, []).append(run)
        charts = []
        for title, keys in CHARTS.items():
            for role, key in keys:
                lines = [
                    {"name": label, **_over_seeds([*seeds.values()], role, key)} for label, seeds in groups.items()
                ]
                lines = [line for line in lines if line["points"]]
                if lines:
                    is_first = (role, key) == keys[0]
                    charts.append({"title": title if is_first else f"{title}: {role} {key}", "lines": lines})
        faults = [f"{Path(name).name} is not drawn: {why}" for name, why in sorted(damaged.items())]
        return {"sweep": sweep, "charts": charts, "faults": faults}

    def _groups(self, sweep: str, runs: list[Run]) -> dict[str, tuple[str, str]]:
        """Of `groups_of`, which reads plans: they never change once they are there."""
        key = frozenset((run.name, bool(run.config())) for run in runs)
        if self.grouped.get(sweep, (None, {}))[0] != key:
            self.grouped[sweep] = key, groups_of({run.name: run.path for run in runs})
        return self.grouped[sweep][1]

    def common_tasks(self, one: str, other: str) -> list[dict[str, Any]]:
        """Held-out tasks that both points kept, each with the newest rollouts of both."""
        newest = [self._held_out(self.run(name)) for name in (one, other)]
        common = sorted(newest[0].keys() & newest[1].keys())
        return [{"env": env, "task": task, "rollouts": [n[env, task] for n in newest]} for env, task in common]

    def _held_out(self, run: Run) -> dict[tuple[str, str], list[dict[str, Any]]]:
        """(env, task) -> step, id and reward of each of its rollouts, the newest first."""
        found: dict[tuple[str, str], list[dict[str, Any]]] = {}
        with run.lock:
            run.rollouts.poll()
            for entry in sorted(run.rollouts.entries, key=lambda e: -e["step"] if isinstance(e["step"], int) else 0):
                if entry["split"] == "held_out" and entry["why"] != "failed":
                    told = {key: entry[key] for key in ("id", "step", "reward")}
                    found.setdefault((str(entry["env"]), str(entry["task"])), []).append(told)
        return found


def _over_seeds(seeds: list[list[Run]], role: str, key: str) -> dict[str, Any]:
    """Points (step, mean, half of the interval or None, seeds): at each step, of the seeds that have reached it. Runs
    that repeat a seed say nothing new of how far seeds differ, and count by their mean.
    """
    series = [[run.series.values.get((role, key), {}) for run in runs] for runs in seeds]
    steps = thin([(step, None) for step in sorted({step for runs in series for values in runs for step in values})])
    points = []
    for step, _ in steps:
        reached = [[values[step] for values in runs if step in values] for runs in series]
        values = [mean(of_seed) for of_seed in reached if of_seed]
        points.append((step, mean(values), half_width(values), len(values)))
    return {"points": points}
