"""`python -m prl.runtime.child <run dir> <role name>`: one process of the tree.

Everything secret or ephemeral (token, ports, inherited socket) comes as one JSON object on stdin, so that it shows in
no command line and in no environment of the programs that a role starts.
"""

from __future__ import annotations

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

from prl.config.errors import UserError
from prl.metrics.writer import MetricsWriter
from prl.planning.run_plan import RolePlan, RunPlan, plan_from_json
from prl.runtime.failures import error_record
from prl.runtime.guards import StopFlag, die_with_parent, dump_stacks_on_signal
from prl.runtime.heartbeat import Heart

WANDB = "wandb"  # the metrics mirror: a child without a role in the plan
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(frozen=True)
class Boot:
    """What the supervisor tells a child when it starts."""

    root_pid: int
    entry: str  # "package.module:function"
    endpoints: dict[str, str]
    token: str
    listen_fd: int | None
    error_fd: int  # a pipe to the supervisor: a file would not do on a full disk
    resume_step: int
    init_model_path: str | None
    wandb_run_id: str
    restarts: int  # of this child, so far

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class ChildContext:
    """What a role gets: its plan, its neighbours, and the few things it owes the supervisor.

    Attributes:
        endpoints: role name -> "http://127.0.0.1:PORT"; "rendezvous" -> "127.0.0.1:PORT". Known before a child starts.
        token: random secret of this run; internal HTTP carries `Authorization: Bearer <token>`.
        listen_socket: bound and listening on this role's endpoint (trainer/0: the rendezvous), or None.
        resume_step: 0 for a fresh run, else the step of the checkpoint to load.
        init_model_path: Hugging Face checkpoint of the warm start; None: config.model.path, or random weights.
        restarts: how often this role has died in this run; what it was given before is gone.
    """

    def __init__(self, plan: RunPlan, role: RolePlan, run_dir: Path, boot: Boot, stop: StopFlag) -> None:
        self.plan, self.role, self.run_dir = plan, role, run_dir
        self.endpoints, self.token = boot.endpoints, boot.token
        self.listen_socket = None if boot.listen_fd is None else socket.socket(fileno=boot.listen_fd)
        self.resume_step, self.init_model_path = boot.resume_step, boot.init_model_path
        self.restarts = boot.restarts
        self.metrics = MetricsWriter(run_dir, role.name)
        self._heart = Heart(run_dir, role.name)
        self._stop = stop

    def beat(self) -> None:
        """The main loop is alive. Cheap and rate-limited; due every few seconds."""
        self._heart.beat()

    def ready(self) -> None:
        """The role is up: the supervisor's start timeout ends, its hang timeout begins."""
        logging.getLogger("prl").info("%s is ready", self.role.name)
        self._heart.ready()

    @property
    def stop_requested(self) -> bool:
        """Whether SIGTERM or SIGINT has come: finish the step, save, return."""
        return self._stop.is_set


def main() -> None:
    run_dir, name = Path(sys.argv[1]), sys.argv[2]
    boot = Boot(**json.load(sys.stdin))
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

        mirror(plan, run_dir, boot.wandb_run_id, boot.resume_step, lambda: stop.is_set)
        return
    role = next(role for role in plan.roles if role.name == name)
    load_entry(boot.entry)(ChildContext(plan, role, run_dir, boot, stop))


def load_entry(entry: str) -> Callable[[ChildContext], None]:
    """ "package.module:function" -> the function."""
    module, _, function = entry.partition(":")
    return getattr(importlib.import_module(module), function)


def _guarded(work: Callable[[], None], error_fd: int) -> int:
    """Run, and report an exception to the supervisor. Returns the exit code."""
    try:
        work()
    except Exception as error:
        if isinstance(error, UserError):
            print(error.render(), file=sys.stderr)
        else:
            traceback.print_exc()
        os.write(error_fd, error_record(error))
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    main()
