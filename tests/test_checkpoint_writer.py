"""The process that writes checkpoints beside training: what it writes, what ends it, and what it does not hear.

Also a script, `python test_checkpoint_writer.py DIR RANK SIZE [WORK]`, for what needs processes of its own.
"""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rank_processes import run_script, serve_rank
from role_context import context_of
from runtime_tree import LIMIT_S, wait_for
from tiny import moe_checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from trainer_ranks import Job, build_policy, job_mesh, train_step

from prl.config.errors import UserError
from prl.runtime.process.failures import classify, error_record, parse_error_record
from prl.runtime.process.guards import STOP_SIGNAL
from prl.trainer.checkpoint import TrainerCheckpointer
from prl.trainer.loops.saving import Saving
from prl.trainer.world import build_world
from prl.trainer.writer.staging import StagingMemory, address_of
from prl.trainer.writer.starting import forked

ADAMW = {"type": "adamw", "lr": 0.01}
DATA = "__0_0.distcp"  # what the first rank writes


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(moe_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture
def policy(world, model_path):
    policy = build_policy(Job(model_path, optim=ADAMW), world)
    train_step(policy, 1)
    return policy


def part(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step}.partial" / "trainer"


def saved(run_dir: Path, policy, step: int, asynchronous: bool) -> Path:
    checkpointer = TrainerCheckpointer(run_dir, asynchronous)
    checkpointer.save(step, policy.model, policy.optimizers)
    assert checkpointer.finish() == step
    return part(run_dir, step)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: is_stopped(pid))


def block(path: Path) -> None:
    """Whoever opens the file that the first rank writes waits there for ever."""
    path.mkdir(parents=True)
    os.mkfifo(path / DATA)


def is_blocked(pid: int) -> bool:
    return "wait_for_partner" in Path(f"/proc/{pid}/wchan").read_text()


# --- what is written


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["optim=muon"],
        ["memory_recipe.optim_cpu_offload=true"],
        ["optim=adamw", "memory_recipe.optim_cpu_offload=full", "model.dtype=bfloat16"],
        ["memory=lora"],
    ],
    ids=["adamw", "muon", "moments on the host", "masters on the host", "lora"],
)
def test_the_files_are_those_of_a_synchronous_save_byte_for_byte(world, model_path, tmp_path, overrides):
    optim = {"type": "muon", "lr": 0.01} if "optim=muon" in overrides else ADAMW
    policy = build_policy(Job(model_path, optim=optim, overrides=overrides), world)
    train_step(policy, 1)
    plain, beside = (saved(tmp_path / str(said), policy, 1, said) for said in (False, True))
    assert [path.name for path in sorted(beside.iterdir())] == [path.name for path in sorted(plain.iterdir())]
    assert (beside / DATA).read_bytes() == (plain / DATA).read_bytes()
    metadata, expected = (dcp.FileSystemReader(str(path)).read_metadata() for path in (beside, plain))
    assert list(metadata.state_dict_metadata) == list(expected.state_dict_metadata)
    assert metadata.storage_data == expected.storage_data
    assert metadata.planner_data == expected.planner_data


def test_memory_is_reused_and_holds_what_was_saved_until_it_is_written(policy, tmp_path):
    checkpointer = TrainerCheckpointer(tmp_path / "beside", asynchronous=True)
    memory, pid = checkpointer.writer.memory, checkpointer.writer.process.pid
    checkpointer.prepare(policy.model, policy.optimizers)
    checkpointer.writer.preparing.join()
    places = [place_of(memory)]
    for step in (1, 2):
        expected = (saved(tmp_path / "plain", policy, step, False) / DATA).read_bytes()
        stop(pid)
        checkpointer.save(step, policy.model, policy.optimizers)
        places.append(place_of(memory))
        for later in range(3):  # the state changes while nothing is written yet
            train_step(policy, 10 * step + later)
        assert checkpointer.finish(wait=False) is None
        with pytest.raises(AssertionError):
            checkpointer.save(step + 5, policy.model, policy.optimizers)
        os.kill(pid, signal.SIGCONT)
        assert checkpointer.finish() == step
        assert (part(tmp_path / "beside", step) / DATA).read_bytes() == expected
    assert places == [places[0]] * 3


def place_of(memory: StagingMemory) -> tuple[int, int, int]:
    return address_of(memory.memory), memory.size, os.fstat(memory.fd).st_size


def test_memory_is_there_after_the_first_step_that_changes_something(world, policy, tmp_path):
    saving = Saving(context_of(tmp_path / "run"), world, lambda step, in_haste: None, lambda step: 0.0)
    writer = saving.checkpointer.writer
    saving.after_step(1, policy, due=False, changed=False)
    assert writer.preparing is None
    saving.after_step(2, policy, due=False, changed=True)
    first = writer.preparing
    first.join()
    assert writer.memory.size > sum(param.nbytes for param in policy.model.parameters())
    saving.after_step(3, policy, due=False, changed=True)
    assert writer.preparing is first


def test_tensors_lie_where_they_were_and_memory_grows():
    memory = StagingMemory()
    tensors = {"a": torch.arange(7.0), "none": torch.empty(0, 3), "one": torch.tensor(5), "b": torch.ones(3, 2).T}
    slots = memory.place(tensors)
    memory.fill(slots, tensors)
    assert memory.place(tensors) == slots
    other = StagingMemory(os.dup(memory.fd))
    other.map(memory.size)
    for name, tensor in tensors.items():
        assert torch.equal(other.tensor(slots[name]), tensor), name
    more = {**tensors, "c": torch.full((5000,), 2.0)}
    slots, before = memory.place(more), memory.size
    assert before >= 20_000
    memory.fill(slots, more)
    other.map(memory.size)
    assert torch.equal(other.tensor(slots["c"]), more["c"])


def test_replicas_are_staged_once_and_nothing_is_missing(model_path, tmp_path):
    """Two replicas of two shards: each rank stages about half of its shard, and all of it is there."""
    run_script(__file__, tmp_path, 4, model_path)
    for kind in ("plain", "beside"):
        dcp_to_torch_save(part(tmp_path / kind, 1), tmp_path / f"{kind}.pt")
    plain, beside = (flat(torch.load(tmp_path / f"{kind}.pt", weights_only=False)) for kind in ("plain", "beside"))
    assert sorted(plain) == sorted(beside)
    for name, value in plain.items():
        same = torch.equal(value, beside[name]) if isinstance(value, torch.Tensor) else str(value) == str(beside[name])
        assert same, name
    sizes = [int((tmp_path / f"staged_{rank}").read_text()) for rank in range(4)]
    whole = sum(value.nbytes for value in plain.values() if isinstance(value, torch.Tensor))
    assert max(sizes) < 0.4 * whole  # a quarter, and what lies between these small tensors


def flat(state: dict, name: str = "") -> dict:
    found = {}
    for key, value in state.items():
        inner = dict(enumerate(value)) if isinstance(value, list) else value
        found.update(flat(inner, f"{name}{key}.") if isinstance(inner, dict) else {f"{name}{key}": value})
    return found


# --- what ends it, and what does not


def test_a_writer_that_dies_while_it_writes_is_an_error_at_finish(policy, tmp_path):
    block(part(tmp_path, 1))
    checkpointer = TrainerCheckpointer(tmp_path, asynchronous=True)
    checkpointer.save(1, policy.model, policy.optimizers)
    wait_for(lambda: is_blocked(checkpointer.writer.process.pid))
    checkpointer.writer.process.kill()
    with pytest.raises(
        RuntimeError, match=r"checkpoint of step 1 could not be written on rank 0: .*killed by SIGKILL"
    ) as caught:
        checkpointer.finish()
    assert classify("trainer", 1, parse_error_record(error_record(caught.value)), (), 0) == "node"
    checkpointer.save(2, policy.model, policy.optimizers)  # nor does it hang when it is dead already
    with pytest.raises(RuntimeError, match="step 2 could not be written"):
        checkpointer.finish()


def test_a_writer_that_dies_on_one_rank_is_an_error_on_all(model_path, tmp_path):
    run_script(__file__, tmp_path, 2, model_path, "die", limit_s=LIMIT_S)
    assert {path.name for path in tmp_path.glob("told_*")} == {"told_0", "told_1"}
    for path in tmp_path.glob("told_*"):
        assert re.search("on rank 1: .*killed by SIGKILL", path.read_text())


def test_nothing_is_left_when_the_trainer_is_killed_while_it_writes(model_path, tmp_path):
    block(part(tmp_path, 1))
    command = [sys.executable, __file__, str(tmp_path), "0", "1", model_path, "save"]
    trainer = subprocess.Popen(command, cwd=Path(__file__).parent)
    wait_for(lambda: (tmp_path / "pid").exists())
    pid = int((tmp_path / "pid").read_text())
    try:
        wait_for(lambda: is_blocked(pid))
        trainer.kill()
        trainer.wait()
        wait_for(lambda: is_gone(pid), timeout_s=5)
    finally:
        trainer.kill()
        if not is_gone(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("moment", ["starting", "saving"])
def test_signals_of_a_stop_are_the_trainers(policy, tmp_path, moment):
    checkpointer = TrainerCheckpointer(tmp_path, asynchronous=True)
    pid = checkpointer.writer.process.pid
    if moment == "saving":
        checkpointer.save(1, policy.model, policy.optimizers)
        checkpointer.finish()
        stop(pid)
    checkpointer.save(2, policy.model, policy.optimizers)
    for number in (signal.SIGTERM, signal.SIGINT, STOP_SIGNAL):
        os.kill(pid, number)
    os.kill(pid, signal.SIGCONT)
    assert checkpointer.finish() == 2


def test_it_ends_with_its_checkpointer(policy, tmp_path):
    checkpointer = TrainerCheckpointer(tmp_path, asynchronous=True)
    pid = checkpointer.writer.process.pid
    del checkpointer
    wait_for(lambda: is_gone(pid))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM])
def test_a_shortage_of_memory_says_what_to_do(policy, tmp_path, monkeypatch, code):
    def refuse(*given):
        raise OSError(code, os.strerror(code))

    checkpointer = TrainerCheckpointer(tmp_path, asynchronous=True)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(UserError, match=r"(?s)bytes of host memory for checkpoints.*ckpt.asynchronous=false"):
        checkpointer.save(1, policy.model, policy.optimizers)


# --- as a script


STARTED = [None]


def start_writer() -> None:
    """As trainers do on CPUs, before they have threads; the tests above start theirs anew."""
    if sys.platform == "linux":
        STARTED[:] = [forked()]


def work(directory: Path, rank: int, size: int) -> None:
    model_path, *rest = sys.argv[4:]
    job = Job(model_path, optim=ADAMW, dp_replicate=2 if size == 4 else 1, dp_shard=min(size, 2))
    policy = build_policy(job, build_world(job_mesh(job), torch.device("cpu")))
    train_step(policy, 1)
    if not rest:
        saved(directory / "plain", policy, 1, asynchronous=False)
    checkpointer = TrainerCheckpointer(
        directory if rest else directory / "beside", asynchronous=True, started=STARTED[0]
    )
    writer = checkpointer.writer
    assert writer is not None
    if rest == ["die"] and rank == 1:
        stop(writer.process.pid)
    checkpointer.save(1, policy.model, policy.optimizers)
    if rest == ["save"]:
        (directory / "pid.new").write_text(str(writer.process.pid))
        (directory / "pid.new").rename(directory / "pid")
        time.sleep(LIMIT_S)
    elif rest == ["die"]:
        if rank == 1:
            writer.process.kill()
        with pytest.raises(RuntimeError) as caught:
            checkpointer.finish()
        (directory / f"told_{rank}").write_text(str(caught.value))
    else:
        checkpointer.finish()
        (directory / f"staged_{rank}").write_text(str(writer.memory.size))


if __name__ == "__main__":
    serve_rank(work, start_writer)
