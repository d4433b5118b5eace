"""`python -m prl.runtime.process.child <run dir> <role name>`: one process of the tree.

Everything secret or ephemeral (keys, ports, inherited socket) comes as one JSON object on stdin, so that it shows in
no command line and in no environment of the programs that a role starts.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import logging
import os
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from prl.config.console import shield_console
from prl.metrics.writer import MetricsWriter
from prl.planning.run_plan import RolePlan, RunPlan, plan_from_json
from prl.runtime.directory.files import as_user_error
from prl.runtime.directory.heartbeat import Heart
from prl.runtime.process.failures import error_record
from prl.runtime.process.guards import StopFlag, die_with_parent, dump_stacks_on_signal
from prl.runtime.process.keys import RunKeys

WANDB = "wandb"  # the metrics mirror: a child without a role in the plan
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(frozen=True)
class Boot:
    """What the supervisor tells a child when it starts."""

    root_pid: int
    entry: str  # "package.module:function"
    endpoints: dict[str, str]
    keys: RunKeys  # those that its role needs
    shared_memory: str  # what segments of this run in /dev/shm are called: a path, to which a version is added
    listen_fd: int | None
    error_fd: int  # a pipe to the supervisor: a file would not do on a full disk
    resume_step: int
    init_model_path: str | None
    wandb_run_id: str
    restarts: int  # of this child, so far

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Boot:
        """Of what `asdict` has made."""
        return Boot(**fields | {"keys": RunKeys(**fields["keys"])})


class ChildContext:
    """What a role gets: its plan, its neighbours, and the few things it owes the supervisor.

    Attributes:
        endpoints: role name -> "http://127.0.0.1:PORT"; "rendezvous" -> "127.0.0.1:PORT". Known before a child starts.
        keys: secrets of this run that the role needs; internal HTTP carries `Authorization: Bearer <key>`.
        shared_memory: what segments of this run in /dev/shm are called, before "-VERSION".
        listen_socket: bound and listening on this role's endpoint (trainer/0: the rendezvous), or None.
        resume_step: 0 for a fresh run, else the step of the checkpoint to load.
        init_model_path: Hugging Face checkpoint of the warm start; None: config.model.path, or random weights.
        run_id: of the run, the same for all its attempts.
        restarts: how often this role has died in this run; what it was given before is gone.
    """

    def __init__(self, plan: RunPlan, role: RolePlan, run_dir: Path, boot: Boot, stop: StopFlag) -> None:
        self.plan, self.role, self.run_dir = plan, role, run_dir
        self.endpoints, self.keys, self.shared_memory = boot.endpoints, boot.keys, boot.shared_memory
        self.listen_socket = None if boot.listen_fd is None else socket.socket(fileno=boot.listen_fd)
        self.resume_step, self.init_model_path = boot.resume_step, boot.init_model_path
        self.restarts, self.run_id = boot.restarts, boot.wandb_run_id
        self.metrics = MetricsWriter(run_dir, role.name)
        self._heart = Heart(run_dir, role.name)
        self._stop, self._error_fd = stop, boot.error_fd

    def beat(self) -> None:
        """The main loop is alive. Cheap and rate-limited; due every few seconds."""
        self._heart.beat()

    def ready(self) -> None:
        """The role is up: the supervisor's start timeout ends, its hang timeout begins."""
        logging.getLogger("prl").info("%s is ready", self.role.name)
        self._heart.ready()

    def saving(self, begins: bool) -> None:
        """A checkpoint is being saved (or no longer): a stop waits for it as long as there are beats."""
        self._heart.save(begins)

    def fail(self, error: Exception) -> NoReturn:
        """End this process at once with an error, from a thread whose main one cannot; the log gets all stacks."""
        faulthandler.dump_traceback(all_threads=True)
        os.write(self._error_fd, error_record(error))
        os._exit(1)

    @property
    def stop_requested(self) -> bool:
        """Whether the supervisor has asked: finish the step, save, return."""
        return self._stop.is_set


def main() -> None:
    shield_console(works=True)  # its log may lie on a disk that is full
    run_dir, name = Path(sys.argv[1]), sys.argv[2]
    boot = Boot.from_json(json.load(sys.stdin))
    die_with_parent(boot.root_pid)
    dump_stacks_on_signal()
    stop = StopFlag()
    stop.install()
    for fd in (boot.listen_fd, boot.error_fd):  # ours, and not of the programs that a role starts
        if fd is not None:
            os.set_inheritable(fd, False)
    code = _guarded(lambda: _run(run_dir, name, boot, stop), boot.error_fd)
    sys.stdout.flush()
    sys.stderr.flush()
    # a role that has returned is done: threads it left must not keep the process, and tearing torch down takes 0.5 s
    os._exit(code)


def _run(run_dir: Path, name: str, boot: Boot, stop: StopFlag) -> None:
    plan = plan_from_json((run_dir / "plan.json").read_text())
    logging.basicConfig(level=plan.config.logging.level.upper(), format=LOG_FORMAT, stream=sys.stderr)
    if name == WANDB:
        from prl.metrics.wandb_mirror import mirror

        mirror(plan, run_dir, boot.wandb_run_id, boot.resume_step, lambda: stop.is_set, Heart(run_dir, name).ready)
        return
    role = next(role for role in plan.roles if role.name == name)
    ctx = ChildContext(plan, role, run_dir, boot, stop)
    load_entry(boot.entry)(ctx)
    try:
        ctx.metrics.flush()
    except OSError as error:
        logging.getLogger("prl").warning("rows of metrics are lost (%d): %s", len(ctx.metrics.pending), error)


def load_entry(entry: str) -> Callable[[ChildContext], None]:
    """ "package.module:function" -> the function.

    The cyclic garbage collector rests meanwhile: what is imported stays, and looking through it again and again took a
    fifth of a trainer's 4.5 s of imports. Later collections leave it out, too.
    """
    module, _, function = entry.partition(":")
    gc.disable()
    try:
        return getattr(importlib.import_module(module), function)
    finally:
        gc.freeze()
        gc.enable()


def _guarded(work: Callable[[], None], error_fd: int) -> int:
    """Run, and report an exception to the supervisor. Returns the exit code."""
    try:
        work()
    except Exception as error:
        told = as_user_error(error, Path(sys.argv[1]))
        if told is not None:
            print(told.render(), file=sys.stderr)
        else:
            traceback.print_exc()
        os.write(error_fd, error_record(told or error))
        return 1 if told is None else 2
    return 0


if __name__ == "__main__":
    main()
