"""The process tree with real, tiny children: completion, signals, deaths, hangs."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
from runtime_tree import Root, Start, mount_small_disk, read_bytes, start, wait_for

from prl.config import compose
from prl.metrics.reader import read_rows
from prl.planning.planner import make_plan
from prl.runtime.directory.checkpoints import steps
from prl.runtime.directory.rundir import is_locked
from prl.runtime.process.environment import ALLOCATORS, WAIT_VARIABLES, child_environment

SLOW_STEPS = {"orchestrator": {"step_s": 0.1}, "trainer/0": {"step_s": 0.1}}
STAYING = {name: {"step_s": 0.1, "stay_at": 5} for name in ("orchestrator", "trainer/0")}  # it is hit before its end
WAITS = {"orchestrator": {"step_s": 5}, "trainer/0": {"step_s": 5}}
MANY = "max_steps=1000"

__all__ = ["start"]  # the fixture


def logged_steps(root: Root) -> list[int]:
    return [row["step"] for row in read_rows(root.run_dir, "orchestrator")]


# --- completion -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deployment", ["colocated", "disaggregated"])
def test_a_run_completes(start: Start, deployment: str) -> None:
    root = start(f"deployment={deployment}", script={"trainer/0": {"follows": True}})
    code, output = root.wait()
    assert code == 0, output
    assert root.status()["state"] == "done"
    assert {role["exit"] for role in root.status()["roles"].values()} == {0}
    assert logged_steps(root) == [1, 2, 3, 4, 5, 6]
    assert steps(root.run_dir) == [4, 6]
    assert "[rl] step 6/6  reward 0.600" in output
    assert (root.run_dir / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert root.alive() == []


def test_an_sft_job_completes_with_its_trainers(start: Start) -> None:
    root = start(config="sft")
    code, output = root.wait()
    assert code == 0, output
    assert list(root.status()["roles"]) == ["trainer/0"]
    assert (root.run_dir / "loss.png").exists()


@pytest.mark.slow
def test_a_run_that_is_done_is_not_run_again(start: Start) -> None:
    start().wait()
    code, output = start().wait()
    assert code == 0
    assert "done already" in output


def test_an_inference_job_runs_until_a_signal(start: Start) -> None:
    root = start(config="inference")
    wait_for(lambda: root.status().get("state") == "running")
    root.process.send_signal(signal.SIGTERM)
    code, output = root.wait()
    assert code == 143
    assert root.status()["state"] == "stopped"
    assert "checkpoint" not in output


def test_children_get_threads_and_marker_but_no_token(start: Start) -> None:
    root = start("debug.num_threads=3", script={"trainer/0": {"print_environment": True}})
    assert root.wait()[0] == 0
    log = (root.run_dir / "logs" / "trainer.0.0.log").read_text()
    environment = json.loads(next(line for line in log.splitlines() if line.startswith("ENV"))[4:])
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE", "spinning threads take the cores from others on this machine"
    assert environment["PRL_RUN_MARKER"]
    assert not any("token" in name.lower() and name.startswith("PRL") for name in environment)


@pytest.mark.parametrize("name", WAIT_VARIABLES)
def test_how_threads_wait_is_the_users_to_say(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plan = make_plan(compose([]))
    assert child_environment(plan, plan.roles[0], "marker")["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv(name, "1")
    assert "OMP_WAIT_POLICY" not in child_environment(plan, plan.roles[0], "marker")


@pytest.mark.parametrize("device", ["auto", "cpu"])
@pytest.mark.parametrize("users", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_trainers_allocator_is_set_up_unless_the_user_did(monkeypatch, users: str | None, device: str) -> None:
    for name in ALLOCATORS:
        monkeypatch.delenv(name, raising=False)
    if users is not None:
        monkeypatch.setenv(users, "expandable_segments:False")
    plan = make_plan(compose([f"deployment.device={device}"]))
    ours = [child_environment(plan, role, "marker").get("PYTORCH_ALLOC_CONF") for role in plan.roles_of("trainer")]
    assert ours == ["expandable_segments:True" if users is None and device == "auto" else None]
    others = [role for role in plan.roles if role.role != "trainer"]
    assert not any("PYTORCH_ALLOC_CONF" in child_environment(plan, role, "marker") for role in others)


# --- two at once ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_runs_in_the_same_second_never_meet(start: Start, tmp_path: Path) -> None:
    roots = [start("output_dir=null", script=SLOW_STEPS) for _ in range(2)]
    codes = [root.wait()[0] for root in roots]
    assert codes == [0, 0]
    found = sorted((tmp_path / "outputs").iterdir())
    assert len(found) == 2
    assert [len(read_rows(path, "orchestrator")) for path in found] == [6, 6]


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_stops_in_order(start: Start, number: signal.Signals, code: int) -> None:
    root = start(MANY, script=SLOW_STEPS)
    root.await_step(3)
    root.await_running()
    root.process.send_signal(number)
    found, output = root.wait()
    assert found == code, output
    assert root.status()["state"] == "stopped"
    last = logged_steps(root)[-1]
    assert steps(root.run_dir)[-1] == last
    assert {role["exit"] for role in root.status()["roles"].values()} == {0}, output
    assert root.alive() == []


@pytest.mark.slow
def test_a_stopped_run_resumes_where_it_stopped(start: Start) -> None:
    root = start("max_steps=8", script=STAYING)
    root.await_step(3)
    root.await_running()
    root.process.send_signal(signal.SIGTERM)
    assert root.wait()[0] == 143
    (root.run_dir / "stop").unlink()
    again = start("max_steps=8")
    code, output = again.wait()
    assert code == 0, output
    assert "resuming from the checkpoint of step" in output
    assert logged_steps(again) == list(range(1, 9))
    assert again.status()["attempt"] == 2


def test_sft_trainers_are_told_themselves(start: Start) -> None:
    root = start(MANY, config="sft", script={"trainer/0": {"step_s": 0.1}})
    root.await_step(2)
    root.process.send_signal(signal.SIGTERM)
    assert root.wait()[0] == 143
    assert steps(root.run_dir)


def test_a_second_signal_ends_at_once(start: Start) -> None:
    root = start(MANY, script=SLOW_STEPS | {"orchestrator": {"deaf": True}})
    wait_for(lambda: root.status().get("state") == "running")
    root.process.send_signal(signal.SIGINT)
    wait_for(lambda: root.status()["state"] == "stopping")
    root.process.send_signal(signal.SIGINT)
    started_s = time.monotonic()
    assert root.wait()[0] == 130
    assert time.monotonic() - started_s < 45  # and not deployment.stop_timeout_s, a minute
    assert root.alive() == []


@pytest.mark.slow
def test_who_does_not_stop_in_time_is_named_and_killed(start: Start) -> None:
    root = start(MANY, "deployment.stop_timeout_s=0.5", script=SLOW_STEPS | {"orchestrator": {"deaf": True}})
    wait_for(lambda: root.status().get("state") == "running")
    root.process.send_signal(signal.SIGTERM)
    code, output = root.wait()
    assert code == 143
    assert "orchestrator (rank 0, node 0)" in output
    assert "did not stop in time" in output
    assert root.alive() == []


# --- deaths -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sigkill_of_the_root_leaves_nobody(start: Start) -> None:
    script = SLOW_STEPS | {
        "inference/0": {"grandchild": True},
        "trainer/0": {"step_s": 0.1, "unmarked_grandchild": True},
    }
    root = start(MANY, script=script)
    root.await_step(2)
    wait_for(lambda: len(root.alive()) == 8)  # root, reaper, four roles, two grandchildren in sessions of their own
    root.await_surveys()  # that is how the reaper knows the unmarked one
    root.process.kill()
    root.process.wait()
    root.await_gone()
    assert root.status()["state"] == "failed"
    assert root.status()["failure"]["role"] == "root"


def test_a_killed_reaper_is_replaced(start: Start) -> None:
    root = start(MANY, script=SLOW_STEPS | {"inference/0": {"grandchild": True}})
    root.await_step(1)
    [reaper] = root.reapers()
    os.kill(reaper, signal.SIGKILL)
    wait_for(lambda: root.reapers() not in ([], [reaper]))
    root.process.kill()
    root.process.wait()
    root.await_gone()


def test_shared_memory_of_a_killed_run_is_unlinked_and_no_other(start: Start) -> None:
    others = SharedMemory(create=True, size=4096)
    try:
        root = start(MANY, script=SLOW_STEPS | {"inference/0": {"segment_beside": others.name}})
        wait_for((root.run_dir / "segment").exists)
        root.await_surveys()
        made = [Path("/dev/shm") / name for name in (root.run_dir / "segment").read_text().split()]
        assert [path.exists() for path in made] == [True, True]
        root.process.kill()
        root.process.wait()
        root.await_gone()
        assert [path.exists() for path in made] == [False, False]
        assert (Path("/dev/shm") / others.name).exists()
    finally:
        others.close()
        others.unlink()


@pytest.mark.slow
def test_after_sigkill_of_the_root_the_next_start_resumes(start: Start) -> None:
    root = start("max_steps=9", script=STAYING)
    root.await_step(4)
    root.process.kill()
    root.process.wait()
    again = start("max_steps=9")  # at once: it waits for the reaper of the first to be done
    code, output = again.wait()
    assert code == 0, output
    assert "resuming from the checkpoint of step" in output
    assert logged_steps(again) == list(range(1, 10))


@pytest.mark.parametrize("name", ["orchestrator", "trainer/0"])
def test_sigkill_of_a_child_ends_the_run(start: Start, name: str) -> None:
    root = start(MANY, script=SLOW_STEPS)
    root.await_step(2)
    os.kill(root.pid_of(name), signal.SIGKILL)
    code, output = root.wait()
    assert code == 1
    assert f"{name} (rank 0, node 0) failed, class node: killed by SIGKILL from outside" in output
    assert f"{name} is ready" in output  # of the log
    assert root.status()["state"] == "failed"
    assert root.status()["failure"]["role"] == name
    assert root.status()["failure"]["log_tail"]
    assert root.alive() == []


def test_sigkill_of_a_trainer_rank_names_that_rank(start: Start) -> None:
    script = {name: {"step_s": 0.1} for name in ("orchestrator", "trainer/0", "trainer/1")}
    root = start(MANY, "deployment.num_train_gpus=2", "parallelism.dp_shard=2", script=script)
    root.await_step(2)
    os.kill(root.pid_of("trainer/1"), signal.SIGKILL)
    assert root.wait()[0] == 1
    assert (root.status()["failure"]["role"], root.status()["failure"]["rank"]) == ("trainer/1", 1)


def test_an_exception_is_shown_with_its_log(start: Start) -> None:
    root = start(script={"trainer/0": {"raise": "the gradient fell off", "at": 2}})
    code, output = root.wait()
    assert code == 1
    assert "trainer/0 (rank 0, node 0) failed, class code: RuntimeError: the gradient fell off" in output
    assert "Traceback" in output


def test_who_fails_a_second_after_the_trainer_that_it_told_is_blamed(start: Start) -> None:
    """An orchestrator that answers 500, and tidies up before it ends."""
    told = "/train/weights: the orchestrator answered 500: PassingError: the disk is full"
    root = start(
        script={
            "trainer/0": {"raise": told, "at": 2, "step_s": 0.1},
            "orchestrator": {"raise": "the disk is full", "at": 3, "step_s": 0.5},
        }
    )
    code, output = root.wait()
    assert code == 1
    assert "orchestrator (rank 0, node 0) failed, class code: RuntimeError: the disk is full" in output


def test_running_out_of_memory_is_told_apart(start: Start) -> None:
    root = start(script={"trainer/0": {"memory_error": True, "at": 2}})
    assert root.wait()[0] == 1
    assert root.status()["failure"]["class"] == "oom"


def test_a_user_error_at_the_start_leaves_no_directory(start: Start) -> None:
    root = start(script=WAITS | {"trainer/0": {"user_error": "the data set is not there"}})
    code, output = root.wait()
    assert code == 2
    assert "the data set is not there\n  where: somewhere\n  do:    something" in output
    assert "Traceback" not in output
    assert not root.run_dir.exists()


def test_a_user_error_in_an_existing_empty_directory_leaves_it_empty(start: Start, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    root = start(script=WAITS | {"env/reverse_text": {"user_error": "no such data"}})
    assert root.wait()[0] == 2
    assert list(root.run_dir.iterdir()) == []


def test_a_foreign_directory_is_refused_and_untouched(start: Start, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    root = start()
    code, output = root.wait()
    assert code == 2
    assert "is not empty and holds no run" in output
    assert [path.name for path in root.run_dir.iterdir()] == ["thesis.tex"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    yield from mount_small_disk(tmp_path)


def test_a_disk_that_fills_up_costs_only_the_newest_checkpoint(start: Start, small_disk: Path) -> None:
    full = {"orchestrator": {"step_s": 0.1, "fill_disk": True, "at": 4, "once_running": True}}
    # else those that start, or the trainer's metrics, may find the disk full first
    root = start(MANY, script=full | {"trainer/0": {"step_s": 60}})
    code, output = root.wait()
    assert code == 2, output
    assert (
        "The disk is full: the checkpoint of step 4 could not be written. The checkpoint of step 2 survives" in output
    )
    assert [path.name for path in (root.run_dir / "checkpoints").iterdir()] == ["step_2"]
    assert root.alive() == []


def test_a_server_that_dies_in_an_orderly_stop_costs_no_checkpoint(start: Start) -> None:
    slow = {"orchestrator": {"step_s": 0.1, "save_s": 1.5}, "trainer/0": {"step_s": 0.1}}
    root = start(MANY, "ckpt.interval=0", script=slow | {"inference/0": {"leave_at_stop": True}})
    root.await_step(1)
    root.await_running()
    root.process.send_signal(signal.SIGTERM)
    code, output = root.wait()
    assert code == 143, output
    status = root.status()
    assert (status["state"], status["failure"]) == ("stopped", None)
    assert status["roles"]["inference/0"]["exit"] == 1
    assert status["saved"]


@pytest.mark.slow
def test_a_corrupt_checkpoint_is_named_and_the_one_before_is_taken(start: Start) -> None:
    root = start(script={"orchestrator": {"raise": "enough", "at": 6}})  # who saves, before it saves
    root.wait()
    assert steps(root.run_dir) == [2, 4]
    before, newest = (root.run_dir / "checkpoints" / f"step_{step}" for step in steps(root.run_dir))
    (newest / "trainer" / "state").write_text("state of step X")
    code, output = start().wait()
    assert code == 0, output
    assert f"is damaged and skipped: {newest / 'trainer/state'}" in output
    assert f"resuming from the checkpoint of step {before.name.removeprefix('step_')}" in output


@pytest.mark.slow
@pytest.mark.parametrize("name", ["env/reverse_text", "inference/0"])
def test_a_server_is_restarted_on_the_same_port(start: Start, name: str) -> None:
    root = start(MANY, script=SLOW_STEPS | {name: {"kill": "SIGKILL", "tell_port": True}})
    (first, second) = root.await_listening(LOGS[name], 2)
    root.await_step(max(root.rows_written().values()) + 2)  # the run goes on
    root.process.send_signal(signal.SIGTERM)
    code, output = root.wait()
    assert code == 143, output
    assert f"{name} ended (killed by SIGKILL from outside); restart 1 of 3" in output
    assert root.status()["roles"][name]["restarts"] == 1
    assert first[0] == second[0]
    assert (first[1], second[1]) == ("0", "1")


LOGS = {"env/reverse_text": "env.reverse_text.0.0.log", "inference/0": "inference.0.0.log"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("env/reverse_text", "env"), ("inference/0", "code")])
def test_a_server_that_keeps_dying_ends_the_run(start: Start, name: str, kind: str) -> None:
    root = start(MANY, script=SLOW_STEPS | {name: {"raise": "broken", "always": True}})
    code, output = root.wait()
    assert code == 1
    assert "restart 3 of 3" in output
    assert f"class {kind}: RuntimeError: broken" in output


@pytest.mark.slow
def test_an_engine_without_memory_is_restarted_once(start: Start) -> None:
    code, output = start(MANY, script=SLOW_STEPS | {"inference/0": {"memory_error": True, "always": True}}).wait()
    assert code == 1
    assert "restart 1 of 3" in output
    assert "restart 2" not in output
    assert "class oom" in output


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("deployment=colocated", "it takes turns with the trainer"),
        ("algo.max_off_policy_steps=0", "in a synchronous run"),
    ],
)
def test_an_engine_that_cannot_come_back_ends_the_run(start: Start, override: str, why: str) -> None:
    code, output = start(MANY, override, script=SLOW_STEPS | {"inference/0": {"kill": "SIGKILL"}}).wait()
    assert code == 1
    assert f"class node: killed by SIGKILL from outside; no restart: {why}" in output


@pytest.mark.slow
def test_a_stop_while_an_engine_comes_back_saves_a_checkpoint(start: Start) -> None:
    root = start(MANY, script=SLOW_STEPS | {"inference/0": {"kill": "SIGKILL", "stuck_when_restarted": True}})
    root.await_step(1)
    wait_for(lambda: root.status()["roles"].get("inference/0", {}).get("restarts") == 1)
    os.kill(root.process.pid, signal.SIGINT)
    code, output = root.wait()
    assert code == 130, output
    assert steps(root.run_dir)[-1] == logged_steps(root)[-1]


# --- hangs ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_hung_child_is_found_and_its_stack_shown(start: Start) -> None:
    root = start(MANY, "deployment.hang_timeout_s=5", script=SLOW_STEPS | {"trainer/0": {"hang": True, "at": 2}})
    code, output = root.wait()
    assert code == 1
    assert root.status()["failure"]["class"] == "hang"
    assert root.status()["failure"]["role"] == "trainer/0"
    assert "no sign of life" in output
    assert "in hang_here" in output
    assert root.alive() == []


@pytest.mark.slow
def test_a_child_that_never_comes_up_is_found(start: Start) -> None:
    root = start(MANY, "deployment.start_timeout_s=12", script={"inference/0": {"stuck_at_start": True}})
    code, output = root.wait()
    assert code == 1
    assert "inference/0 (rank 0, node 0) failed, class hang: not ready" in output
    assert "in play" in output


# --- people -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_progress_is_live_on_a_terminal(start: Start, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    root = start(script=SLOW_STEPS | {"trainer/0": SLOW_STEPS["trainer/0"] | {"follows": True}}, stdout=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while data := os.read(ours, 65536):
            shown += data
    os.close(ours)
    assert root.process.wait() == 0
    assert shown.count(b"\x1b[2K") > 2  # lines drawn over
    assert "6/6" in shown.decode()
    assert "reward 0.600" in re.sub(r"\x1b\[[0-9;]*m", "", shown.decode())


@pytest.mark.slow
def test_status_shows_runs_and_their_failures(start: Start, tmp_path: Path) -> None:
    good, bad = start(name="good"), start(name="bad", script={"trainer/0": {"raise": "oh no", "at": 2}})
    good.wait(), bad.wait()
    table = subprocess.run(
        [sys.executable, "-m", "prl.status", str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout
    assert any(line.split()[:3] == ["good", "done", "6/6"] for line in table.splitlines())
    assert any("bad" in line and "code: trainer/0: RuntimeError: oh no" in line for line in table.splitlines())
    assert not is_locked(good.run_dir)
    assert read_bytes(good.run_dir / "overrides.txt") == b""
