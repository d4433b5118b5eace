"""RunConfig in, exit code out: one run from its directory to its final table.

Exit codes: 0 done, 1 failed, 130 and 143 stopped by SIGINT and SIGTERM; UserError for what the user can mend (2).
"""

from __future__ import annotations

import contextlib
import secrets
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from prl.config.branching import check_start
from prl.config.console import one_line, shield_console
from prl.config.errors import AwayError, PassingError, ReadOnlyError, UserError
from prl.config.schema import RunConfig
from prl.metrics.reader import truncate_rows
from prl.planning.planner import make_plan
from prl.planning.render import mixed_environments
from prl.planning.run_plan import RunPlan
from prl.runtime.branching import begun_with, first_checkpoint, first_step
from prl.runtime.directory.checkpoints import discard_after, discard_unfinished, latest_valid, parts_of, steps
from prl.runtime.directory.files import as_user_error
from prl.runtime.directory.hours import Hours
from prl.runtime.directory.inputs import note_changes
from prl.runtime.directory.rundir import ENV, RunDir, claim, is_locked
from prl.runtime.directory.status_file import State, StatusFile, read_status
from prl.runtime.evaluated import why_outdated
from prl.runtime.external import await_listeners, check_engines, check_keys
from prl.runtime.nodes.remote import Nodes, has_no_agents
from prl.runtime.nodes.seats import Seat, starter_of
from prl.runtime.people.progress import Progress
from prl.runtime.plain_model import plain_model
from prl.runtime.policy_stage import drop_converted, prepare_policy
from prl.runtime.preflight import check_machine
from prl.runtime.presence import Presence
from prl.runtime.process.failures import Failure, failure_of_root, waits_for_people
from prl.runtime.process.gpus import roles_without_gpu
from prl.runtime.process.reaper import Reaper
from prl.runtime.process.signals import StopSignals
from prl.runtime.supervisor import ENTRIES, Household, Outcome, Supervisor
from prl.runtime.warm_start import warm_start


def run(
    config: RunConfig,
    entries: Mapping[str, str] = ENTRIES,
    signals: StopSignals | None = None,
    own_job: bool = False,
    seats: tuple[Seat, ...] = (),
    on_claim: Callable[[Path], None] = lambda path: None,
) -> int:
    """Run one point to its end, resuming it if its directory holds an earlier attempt.

    Args:
        entries: role -> "module:function"; tests put tiny roles in their place.
        signals: installed already, by who wants to know which came; None: installed here.
        own_job: whether the SLURM job around was submitted for this run, which pays for it from its start.
        seats: who starts which roles, where others start some of them; the first is this process'.
        on_claim: is told the run directory once it is this run's.

    Raises UserError for places that this machine has not, a directory of something else, a taken port, and whatever a
    role cannot do with this input. If that happens before the first step of a fresh run, the run directory is removed
    again.
    """
    shield_console(works=True)
    plan = make_plan(config)
    alone = has_no_agents() and (not seats or plan.num_nodes == 1)
    mine = [role for role in plan.roles if (seats[0].has(role) if seats and plan.num_nodes > 1 else role.node == 0)]
    on_gpus = plan if any(role.devices for role in mine) else None
    with recording_refusals(plan):
        check_start(config)
        check_machine(config, plan if alone else None, starts_all=alone and not seats, on_gpus=on_gpus)
    with nullcontext(signals) if signals else StopSignals() as signals:
        run_dir = claim(plan)
        on_claim(run_dir.path)
        hours = Hours(run_dir.path, plan.num_devices, run_dir.is_ours, own_job)
        try:
            return _run_claimed(plan, run_dir, signals, entries, hours, seats)
        except OSError as error:
            told = as_user_error(error, run_dir.path)
            if told is None:
                raise
            if _tell_read_only(told):
                return 1
            raise told from error
        except UserError as error:
            may_pass = isinstance(error, PassingError) and not isinstance(error, AwayError)  # then it resumes here
            if run_dir.fresh and not may_pass and not has_worked(run_dir.path):
                run_dir.discard()
            raise
        finally:
            hours.close()
            run_dir.release()


@contextmanager
def recording_refusals(plan: RunPlan) -> Iterator[None]:
    """A UserError before the run takes its directory: where that is there, frozen or of an earlier attempt, its status
    tells the cause, unless the run is done, or alive.
    """
    try:
        yield
    except UserError as error:
        _record_refusal(plan, error)
        raise


def _record_refusal(plan: RunPlan, error: UserError) -> None:
    path = Path(plan.config.output_dir or "").expanduser()
    if plan.config.output_dir is None or not (path / "plan.json").exists() or is_locked(path):
        return
    with contextlib.suppress(UserError, OSError):  # another's directory, or one that cannot be written
        run_dir = claim(plan)
        try:
            before = read_status(run_dir.path)
            if before.get("state") == "done":
                return
            config = plan.config
            status = StatusFile(run_dir.path, plan.point_id, config.job, config.name, config.max_steps, run_dir.is_ours)
            kept = {key: before[key] for key in ("step", "saved", "started_by") if key in before}
            status.update(state="failed", failure=failure_of_root(error, error), **kept)
        finally:
            run_dir.release()


def _run_claimed(
    plan: RunPlan,
    run_dir: RunDir,
    signals: StopSignals,
    entries: Mapping[str, str],
    hours: Hours,
    seats: tuple[Seat, ...],
) -> int:
    from prl.runtime.people.report import print_report

    progress = Progress(plan.config.logging.progress)
    outdated = ""
    if read_status(run_dir.path).get("state") == "done":
        outdated = why_outdated(run_dir.path, plan.config)
        if not outdated:
            progress.note(f"{run_dir.path} is done already")
            print_report(plan, run_dir.path)
            return 0
    progress.note(f"run directory {run_dir.path}")
    if outdated:
        progress.note(f"{outdated}: evaluated anew")
    if mixed := mixed_environments(plan):
        progress.note(f"environments are mixed: {mixed}")
    if without := roles_without_gpu(plan):
        progress.note(f"{', '.join(without)}: no GPU is left, so on the CPU; deployment=colocated shares the GPUs")
    marker = secrets.token_hex(16)
    reaper, nodes = Reaper(marker, run_dir.lock_fd), Nodes(seats)
    verdict = "failed: its own terminal says why"
    try:
        presence = Presence(run_dir.path, run_dir.is_ours)
        home = Household(reaper, marker, signals, progress, presence, run_dir.run_id, hours, nodes, entries)
        outcome = _run_stages(plan, run_dir, home)
        verdict = f"failed: {outcome.failure.message}" if outcome.failure else outcome.state
    finally:
        nodes.end(verdict)
        progress.close()
        reaper.finish()
    return _conclude(plan, run_dir, outcome, signals, bool(seats))


def _run_stages(plan: RunPlan, run_dir: RunDir, home: Household) -> Outcome:
    """Warm start if there is one and it is not cached, then the job."""
    path = run_dir.path
    config = plan.config
    resume_step = _prepare_resume(path, config, home.progress)
    status = StatusFile(path, plan.point_id, config.job, config.name, config.max_steps, run_dir.is_ours)
    changed = note_changes(path / ENV, config, status.content["attempt"])
    if changed and resume_step:
        home.progress.note(f"changed since the attempt before: {', '.join(changed)}; what was trained is of the old")
    status.content["started_by"] = starter_of(home.nodes.seats)
    status.write()
    home.reaper.tell(f"status {status.path}")
    home.hours.begin(status.content["attempt"])
    try:
        failure = home.nodes.gather(plan, path, home.reaper, home.signals, home.progress.note)
        if failure is not None or home.signals.count:
            state: State = "stopped" if failure is None else "failed"
            status.update(state=state, failure=failure.to_status() if failure else None)
            return Outcome(state, resume_step, failure)
        check_keys(config)
        await_listeners(config, home.progress.note, lambda: home.signals.count > 0)
        if config.inference.urls and config.job != "eval":
            check_engines(config, run_dir.run_id, home.progress.note, lambda: home.signals.count > 0)
        if home.signals.count:  # nobody has begun
            status.update(state="stopped")
            return Outcome("stopped", resume_step, None)
        init_model_path, ended = _initial_model(plan, path, home, status)
        if ended is not None:
            status.update(state=ended.state, failure=ended.failure.to_status() if ended.failure else None)
            return ended
        home.progress.begin(config.job)
        if resume_step:
            home.progress.note(f"resuming from the checkpoint of step {resume_step}")
        outcome = Supervisor(plan, path, home, status, resume_step, init_model_path).run()
        if outcome.state == "done":
            drop_converted(path)
    except BaseException as error:
        cause = failure_of_root(error, as_user_error(error, path)) if isinstance(error, Exception) else None
        step = status.content["step"] or resume_step
        status.update(state="failed", failure=status.content["failure"] or cause, step=step)
        raise
    return outcome


def _initial_model(plan: RunPlan, path: Path, home: Household, status: StatusFile) -> tuple[str | None, Outcome | None]:
    """Where the weights lie that the job begins with (None: as model.path says), made by stages of their own where that
    is needed; and the outcome of the run if one of these was its end.
    """
    found, outcome = begun_with(path) if plan.config.warm_start is not None else None, None
    if found is None:
        found, outcome = warm_start(plan, path, home, status)
    if plan.config.job == "eval":
        found, outcome = prepare_policy(plan, path, home)
    if outcome is None or outcome.state == "done":
        found, outcome = plain_model(plan, path, home, status, found)
    return found, None if outcome is None or outcome.state == "done" else outcome


def _prepare_resume(path: Path, config: RunConfig, progress: Progress) -> int:
    """The step to go on from, 0 for none; what an earlier attempt wrote beyond it is cut off."""
    found = latest_valid(path, parts_of(config.job), progress.note)
    if found is None and (steps(path) or read_status(path).get("step")):
        own = "no checkpoint is usable" if steps(path) else "there is no checkpoint of what was trained before"
        progress.note(f"{own}: starting {'over' if config.ckpt.from_run else 'from the beginning'}")
    resume_step = 0 if found is None else found[0]
    discard_after(path, resume_step)
    if found is None and config.ckpt.from_run is not None:
        resume_step = first_checkpoint(config, path, progress.note)
    truncate_rows(path, resume_step)
    return resume_step


def _conclude(plan: RunPlan, run_dir: RunDir, outcome: Outcome, signals: StopSignals, by_hand: bool = False) -> int:
    """Tell how it ended. Returns the exit code, or raises the role's UserError."""
    from prl.runtime.people.report import print_report

    path = run_dir.path
    if run_dir.is_ours():
        discard_unfinished(path)
    for alarm in read_status(path).get("alarms", []):
        told = f"alarm {alarm['kind']} was on at the end, since step {alarm['since']}: {alarm['message']}"
        print(one_line(told), file=sys.stderr, flush=True)
    if outcome.failure is not None:
        if outcome.state == "failed" and has_worked(path) and plan.config.job in ("rl", "sft"):
            print(one_line(_after_failure(plan, path, by_hand)), file=sys.stderr, flush=True)
        _tell_failure(outcome.failure)
    if outcome.state == "failed":
        return 1
    if outcome.state == "stopped":
        if plan.config.job == "inference":
            print("stopped serving", flush=True)
            return signals.exit_code
        if plan.config.job == "eval":
            print(one_line(f"stopped; {how_to_go_on(plan, path, 'begins anew')}"), flush=True)
            return signals.exit_code
        saved = steps(path)
        kept = f"checkpoint of step {saved[-1]}" if saved else "no checkpoint"
        if saved and saved[-1] < outcome.step:
            kept += f" (later ones did not fit into the time that was left: {path / 'logs'})"
        told = f"stopped at step {outcome.step}, {kept}; {how_to_go_on(plan, path, 'resumes', by_hand)}"
        print(one_line(told), flush=True)
        return signals.exit_code
    print_report(plan, path)
    return 0


def _after_failure(plan: RunPlan, path: Path, by_hand: bool) -> str:
    """Of a run that has trained: whether its sweep's command tries it again, or has to be told so."""
    kept = f"the checkpoint of step {saved[-1]} is kept" if (saved := steps(path)) else "there is no checkpoint yet"
    told = ", only with hydra.launcher.retry_failed=true," if waits_for_people(read_status(path)) else ""
    way = how_to_go_on(plan, path, "goes on", by_hand)
    return f"{kept}; {way.replace('command goes on', f'command{told} goes on') if plan.config.sweep else way}"


def how_to_go_on(plan: RunPlan, path: Path, does: str, by_hand: bool = False) -> str:
    """Which command does that. A sweep gives its points their directories, and takes no output_dir."""
    if by_hand:
        return "to go on: the commands of its roles, each once more"
    place = shlex.quote(str(path))
    if plan.config.sweep is None:
        return f"the same command with output_dir={place} {does}"
    return f"the sweep's command {does}; for this point alone: python -m prl.runtime.agent {place}"


def _tell_read_only(error: UserError) -> bool:
    """Whether it was told here: a disk that becomes read-only under a run is no mistake of who started it."""
    if isinstance(error, ReadOnlyError):
        print(error.render(), file=sys.stderr, flush=True)
        return True
    return False


def _tell_failure(failure: Failure) -> None:
    error = failure.as_user_error()
    if error is not None:
        if _tell_read_only(error):
            return
        raise error
    print(failure.render(), file=sys.stderr, flush=True)


def has_worked(path: Path) -> bool:
    """Whether the run got as far as a step worth keeping."""
    status, first = read_status(path), first_step(path)
    return any(step > first for step in steps(path)) or (status.get("began", False) and status["step"] > first)
