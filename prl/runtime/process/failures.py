"""Why a child failed: one class out of few, from its exit code, its exception and the end of its log."""

from __future__ import annotations

import contextlib
import errno
import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from prl.config.console import one_line
from prl.config.errors import PassingError, ReadOnlyError, UserError

FailureClass = Literal["oom", "hang", "collective", "node", "config", "env", "diverged", "code"]
PASSING: tuple[FailureClass, ...] = ("node", "hang", "collective")  # worth another try
MENDED_BY_PEOPLE = tuple(kind for kind in get_args(FailureClass) if kind not in PASSING)  # would come again

TAIL_LINES = 20
TAIL_BYTES = 65536  # the stacks of all threads, as faulthandler writes them
CRASH, CRASHED_THREAD = "Fatal Python error: ", "Current thread "
THREADS = (CRASHED_THREAD, "Thread ")
DUMP_TEXTS = ("  ", *THREADS, "Extension modules:")  # how the lines begin that follow it
CRASH_FRAMES = 8
RECORD_TEXT_LENGTH = 2048  # characters of one text; five of them fit into a pipe however they are encoded
RECORD_BYTES = 65536  # what a pipe holds, so that writing a record never blocks
OOM_TEXTS = ("OutOfMemoryError", "out of memory", "can't allocate memory", "Cannot allocate memory")
COLLECTIVE_TEXTS = (
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "NCCL error",
    "ncclUnhandled",
    "ncclSystemError",
    "ncclRemoteError",
    "third_party/gloo",
    "Watchdog caught collective operation timeout",
)
NODE_TEXTS = ("uncorrectable ECC error", "CUDA error: unspecified launch failure", "Bus error", "Input/output error")
NODE_ERRNOS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE)
NOBODY_LISTENS = "nobody listens there"  # what is said of an engine that was asked in vain
UNREACHABLE = "it cannot be reached"
HUNG_UP = "it hung up before it had answered"
NO_ANSWER_IN_TIME = "it did not answer in time"
PEER_TEXTS = (
    "ConnectionRefusedError",
    "ConnectionResetError",
    "ClientConnectorError",
    "ClientOSError",
    "ServerDisconnectedError",
    "no answer from the orchestrator",
    "the orchestrator answered 500",  # and ends of what it tells there
    ": TimeoutError:",  # of an answer
    *(NOBODY_LISTENS, UNREACHABLE, HUNG_UP, NO_ANSWER_IN_TIME),
)
SENTENCES = ("EngineError", "EngineLost")  # exceptions whose message needs no name before it
BY_TYPE: dict[str, FailureClass] = {
    "Diverged": "diverged",
    "BrokenWeights": "diverged",
    "EnvironmentBroken": "env",
    "CommitStalled": "hang",
    "AwayError": "node",
    "PassingError": "node",
    "ReadOnlyError": "node",
    "WriterDied": "node",  # the process that writes a trainer's checkpoints; if for lack of memory, it says so
}
MOST_NAMES = 8
CGROUP_EVENTS = Path("/sys/fs/cgroup/memory.events")


@dataclass(frozen=True)
class Failure:
    """The failure of a run, as status.json holds it and the terminal shows it."""

    kind: FailureClass
    role: str
    rank: int
    node: int
    message: str
    log_path: str
    log_tail: tuple[str, ...] = ()
    user_error: dict[str, str] | None = None  # what, where, why, fix of a UserError
    error_type: str = ""  # the exception's, by name

    def to_status(self) -> dict[str, Any]:
        return {
            "class": self.kind,
            "role": self.role,
            "rank": self.rank,
            "node": self.node,
            "message": self.message,
            "log": self.log_path,
            "log_tail": list(self.log_tail),
        }

    def render(self) -> str:
        lines = [f"{self.role} (rank {self.rank}, node {self.node}) failed, class {self.kind}: {self.message}"]
        lines.append(f"  log: {self.log_path}")
        lines += [f"  | {line.expandtabs()}" for line in self.log_tail]
        return "\n".join(map(one_line, lines))

    def as_user_error(self) -> UserError | None:
        """The UserError that the role raised, to be raised again in the root; None for any other failure."""
        if self.user_error is None:
            return None
        if self.error_type == ReadOnlyError.__name__:
            return ReadOnlyError(**self.user_error)
        return (PassingError if self.kind == "node" else UserError)(**self.user_error)


def is_refusal(status: dict[str, Any]) -> bool:
    """Whether it ended by an error of the user's before anything was trained. Engines that do not answer, a checkpoint
    that is missing, GPUs too few: what was in the way may be gone by the next command, and nothing is lost by a look.
    """
    kind = (status["failure"] or {}).get("class")
    return status["state"] == "failed" and kind == "config" and not (status["began"] and status["step"])


def waits_for_people(status: dict[str, Any]) -> bool:
    """Whether it failed in a way that would come again, so that a sweep's command leaves it alone unless told."""
    kind = (status["failure"] or {}).get("class")
    return status["state"] == "failed" and kind in MENDED_BY_PEOPLE and not is_refusal(status)


def how_points_go_on(statuses: Mapping[str, dict[str, Any]]) -> list[str]:
    """Of the points of a sweep, by name, that failed: which the sweep's command tries again by itself, and what makes
    it try the others.
    """
    failed = {name: status for name, status in statuses.items() if status and status["state"] == "failed"}
    lasting = [name for name, status in failed.items() if waits_for_people(status)]
    passing = [name for name in failed if name not in lasting]
    told = []
    if passing:
        told.append(f"failed, and may pass: {some_names(passing)}; the sweep's command tries again")
    if lasting:
        why = "failed, and would fail again as it is"
        told.append(
            f"{why}: {some_names(lasting)}; hydra.launcher.retry_failed=true in the sweep's command tries again"
        )
    return told


def some_names(names: list[str]) -> str:
    return ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")


def error_record(error: Exception) -> bytes:
    """What a child reports about its exception, as JSON that `parse_error_record` reads. At most RECORD_BYTES."""
    record: dict[str, Any] = {"type": type(error).__name__, "message": str(error)[:RECORD_TEXT_LENGTH]}
    if isinstance(error, UserError):
        parts = {"what": error.what, "where": error.where, "why": error.why, "fix": error.fix}
        record["user_error"] = {name: text[:RECORD_TEXT_LENGTH] for name, text in parts.items()}
    if isinstance(error, OSError):
        record["errno"] = error.errno
    return json.dumps(record, ensure_ascii=False).encode(errors="replace")


def parse_error_record(data: bytes) -> dict[str, Any]:
    """The record, or {} if the child had no chance to write one."""
    try:
        return json.loads(data)
    except ValueError:
        return {}


def failure_of_root(error: Exception, told: UserError | None) -> dict[str, Any]:
    """`failure` of status.json for an error of the root itself, which has no log; of what the user is told, all."""
    kind = classify("root", 1, parse_error_record(error_record(error)), (), 0)
    message = describe(1, parse_error_record(error_record(told or error)), 0)
    details = told.render().splitlines()[1:] if told else []
    return Failure(kind, "root", 0, 0, message, "", tuple(line.strip() for line in details)).to_status()


def log_tail(path: Path, lines: int = TAIL_LINES) -> tuple[str, ...]:
    """The last lines of a log; of a crash below Python what was said before it, and where it was."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(_end_of(text.splitlines(), lines))


def _end_of(log: list[str], count: int) -> list[str]:
    """The last `count` lines, or where it ends in a crash, those around it: native code gives its reason before
    faulthandler writes the stacks of all threads, the innermost call first.
    """
    crash = max((i for i, line in enumerate(log) if line.startswith(CRASH)), default=None)
    if crash is None or any(line and not line.startswith(DUMP_TEXTS) for line in log[crash + 1 :]):
        return log[-count:]
    after = log[crash:]
    threads = [i for i, line in enumerate(after) if line.startswith(THREADS)]
    crashed = [i for i in threads if after[i].startswith(CRASHED_THREAD)]  # none, if it is not one of Python's
    stack = after[(crashed or threads)[-1] :][: 1 + CRASH_FRAMES] if threads else []  # the last: the first that began
    before = max(1, count - len(stack) - 1)
    return [*log[max(0, crash - before) : crash], after[0], *stack]


def classify(role: str, exit_code: int, error: dict[str, Any], tail: tuple[str, ...], oom_kills: int) -> FailureClass:
    """The class of a child's death.

    Args:
        exit_code: as subprocess reports it: negative for a signal.
        error: from `parse_error_record`.
        oom_kills: processes that the kernel killed for memory since the run started.
    """
    text = "\n".join([error.get("type", ""), error.get("message", ""), *([] if error else tail)])
    if exit_code == -signal.SIGKILL:
        return "oom" if oom_kills else "node"
    if error.get("type") == "MemoryError" or any(mark in text for mark in OOM_TEXTS):
        return "oom"
    if error.get("type") in BY_TYPE:
        return BY_TYPE[error["type"]]
    if "user_error" in error:
        return "config"
    if any(mark in text for mark in COLLECTIVE_TEXTS):
        return "collective"
    if error.get("errno") in NODE_ERRNOS or any(mark in text for mark in NODE_TEXTS) or exit_code == -signal.SIGBUS:
        return "node"
    if role in ("trainer", "orchestrator") and any(mark in text for mark in PEER_TEXTS):
        return "collective"  # roles that lost each other, where none of them had failed
    return "env" if role == "env" else "code"


def describe(exit_code: int, error: dict[str, Any], oom_kills: int) -> str:
    """One line: what ended the child."""
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        if exit_code == -signal.SIGKILL:
            return "killed by the kernel, out of memory" if oom_kills else f"killed by {name} from outside"
        return f"killed by {name}"
    if "user_error" in error:
        return error["user_error"]["what"]
    if error:
        name = "" if error["type"] in SENTENCES else f"{error['type']}: "
        return f"{name}{error['message']}".splitlines()[0]
    if exit_code == 0:
        return "ended before the run was done"
    return f"exit code {exit_code}"


LOST_A_PEER = 3  # of `blame_rank`: somebody else's end was the cause


def blame_rank(exit_code: int, error: dict[str, Any], kind: FailureClass) -> int:
    """Order of suspicion among children that died together: the first cause before those who only lost a peer."""
    if kind == "oom" or (exit_code < 0 and kind != "collective"):
        return 0
    if kind == "config":
        return 1
    if kind == "collective" or any(mark in f"{error.get('type')} {error.get('message')}" for mark in PEER_TEXTS):
        return LOST_A_PEER
    return 2


def count_oom_kills() -> int:
    """Processes of this control group that the kernel has killed for memory so far."""
    with contextlib.suppress(OSError, ValueError):
        for line in CGROUP_EVENTS.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    return 0
