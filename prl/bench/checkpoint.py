"""`python -m prl.bench.checkpoint [DIRECTORY] [--help]`: what saving costs training, and how fast it is.

Ranks are processes over gloo, each with its shard of a model in float32 and AdamW's moments (12 bytes a parameter). A
step is many small operations, so that whoever holds Python's lock beside it shows. What the thread that trains waits
for a core is left out of its times, not of the seconds until all is saved.

sync          torch.distributed.checkpoint.save, while the step waits
thread        its async_save in a thread, with a fresh copy each time
torch         its async_save in a process, with its stager over shared memory
prl           what trainers do (prl.trainer.checkpoint)
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from prl.bench.arguments import directory, parser_of, refuse_beyond_memory, user_errors_told
from prl.bench.processes import Processes
from prl.config.arguments import a_count, an_amount

GIB = 1 << 30
VARIANTS = ("sync", "thread", "torch", "prl")
BYTES = 12  # of a parameter: its float32 weight and two moments
LAYERS, MATRICES = 24, 7
SMALL_OPS = 1500  # in a step
QUIET_STEPS = 100
WATCH_S = 0.2
SHIFT = 1e-3  # of the weights between two saves


def sharded_model(gib: float, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Of so many GiB with its moments, over all ranks; stepped once."""
    from torch.distributed.fsdp import fully_shard

    side = int((gib * GIB / BYTES / (LAYERS * MATRICES)) ** 0.5)
    model = nn.Sequential(
        *(nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(MATRICES))) for _ in range(LAYERS))
    ).to(device)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class Library:
    """torch's ways: `save` returns when training may go on, `finish` when all is written."""

    def __init__(self, variant: str, run_dir: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self.variant, self.run_dir, self.model, self.optimizer = variant, run_dir, model, optimizer
        self.group = dist.new_group(backend="gloo")
        cuda = torch.cuda.is_available()
        self.stager = DefaultStager(StagingOptions(cuda, True, False, cuda)) if variant == "torch" else None
        self.future: Future[Any] = Future()

    def save(self, step: int) -> None:
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        state, target = {"model": model_state, "optimizer": optimizer_state}, str(self.run_dir / str(step))
        if self.variant == "sync":
            self.future = Future()
            self.future.set_result(dcp.save(state, checkpoint_id=target))
            return
        kind = AsyncCheckpointerType.PROCESS if self.stager else AsyncCheckpointerType.THREAD
        future = dcp.async_save(
            state,
            checkpoint_id=target,
            process_group=self.group,
            async_checkpointer_type=kind,
            async_stager=self.stager,
        )
        assert isinstance(future, Future)
        self.future = future

    def done(self) -> bool:
        return self.future.done()

    def finish(self) -> None:
        self.future.result()


class Ours:
    def __init__(self, run_dir: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from prl.trainer.checkpoint import TrainerCheckpointer

        self.checkpointer = TrainerCheckpointer(run_dir, asynchronous=True)
        self.model, self.optimizer = model, optimizer
        self.checkpointer.prepare(model, [optimizer])

    def save(self, step: int) -> None:
        self.checkpointer.save(step, self.model, [self.optimizer])

    def done(self) -> bool:
        assert self.checkpointer.pending is not None
        return self.checkpointer.pending[1].done()

    def finish(self) -> None:
        self.checkpointer.finish()


def step_of(device: torch.device) -> Callable[[], None]:
    """A step whose time is the host's: many operations with little in each."""
    x, w = torch.randn(16, 16, device=device), torch.randn(16, 16, device=device) / 4

    def step() -> None:
        y = x
        for _ in range(SMALL_OPS // 3):
            y = torch.relu(y @ w) + x
        if device.type == "cuda":
            torch.cuda.synchronize()

    return step


def timed(work: Callable[[], object]) -> float:
    """Seconds without those in which this thread could have run and had no core: others compute here, too."""
    began = _clock()
    work()
    return _clock() - began


def _clock() -> float:
    waited_ns = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return time.perf_counter() - waited_ns * 1e-9


def train(rank: int, variant: str, said: argparse.Namespace, directory: Path, pipe: Connection) -> None:
    """One rank. Through the pipe: when the state is there, when it may be saved, and one dict for each save."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), said.ranks)
    device = torch.device("cuda", rank) if said.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=said.ranks)
    model, optimizer = sharded_model(said.gib, device)
    pipe.send("made")
    pipe.recv()
    saver = Ours(directory, model, optimizer) if variant == "prl" else Library(variant, directory, model, optimizer)
    if variant == "torch":  # its process tells of all that it does, and of its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    step = step_of(device)
    for _ in range(10):
        step()
    time.sleep(said.settle_s)  # a process that was started with the trainer is up
    pipe.send("ready")
    pipe.recv()
    for number in range(1, said.saves + 1):
        quiet = [timed(step) for _ in range(QUIET_STEPS)]
        dist.barrier()
        began = time.perf_counter()
        blocked_s = timed(partial(saver.save, number))
        beside = []
        while not saver.done():
            beside.append(timed(step))
        saver.finish()
        saved_s = time.perf_counter() - began
        with torch.no_grad():
            for param in model.parameters():
                param.add_(SHIFT)
        dist.barrier()
        pipe.send({"blocked_s": blocked_s, "saved_s": saved_s, "quiet": quiet, "beside": beside})
        pipe.recv()
    pipe.send(None)


def memory_of(pid: int) -> int:
    """Bytes of a process and its descendants; what several share is counted once."""
    own = 0
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        own = sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) << 10
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return own
    return own + sum(memory_of(int(child)) for child in children)


def measure(variant: str, said: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """Of each save, of each rank what `train` sends; "memory": most bytes beyond those of the model alone.

    Raises UserError when a rank has died.
    """
    results, ranks = [], range(said.ranks)
    with tempfile.TemporaryDirectory(dir=said.directory) as made, Processes("spawn", daemon=False) as processes:
        directory = Path(made)
        for rank in ranks:
            processes.start(f"rank {rank}", train, rank, variant, said, directory)
        for rank in ranks:
            processes.hear(rank)
        pids = [int(process.pid or 0) for process in processes.started]
        before = sum(map(memory_of, pids))
        processes.tell(ranks, "go on")
        for rank in ranks:
            processes.hear(rank)
        for _ in range(said.saves):
            processes.tell(ranks, "go on")
            most = 0
            while len(wait(processes.pipes, WATCH_S)) < said.ranks:
                processes.check()
                most = max(most, sum(map(memory_of, pids)) - before)
            results.append([processes.hear(rank) | {"memory": most} for rank in ranks])
            for path in directory.glob("[1-9]*"):
                shutil.rmtree(path)
            shutil.rmtree(directory / "checkpoints", ignore_errors=True)
        processes.tell(ranks, "end")
        for rank in ranks:
            processes.hear(rank)
    return results


def row_of(results: list[dict[str, Any]], gib: float) -> list[str]:
    """Of one save; of ranks the slowest."""
    blocked_s, saved_s = (max(rank[key] for rank in results) for key in ("blocked_s", "saved_s"))
    quiet, beside = ([t for rank in results for t in rank[key]] for key in ("quiet", "beside"))
    quiet_s, beside_s = statistics.median(quiet), statistics.median(beside or [0.0])
    slow_s = sorted(beside or [0.0])[int(0.95 * len(beside))]
    lost_s = max(blocked_s + sum(max(0.0, t - quiet_s) for t in rank["beside"]) for rank in results)
    return [
        f"{blocked_s * 1e3:.0f}",
        f"{gib / blocked_s:.2f}",
        f"{saved_s:.1f}",
        f"{gib / saved_s:.2f}",
        f"{quiet_s * 1e3:.1f}",
        f"{beside_s * 1e3:.1f}" if beside_s else "-",
        f"{slow_s * 1e3:.1f}" if beside_s else "-",
        f"{lost_s:.2f}",
        f"{results[0]['memory'] / GIB:.2f}",
    ]


HEAD = ("save", "blocked ms", "GiB/s", "saved s", "GiB/s", "step ms", "beside ms", "95 % ms", "lost s", "memory GiB")


def main() -> None:
    parser = parser_of("checkpoint", __doc__)
    parser.add_argument("directory", nargs="?", type=directory, help="where to write; default: the temporary directory")
    parser.add_argument("--ranks", type=a_count, default=2, help="default: 2")
    parser.add_argument("--gib", type=an_amount, default=2.0, help="weights and moments of all ranks; default: 2")
    parser.add_argument("--saves", type=a_count, default=2, help="one after another; default: 2")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="one GPU a rank; default: cpu")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="default: all")
    parser.add_argument(
        "--settle-s",
        type=an_amount,
        default=4.0,
        help="before the first save, while what starts with a trainer starts; default: 4",
    )
    said = parser.parse_args()
    if said.device == "cuda" and said.ranks > torch.cuda.device_count():
        parser.error(f"--device cuda --ranks {said.ranks}: {torch.cuda.device_count()} GPUs are seen here")
    if said.device == "cpu":
        refuse_beyond_memory(parser, f"--gib {said.gib:g}", said.gib)
    print(f"{said.ranks} ranks, {said.gib:g} GiB, of which each has {said.gib / said.ranks:.2f}")
    print("".join(f"{title:>12}" for title in HEAD))
    for variant in said.variants:
        with user_errors_told():
            measured = measure(variant, said)
        for number, results in enumerate(measured, 1):
            row = [f"{variant} {number}", *row_of(results, said.gib)]
            print("".join(f"{figure:>12}" for figure in row), flush=True)


if __name__ == "__main__":
    main()
