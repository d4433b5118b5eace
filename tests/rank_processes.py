"""Ranks of a process group as real processes: `run_script` in the test, `serve_rank` in the script that it starts.

The script is called as `python SCRIPT DIR RANK SIZE [ARGUMENTS]`; a rank that fails writes DIR/error_<rank>.txt. RANK
`all`: one process imports the script's modules and makes all ranks by fork, each with its own number in sys.argv.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

TESTS = Path(__file__).parent


def run_script(script: str, directory: Path, size: int, *arguments: str, limit_s: float = 500) -> None:
    """Run all ranks to their end. Fails with the tracebacks of those that failed; nothing outlives `limit_s`."""
    command = [sys.executable, script, str(directory), "all", str(size), *arguments]
    ranks = subprocess.Popen(command, cwd=TESTS, start_new_session=True)
    try:
        code = ranks.wait(timeout=limit_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
    errors = "\n".join(path.read_text() for path in sorted(directory.glob("error_*.txt")))
    assert code == 0, errors


def serve_rank(work: Callable[[Path, int, int], None], first: Callable[[], torch.device | None] = lambda: None) -> None:
    """Join the group, call work(directory, rank, size), leave: the `main` of a script.

    `first` is called before a rank joins, and may give a device, for NCCL.
    """
    directory, size = Path(sys.argv[1]), int(sys.argv[3])
    if sys.argv[2] == "all":
        fork_ranks(size)
    rank = int(sys.argv[2])
    torch.set_num_threads(1)
    device = first()
    store = dist.FileStore(str(directory / "store"), size)
    dist.init_process_group("gloo" if device is None else "nccl", store=store, rank=rank, world_size=size)
    try:
        work(directory, rank, size)
        dist.barrier()
    except BaseException:
        (directory / f"error_{rank}.txt").write_text(traceback.format_exc())
        sys.exit(1)
    dist.destroy_process_group()


def fork_ranks(size: int) -> None:
    """Fork `size` ranks and return in each of them. Their parent exits when all have ended: with 1 if one failed."""
    ranks = []
    for rank in range(size):
        if (pid := os.fork()) == 0:
            sys.argv[2] = str(rank)
            return
        ranks.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in ranks]
    sys.exit(1 if any(statuses) else 0)
