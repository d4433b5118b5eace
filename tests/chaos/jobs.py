"""The command of a round: as a process of its own, or submitted to SLURM."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from prl.runtime.agent import read_attempts
from prl.runtime.directory.status_file import read_status

END_S = 300.0  # for a job that was hit, or resumes
POLL_S = 0.2


class Job(Protocol):
    """What was started."""

    def ended(self) -> bool: ...

    def wait(self) -> int | None:
        """The exit code; None if it does not end within END_S."""

    def root(self) -> int | None:
        """The process at the top of the run, or of the sweep."""

    def kill(self) -> None: ...


class LocalJob:
    """In a session of its own, at a terminal of its own where that will be closed."""

    def __init__(self, arguments: list[str], folder: Path, env: dict[str, str], terminal: bool = False) -> None:
        """folder: where its console.log is; it works on the disk in there, if there is one."""
        command = [sys.executable, "-m", "prl.rl", *arguments]
        self.log, self.master = folder / "console.log", None
        disk = folder / "disk"
        options: dict[str, Any] = {"cwd": disk if disk.exists() else folder, "env": env, "start_new_session": True}
        if terminal:
            self.master, slave = pty.openpty()
            options |= {"preexec_fn": _take_terminal}
            self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, **options)
            os.close(slave)
            threading.Thread(target=self._drain, daemon=True).start()
        else:
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **options)

    def _drain(self) -> None:
        with self.log.open("ab") as log:
            while self.master is not None:
                try:
                    log.write(os.read(self.master, 4096))
                    log.flush()
                except (OSError, TypeError):
                    return

    def close_terminal(self) -> None:
        master, self.master = self.master, None
        assert master is not None
        os.close(master)

    def ended(self) -> bool:
        return self.process.poll() is not None

    def wait(self) -> int | None:
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return None

    def root(self) -> int | None:
        return None if self.ended() else self.process.pid

    def kill(self) -> None:
        if not self.ended():
            os.killpg(self.process.pid, signal.SIGKILL)


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class SlurmJob:
    """`-m hydra/launcher=slurm`, with one point; exit code: that of the last attempt, 0 for a point that is done."""

    def __init__(self, arguments: list[str], folder: Path, env: dict[str, str]) -> None:
        command = [sys.executable, "-m", "prl.rl", *arguments]
        with (folder / "console.log").open("ab") as log:
            subprocess.run(command, cwd=folder, env=env, stdout=log, stderr=log, check=True, timeout=300)
        self.sweep = folder / "outputs/sweeps/s"
        self.id = json.loads((self.sweep / "sweep.json").read_text())["submissions"][-1]["job_id"]

    @property
    def point(self) -> Path:
        return self.sweep / json.loads((self.sweep / "sweep.json").read_text())["points"][0]["dir"]

    def ended(self) -> bool:
        queue = subprocess.run(["squeue", "-h", "-j", self.id], capture_output=True, text=True, check=False)
        is_answer = queue.returncode == 0 or "Invalid job id" in queue.stderr  # a busy controller may not answer
        return is_answer and not queue.stdout.strip()

    def wait(self) -> int | None:
        deadline = time.monotonic() + END_S
        while not self.ended():
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_S)
        if read_status(self.point).get("state") == "done":
            return 0
        attempts = read_attempts(self.point)
        return int(attempts[-1].get("exit_code", -9)) if attempts else -9  # killed before it could tell

    def root(self) -> int | None:
        return read_status(self.point).get("root_pid")

    def began_again(self) -> float | None:
        """When SLURM started it for the last time (seconds of the epoch), if that was not the first time."""
        attempts = read_attempts(self.point)
        return attempts[-1]["started"] if len(attempts) > 1 else None

    def disturb(self, how: str) -> None:
        """Cancel it, send it back to the queue, end a node under it, or signal all its processes."""
        if how == "node down":
            self.ask("scontrol", "update", f"JobId={self.id}", "Requeue=1")
            node = self.ask("squeue", "-h", "-j", self.id, "-o", "%B").split()[0]
            self.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=chaos")
            deadline = time.monotonic() + END_S
            while "DOWN" in self.ask("sinfo", "-h", "-n", node, "-o", "%T").upper() and time.monotonic() < deadline:
                subprocess.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], check=False, timeout=60)
                time.sleep(POLL_S)
            return
        command = {"cancel": ["scancel"], "requeue": ["scontrol", "requeue"]}
        self.ask(*command.get(how, ["scancel", f"--signal={how}", "--full"]), self.id)

    def ask(self, *words: str) -> str:
        return subprocess.run(words, check=True, timeout=60, capture_output=True, text=True).stdout.strip()

    def kill(self) -> None:
        self.ask("scancel", "--signal=KILL", "--full", self.id)
