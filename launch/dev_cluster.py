"""`python -m launch.dev_cluster up|down|status|env`: a real SLURM on this one machine, for tests and for trying things.

munge, MariaDB, slurmdbd, slurmctld, and two slurmd that pose as nodes n0 and n1 with 8 GPUs each. The GPUs are device
files without devices: jobs get CUDA_VISIBLE_DEVICES and share this machine's cores. All of it lies in one directory,
with ports and a munge key of its own, so it meets no other SLURM. Partitions: main, and preemptible, whose jobs have
GRACE_S seconds to save before they are requeued for jobs of main.

Needs root, and on Debian:

    apt-get install -y --no-install-recommends slurmctld slurmd slurm-client slurmdbd munge mariadb-server
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from prl.config.errors import UserError

DEFAULT_DIR = Path("/tmp/prl-dev-cluster")
PROGRAMS = ("munged", "mariadbd", "mariadb-install-db", "slurmdbd", "slurmctld", "slurmd", "sinfo")
PACKAGES = "slurmctld slurmd slurm-client slurmdbd munge mariadb-server"
NODES = ("n0", "n1")
GPUS = 8
GRACE_S = 10
DAEMONS = (*NODES, "slurmctld", "slurmdbd", "mariadbd", "munged")  # in the order of stopping
START_LIMIT_S = 60.0

SLURM_CONF = """\
ClusterName=dev
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={slurmctld}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={dir}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={dir}/state
SlurmctldPidFile={dir}/slurmctld.pid
SlurmctldLogFile={dir}/slurmctld.log
SlurmdSpoolDir={dir}/spool/%n
SlurmdPidFile={dir}/%n.pid
SlurmdLogFile={dir}/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
GresTypes=gpu
ReturnToService=2
JobRequeue=1
KillWait=30
MaxArraySize=1001
MaxJobCount=10000
SchedulerParameters=batch_sched_delay=1,sched_interval=5,bf_interval=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={slurmdbd}
AccountingStoragePass={dir}/munge.socket
AccountingStorageTRES=gres/gpu
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={n0} CPUs={cpus} Gres=gpu:{gpus}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1} CPUs={cpus} Gres=gpu:{gpus}
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
StoragePass=slurm
StorageLoc=slurm_accounting
"""
GRES_CONF = "NodeName=n[0-1] Name=gpu File={dir}/nvidia[0-7]\n"
CGROUP_CONF = "CgroupPlugin=cgroup/v1\nConstrainCores=no\nConstrainDevices=no\nConstrainRAMSpace=no\n"
CPUS = 16  # slots that a node offers, whatever this machine has


def main() -> None:
    parser = argparse.ArgumentParser(prog="launch.dev_cluster", description=__doc__)
    parser.add_argument("action", choices=("up", "down", "status", "env"))
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIR)
    arguments = parser.parse_args()
    cluster = DevCluster(arguments.dir.absolute())
    actions: dict[str, Callable[[], None]] = {
        "up": cluster.up,
        "down": cluster.down,
        "status": cluster.status,
        "env": lambda: print(f"export SLURM_CONF={cluster.conf}"),
    }
    try:
        actions[arguments.action]()
    except UserError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(2)


class DevCluster:
    """The cluster that lives in `path`."""

    def __init__(self, path: Path) -> None:
        self.path, self.conf = path, path / "slurm.conf"
        self.environment = os.environ | {"SLURM_CONF": str(self.conf), "PATH": f"{os.environ['PATH']}:/usr/sbin"}

    @property
    def is_up(self) -> bool:
        return self.conf.exists() and self._ask("sinfo", "--noheader", "--format=%T", "--states=idle,mixed,alloc") != ""

    def up(self) -> None:
        """Start what does not run, and wait until both nodes take jobs. Raises UserError with the log's end."""
        refuse_if_impossible()
        if self.is_up:
            print(f"up already: export SLURM_CONF={self.conf}")
            return
        self.down()
        started = time.monotonic()
        ports = self._write_files()
        try:
            self._start_database(ports["mariadb"])
            self._start_slurm()
        except UserError:
            self._stop_daemons()
            raise
        print(f"up after {time.monotonic() - started:.0f} s: nodes {' '.join(NODES)} with {GPUS} GPUs each")
        print(f"export SLURM_CONF={self.conf}")

    def down(self) -> None:
        """Cancel all jobs, stop all daemons, remove the directory."""
        if self.conf.exists():
            self._ask("scancel", "--full", "--signal=KILL", *self._ask("squeue", "--noheader", "--format=%i").split())
        self._stop_daemons()
        shutil.rmtree(self.path, ignore_errors=True)

    def status(self) -> None:
        if not self.is_up:
            raise UserError(
                f"no cluster is up in {self.path}", where="dev_cluster", fix="python -m launch.dev_cluster up"
            )
        print(self._ask("sinfo", "--Node", "--long"), end="")

    # --- start --------------------------------------------------------------------------------------------------------

    def _write_files(self) -> dict[str, int]:
        ports = free_ports("slurmctld", "slurmdbd", "mariadb", *NODES)
        for folder in ("state", "database", *(f"spool/{node}" for node in NODES)):
            (self.path / folder).mkdir(parents=True)
        self.path.chmod(0o755)
        values = {"dir": self.path, "host": socket.gethostname(), "cpus": CPUS, "gpus": GPUS, "grace": GRACE_S, **ports}
        for name, text in {
            "slurm.conf": SLURM_CONF,
            "slurmdbd.conf": SLURMDBD_CONF,
            "gres.conf": GRES_CONF,
            "cgroup.conf": CGROUP_CONF,
        }.items():
            (self.path / name).write_text(text.format(**values))
        (self.path / "slurmdbd.conf").chmod(0o600)
        for index in range(GPUS):
            os.mknod(self.path / f"nvidia{index}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        key = self.path / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        return ports

    def _start_database(self, port: int) -> None:
        data = self.path / "database"
        with (self.path / "mariadbd.log").open("ab") as log:
            install = [
                "mariadb-install-db",
                f"--datadir={data}",
                "--user=root",
                "--auth-root-authentication-method=normal",
            ]
            subprocess.run([*install, "--skip-test-db"], stdout=log, stderr=log, check=False)
        socket_path = self.path / "mariadb.socket"
        self._daemon(
            "mariadbd",
            *("mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", f"--socket={socket_path}"),
            *(f"--port={port}", "--bind-address=127.0.0.1", "--innodb-buffer-pool-size=64M"),
        )
        self._wait("mariadbd", lambda: self._ask("mariadb-admin", f"--socket={socket_path}", "ping") != "")
        grant = (
            "CREATE DATABASE slurm_accounting; CREATE USER 'slurm'@'127.0.0.1' IDENTIFIED BY 'slurm'; "
            "CREATE USER 'slurm'@'localhost' IDENTIFIED BY 'slurm'; "
            "GRANT ALL ON slurm_accounting.* TO 'slurm'@'127.0.0.1'; "
            "GRANT ALL ON slurm_accounting.* TO 'slurm'@'localhost';"
        )
        subprocess.run(["mariadb", f"--socket={socket_path}", "--user=root", "-e", grant], check=True)

    def _start_slurm(self) -> None:
        munge = self.path / "munge.socket"
        self._daemon(
            "munged",
            *("munged", "--foreground", "--force", f"--key-file={self.path}/munge.key", f"--socket={munge}"),
            *(f"--log-file={self.path}/munged.log", f"--pid-file={self.path}/munged.pid"),
            f"--seed-file={self.path}/munged.seed",
        )
        self._wait("munged", munge.exists)
        self._daemon("slurmdbd", "slurmdbd", "-D")
        self._wait("slurmdbd", lambda: "dev" in self._ask("sacctmgr", "-i", "-n", "add", "cluster", "dev"))
        self._daemon("slurmctld", "slurmctld", "-D")
        self._wait("slurmctld", lambda: "UP" in self._ask("scontrol", "ping"))
        for node in NODES:
            self._daemon(node, "slurmd", "-D", "-N", node)
        self._ask("scontrol", "update", "nodename=n[0-1]", "state=resume")
        self._wait(
            "n1", lambda: self._ask("sinfo", "--noheader", "--Node", "--format=%N", "--states=idle").count("n") >= 2
        )

    def _daemon(self, name: str, *command: str) -> None:
        """Start in a session of its own; NAME.daemon holds its process id."""
        with (self.path / f"{name}.console").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
                cwd=self.path,
            )
        (self.path / f"{name}.daemon").write_text(str(process.pid))

    def _wait(self, name: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not condition():
            if time.monotonic() > deadline:
                tails = [log.read_text(errors="replace")[-1500:] for log in self._logs(name)]
                raise UserError(
                    f"{name} did not come up within {START_LIMIT_S:.0f} s.",
                    where=str(self.path),
                    why="\n".join(tails).strip() or "its log is empty",
                    fix="mend what the log says, then: python -m launch.dev_cluster up",
                )
            time.sleep(0.2)

    def _logs(self, name: str) -> list[Path]:
        return [path for path in (self.path / f"{name}.log", self.path / f"{name}.console") if path.exists()]

    # --- stop ---------------------------------------------------------------------------------------------------------

    def _stop_daemons(self) -> None:
        for name in DAEMONS:
            pid_file = self.path / f"{name}.daemon"
            if pid_file.exists():
                stop(int(pid_file.read_text()))
                pid_file.unlink()

    def _ask(self, *command: str) -> str:
        """What a command prints; nothing if it fails."""
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env=self.environment, timeout=START_LIMIT_S
            )
        except (FileNotFoundError, subprocess.TimeoutExpired):
            return ""
        return done.stdout if done.returncode == 0 else ""


def refuse_if_impossible() -> None:
    """Raise UserError where a cluster cannot be started."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing:
        raise UserError(
            f"These programs are missing: {', '.join(missing)}.",
            where="PATH",
            why="the cluster is made of Debian's packages",
            fix=f"apt-get install -y --no-install-recommends {PACKAGES}",
        )
    if os.geteuid() != 0:
        raise UserError(
            "A cluster of one's own needs root.", where="user", why="slurmd starts jobs as others", fix="sudo"
        )


def free_ports(*names: str) -> dict[str, int]:
    """A port for each name, free a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in names]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return {name: listener.getsockname()[1] for name, listener in zip(names, sockets, strict=True)}


def stop(pid: int, limit_s: float = 10.0) -> None:
    """SIGTERM, and SIGKILL if that is not enough."""
    deadline = time.monotonic() + limit_s
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            os.kill(pid, 0)
            time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
