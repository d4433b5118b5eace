"""The supervisor: starts the children of one job, watches them by polling, and ends them in order.

It does no work of its own and no network, so it cannot hang; see the README of this folder for the rules.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from prl.planning.run_plan import RolePlan, RunPlan
from prl.runtime.directory.checkpoints import steps
from prl.runtime.directory.hours import Hours
from prl.runtime.directory.status_file import State, StatusFile
from prl.runtime.directory.stop_notice import clear_notice, write_notice
from prl.runtime.nodes.remote import Nodes, RemoteChild
from prl.runtime.people.echo import LogEcho
from prl.runtime.people.for_people import hand_out_keys, is_told_in_private, take_back_keys, urls_of
from prl.runtime.people.progress import Progress
from prl.runtime.people.view import RunView
from prl.runtime.presence import Presence
from prl.runtime.process.child import WANDB, Boot
from prl.runtime.process.child_process import ChildProcess, log_path
from prl.runtime.process.environment import child_environment
from prl.runtime.process.failures import (
    LOST_A_PEER,
    Failure,
    blame_rank,
    classify,
    describe,
    log_tail,
)
from prl.runtime.process.keys import make_keys
from prl.runtime.process.ports import lease_ports
from prl.runtime.process.reaper import Reaper
from prl.runtime.process.restarts import MAX_RESTARTS, Restarts, why_final
from prl.runtime.process.signals import StopSignals

ENTRIES = {  # role, "sft" for the trainers of an SFT job, "eval" for who leads an evaluation -> "module:function"
    "inference": "prl.inference.server:main",
    "router": "prl.inference.router.server:main",
    "orchestrator": "prl.orchestrator.loop:main",
    "trainer": "prl.trainer.loops.rl_loop:main",
    "sft": "prl.trainer.loops.sft_loop:main",
    "eval": "prl.orchestrator.evaluator:main",
    "env": "prl.envs.worker:main",
}
OF_JOBS = {("sft", "trainer"): "sft", ("eval", "orchestrator"): "eval"}  # where a job has a role in a way of its own
START_ORDER = ("inference", "router", "env", "orchestrator", "trainer")
POLL_S = 0.02
BLAME_WINDOW_S = 0.3  # after the first death, so that its cause is found among those that follow from it
PEER_WINDOW_S = 5.0  # as long as nobody is dead but who lost somebody, who may still be tidying up
DUMP_WAIT_S = 0.3  # for a hung child to write its stacks
DUMP_LINES = 60
SERVER_STOP_S = 5.0  # inference, env and benchmarks have nothing to save
SHORT_STOP_S = 0.5  # nor has anybody before the start is over, or can after a failure
MIRROR_STOP_S = 10.0
MIRROR_STOP_AFTER_FAILURE_S = 2.0


Child = ChildProcess | RemoteChild  # here, or on another node


@dataclass(frozen=True)
class Household:
    """What the trees of one run (warm start, then the job) share."""

    reaper: Reaper
    marker: str
    signals: StopSignals
    progress: Progress
    presence: Presence
    run_id: str
    hours: Hours
    nodes: Nodes = field(default_factory=Nodes)
    entries: Mapping[str, str] = field(default_factory=lambda: ENTRIES)


@dataclass(frozen=True)
class Outcome:
    state: State  # done, stopped or failed
    step: int
    failure: Failure | None = None


class Supervisor:
    """One job from start to end. `run` is called once."""

    def __init__(
        self,
        plan: RunPlan,
        run_dir: Path,
        household: Household,
        status: StatusFile,
        resume_step: int = 0,
        init_model_path: str | None = None,
    ) -> None:
        self.plan, self.run_dir, self.home, self.status = plan, run_dir, household, status
        self.resume_step, self.init_model_path = resume_step, init_model_path
        self.keys = make_keys()
        self.shared_memory = f"/dev/shm/prl-{secrets.token_hex(8)}"  # no secret, and of no other use
        self.leases = lease_ports(plan, household.nodes.is_here, household.nodes.address)
        self.endpoints = dict(self.leases.endpoints)  # those of other nodes join them
        self.view = RunView(plan, run_dir, step=resume_step, observe=household.hours.phases.observe)
        self.children: list[Child] = []  # in the order of starting
        self.mirror: ChildProcess | None = None
        logs = [(role, log_path(run_dir, role.name, role)) for role in plan.roles]
        self.echo = LogEcho(logs, plan.config.logging.local_ranks)
        self.restarts = Restarts(plan.config)
        self.noticed = False  # a limit from outside
        clear_notice(run_dir)

    def run(self) -> Outcome:
        """Start, watch, end. Nothing is left running when this returns or raises."""
        self.home.reaper.tell(f"shm {self.shared_memory}")
        try:
            self._start_all()
            outcome = self._watch()
        finally:
            self._kill_all()
            self._echo()
            self.leases.close()
            take_back_keys(self.run_dir)
            self.status.update(roles=self._snapshot()["roles"])
        self.home.progress.end(self.view)
        self.home.hours.roles_end()
        saved = steps(self.run_dir)
        self.status.update(state=outcome.state, saved=saved[-1] if saved else None, **self._snapshot())
        if outcome.failure is not None:
            self.status.update(failure=outcome.failure.to_status())
        self.status.write()
        return outcome

    # --- start ----------------------------------------------------------------------------------------------------

    def _start_all(self) -> None:
        self.endpoints |= self.home.nodes.lease(self.run_dir)
        if self._find_lost_node() is not None:
            return
        for role in sorted(self.plan.roles, key=lambda role: START_ORDER.index(role.role)):
            child = self._make_child(role)
            self._start(child)
            self.children.append(child)
            if why_final(self.plan.config, role.role):
                self.leases.release(role.name)
        if self.plan.config.logging.wandb.mode != "disabled" and self.plan.config.job != "inference":
            self.mirror = ChildProcess(self.run_dir, WANDB, None, self.home.reaper)
            self._start(self.mirror)

    def _make_child(self, role: RolePlan) -> Child:
        if self.home.nodes.is_here(role):
            return ChildProcess(self.run_dir, role.name, role, self.home.reaper)
        return RemoteChild(self.run_dir, role, self.home.nodes.of(role))

    def _start(self, child: Child) -> None:
        leased = self.leases.socket_for(child.name)
        boot = Boot(
            root_pid=os.getpid(),
            entry=self._entry(child.role),
            endpoints=self.endpoints,
            keys=self.keys.of(child.role.role if child.role else ""),
            shared_memory=self.shared_memory,
            listen_fd=None if leased is None else leased.fileno(),
            error_fd=-1,  # set by the child's process
            resume_step=self.resume_step,
            init_model_path=self.init_model_path,
            wandb_run_id=self.home.run_id,
            restarts=child.restarts,
        )
        address = self.home.nodes.address
        child.start(boot, child_environment(self.plan, child.role, self.home.marker, address))

    def _entry(self, role: RolePlan | None) -> str:
        if role is None:
            return ""
        return self.home.entries[OF_JOBS.get((self.plan.config.job, role.role), role.role)]

    # --- watch ----------------------------------------------------------------------------------------------------

    def _watch(self) -> Outcome:
        while True:
            failure = self._find_failure()
            if failure is not None:
                return self._fail(failure)
            if self.home.signals.count:
                return self._stop()
            if self._is_complete():
                return self._finish()
            self._tell()
            self._check_mirror()
            self.home.reaper.revive()
            time.sleep(POLL_S)

    def _check_mirror(self) -> None:
        """Losing the mirror costs nothing: the metrics files are complete, and `wandb sync` can be made up for."""
        if self.mirror is not None and self.mirror.alive:
            self.mirror.pulse.check()
        elif self.mirror is not None:
            if self.mirror.exit_code:
                self.home.progress.note(f"the wandb mirror ended, the run goes on; see {self.mirror.log}")
            self.mirror = None

    def _workers(self) -> list[Child]:
        """Children whose return with exit code 0 completes the job: trainers and orchestrator."""
        return [child for child in self.children if child.role and child.role.role in ("trainer", "orchestrator")]

    def _is_complete(self) -> bool:
        workers = self._workers()
        return bool(workers) and all(child.poll() == 0 for child in workers)

    def _is_dead(self, child: Child) -> bool:
        """Ended when it should not have."""
        code = child.poll()
        return code is not None and not (code == 0 and child in self._workers())

    def _find_lost_node(self) -> Failure | None:
        return self.home.nodes.find_lost(self.run_dir)

    def _find_failure(self) -> Failure | None:
        lost = self.home.presence.find_loss() or self._find_lost_node()
        if lost is not None:
            return lost
        for child in self.children:
            if self._is_dead(child):
                if not self._restart(child):
                    return self._blame()
            elif child.alive:
                child.pulse.check()
        return self._find_hang()

    def _restart(self, child: Child) -> bool:
        """An environment, engine or router that was up, as `Restarts` allows."""
        assert child.role is not None
        child.pulse.check()
        role, failure = child.role.role, self._failure_of(child)
        self.view.poll()
        if not self.restarts.grant(child.name, role, child.pulse.ready, failure.kind, self.view.step):
            return False
        child.restarts += 1
        number = f"restart {self.restarts.recent(role, self.view.step)} of {MAX_RESTARTS}"
        self.home.progress.note(f"{child.name} ended ({failure.message}); {number}")
        self._start(child)
        self.status.update(**self._snapshot())
        self.status.write()  # at once: the orchestrator reads there that an engine is a new one
        return True

    def _blame(self) -> Failure:
        """The failure of the child that died first, among those that are dead a moment later."""
        time.sleep(BLAME_WINDOW_S)
        lost = self.home.presence.find_loss(at_once=True) or self._find_lost_node()
        if lost is not None:  # its children were the first to die, and those here only lost their peers
            return lost
        until = time.monotonic() + PEER_WINDOW_S
        child, failure = self._first_cause()
        while self._suspicion(child, failure) == LOST_A_PEER and time.monotonic() < until:
            time.sleep(POLL_S)
            child, failure = self._first_cause()
        assert child.role is not None
        why = why_final(self.plan.config, child.role.role)
        if child.role.role == "inference" and self.plan.config.job == "rl" and child.pulse.ready and why:
            return replace(failure, message=f"{failure.message}; no restart: {why}")
        return failure

    def _first_cause(self) -> tuple[Child, Failure]:
        """Of those that are dead by now."""
        failures = [(child, self._failure_of(child)) for child in self.children if self._is_dead(child)]
        return min(failures, key=lambda pair: self._suspicion(*pair))

    def _suspicion(self, child: Child, failure: Failure) -> int:
        assert child.exit_code is not None
        return blame_rank(child.exit_code, child.error, failure.kind)

    def _failure_of(self, child: Child) -> Failure:
        assert child.role is not None
        assert child.exit_code is not None
        error, tail = child.error, log_tail(child.log)
        kind = classify(child.role.role, child.exit_code, error, tail, child.oom_kills)
        message = describe(child.exit_code, error, child.oom_kills)
        role = child.role
        told, kind_of_error = error.get("user_error"), error.get("type", "")
        return Failure(kind, role.name, role.rank, role.node, message, str(child.log), tail, told, kind_of_error)

    def _find_hang(self) -> Failure | None:
        """The child that has been silent for longest, if that is too long: those that wait for it fall silent later."""
        deployment = self.plan.config.deployment
        late, silent = [], []
        for child in self.children:
            if not child.alive:
                continue
            if not child.pulse.ready and child.pulse.age_s() > deployment.start_timeout_s:
                late.append(child)
            elif child.pulse.ready and child.pulse.silent_s() > deployment.hang_timeout_s:
                silent.append(child)
        if silent:
            child = max(silent, key=lambda child: child.pulse.silent_s())
            limit = f"deployment.hang_timeout_s={deployment.hang_timeout_s:g}"
            return self._hang(child, f"no sign of life for {child.pulse.silent_s():.0f} s ({limit})")
        if late:
            age_s, more_s = late[0].pulse.age_s(), max(60.0, 2 * deployment.start_timeout_s)
            key = f"deployment.start_timeout_s={deployment.start_timeout_s:g}; if it was only slow, {more_s:g}"
            return self._hang(late[0], f"not ready {age_s:.0f} s after its start ({key})")
        return None

    def _hang(self, child: Child, message: str) -> Failure:
        assert child.role is not None
        child.dump_stacks()
        time.sleep(DUMP_WAIT_S)
        tail, role = log_tail(child.log, DUMP_LINES), child.role
        return Failure("hang", role.name, role.rank, role.node, message, str(child.log), tail)

    def _tell(self) -> None:
        """Progress and status."""
        self.home.progress.update(self.view, self.status.state)
        self.home.hours.beat()
        self._echo()
        if self.status.state == "starting" and all(child.pulse.ready for child in self.children):
            is_server, tell = self.plan.config.job == "inference", self.home.progress.note
            urls = urls_of(self.plan, self.endpoints) if is_server else []
            if is_server:
                hand_out_keys(self.plan, self.run_dir, self.keys, tell, is_told_in_private(self.home.signals.scheduled))
            # at once: who waits for the state reads the addresses, and asks with the keys
            self.status.update(state="running", began=True, urls=urls, **self._snapshot())
            if is_server:
                tell(f"serving {self.plan.config.model.name} at {', '.join(urls)}; Ctrl-C stops")
        else:
            self.status.update(**self._snapshot())

    def _echo(self) -> None:
        for line in [*self.view.take_told(), *self.echo.poll()]:
            self.home.progress.note(line)

    def _snapshot(self) -> dict[str, object]:
        """The fields of status.json that change all the time."""
        children = [*self.children, *([self.mirror] if self.mirror else [])]
        alarms = [alarm.to_json() for alarm in self.view.alarms.active.values()]
        roles = {child.name: child.snapshot() for child in children}
        lost = dict(self.view.lost_engines)
        return {"step": self.view.step, "alarms": alarms, "lost_engines": lost, "roles": roles}

    # --- end ------------------------------------------------------------------------------------------------------

    def _finish(self) -> Outcome:
        """The work is done: the servers have nobody left to serve."""
        self.status.update(state="stopping", **self._snapshot())
        self._wind_down(SERVER_STOP_S)
        return Outcome("done", self._final_step())

    def _fail(self, failure: Failure) -> Outcome:
        for child in self.children:
            child.kill()
        self._end_mirror(MIRROR_STOP_AFTER_FAILURE_S)
        return Outcome("failed", self._final_step(), failure)

    def _stop(self) -> Outcome:
        """Orderly stop after a signal: the workers save and return, then the rest ends in reverse order of starting."""
        came_up = all(child.pulse.ready or not child.alive for child in self.children)
        was_running = came_up or self.status.state == "running"  # a child that is being restarted does not undo that
        self.status.update(state="stopping", **self._snapshot())
        saves = ": saving a checkpoint" if self.plan.roles_of("trainer") else ""
        self.home.progress.note(f"stopping{saves}; a second signal ends everything at once")
        failure = None
        self._is_time_left()  # who saves decides by it, and must not find it too late
        if was_running:
            for child in self._stop_targets():
                child.terminate()
            failure = self._await_workers()
        has_time = was_running and failure is None and self.home.signals.deadline_s is None
        self._wind_down(SERVER_STOP_S if has_time else SHORT_STOP_S)
        return Outcome("stopped", self._final_step(), failure)

    def _stop_targets(self) -> Iterable[Child]:
        """In RL the orchestrator tells the trainers to stop at a step boundary; in SFT all ranks agree on one."""
        leader = "orchestrator" if self.plan.roles_of("orchestrator") else "trainer"
        return (child for child in self.children if child.role and child.role.role == leader)

    def _await_workers(self) -> Failure | None:
        """Until they have returned, or failed, or time is over, or a second signal came. While a checkpoint is being
        saved, only silence counts.
        """
        stop_timeout_s = self.plan.config.deployment.stop_timeout_s
        if self.plan.config.bench is not None:
            stop_timeout_s = min(stop_timeout_s, SERVER_STOP_S)
        deadline = time.monotonic() + stop_timeout_s
        while any(child.alive for child in self._workers()):
            for child in self.children:  # first: what follows judges by it, and telling may take long on a busy disk
                child.pulse.check()
            if self.home.signals.count > 1 or not self._is_time_left():
                return None
            if any(child.exit_code for child in self._workers()):  # a server's death must not cost what they save
                return self._blame()
            if any(child.alive and child.pulse.saving for child in self._workers()):
                deadline = time.monotonic() + stop_timeout_s
                hang = self._find_hang()
                if hang is not None:
                    return hang
            if time.monotonic() > deadline:
                if self.plan.config.bench is not None:  # it saves nothing
                    return None
                limit = f"deployment.stop_timeout_s={stop_timeout_s:g}"
                late = next(child for child in self._workers() if child.alive)
                return self._hang(late, f"did not stop in time ({limit})")
            self._tell()
            time.sleep(POLL_S)
        return None

    def _is_time_left(self) -> bool:
        """Whether a limit from outside is not over; it is passed on to who saves, and so is that it is lifted."""
        left_s = self.home.signals.seconds_left()
        limited = left_s < float("inf")
        if limited != self.noticed:
            self.noticed = limited
            self.home.progress.note(
                f"{left_s:.0f} s are left; what does not fit is not saved" if limited else "there is time after all"
            )
            with contextlib.suppress(OSError):  # a full disk: the limit holds all the same
                write_notice(self.run_dir, left_s) if limited else clear_notice(self.run_dir)
        return left_s > 0

    def _wind_down(self, timeout_s: float) -> None:
        """SIGTERM role by role, in reverse order of starting, or to all at once under a limit from outside; SIGKILL
        for who takes too long.
        """
        is_pressed = self.home.signals.deadline_s is not None
        for roles in [START_ORDER] if is_pressed else [(role,) for role in reversed(START_ORDER)]:
            group = [child for child in self.children if child.role and child.role.role in roles]
            for child in group:
                child.terminate()
            if not self._wait(lambda group=group: not any(child.alive for child in group), timeout_s):  # type: ignore[misc]
                self._lose_patience([child for child in group if child.alive], timeout_s)
        self._end_mirror(MIRROR_STOP_AFTER_FAILURE_S if is_pressed else MIRROR_STOP_S)

    def _lose_patience(self, late: list[Child], timeout_s: float) -> None:
        """Kill who did not stop; what they were doing is in their logs, unless the user is in a hurry."""
        if self.home.signals.count < 2:
            for child in late:
                child.dump_stacks()
            time.sleep(DUMP_WAIT_S)
        for child in late:
            child.kill()
            self.home.progress.note(f"{child.name} was killed: it did not stop within {timeout_s:g} s; see {child.log}")

    def _end_mirror(self, timeout_s: float) -> None:
        """Last, so that it has seen every row, and what each phase of the run has cost but for the rest of its end."""
        mirror = self.mirror
        if mirror is not None:
            self.view.poll()
            self.home.hours.roles_end()
            mirror.terminate()
            if not self._wait(lambda: not mirror.alive, timeout_s):
                mirror.kill()

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Whether it became true in time; a second signal ends all patience."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline or self.home.signals.count > 1:
                return False
            time.sleep(0.01)
        return True

    def _kill_all(self) -> None:
        children = [*self.children, *([self.mirror] if self.mirror else [])]
        for child in children:
            child.kill()
        for child in children:
            child.wait(SERVER_STOP_S)

    def _final_step(self) -> int:
        self.view.poll()
        return self.view.step
