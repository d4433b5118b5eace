"""Ranks of a process group as real processes: `run_script` in the test, `serve_rank` in the script that it starts.

The script is called as `python SCRIPT DIR RANK SIZE [ARGUMENTS]`; a rank that fails writes DIR/error_<rank>.txt.
"""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

TESTS = Path(__file__).parent


def run_script(script: str, directory: Path, size: int, *arguments: str, limit_s: float = 500) -> None:
    """Run all ranks to their end. Fails with the tracebacks of those that failed."""
    command = [sys.executable, script, str(directory)]
    children = [subprocess.Popen([*command, str(rank), str(size), *arguments], cwd=TESTS) for rank in range(size)]
    codes = [child.wait(timeout=limit_s) for child in children]
    errors = "\n".join(path.read_text() for path in sorted(directory.glob("error_*.txt")))
    assert codes == [0] * size, errors


def serve_rank(work: Callable[[Path, int, int], None], device: torch.device | None = None) -> None:
    """Join the group, call work(directory, rank, size), leave: the `main` of a script. `device`: for NCCL."""
    directory, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), size)
    dist.init_process_group("gloo" if device is None else "nccl", store=store, rank=rank, world_size=size)
    try:
        work(directory, rank, size)
        dist.barrier()
    except BaseException:
        (directory / f"error_{rank}.txt").write_text(traceback.format_exc())
        sys.exit(1)
    dist.destroy_process_group()
