"""What an engine died of. vLLM says only `Engine core initialization failed. See root cause above.`, or `EngineCore
encountered an issue.`: the cause is in what its processes have written to the log that they share with us.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections import deque

from prl.config.errors import UserError

ANSWERS_AFTER = 8  # no fewer than steps that vLLM has under way at a time: 2, with pipeline stages one for each
MAX_BYTES = 1 << 20  # of the log, from where all was well
MAX_LINES = 8  # of what an error says
LOGGED = r"^(\(\w+ pid=\d+\) ERROR [^\[]*\[[\w.]+:\d+\] )"  # (Worker pid=7) ERROR 11-22 21:46:23 [core.py:10]
RAISED = re.compile(
    LOGGED + r"(?:\w+\.)*(?!EngineDeadError)(\w*(?:Error|Exception)): (.+(?:\n\1.+)*)$",
    re.MULTILINE,
)
MEMORY = re.compile(
    "No available memory for the cache blocks|Free memory on device|cache is needed, which is larger than the available"
)
OTHER_WEIGHTS = "weights were not initialized from checkpoint"
REFUSALS = ("ValueError", "NotImplementedError")  # how vLLM refuses arguments, and too little memory for the cache


def log_end() -> int | None:
    """Bytes of the log so far; None where stderr is no file."""
    sys.stderr.flush()
    found = os.fstat(2)
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def root_cause(begin: int | None) -> tuple[str, str] | None:
    """Type and message of the first error that a process of the engine has logged after `begin`."""
    if begin is None:
        return None
    with open("/proc/self/fd/2", "rb") as file:
        file.seek(begin)
        return first_error(file.read(MAX_BYTES).decode(errors="replace"))


class Asked:
    """How far the log had come at each question whether the engine is well, from the first on.

    An answer does not say that all is well yet: while a step waits for its worker, which has failed and logged why, the
    engine may begin another, and answers between them.
    """

    def __init__(self) -> None:
        self.ends = deque([log_end()], maxlen=ANSWERS_AFTER + 1)

    def again(self) -> None:
        """The last question was answered."""
        self.ends.append(log_end())

    @property
    def in_health(self) -> int | None:
        """What the engine dies of is logged after this."""
        return self.ends[0]


def cause_of_death(error: Exception, begin: int | None) -> RuntimeError:
    """`error`, by which vLLM says that its engine is dead and its log says why, with what that says after `begin`."""
    kind, message = root_cause(begin) or ("", "")
    return RuntimeError(f"vLLM's engine died: {kind}: {message}" if kind else str(error))


def first_error(text: str) -> tuple[str, str] | None:
    found = RAISED.search(text)
    if found is None:
        return None
    lines = [line.removeprefix(found[1]).strip() for line in found[3].splitlines()]
    return found[2], " ".join(lines[:MAX_LINES])


def refused(reason: object) -> UserError:
    if MEMORY.search(str(reason)):
        return UserError(
            f"vLLM has too little memory: {reason}",
            where="inference.vllm.gpu_memory_utilization, inference.max_model_len",
            why="weights, the largest step and the KV cache of one request must fit into its part of the device, which "
            "others may share",
            fix="inference.vllm.gpu_memory_utilization=0.95, a smaller inference.max_model_len or "
            "inference.max_num_seqs, a larger inference.tp; or a device that nobody else uses",
        )
    if OTHER_WEIGHTS in str(reason):  # the checkpoint was held against its card before
        return UserError(
            f"this vLLM's model has weights that the checkpoint has not: {reason}",
            where="model.path, and the vLLM that is installed",
            why="it builds the family otherwise; layers that share a choice of keys (GLM-5.2), for instance, 0.23 does "
            "not know yet, and 0.32 does",
            fix="another version of vLLM, or inference=torch",
        )
    return UserError(
        f"vLLM refuses its arguments: {reason}",
        where="inference.vllm, and the keys of inference that become arguments of vLLM",
        why="`vllm serve --help=all` lists what it takes",
        fix="correct or remove the argument",
    )
