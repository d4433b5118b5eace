"""The development cluster's configuration: what SLURM reads, and why each line that is not obvious is there."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from pathlib import Path

NODES = ("n0", "n1")
GPUS = 8
CPUS = 16  # slots that a node offers, whatever this machine has
NODE_TIMEOUT_S = 8  # a dead node is noticed after about 20 s: SLURM asks again before it believes it
MEMORY_MB = 2_000_000  # likewise; nobody counts what jobs use
GRACE_S = 10  # from the warning of a preemption to the kill
CLUSTER = "dev"
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
FREEZER = Path("/sys/fs/cgroup/freezer")
MARKER = "prl-dev-cluster"  # only a directory that holds this file is ever emptied

SLURM_CONF = """\
ClusterName={cluster}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={slurmctld}
SlurmUser=root
SlurmdUser=root
# A requeued job starts again only when its credential has expired: 120 s unless told.
AuthType=auth/munge
AuthInfo=socket={dir}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={dir}/state
SlurmctldPidFile={dir}/slurmctld.pid
SlurmctldLogFile={dir}/slurmctld.log
SlurmdSpoolDir={dir}/spool/%n
SlurmdPidFile={dir}/%n.pid
SlurmdLogFile={dir}/%n.log
# Believe what this file says of the nodes, not what slurmd finds here.
SlurmdParameters=config_overrides
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
GresTypes=gpu
ReturnToService=2
# A node that is silent is down after these two, and its jobs are requeued: 300 s elsewhere.
SlurmdTimeout={node_timeout}
MessageTimeout=6
JobRequeue=1
KillWait=30
MaxArraySize=1001
# Nodes of two such clusters share their cgroups' names, jobs must not.
FirstJobId={first_job}
MaxJobCount=10000
SchedulerParameters=batch_sched_delay=1,sched_interval=5,bf_interval=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={slurmdbd}
AccountingStoragePass={dir}/munge.socket
# Unknown accounts and QOS are refused, as on most clusters.
AccountingStorageEnforce=associations,limits,qos
AccountingStorageTRES=gres/gpu
NodeName=DEFAULT CPUs={cpus} RealMemory={memory} Gres=gpu:{gpus} Feature=h200
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={n0}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1}
PartitionName=main Nodes=n0,n1 Default=YES MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=preemptible Nodes=n0,n1 MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
"""

SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={dir}/munge.socket
DbdHost=localhost
DbdPort={slurmdbd}
SlurmUser=root
LogFile={dir}/slurmdbd.log
PidFile={dir}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={mariadb}
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm_accounting
"""

GRES_CONF = "NodeName=n[0-1] Name=gpu File={dir}/nvidia[0-7]\n"
CGROUP_CONF = "CgroupPlugin=cgroup/v1\nConstrainCores=no\nConstrainDevices=no\nConstrainRAMSpace=no\n"

# What the database is told before anyone may log in over TCP.
GRANTS = """\
CREATE DATABASE slurm_accounting;
CREATE USER 'slurm'@'127.0.0.1' IDENTIFIED BY '{password}';
CREATE USER 'slurm'@'localhost' IDENTIFIED BY '{password}';
GRANT ALL ON slurm_accounting.* TO 'slurm'@'127.0.0.1';
GRANT ALL ON slurm_accounting.* TO 'slurm'@'localhost';
"""


def write_files(path: Path) -> dict[str, int]:
    """Fill an empty directory with configuration, keys and folders. Returns the port of each daemon."""
    ports = free_ports("slurmctld", "slurmdbd", "mariadb", *NODES)
    for folder in ("state", "database", *(f"spool/{node}" for node in NODES)):
        (path / folder).mkdir(parents=True)
    values = {"dir": path, "host": socket.gethostname(), "cluster": CLUSTER, "password": os.urandom(16).hex()}
    values["proctrack"] = "cgroup" if can_use_cgroups() else "linuxproc"
    numbers = {"cpus": CPUS, "gpus": GPUS, "grace": GRACE_S, "node_timeout": NODE_TIMEOUT_S, "memory": MEMORY_MB}
    numbers["first_job"] = 1000 * random.randint(1, 60_000) + 1
    for name, text, mode in (
        ("slurm.conf", SLURM_CONF, 0o644),
        ("gres.conf", GRES_CONF, 0o644),
        ("cgroup.conf", CGROUP_CONF, 0o644),
        ("slurmdbd.conf", SLURMDBD_CONF, 0o600),
        ("grants.sql", GRANTS, 0o600),
    ):
        (path / name).touch(mode)
        (path / name).write_text(text.format(**values, **numbers, **ports))
    for index in range(GPUS):
        (path / f"nvidia{index}").symlink_to("/dev/null")  # slurmd wants a device, and jobs never open it
    key = path / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    return ports


def can_use_cgroups() -> bool:
    """Whether SLURM can keep a job's processes in a cgroup (v1), so that none escapes it.

    Without, it finds them by their parents: one whose parents have died is lost, and lives on after scancel.
    """
    probe = FREEZER / f"prl-probe-{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return (FREEZER / "release_agent").exists()


def remove_cgroups() -> None:
    """Of the nodes, those that are empty: the rest belongs to another cluster's jobs."""
    for node in NODES:
        for path in sorted(FREEZER.glob(f"slurm_{node}/**/"), key=lambda path: -len(path.parts)):
            with contextlib.suppress(OSError):
                path.rmdir()


def free_ports(*names: str) -> dict[str, int]:
    """A port for each name, free a moment ago, and none that the system gives to connections: until its daemon binds
    it, which may take seconds, any of them could get it.
    """
    candidates = random.sample(range(*_unassigned()), 1000)
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < len(names):
            listener = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):  # somebody has it
                listener.bind(("127.0.0.1", candidates.pop()))
                ports.append(listener.getsockname()[1])
        return dict(zip(names, ports, strict=True))


def _unassigned() -> tuple[int, int]:
    """The ports below those that the system gives away; all where it says nothing of them, or leaves no room."""
    try:
        lowest = int(EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        lowest = 0
    return (10_000, lowest) if lowest >= 20_000 else (10_000, 65_536)
