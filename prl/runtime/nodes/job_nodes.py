"""Which node of a job this process is on, how the others reach the first one, and where they learn that.

The root stands on node 0. It writes `nodes.json` into the run directory, which all nodes see; the agents of the other
nodes wait for one that bears the key of their job, so that the file of an earlier attempt fools nobody.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from prl.config.errors import UserError
from prl.runtime.directory.files import read_object, replace_file

NODES_FILE = "nodes.json"
KEY = "PRL_NODES_KEY"  # environment variable: the key of a job that is not SLURM's
BY_HAND = "by-hand"
POLL_S = 0.2
CONNECT_LIMIT_S = 5.0
CLUSTER = "SLURM_CONF"  # which cluster this is, not which job


@dataclass(frozen=True)
class Meeting:
    """How to reach the root. `hosts` are tried one after another; `machine` is its own name for where it is; `ended`:
    there is no run to take part in; `complete`: all have joined, and nobody listens any more.
    """

    key: str
    num_nodes: int
    hosts: tuple[str, ...] = ()
    port: int = 0
    token: str = ""
    machine: str = ""
    ended: bool = False
    complete: bool = False


def without_job(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for what is started inside of a job, but is not that job: it has its nodes, signals and requeueing
    from somebody else.
    """
    return {name: text for name, text in environment.items() if name == CLUSTER or not _is_of_job(name)}


def _is_of_job(name: str) -> bool:
    return name == KEY or name.startswith("SLURM_")


def node_of_this_process() -> int:
    """The index within the job; 0 outside SLURM. (Not `SLURM_NODEID` alone: salloc's shell has it too.)"""
    return int(os.environ["SLURM_NODEID"]) if "SLURM_STEP_ID" in os.environ else 0


def host_name() -> str:
    """This node as people know it."""
    return os.environ.get("SLURMD_NODENAME", socket.gethostname())


def nodes_of_step() -> int:
    """Nodes on which SLURM has started agents; 0 if it has not."""
    return int(os.environ.get("SLURM_STEP_NUM_NODES", "1")) if "SLURM_STEP_ID" in os.environ else 0


def job_key() -> str:
    """The same on all nodes of one attempt, and another for each attempt."""
    if KEY in os.environ:
        return os.environ[KEY]
    if "SLURM_STEP_ID" not in os.environ:
        return BY_HAND
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    return f"slurm-{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}-{restarts}"


def own_hosts() -> tuple[str, ...]:
    """Names and addresses by which other nodes may reach this one, best first."""
    found = [slurm_address(), socket.gethostname()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 9))  # nothing is sent: it asks which address the default route has
            found.append(probe.getsockname()[0])
        except OSError:
            pass
    return tuple(dict.fromkeys(host for host in found if host))


def slurm_address() -> str | None:
    """NodeAddr of this node: what SLURM itself talks to."""
    node = os.environ.get("SLURMD_NODENAME")
    if node is None:
        return None
    asked = subprocess.run(
        ["scontrol", "--oneliner", "show", "node", node], capture_output=True, text=True, check=False
    ).stdout
    return next((word.removeprefix("NodeAddr=") for word in asked.split() if word.startswith("NodeAddr=")), node)


def announce(run_dir: Path, meeting: Meeting) -> None:
    """Replace nodes.json. It holds a token: nobody else may read it."""
    path = run_dir / NODES_FILE
    replace_file(path, json.dumps(asdict(meeting)) + "\n", mode=0o600)


def read_meeting(run_dir: Path) -> Meeting | None:
    """What the root of this job has announced, if it has."""
    content = read_object(run_dir / NODES_FILE)
    if content is None:
        return None
    meeting = Meeting(**content | {"hosts": tuple(content["hosts"])})
    return meeting if meeting.key == job_key() else None


def connect(
    run_dir: Path, deadline: float, limit_s: float, is_over: Callable[[], bool] = lambda: False, leader: str = ""
) -> tuple[socket.socket, Meeting] | None:
    """A connection to the root; None if its run has ended meanwhile, or the search is over.

    Args:
        leader: the command that starts the root, where people start the roles.

    Raises UserError at the deadline (of time.monotonic), `limit_s` after the search began.
    """
    tried = f"no {NODES_FILE} of this job appeared there"
    while time.monotonic() < deadline:
        meeting = read_meeting(run_dir)
        if is_over() or (meeting is not None and meeting.ended):
            return None
        for host, known in [] if meeting is None else [(host, meeting) for host in meeting.hosts]:
            try:
                return socket.create_connection((host, known.port), timeout=CONNECT_LIMIT_S), known
            except OSError as error:
                tried = f"{host}:{known.port}: {error}"
        time.sleep(POLL_S)
    raise UserError(
        f"Node {node_of_this_process()} found no root of its run within {limit_s:g} s.",
        where=f"{run_dir / NODES_FILE}, deployment.start_timeout_s={limit_s:g}",
        why=tried,
        fix=(f"start it, too: {leader}; beyond one machine " if leader else "")
        + "output_dir on a filesystem that all nodes share; open ports between the nodes",
    )
