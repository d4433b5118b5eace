"""Roles that others start: `python -m prl.trainer|orchestrator|inference POINT`, and ranks of torchrun's.

One process is the root of the run (`prl.orchestrator` in RL, else the trainer or the engines of the first node; rank 0
of torchrun). It waits for the others, which find it through nodes.json of the point. Each starts the roles of its seat.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

from prl.config.console import leave_interrupted, one_line, shield_console
from prl.config.errors import UserError
from prl.config.place_names import a_path
from prl.config.schema import RunConfig
from prl.planning.run_plan import RunPlan
from prl.runtime.agent import read_plan
from prl.runtime.directory.status_file import read_status
from prl.runtime.nodes.job_nodes import BY_HAND, KEY, Meeting, announce, without_job
from prl.runtime.nodes.node_agent import NOT_JOINED, refuse_taken, serve_seat
from prl.runtime.nodes.seats import LEADERS, Seat, seats_by_hand, seats_of_ranks
from prl.runtime.nodes.torchrun import Torchrun, check_layout, looks_like_ranks, take_torchrun
from prl.runtime.process.gpus import no_usable_gpus, visible_gpus
from prl.runtime.process.signals import StopSignals

FIND_LIMIT_S = 1800.0  # for rank 0 to compose, look at the machine and claim its directory
SWEEPS = ("-m", "--multirun", "hydra/launcher=", "hydra.launcher.")


# --- torchrun -m prl.sft ----------------------------------------------------------------------------------------------


def under_torchrun(torchrun: Torchrun, compose: Callable[[Callable[[RunConfig], int]], None]) -> None:
    """This process' part of a run whose trainer ranks torchrun starts. Leaves by SystemExit.

    Args:
        compose: given a job, composes a configuration and calls it; on rank 0 only.
    """
    shield_console()
    if torchrun.rank > 0:
        told = torchrun.ask(FIND_LIMIT_S)
        if told is None:
            sys.exit(0)  # the exit code of rank 0 says how it ended
        path, os.environ[KEY] = told
        plan = read_plan(path)
        try:
            sys.exit(take_seat(path, plan, torchrun.rank, seats_of_ranks(plan)[torchrun.rank], torchrun))
        except UserError as error:
            print(error.render(), file=sys.stderr)
            sys.exit(2)
    os.environ[KEY] = key = secrets.token_hex(8)
    try:
        if any(word.startswith(SWEEPS) for word in sys.argv[1:]):
            refused = UserError(
                "torchrun starts one run, and no sweep.",
                where=" ".join(word for word in sys.argv[1:] if word.startswith(SWEEPS)),
                why="its processes are the trainer ranks of one run",
                fix="the command without torchrun starts each point's processes itself",
            )
            print(refused.render(), file=sys.stderr)
            sys.exit(2)
        compose(lambda config: lead_ranks(config, torchrun, key))
    finally:
        with suppress(Exception):  # whoever waits is ended by torchrun then
            torchrun.tell(None, key)


def lead_ranks(config: RunConfig, torchrun: Torchrun, key: str) -> int:
    """Rank 0's part: the root of the run. Returns the exit code."""
    from prl.planning.planner import make_plan
    from prl.runtime.launch import run

    plan = make_plan(config)
    check_layout(plan, torchrun)
    claimed: list[Path] = []

    def tell(path: Path) -> None:
        claimed.append(path)
        torchrun.tell(path, key)

    try:
        with torchrun.signals() as signals:
            return run(config, signals=signals, seats=seats_of_ranks(plan), on_claim=tell)
    finally:
        if claimed and claimed[0].is_dir() and plan.mesh.world_size > 1:
            with suppress(OSError):  # ranks that still look for the root need not wait any longer
                announce(claimed[0], Meeting(key, plan.num_nodes, ended=True))


# --- roles by hand ----------------------------------------------------------------------------------------------------


def is_point(words: list[str]) -> bool:
    """Whether the arguments of an entry point name a frozen point."""
    return bool(words) and not words[0].startswith("-") and "=" not in words[0] and Path(words[0]).exists()


def run_role(kind: str) -> None:
    """`python -m prl.KIND POINT [--node=K]`. Leaves by SystemExit."""
    shield_console()
    parser = argparse.ArgumentParser(prog=f"prl.{kind}", description=__doc__)
    parser.add_argument("point", type=a_path, help="a frozen point: a directory with plan.json (prl.plan --freeze)")
    parser.add_argument("--node", type=int, help="which of the plan's nodes this is, where several have such roles")
    arguments = parser.parse_args()
    try:
        sys.exit(_run_role(kind, arguments.point.absolute(), arguments.node))
    except UserError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # before there is anything to stop
        leave_interrupted()


def _run_role(kind: str, path: Path, node: int | None) -> int:
    plan = read_plan(path)
    torchrun = take_torchrun() if kind == "trainer" else None
    if (
        kind == "trainer"
        and torchrun is None
        and (told := looks_like_ranks(os.environ, "the whole trainer of its node"))
    ):
        print(one_line(told), file=sys.stderr, flush=True)
    _leave_slurm()
    if plan.config.job not in LEADERS:
        raise UserError(
            f"{path} is a point of prl.{plan.config.job}, which has no roles to start by hand.",
            where=str(path / "plan.json"),
            fix=f"python -m prl.runtime.agent {shlex.quote(str(path))}",
        )
    if torchrun is not None:
        check_layout(plan, torchrun, frozen=True)
    if torchrun is not None and LEADERS[plan.config.job] == "trainer":
        seats = seats_of_ranks(plan)
        index = torchrun.rank
    else:
        seats = seats_by_hand(plan, path)
        index = _find_seat(seats, plan, kind, node, torchrun)
    from prl.runtime.launch import recording_refusals, run

    config = plan.config.model_copy(update={"output_dir": str(path)})
    root = plan.model_copy(update={"config": config})
    with recording_refusals(root) if index == 0 else nullcontext():
        place_devices(plan, seats[index])
    if index > 0:
        if read_status(path).get("state") == "done":
            print(one_line(f"{path} is done already"), flush=True)
            return 0
        refuse_taken(path, seats[index])
        print(f"{seats[index].name}: waiting for {seats[0].command}", flush=True)
        return take_seat(path, plan, index, seats[index], torchrun)
    with torchrun.signals() if torchrun else StopSignals() as signals:
        return run(config, signals=signals, seats=seats)


def _leave_slurm() -> None:
    """What starts the roles is not the job around, if there is one (`salloc`, `srun --overlap`)."""
    kept = without_job(os.environ)
    for name in list(os.environ):
        if name not in kept:
            del os.environ[name]
    os.environ[KEY] = BY_HAND


def _find_seat(seats: tuple[Seat, ...], plan: RunPlan, kind: str, node: int | None, torchrun: Torchrun | None) -> int:
    if torchrun is not None:
        name = f"trainer/{torchrun.rank}"
        return next(i for i, seat in enumerate(seats) if seat.roles == {name} and seat.name == name)
    own = [i for i, seat in enumerate(seats) if seat.name.split()[0] == kind]
    if not own:
        others = ", ".join(seat.command for seat in seats if "/" not in seat.name)
        raise UserError(
            f"This point has no {kind}.", where="plan.json", why=f"it is one of prl.{plan.config.job}", fix=others
        )
    wanted = [i for i in own if node is None or seats[i].node == node]
    if len(wanted) != 1:
        raise UserError(
            f"Node {node} has no {kind}." if node is not None else f"Several nodes have roles of the {kind}.",
            where="--node" if node is None else f"--node={node}",
            why="each machine starts the roles of its own node",
            fix=" or ".join(seats[i].command for i in own),
        )
    return wanted[0]


def place_devices(plan: RunPlan, seat: Seat) -> None:
    """Have this process see the GPUs that its roles take where the plan counts them, if it sees those alone.

    Where it sees all GPUs of the node, the plan's numbers hold. Raises UserError where it sees too few, or has none.
    """
    takes_some = any(role.devices for role in plan.roles if seat.has(role))
    if takes_some and (no_gpu := no_usable_gpus(plan)) is not None:
        raise no_gpu
    kinds = {role.role for role in plan.roles if seat.has(role)}
    near = [role for role in plan.roles if role.role in kinds and role.node == seat.node]
    wanted = sorted({device for role in near for device in role.devices})
    names = visible_gpus()
    if plan.config.deployment.device == "cpu" or not names or not wanted or wanted[-1] < len(names):
        return
    if len(names) == len(wanted):
        places = [names[(place - wanted[0]) % len(names)] for place in range(wanted[-1] + 1)]
        places = [names[wanted.index(i)] if i in wanted else name for i, name in enumerate(places)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(places)
    elif plan.config.deployment.device == "cuda":
        raise UserError(
            f"{seat.name} takes the GPUs {', '.join(map(str, wanted))} of its node, and {len(names)} are seen here.",
            where="CUDA_VISIBLE_DEVICES, deployment.device=cuda",
            why="devices are counted among all of a node, or a process sees exactly its own",
            fix=f"show it {len(wanted)} GPUs, or all {wanted[-1] + 1}",
        )


def take_seat(path: Path, plan: RunPlan, index: int, seat: Seat, torchrun: Torchrun | None) -> int:
    """Serve the root until its run ends; tell how it did. Returns the exit code."""
    names = ", ".join(sorted(seat.roles or ()))
    with torchrun.signals() if torchrun else StopSignals() as signals:
        verdict = serve_seat(path, plan, index, seat, signals)
    if torchrun is not None and (torchrun.rank > 0 or LEADERS[plan.config.job] == "trainer"):
        # rank 0 says how it ended, by its exit code, too; another one here would cut its last words off
        return 1 if verdict is None and not signals.count else 0
    if verdict == NOT_JOINED:
        print(f"{names}: stopped before the run began", flush=True)
        return signals.exit_code
    print(f"{names}: the run has ended: {verdict or 'its root is gone'}", flush=True)
    if verdict == "done":
        return 0
    return signals.exit_code if signals.count else 143 if verdict == "stopped" else 1
