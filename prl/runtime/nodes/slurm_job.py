"""The SLURM job that this process runs in: what its signals mean, how much time they leave, and how it goes on."""

from __future__ import annotations

import re
import subprocess
import time

from prl.runtime.process.signals import StopSignals

POLL_S = 0.02  # a small run has saved and ended within a fifth of a second
ASK_AGAIN_S = 2.0
ANSWER_S = 20.0  # SLURM's own clients wait for 10
ENDING = ("COMPLETING", "CANCELLED", "PREEMPTED", "TIMEOUT", "")  # SIGTERM was sent, SIGKILL follows after KillWait
DEFAULT_KILL_WAIT_S = 30.0  # SLURM's own
MARGIN = 0.15  # of KillWait: to end all processes, and for signals that come late


def limit_by_kill_wait(signals: StopSignals, job: str) -> None:
    """For a thread: keep the deadline of the stop true. A job that SLURM ends has KillWait from the SIGTERM on.

    Ended is one that was cancelled or requeued, whose time is over, or whose grace before a preemption is over; before
    that it may take the time that it needs. Until SLURM says which it is, a SIGTERM means the end, a warning does not.
    """
    signals.time_to_end_s = ask_kill_wait() * (1 - MARGIN)  # now: when many jobs end at once the controller is busy
    while signals.first is None:
        time.sleep(POLL_S)
    told_s = signals.terminated_s
    while (state := state_of(job)) not in ENDING:
        if state is not None and told_s == signals.terminated_s:  # asked after the last SIGTERM
            signals.deadline_s = None
        time.sleep(ASK_AGAIN_S)
        told_s = signals.terminated_s
    signals.deadline_s = (signals.terminated_s or time.monotonic()) + signals.time_to_end_s


def state_of(job: str) -> str | None:
    """As squeue has it, RUNNING for example; "" for a job that it no longer knows, None if it does not answer."""
    code, said, complaint = _run("squeue", "--noheader", f"--jobs={job}", "--format=%T")
    if code == 0 or "Invalid job id" in complaint:
        return said
    return None


def ask_kill_wait() -> float:
    """Seconds between SIGTERM and SIGKILL."""
    found = re.search(r"KillWait\s*=\s*(\d+)", _run("scontrol", "show", "config")[1])
    return float(found[1]) if found else DEFAULT_KILL_WAIT_S


def was_preempted(job: str | None) -> bool:
    """Whether SLURM is about to give the nodes to another job; one that ends by itself before is not requeued."""
    if job is None:
        return False
    found = re.search(r" PreemptTime=(\S+)", _run("scontrol", "--oneliner", "show", "job", job)[1])
    return found is not None and found.group(1) not in ("None", "(null)")


def requeue(job: str) -> None:
    """SLURM ends this job at once, to start it again later."""
    _run("scontrol", "requeue", job)
    time.sleep(60)


def _run(*command: str) -> tuple[int, str, str]:
    """Exit code, output, complaint. A controller that does not answer, or a program that is not there, is a failure."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, "", str(error)
    return done.returncode, done.stdout.strip(), done.stderr.strip()
