"""Runs over several nodes, all of them on this machine: agents, what the root learns of them, what ends with whom."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from runtime_tree import TESTS, Root, Start, make_config, start, wait_for

from prl.metrics.reader import read_rows
from prl.planning.planner import make_plan
from prl.runtime.directory.checkpoints import steps
from prl.runtime.directory.rundir import claim
from prl.runtime.nodes.door import knock
from prl.runtime.nodes.job_nodes import KEY, Meeting, announce, connect, job_key, node_of_this_process, read_meeting
from prl.runtime.nodes.remote import devices_of
from prl.runtime.nodes.wire import SILENCE_LIMIT_S, Wire

__all__ = ["start"]  # the fixture

TWO_NODES = ("deployment=multi_node", "deployment.gpus_per_node=2", "deployment.device=cpu")
SLOW_STEPS = {name: {"step_s": 0.1} for name in ("orchestrator", "trainer/0", "trainer/1")}
MANY = "max_steps=1000"


def agent_of(root: Root) -> int:
    """Process id of the agent of node 1."""
    for pid in root.alive():
        if b"--node=1" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError("there is no agent")


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# --- a run ------------------------------------------------------------------------------------------------------------


def test_roles_live_under_the_agent_of_their_node(start: Start) -> None:
    root = start(*TWO_NODES, MANY, script=SLOW_STEPS)
    root.await_step(2)
    agent = agent_of(root)
    wait_for(lambda: root.pid_of("trainer/1") > 0)
    assert [parent_of(root.pid_of(f"trainer/{rank}")) for rank in (0, 1)] == [agent, agent]
    assert parent_of(root.pid_of("inference/1")) == parent_of(root.pid_of("orchestrator")) == root.process.pid
    assert root.status()["roles"]["trainer/1"]["node"] == socket.gethostname()


def test_a_run_on_two_nodes_completes(start: Start) -> None:
    root = start(*TWO_NODES)
    code, output = root.wait()
    assert code == 0, output
    assert root.status()["state"] == "done"
    assert {role["exit"] for role in root.status()["roles"].values()} == {0}
    assert [row["step"] for row in read_rows(root.run_dir, "orchestrator")] == [1, 2, 3, 4, 5, 6]
    assert root.alive() == []
    assert not (root.run_dir / "nodes.json").exists(), "it held a token"


@pytest.mark.slow
def test_an_engine_of_another_node_is_restarted_there(start: Start) -> None:
    script = SLOW_STEPS | {"inference/2": {"kill": "SIGKILL", "tell_port": True}}
    root = start(*TWO_NODES, "deployment.num_infer_nodes=2", MANY, script=script)
    (first, second) = root.await_listening("inference.1.2.log", 2)
    root.await_step(max(root.rows_written().values()) + 2)  # the run goes on
    root.process.send_signal(signal.SIGTERM)
    code, output = root.wait()
    assert code == 143, output
    assert "inference/2 ended (killed by SIGKILL from outside); restart 1 of 3" in output
    assert first[0] == second[0]
    assert (first[1], second[1]) == ("0", "1")


def test_logs_are_named_by_role_node_and_rank(start: Start) -> None:
    root = start(*TWO_NODES)
    root.wait()
    logs = root.run_dir / "logs"
    assert {path.name for path in logs.iterdir() if not path.is_symlink()} == {
        "agent.1.log",
        "env.reverse_text.0.0.log",
        "inference.0.0.log",
        "inference.0.1.log",
        "orchestrator.0.0.log",
        "trainer.1.0.log",
        "trainer.1.1.log",
    }
    latest = {path.name: os.readlink(path) for path in logs.iterdir() if path.is_symlink()}
    assert latest["latest.trainer.log"] == "trainer.1.0.log"
    assert latest["latest.inference.log"] == "inference.0.0.log"


def test_the_console_shows_the_local_ranks_asked_for(start: Start) -> None:
    shout = {name: {"print_environment": True} for name in ("trainer/0", "trainer/1")}
    _, output = start(*TWO_NODES, "logging.local_ranks=[1]", script=shout).wait()
    assert "[trainer/1] ENV" in output
    assert "[inference/1] ---" in output
    assert "[trainer/0]" not in output
    _, output = start(*TWO_NODES, name="silent", script=shout).wait()
    assert "[trainer/" not in output


@pytest.mark.slow
def test_the_warm_start_runs_on_the_same_nodes(start: Start) -> None:
    overrides = ("warm_start=reverse_text", "warm_start.max_steps=3", "deployment.num_train_nodes=2")
    root = start(*TWO_NODES, *overrides)
    code, output = root.wait()
    assert code == 0, output
    assert "[warm start] step 3/3" in output
    warm = {path.name for path in (root.run_dir / "warm_start" / "logs").iterdir()}
    assert {"trainer.0.0.log", "trainer.0.1.log", "trainer.1.2.log", "trainer.1.3.log"} <= warm
    main = {path.name for path in (root.run_dir / "logs").iterdir()}
    assert {"trainer.1.0.log", "trainer.2.2.log"} <= main


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_lost_agent_is_a_failure_of_its_node(start: Start) -> None:
    root = start(*TWO_NODES, MANY, script=SLOW_STEPS)
    root.await_step(2)
    os.kill(agent_of(root), signal.SIGKILL)
    code, output = root.wait()
    assert code == 1
    failure = root.status()["failure"]
    assert (failure["class"], failure["role"], failure["node"]) == ("node", "agent", 1)
    assert f"node 1 ({socket.gethostname()}) is lost: its connection closed" in output
    root.await_gone()


def test_an_agent_that_stops_is_lost_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = tcp_pair()
    wire = Wire(near)
    now = [wire.heard_s]
    monkeypatch.setattr("prl.runtime.nodes.wire.time", SimpleNamespace(monotonic=lambda: now[0]))
    now[0] += 0.9 * SILENCE_LIMIT_S
    assert wire.lost is None
    far.sendall(b'{"ping": 1}\n')
    wait_for(lambda: select.select([near], [], [], 0)[0] != [])
    assert wire.poll() == []
    now[0] += 0.9 * SILENCE_LIMIT_S
    assert wire.lost is None, "a ping is a sign of life"
    now[0] += 0.2 * SILENCE_LIMIT_S
    assert wire.lost == f"no sign of life for {1.1 * SILENCE_LIMIT_S:.0f} s"


def by_hand(run_dir: Path, node: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "prl.runtime.agent", str(run_dir), f"--node={node}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=TESTS.parent)


@pytest.mark.slow
def test_agents_by_hand_have_a_node_of_the_point_and_end_by_signal_until_they_have_joined(tmp_path: Path) -> None:
    claim(make_plan(make_config("rl", TWO_NODES, tmp_path / "run"))).release()
    agents = {node: by_hand(tmp_path / "run", node) for node in (1, 2, -1)}
    for node, code, told in ((2, 0, "node 2 is not needed: the point has 2"), (-1, 2, "has no node -1")):
        output, _ = agents[node].communicate(timeout=120)
        assert (agents[node].returncode, told in output) == (code, True), output
    time.sleep(3)  # the other has come up as well, and looks for its root
    agents[1].terminate()
    assert agents[1].wait(60) == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_when_the_root_goes_all_nodes_go(start: Start, number: int) -> None:
    root = start(*TWO_NODES, MANY, script=SLOW_STEPS)
    root.await_step(2)
    assert len(root.alive()) > 8
    root.process.send_signal(number)
    root.await_gone()


def test_a_child_that_outlived_its_agent_is_found(start: Start) -> None:
    root = start(*TWO_NODES, MANY, script=SLOW_STEPS | {"trainer/1": {"unmarked_grandchild": True, "step_s": 0.1}})
    root.await_step(2)
    wait_for((root.run_dir / "grandchild").exists)
    root.await_surveys()  # of the agent's reaper
    os.kill(agent_of(root), signal.SIGKILL)
    root.wait()
    root.await_gone()


def test_a_failure_elsewhere_is_told_with_its_node(start: Start) -> None:
    root = start(*TWO_NODES, script={"trainer/1": {"raise": "no such thing", "at": 2}})
    code, output = root.wait()
    assert code == 1
    assert "trainer/1 (rank 1, node 1) failed, class code: RuntimeError: no such thing" in output
    assert any("no such thing" in line for line in root.status()["failure"]["log_tail"])
    root.await_gone()


def test_a_users_error_elsewhere_is_the_users(start: Start) -> None:
    root = start(*TWO_NODES, script={"trainer/1": {"user_error": "that cannot be"}, "orchestrator": {"step_s": 5}})
    code, output = root.wait()
    assert code == 2
    assert "that cannot be" in output
    assert not root.run_dir.exists()


@pytest.mark.slow
def test_a_hang_elsewhere_is_found_and_its_stacks_are_kept(start: Start) -> None:
    limits = ("deployment.hang_timeout_s=5", "deployment.start_timeout_s=90")
    root = start(*TWO_NODES, MANY, *limits, script=SLOW_STEPS | {"trainer/1": {"hang": True, "at": 2}})
    code, _ = root.wait()
    assert code == 1
    failure = root.status()["failure"]
    assert (failure["class"], failure["role"], failure["node"]) == ("hang", "trainer/1", 1)
    assert any("hang_here" in line for line in failure["log_tail"])


def test_a_signal_stops_all_nodes_in_order_and_the_run_resumes(start: Start) -> None:
    root = start(*TWO_NODES, "max_steps=12", script={name: {"step_s": 0.1, "stay_at": 5} for name in SLOW_STEPS})
    root.await_step(4)
    root.await_running()
    root.process.send_signal(signal.SIGTERM)
    code, output = root.wait()
    assert code == 143, output
    saved = steps(root.run_dir)[-1]
    assert saved >= 4
    (root.run_dir / "stop").unlink()
    code, output = start(*TWO_NODES, "max_steps=12").wait()
    assert code == 0, output
    assert f"resuming from the checkpoint of step {saved}" in output
    assert [row["step"] for row in read_rows(root.run_dir, "orchestrator")] == list(range(1, 13))


@pytest.mark.slow
def test_nodes_that_never_join_are_named(start: Start) -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_ID": "7", "SLURM_NODEID": "0"}
    root = start(*TWO_NODES, "deployment.start_timeout_s=2", environment=step)
    code, output = root.wait()
    assert code == 1
    assert "failed, class node: node 1 did not join within deployment.start_timeout_s=2" in output


# --- agents by themselves ---------------------------------------------------------------------------------------------


def run_agent(point: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "prl.runtime.agent", str(point), *arguments]
    environment = os.environ | variables
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def frozen_point(start: Start, *overrides: str) -> Path:
    """A point whose plan is there and which has not begun: its root was told to stop at once."""
    root = start(*TWO_NODES, *overrides, script=SLOW_STEPS)
    wait_for((root.run_dir / "plan.json").exists)
    root.process.kill()
    root.await_gone()
    return root.run_dir


@pytest.mark.slow
def test_nodes_started_by_hand_find_each_other(start: Start) -> None:
    """The point's own roles, so it is the real thing: two commands on what could be two machines."""
    point = frozen_point(start, "max_steps=2")
    agents = [run_agent(point, f"--node={node}") for node in (1, 0)]
    outputs = [agent.communicate(timeout=200)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert json.loads((point / "status.json").read_text())["state"] == "done"
    assert not (point / "nodes.json").exists(), "what it says of this attempt would send the next one's agents home"


def test_a_node_beyond_the_points_ends_at_once(start: Start) -> None:
    agent = run_agent(frozen_point(start), "--node=2")
    assert agent.communicate(timeout=120)[0] == "node 2 is not needed: the point has 2, counted from 0\n"
    assert agent.returncode == 0


def test_a_node_that_finds_no_root_says_where_it_looked(start: Start) -> None:
    point = frozen_point(start, "deployment.start_timeout_s=0.5")
    output = run_agent(point, "--node=1", **{KEY: "of-today"}).communicate(timeout=120)[0]
    assert "found no root of its run within 0.5 s" in output
    assert "nodes.json" in output
    assert "a filesystem that all nodes share" in output


def test_the_file_of_an_earlier_attempt_fools_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_NODEID": "1"}.items():
        monkeypatch.setenv(name, value)
    assert node_of_this_process() == 1
    announce(tmp_path, Meeting(job_key(), 2, ("127.0.0.1",), 1, "secret"))
    assert (tmp_path / "nodes.json").stat().st_mode & 0o777 == 0o600
    assert read_meeting(tmp_path) == Meeting(job_key(), 2, ("127.0.0.1",), 1, "secret")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert read_meeting(tmp_path) is None
    announce(tmp_path, Meeting(job_key(), 2, ended=True))
    assert connect(tmp_path, time.monotonic() + 5.0, 5.0) is None


def test_a_stranger_is_not_let_in(start: Start) -> None:
    """A connection without the token is closed, and the run goes on without it."""
    root = start(*TWO_NODES, MANY, script=SLOW_STEPS)
    wait_for((root.run_dir / "nodes.json").exists)
    meeting = json.loads((root.run_dir / "nodes.json").read_text())
    with pytest.raises(ConnectionError):
        knock(socket.create_connection(("127.0.0.1", meeting["port"])), "guess", 1, "evil", 1, 60)
    root.await_step(1)
    assert root.status()["roles"]["trainer/0"].get("node") != "evil"


# --- messages ---------------------------------------------------------------------------------------------------------


def test_messages_arrive_whole_and_in_order() -> None:
    near, far = tcp_pair()
    sender, receiver = Wire(near), Wire(far)
    messages = [{"number": number, "text": "ä\n" * number} for number in range(200)]
    thread = threading.Thread(target=lambda: [sender.send(message) for message in messages])
    thread.start()
    assert receiver.wait(60) == messages[0]
    got: list[object] = []
    wait_for(lambda: got.extend(receiver.poll()) is None and len(got) == 199)  # type: ignore[func-returns-value]
    thread.join()
    assert got == messages[1:]
    sender.close()
    wait_for(lambda: receiver.poll() == [] and receiver.lost == "its connection closed")


def test_what_is_no_message_ends_the_connection() -> None:
    near, far = tcp_pair()
    far.sendall(b"GET / HTTP/1.1\r\n")
    wire = Wire(near)
    assert wire.poll() == []
    assert wire.closed


@pytest.mark.parametrize(
    ("outer", "expected"), [(None, "2,3"), ("4,5,6,7", "6,7"), ("4,5,6", "6")], ids=["all", "cut", "too few"]
)
def test_a_posing_node_has_its_own_gpus(outer: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if outer is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", outer)
    assert devices_of(1, 2) == {"CUDA_VISIBLE_DEVICES": expected}
