"""A batch of points, from their names to their start: what is done is left alone, the rest runs here or on SLURM."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launch.ends import points_without_word, why_lost
from launch.local import device_places, run_points
from launch.places import telling_places
from launch.points import Point, freeze, is_to_start, make_points
from launch.roles import write_roles
from launch.session import Session
from launch.settings import LauncherSettings
from launch.shapes import refuse_loopback_engines, refuse_too_large, refuse_too_short
from launch.slurm_queue import is_configured
from launch.states import PointState, renewed, state_in, taken, what_it_needs
from launch.submitit_keys import refuse_contradictions
from launch.submitting import SUBMIT_LOCK, adopt
from launch.sweep_file import read_sweep, record_points, where_they_are
from launch.waiting import outcome, queued_points, refuse_without_objective, urls_when_serving, wait_for
from prl.config.branching import check_start
from prl.config.console import one_line
from prl.config.errors import ConfigError, PointFailedError, UserError
from prl.planning.planner import make_plan
from prl.runtime.directory.files import locked
from prl.runtime.directory.inputs import what_changed
from prl.runtime.directory.rundir import ENV, make_unique, refuse_foreign
from prl.runtime.directory.status_file import read_attempts, read_status
from prl.runtime.people.for_people import API_KEY
from prl.runtime.preflight import check_directory
from prl.runtime.process.ports import ANY_HOST, LOOPBACK

if TYPE_CHECKING:
    from prl.config.schema import RunConfig


def launch_points(
    session: Session,
    batch: Sequence[tuple[str, ...]],
    sweep_dir: Path,
    settings: LauncherSettings,
    waits: bool,
) -> list[float | PointFailedError | None]:
    """Start what is missing of a batch.

    Args:
        waits: whether to return only when all points have ended, for a sweeper that goes on from their results. It may
            name a point twice.

    Returns: for each point its objective, or why it has none; None where nobody waits.
    """
    on_slurm = uses_slurm(settings)
    configs = where_they_are(session.configs_of(batch, sweep_dir), sweep_dir)
    configs = [reachable(config) if on_slurm else config for config in configs]
    distinct = {config.output_dir: i for i, config in enumerate(configs)}.values() if waits else range(len(batch))
    points = make_points([batch[i] for i in distinct], [configs[i] for i in distinct])
    if waits:
        refuse_without_objective(points)
    queued = queued_points(sweep_dir) if on_slurm else set()
    states = {point.path: what_it_needs(point.path, point.config, queued) for point in points}
    todo = [point for point in points if is_to_start(states[point.path], settings)]
    refuse_impossible(todo, settings, on_slurm)
    if settings.dry_run:
        from launch.dry_run import show  # submitit and jinja2: 0.1 s that points on this machine do without

        show(points, states, todo, sweep_dir, settings, on_slurm)
        if waits:
            print("the sweeper chooses further points when these have results", flush=True)
            raise SystemExit(0)
        return [None] * len(points)
    if on_slurm:
        _submit(session, points, sweep_dir, settings)
    else:
        _start(session, points, sweep_dir, settings)
    if not waits:
        return [None] * len(points)
    results = _results(session, points, sweep_dir, on_slurm)
    return [results[str(config.output_dir)] for config in configs]


def launch_alone(session: Session, overrides: tuple[str, ...], config: RunConfig, settings: LauncherSettings) -> None:
    """One job that is no part of a sweep, to SLURM, or as a dry run: its own directory (`output_dir`, or a fresh one
    under outputs/) holds the record of its submission, too.
    """
    on_slurm = settings.mode == "slurm" and uses_slurm(settings)
    config = reachable(config) if on_slurm else config
    is_new = config.output_dir is None
    if config.output_dir is not None:
        check_directory(Path(config.output_dir), "output_dir", "output_dir=outputs/mine")
    path = make_unique(config.name) if config.output_dir is None else Path(config.output_dir).expanduser().absolute()
    try:
        config = config.model_copy(update={"output_dir": str(path)})
        check_start(config)
        point = Point(overrides, make_plan(config))
        refuse_impossible([point], settings, on_slurm)
        with telling_places(path):
            refuse_foreign(path, point.plan)
            if settings.dry_run:
                from launch.dry_run import show  # as above

                state = what_it_needs(path, point.config)
                todo = [point] if is_to_start(state, settings) else []
                show([point], {path: state}, todo, path, settings, on_slurm)
            else:
                _submit(session, [point], path, settings)
    except UserError:
        if is_new:
            shutil.rmtree(path, ignore_errors=True)
        raise
    if config.job == "inference" and not settings.dry_run:
        wait_for_server(session, path)


def reachable(config: RunConfig) -> RunConfig:
    """A server that runs on a node of a cluster is of no use on loopback; beyond it, it has a key."""
    if config.job != "inference" or config.inference.host != LOOPBACK:
        return config
    return config.model_copy(update={"inference": config.inference.model_copy(update={"host": ANY_HOST[0]})})


def wait_for_server(session: Session, path: Path) -> None:
    """Tell where it serves once it does. A job that ends before is one that failed."""
    print("waiting until it serves; Ctrl-C ends the waiting, not the job", flush=True)
    try:
        urls = urls_when_serving(path)
    except KeyboardInterrupt:
        print(one_line(f"python -m prl.status {shlex.quote(str(path))} tells where it serves"), file=sys.stderr)
        raise SystemExit(130) from None
    if not urls:
        print(why_it_does_not_serve(path), file=sys.stderr)
        session.exit_code = 1
        return
    for url in urls:
        print(f"serving at {url}", flush=True)
    if (path / API_KEY).exists():
        print(one_line(f"key for sampling: in {path / API_KEY}, for you alone"), flush=True)


def why_it_does_not_serve(path: Path) -> str:
    """Of a server whose job has ended: the class, cause and remedy that its status has, and where more is said."""
    more = f"python -m prl.status {shlex.quote(str(path))}"
    more += f"; {path / 'slurm'} has its log" * any((path / "slurm").glob("*.log"))
    failure = read_status(path).get("failure")
    if not failure:
        state, why = points_without_word(path, read_sweep(path)).get(".", ("lost", ""))
        job = str((read_attempts(path) or [{}])[-1].get("job") or "")
        cause = why or (why_lost(path, job) if state == "lost" else state)
        return "\n".join(map(one_line, [f"it does not serve: {cause}", f"  more:  {more}"]))
    parts = [line for line in failure["log_tail"] if re.match(r"  (where|why|do):", line)]  # as a UserError renders
    cause = f"{failure['role']} failed, class {failure['class']}: {failure['message']}"
    return "\n".join(map(one_line, [f"it does not serve: {cause}", *parts, f"  more:  {more}"]))


def refuse_impossible(points: list[Point], settings: LauncherSettings, on_slurm: bool) -> None:
    """Raise ConfigError for points that cannot be started so."""
    refuse_contradictions(points, settings)
    if on_slurm:
        refuse_loopback_engines(points)
        refuse_too_large(points)
        refuse_too_short(points, settings)
        if settings.slurm.template_path or any(point.config.slurm.template_path for point in points):
            from launch.slurm import refuse_templates  # submitit and jinja2, as above

            refuse_templates(points, settings)


def _results(
    session: Session, points: list[Point], sweep_dir: Path, on_slurm: bool
) -> dict[str, float | PointFailedError]:
    """Of each point, by its directory, once all have ended."""
    try:
        wait_for([point.path for point in points], sweep_dir, on_slurm)
    except KeyboardInterrupt:
        print(
            one_line(f"no longer waiting; python -m prl.cancel {shlex.quote(str(sweep_dir))} stops what runs"),
            file=sys.stderr,
        )
        raise SystemExit(130) from None
    results = {str(point.path): outcome(point) for point in points}
    session.failed |= {path: 1 for path, value in results.items() if isinstance(value, PointFailedError)}
    return results


def _submit(session: Session, points: list[Point], sweep_dir: Path, settings: LauncherSettings) -> None:
    """Submit what nobody has submitted: of two equal commands at the same instant, the second sees the first's jobs."""
    from launch.slurm import submit  # submitit and jinja2, as above

    with _turn(sweep_dir):
        adopt(sweep_dir)
        queued = queued_points(sweep_dir)
        states = {point.path: what_it_needs(point.path, point.config, queued) for point in points}
        todo = _prepare(session, points, states, sweep_dir, settings)
        for point in todo:
            freeze(point)
            write_roles(point)
        submit(todo, sweep_dir, settings)


@contextlib.contextmanager
def _turn(sweep_dir: Path) -> Iterator[None]:
    """One command at a time looks at a sweep's points and decides which are its own to start."""
    sweep_dir.mkdir(parents=True, exist_ok=True)
    lock, has_it = sweep_dir / SUBMIT_LOCK, False
    try:
        with locked(lock):
            has_it = True
            yield
    except KeyboardInterrupt:
        if not has_it:
            print(f"waited for another command of this sweep, which holds {lock}; nothing was started", file=sys.stderr)
        raise


def _start(session: Session, points: list[Point], sweep_dir: Path, settings: LauncherSettings) -> None:
    """Run here what is to be started."""
    with _turn(sweep_dir):
        states = {point.path: what_it_needs(point.path, point.config) for point in points}
        todo = [
            point
            for point in _prepare(session, points, states, sweep_dir, settings)
            if _freeze_if_free(session, point, settings)
        ]
    if todo:
        run_points(session, todo, device_places(todo, settings), settings)


def _freeze_if_free(session: Session, point: Point, settings: LauncherSettings) -> bool:
    """Whether another sweep on this machine has not begun with it since we looked: who freezes locks it, too."""
    with taken(point.path) as is_ours:
        state = renewed(state_in(point.path), point.path, point.config) if is_ours else "active"
        if is_to_start(state, settings):
            freeze(point)
            return True
    session.leave(point.path, state)
    return False


def _prepare(
    session: Session, points: list[Point], states: dict[Path, PointState], sweep_dir: Path, settings: LauncherSettings
) -> list[Point]:
    """Record the points. Returns those that are to be started."""
    todo = [point for point in points if is_to_start(states[point.path], settings)]
    left = [point for point in points if point not in todo]
    for point in left:
        is_done = states[point.path] == "done"
        session.leave(point.path, states[point.path], what_changed(point.path / ENV, point.config) if is_done else ())
    for point in todo:
        if states[point.path] == "refused":
            session.try_again(point.path)
    record_points(sweep_dir, points)
    return todo


def uses_slurm(settings: LauncherSettings) -> bool:
    """Whether points go to SLURM. Raises ConfigError when they shall and cannot."""
    there = settings.mode != "local" and is_configured()
    if settings.mode == "slurm" and not there and not settings.dry_run:
        raise ConfigError(
            [
                UserError(
                    "There is no SLURM here.",
                    where="hydra/launcher",
                    why="sbatch is not on the PATH, or this machine belongs to no cluster",
                    fix="hydra/launcher=local, or submit from a login node; hydra.launcher.dry_run=true needs no SLURM",
                )
            ]
        )
    return settings.mode == "slurm" or there
