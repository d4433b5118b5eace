"""`python -m launch.dev_cluster up|down|status|env|install`: a real SLURM on this one machine, to test and try things.

munge, MariaDB, slurmdbd, slurmctld, and two slurmd that pose as nodes n0 and n1 with 8 GPUs each. The GPUs are files
without devices: jobs get CUDA_VISIBLE_DEVICES and share this machine's cores. All of it lies in one directory, with
ports and a munge key of its own, so it meets no other SLURM; SLURM_CONF is how commands find it (`env` prints the
line). Partitions: main, and preemptible, whose jobs are warned some seconds before they are requeued for jobs of main.

Needs root and the Debian packages that `install` installs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from launch.dev_cluster_files import CLUSTER, GPUS, MARKER, NODES, remove_cgroups, write_files
from prl.config.console import shield_console
from prl.config.errors import UserError

DEFAULT_DIR = Path("/tmp/prl-dev-cluster")
PROGRAMS = ("munged", "mariadbd", "mariadb-install-db", "slurmdbd", "slurmctld", "slurmd", "sinfo", "sacctmgr")
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurmdbd", "munge", "mariadb-server")
ACCOUNT, QOS = "dev", ("normal", "high")
DAEMONS = (*NODES, "slurmctld", "slurmdbd", "mariadbd", "munged")  # in the order of stopping
START_LIMIT_S = 60.0  # for each daemon
ASK_LIMIT_S = 20.0  # for one command
KILL_LIMIT_S = 10.0  # a process in the kernel's hands dies late
LONGEST_DIR = 80  # characters: a socket's path has at most 107
SYSTEM_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin:/sbin:/bin"  # Debian's daemons are in sbin
ACTIONS = {
    "up": "start it, and wait until both nodes take jobs",
    "down": "cancel its jobs and stop it; its logs stay until the next up, or --purge",
    "status": "nodes and jobs; exit code 2 when it is not up",
    "env": 'eval "$(python -m launch.dev_cluster env)" points this shell to it',
    "install": f"apt-get install {' '.join(PACKAGES)}",
}


def main() -> None:
    shield_console()
    parser = argparse.ArgumentParser(
        prog="python -m launch.dev_cluster",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
        epilog="\n".join(f"{name:<8} {what}" for name, what in ACTIONS.items()),
    )
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIR, help="where it lives (%(default)s)")
    parser.add_argument("--purge", action="store_true", help="down: remove the directory too")
    arguments = parser.parse_args()
    cluster = DevCluster(arguments.dir.absolute())
    actions: dict[str, Callable[[], None]] = {
        "up": cluster.up,
        "down": lambda: cluster.down(purge=arguments.purge),
        "status": cluster.status,
        "env": lambda: print(cluster.export_line),
        "install": install_packages,
    }
    try:
        actions[arguments.action]()
    except UserError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(2)


class DevCluster:
    """The cluster that lives in the directory `path`."""

    def __init__(self, path: Path) -> None:
        self.path, self.conf = path, path / "slurm.conf"
        self.complaint = ""  # of the command that failed last
        self.environment = os.environ | {"SLURM_CONF": str(self.conf), "PATH": SYSTEM_PATH}

    @property
    def export_line(self) -> str:
        return f"export SLURM_CONF={self.conf}"

    @property
    def is_up(self) -> bool:
        """All daemons live, both nodes answer the controller, and the accounting answers."""
        return (
            self.conf.exists()
            and all(self._pid(name) is not None for name in DAEMONS)
            and self._nodes_in("idle,mix,alloc") == len(NODES)
            and self._ask("sacct", "--noheader") is not None
        )

    def up(self) -> None:
        """Start it, unless it is up, and wait until both nodes take jobs. Raises UserError with the log's end."""
        refuse_if_impossible()
        if self.is_up:
            print(f"up already\n{self.export_line}")
            return
        self._refuse_foreign()
        self.down(purge=True)
        started = time.monotonic()
        self.path.mkdir(parents=True)
        self.path.chmod(0o755)
        (self.path / MARKER).touch()
        ports = write_files(self.path)
        try:
            self._start_database(ports["mariadb"])
            self._start_accounting()
            self._start_slurm()
        except BaseException:
            self._stop_daemons()  # the logs stay
            raise
        print(f"up after {time.monotonic() - started:.0f} s: nodes {' '.join(NODES)} with {GPUS} GPUs each")
        print(self.export_line)

    def down(self, purge: bool = False) -> None:
        """Cancel all jobs and stop all daemons; with `purge`, remove the directory. Idempotent."""
        if not (self.path / MARKER).exists():
            return
        self._cancel_jobs()
        self._stop_daemons()
        if purge:
            shutil.rmtree(self.path, ignore_errors=True)

    def status(self) -> None:
        """Print nodes and jobs. Raises UserError where the cluster is not up."""
        if not self.is_up:
            dead = [name for name in DAEMONS if self._pid(name) is None]
            raise UserError(
                f"No cluster is up in {self.path}.",
                where="dev_cluster",
                why=f"not running: {', '.join(dead)}" if dead else "a node is down or the accounting does not answer",
                fix="python -m launch.dev_cluster up",
            )
        print(self._ask("sinfo", "--Node", "--format=%6N %12P %10T %8G %C") or "", end="")
        print(self._ask("squeue", "--all") or "", end="")

    def kill_node(self, node: str) -> None:
        """All at once what runs on a node dies, as if it lost power; SLURM notices after about 20 s."""
        daemon = self._pid(node)
        if daemon is not None:
            os.kill(daemon, signal.SIGKILL)
        self._kill_jobs(node)

    def start_node(self, node: str) -> None:
        """After `kill_node`: it comes back without the jobs it had. Raises UserError with the log's end."""
        if self._pid(node) is not None:
            return
        before = self._started(node)
        daemon = self._start(node, "slurmd", "-D", "-N", node)
        self._wait(node, daemon, lambda: self._started(node) != before and self._nodes_in("idle,mix,alloc", node) == 1)

    # --- start --------------------------------------------------------------------------------------------------------

    def _refuse_foreign(self) -> None:
        if len(str(self.path)) > LONGEST_DIR:
            raise UserError(
                f"The directory's path has {len(str(self.path))} characters.",
                where=f"--dir {self.path}",
                why=f"sockets lie in it, and their paths are short: {LONGEST_DIR} characters are left",
                fix=f"--dir {DEFAULT_DIR}",
            )
        is_ours = (self.path / MARKER).exists() and self.path.stat().st_uid == os.geteuid()
        if self.path.exists() and not is_ours and (not self.path.is_dir() or any(self.path.iterdir())):
            raise UserError(
                f"{self.path} exists and is not a development cluster.",
                where="--dir",
                why="what it holds would be lost",
                fix="name another directory, or remove this one",
            )
        if self.path.is_dir() and not is_ours:
            self.path.rmdir()

    def _start_database(self, port: int) -> None:
        data, socket_path = self.path / "database", self.path / "mariadb.socket"
        install = [f"--datadir={data}", "--user=root", "--auth-root-authentication-method=normal", "--skip-test-db"]
        with (self.path / "mariadbd.log").open("ab") as log:
            command = ["mariadb-install-db", "--no-defaults", *install]
            subprocess.run(command, stdout=log, stderr=log, check=False, env=self.environment)
        daemon = self._start(
            "mariadbd",
            *("mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", f"--socket={socket_path}"),
            *(f"--port={port}", "--bind-address=127.0.0.1", "--innodb-buffer-pool-size=64M"),
            *("--innodb-flush-log-at-trx-commit=0", "--innodb-lock-wait-timeout=900"),
        )
        client = ("mariadb", "--no-defaults", f"--socket={socket_path}", "--user=root")
        self._wait("mariadbd", daemon, lambda: self._ask(*client, "-e", "SELECT 1") is not None)
        grants = f"source {self.path}/grants.sql"
        self._wait("mariadbd", daemon, lambda: self._ask(*client, "-e", grants) is not None)

    def _start_accounting(self) -> None:
        munge = self.path / "munge.socket"
        daemon = self._start(
            "munged",
            *("munged", "--foreground", "--force", f"--key-file={self.path}/munge.key", f"--socket={munge}"),
            *(f"--log-file={self.path}/munged.log", f"--pid-file={self.path}/munged.pid"),
            f"--seed-file={self.path}/munged.seed",
        )
        self._wait("munged", daemon, munge.exists)
        daemon = self._start("slurmdbd", "slurmdbd", "-D")
        self._wait("slurmdbd", daemon, lambda: self._ask("sacctmgr", "-i", "add", "cluster", CLUSTER) is not None)
        self._ask("sacctmgr", "-i", "add", "account", ACCOUNT, "Description=development")
        for name in QOS[1:]:  # normal is there from the start
            self._ask("sacctmgr", "-i", "add", "qos", name, "Priority=100")
        users = {"root", os.environ.get("SUDO_USER", "root")}
        for user in users:
            self._ask("sacctmgr", "-i", "add", "user", user, f"DefaultAccount={ACCOUNT}", f"QOS={','.join(QOS)}")

    def _start_slurm(self) -> None:
        controller = self._start("slurmctld", "slurmctld", "-D")
        self._wait("slurmctld", controller, lambda: "is UP" in (self._ask("scontrol", "ping") or ""))
        daemons = {node: self._start(node, "slurmd", "-D", "-N", node) for node in NODES}
        for node, daemon in daemons.items():
            self._wait(node, daemon, partial(self._is_idle, node))
        self._wait("slurmdbd", None, lambda: self._ask("sacct", "--noheader") is not None)

    def _start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """A daemon in a session of its own; NAME.daemon holds its process id, NAME.console what it prints."""
        with (self.path / f"{name}.console").open("ab") as log:
            daemon = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
                cwd=self.path,
            )
        (self.path / f"{name}.daemon").write_text(str(daemon.pid))
        return daemon

    def _wait(self, name: str, daemon: subprocess.Popen[bytes] | None, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not condition():
            ended = None if daemon is None else daemon.poll()
            if ended is None and time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            logs = [path for path in (self.path / f"{name}.log", self.path / f"{name}.console") if path.exists()]
            tails = [line for log in logs for line in log.read_text(errors="replace").splitlines()[-8:]]
            late = f"did not come up within {START_LIMIT_S:.0f} s"
            raise UserError(
                f"{name} {late if ended is None else f'ended with code {ended}'}.",
                where=" ".join(map(str, logs)),
                why=" | ".join([*tails, *self.complaint.splitlines()[:4]]) or "its log is empty",
                fix="mend what the log says, then: python -m launch.dev_cluster up",
            )

    # --- stop ---------------------------------------------------------------------------------------------------------

    def _cancel_jobs(self, limit_s: float = 3.0) -> None:
        """Ask SLURM first, so that the accounting is right; what remains is killed with its node."""
        if self._pid("slurmctld") is None:
            return
        jobs = (self._ask("squeue", "--all", "--noheader", "--format=%A") or "").split()
        for options in (["--signal=KILL"], ["--signal=KILL", "--full"], []):  # steps, batch scripts, what waits
            if jobs:
                self._ask("scancel", *options, *jobs)
        deadline = time.monotonic() + limit_s
        while self._ask("squeue", "--all", "--noheader") and time.monotonic() < deadline:
            time.sleep(0.1)

    def _stop_daemons(self) -> None:
        self._kill_jobs()  # slurmd would wait for them
        for name in DAEMONS:
            pid = self._pid(name)
            if pid is not None:
                stop(pid)
            (self.path / f"{name}.daemon").unlink(missing_ok=True)
        self._kill_jobs()
        remove_cgroups()

    def _kill_jobs(self, node: str | None = None) -> None:
        """Steps before their tasks, whose end they would report; again, for what was forked meanwhile."""
        deadline = time.monotonic() + KILL_LIMIT_S
        while (found := processes_of_jobs(self.conf, node)) and time.monotonic() < deadline:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _pid(self, name: str) -> int | None:
        """Of a daemon that lives; process ids are used again, so it must have been started for this cluster."""
        try:
            pid = int((self.path / f"{name}.daemon").read_text())
        except (OSError, ValueError):
            return None
        return pid if environment_of(pid).get("SLURM_CONF") == str(self.conf) else None

    # --- ask ----------------------------------------------------------------------------------------------------------

    def _is_idle(self, node: str) -> bool:
        return self._nodes_in("idle", node) == 1

    def _started(self, node: str) -> str:
        """When the controller last saw the node's daemon start."""
        found = re.search(r"SlurmdStartTime=(\S+)", self._ask("scontrol", "show", "node", node) or "")
        return found.group(1) if found else ""

    def _nodes_in(self, states: str, nodes: str = ",".join(NODES)) -> int:
        """How many of the nodes are in one of the states, and answer."""
        listing = self._ask("sinfo", "-h", "-N", "-r", "-p", "main", "-n", nodes, "-t", states, "-o", "%N")
        return len((listing or "").split())

    def _ask(self, *command: str) -> str | None:
        """What a command prints; None if it fails."""
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env=self.environment, timeout=ASK_LIMIT_S
            )
        except (FileNotFoundError, subprocess.TimeoutExpired) as error:
            self.complaint = str(error)
            return None
        if done.returncode:
            self.complaint = f"{command[0]}: {done.stderr.strip()}"
        return done.stdout if done.returncode == 0 else None


def refuse_if_impossible() -> None:
    """Raise UserError where a cluster cannot be started."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=SYSTEM_PATH) is None]
    if missing:
        raise UserError(
            f"These programs are missing: {', '.join(missing)}.",
            where="PATH",
            why="the development cluster is made of Debian's packages",
            fix="python -m launch.dev_cluster install",
        )
    refuse_without_root()


def refuse_without_root() -> None:
    if os.geteuid() != 0:
        raise UserError(
            "The development cluster needs root.",
            where="user",
            why="packages are installed and jobs started for all users",
            fix="sudo, or a container",
        )


def install_packages() -> None:
    """Debian's packages. Their own services are not needed, and stay as the system has them. Raises UserError."""
    refuse_without_root()
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-q"],
        ["apt-get", "install", "-q", "-y", "--no-install-recommends", *PACKAGES],
    ):
        try:
            subprocess.run(command, env=environment, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise UserError(
                f"{' '.join(command[:2])} failed: {error}",
                where="apt-get",
                why="see above; only Debian and its kin have these packages under these names",
                fix=f"install by hand what gives you {', '.join(PROGRAMS)}",
            ) from error


def environment_of(pid: int) -> dict[str, str]:
    """What a process was started with; empty for one that is gone, a zombie or another user's."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(word.split("=", 1) for word in words if "=" in word)


def processes_of_jobs(conf: Path, node: str | None = None) -> list[int]:
    """What slurmd of this cluster, or of one node, started and is left: steps first, then processes of jobs."""
    steps, tasks = [], []
    for entry in Path("/proc").glob("[0-9]*"):
        environment = environment_of(int(entry.name))
        if environment.get("SLURM_CONF") != str(conf) or not is_alive(int(entry.name)):
            continue
        if "SLURM_JOB_ID" in environment:  # a shell of a user who exported SLURM_CONF has none
            if node in (None, environment.get("SLURMD_NODENAME")):
                tasks.append(int(entry.name))
        elif name_of(entry) == "slurmstepd" and (node is None or has_open(entry, conf.parent / f"{node}.log")):
            steps.append(int(entry.name))
    return steps + tasks


def name_of(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return ""


def has_open(process: Path, file: Path) -> bool:
    try:
        return str(file) in {os.readlink(link) for link in (process / "fd").iterdir()}
    except OSError:
        return False


def stop(pid: int, limit_s: float = 10.0) -> None:
    """SIGTERM, and SIGKILL if that is not enough."""
    deadline = time.monotonic() + limit_s
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        while is_alive(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """A zombie is not: its parent may take seconds to notice, or be this process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


if __name__ == "__main__":
    main()
