"""Parts of the runtime on their own: directories, ports, failure classes, threads, devices."""

from __future__ import annotations

import errno
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runtime_tree import fill_bytes, mount_small_disk

from prl.config import compose
from prl.config.errors import UserError
from prl.inference.isolation import BrokenWeights
from prl.metrics.writer import MetricsWriter
from prl.planning.planner import make_plan
from prl.planning.run_plan import RunPlan, plan_from_json
from prl.runtime.directory.rundir import claim
from prl.runtime.people.report import print_report
from prl.runtime.people.view import RunView, clock
from prl.runtime.process import environment
from prl.runtime.process import restarts as restarts_module
from prl.runtime.process.environment import num_threads, visible_devices
from prl.runtime.process.failures import blame_rank, classify, error_record, log_tail, parse_error_record
from prl.runtime.process.ports import lease_ports
from prl.runtime.process.restarts import Restarts, why_final


def plan_of(*overrides: str, config: str = "rl") -> RunPlan:
    return make_plan(compose(list(overrides), config))


# --- run directory ----------------------------------------------------------------------------------------------------


def test_fresh_directories_get_names_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "20260102-030405")
    claimed = [claim(plan_of("name=mine")) for _ in range(3)]
    assert [run.path.name for run in claimed] == [f"mine-20260102-030405{end}" for end in ("", "-2", "-3")]
    assert len({run.run_id for run in claimed}) == 3
    for run in claimed:
        run.release()


def test_the_same_point_takes_over_with_its_run_id(tmp_path: Path) -> None:
    plan = plan_of(f"output_dir={tmp_path / 'run'}")
    first = claim(plan)
    first.release()
    again = claim(plan)
    assert (first.fresh, again.fresh) == (True, False)
    assert first.run_id == again.run_id
    assert first.run_id.startswith(plan.point_id)
    again.release()


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    plan = plan_of(f"output_dir={tmp_path / 'run'}")
    first = claim(plan)
    with pytest.raises(UserError, match="a run is alive in"):
        claim(plan)
    first.release()


def test_only_what_a_run_leaves_itself_makes_a_directory_its_own(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "model.safetensors.partial").write_text("somebody's")
    with pytest.raises(UserError, match="is not empty and holds no run"):
        claim(plan_of(f"output_dir={run}"))
    (run / "model.safetensors.partial").rename(run / ".plan.json.1-2.partial")
    claim(plan_of(f"output_dir={run}")).release()


def test_a_run_that_lost_its_plan_is_told_as_that(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "status.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds a run without its plan\.json"):
        claim(plan_of(f"output_dir={run}"))


def test_another_point_is_refused(tmp_path: Path) -> None:
    claim(plan_of(f"output_dir={tmp_path / 'run'}")).release()
    with pytest.raises(UserError, match="belongs to a different run") as refused:
        claim(plan_of(f"output_dir={tmp_path / 'run'}", "seed=7", "logging=none"))
    assert refused.value.why == "only the same point resumes, and seed was 0, and is 7"
    others = ["seed=7", "max_steps=3", "optim.lr=0.5", "seq_len=2048", "algo=distill", "algo.teacher.urls=[http://h:1]"]
    with pytest.raises(UserError) as refused:
        claim(plan_of(f"output_dir={tmp_path / 'run'}", *others))
    assert refused.value.why.count(" was ") == 3
    assert refused.value.why.endswith("and 3 more keys")


@pytest.mark.parametrize("torn", ["", '{"point_id": "', "[]", "{}"])
def test_a_damaged_plan_is_written_anew_by_its_own_point_only(tmp_path: Path, torn: str) -> None:
    plan = plan_of(f"output_dir={tmp_path / 'run'}")
    first = claim(plan)
    first.release()
    (first.path / "plan.json").write_text(torn)
    (first.path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="belongs to a different run"):
        claim(plan_of(f"output_dir={tmp_path / 'run'}", "seed=7"))
    again = claim(plan)
    again.release()
    assert plan_from_json((first.path / "plan.json").read_text()) == plan
    assert (again.fresh, again.run_id) == (False, first.run_id)
    assert (first.path / "checkpoints").is_dir()


def test_a_full_disk_leaves_no_directory(tmp_path: Path, small_disk: Path) -> None:
    fill_bytes(small_disk)
    with pytest.raises(UserError, match="The disk is full"):
        claim(plan_of(f"output_dir={small_disk / 'run'}"))
    assert not (small_disk / "run").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    yield from mount_small_disk(tmp_path)


def test_a_place_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be made"):
        claim(plan_of(f"output_dir={tmp_path / 'file' / 'run'}"))


# --- ports ------------------------------------------------------------------------------------------------------------


def test_every_server_has_a_port_that_listens() -> None:
    leases = lease_ports(plan_of("env=[reverse_text,countdown]"))
    assert set(leases.endpoints) == {"inference/0", "orchestrator", "env/reverse_text", "env/countdown", "rendezvous"}
    for name, endpoint in leases.endpoints.items():
        host, port = endpoint.removeprefix("http://").rsplit(":", 1)
        socket.create_connection((host, int(port)), timeout=1).close()
        assert name == "rendezvous" or endpoint.startswith("http://127.0.0.1:")
    assert leases.socket_for("trainer/0") is leases.sockets["rendezvous"]
    assert leases.socket_for("trainer/1") is None
    leases.close()


def test_a_taken_port_is_a_user_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match=r"inference.port=0 takes a free port"):
            lease_ports(plan_of(f"inference.port={taken.getsockname()[1]}", config="inference"))


# --- failures ---------------------------------------------------------------------------------------------------------


def recorded(error: Exception | None) -> dict[str, Any]:
    """What the supervisor gets to know of a child's exception."""
    return {} if error is None else parse_error_record(error_record(error))


@pytest.mark.parametrize(
    ("role", "exit_code", "error", "tail", "oom_kills", "expected"),
    [
        ("trainer", -signal.SIGKILL, None, (), 0, "node"),
        ("trainer", -signal.SIGKILL, None, (), 1, "oom"),
        ("trainer", 1, MemoryError(), (), 0, "oom"),
        ("inference", 1, RuntimeError("CUDA out of memory. Tried to allocate"), (), 0, "oom"),
        ("trainer", 1, RuntimeError("NCCL error in: x.cpp, unhandled system error"), (), 0, "collective"),
        ("trainer", -signal.SIGABRT, None, ("Watchdog caught collective operation timeout",), 0, "collective"),
        ("trainer", 1, OSError(errno.EIO, "Input/output error"), (), 0, "node"),
        ("trainer", -signal.SIGBUS, None, (), 0, "node"),
        ("trainer", 2, UserError("no such file"), (), 0, "config"),
        ("env", 1, ValueError("x"), (), 0, "env"),
        ("inference", 1, BrokenWeights("version 3"), (), 0, "diverged"),
        ("trainer", 1, ValueError("x"), ("an old line about NCCL error",), 0, "code"),
        ("orchestrator", -signal.SIGSEGV, None, (), 0, "code"),
    ],
)
def test_failure_classes(
    role: str,
    exit_code: int,
    error: Exception | None,
    tail: tuple[str, ...],
    oom_kills: int,
    expected: str,
) -> None:
    assert classify(role, exit_code, recorded(error), tail, oom_kills) == expected


@pytest.mark.parametrize(("kind", "again"), [("node", True), ("code", True), ("diverged", False), ("config", False)])
def test_what_a_new_engine_would_only_meet_again_starts_none(kind: str, again: bool) -> None:
    assert Restarts(compose(["warm_start=none"])).grant("inference/0", "inference", True, kind, step=0) == again


def test_what_dies_on_its_way_back_was_up_once() -> None:
    restarts = Restarts(compose(["warm_start=none"]))
    assert not restarts.grant("inference/0", "inference", False, "node", step=0), "it never was"
    assert restarts.grant("inference/0", "inference", True, "node", step=0)
    assert restarts.grant("inference/0", "inference", False, "node", step=0)
    assert not restarts.grant("inference/1", "inference", False, "node", step=0), "another one"
    assert restarts.grant("inference/0", "inference", False, "code", step=0)
    assert not restarts.grant("inference/0", "inference", True, "node", step=0), "the fourth"


def test_restarts_are_counted_by_what_training_gets_done_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts_module, "WINDOW_S", 0.0)
    restarts = Restarts(compose(["warm_start=none"]))

    def grants(*steps: int) -> list[bool]:
        return [restarts.grant("env/a", "env", True, "node", step) for step in steps]

    assert grants(0, 0, 0, 0) == [True, True, True, False]
    assert grants(9, 10, 11, 12, 19, 20) == [False, True, True, True, False, True]
    assert restarts.recent("env", 20) == 3
    monkeypatch.setattr(restarts_module, "WINDOW_S", 60.0)
    assert restarts.recent("env", 1000) == 7, "many steps in a moment are no progress worth a restart"


def test_the_cause_ranks_before_its_consequences() -> None:
    def rank(exit_code: int, error: Exception | None, kind: str) -> int:
        return blame_rank(exit_code, recorded(error), kind)  # type: ignore[arg-type]

    ordered = [
        rank(-signal.SIGKILL, None, "node"),
        rank(2, UserError("x"), "config"),
        rank(1, ValueError("x"), "code"),
        rank(1, ConnectionRefusedError("x"), "code"),
    ]
    assert ordered == sorted(set(ordered))
    assert rank(1, RuntimeError("NCCL error"), "collective") == ordered[-1]
    assert rank(1, OSError("/train/weights: the orchestrator answered 500: x"), "code") == ordered[-1]


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"\xff\n" + b"".join(b"line %d\n" % i for i in range(9999)))
    assert log_tail(tmp_path / "log", 2) == ("line 9997", "line 9998")
    assert log_tail(tmp_path / "absent") == ()


def test_the_tail_of_a_log_that_ends_in_a_crash_has_its_reason(tmp_path: Path) -> None:
    """As faulthandler and libstdc++ write them: the reason stands above the stacks of all threads."""
    script = (
        "import faulthandler, os, sys, threading\n"
        "faulthandler.enable()\n"
        "def deep(n):\n    deep(n - 1) if n else os.abort()\n"
        "for _ in range(4):\n    threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "print('step 3', file=sys.stderr)\n"
        "print('terminate called: [enforce fail at /pytorch/third_party/gloo/x.cc:1] 8 vs 4', file=sys.stderr)\n"
        "deep(50)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    (tmp_path / "log").write_bytes(done.stderr)
    tail = log_tail(tmp_path / "log")
    assert tail[0] == "step 3"
    assert "third_party/gloo" in tail[1]
    assert any(line.startswith("Fatal Python error: Aborted") for line in tail)
    assert "in deep" in tail[-1]
    assert len(tail) <= 20
    assert classify("trainer", done.returncode, {}, tail, 0) == "collective"
    (tmp_path / "log").write_bytes(done.stderr + b"a later process\n" * 30)  # the crash was of an earlier one
    assert log_tail(tmp_path / "log") == ("a later process",) * 20


# --- environment ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("deployment=disaggregated",), 4),  # one engine and one rank share eight cores
        (("deployment=colocated",), 8),  # they take turns
        (("deployment=colocated_overlapped",), 4),
        (("deployment=disaggregated", "deployment.num_infer_gpus=3"), 2),
        (("debug.num_threads=5",), 5),
    ],
)
def test_threads_are_shared_among_those_that_compute(
    monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], expected: int
) -> None:
    monkeypatch.setattr(environment, "num_cores", lambda: 8)
    assert num_threads(plan_of(*overrides)) == expected


@pytest.mark.parametrize(
    ("outer", "device", "expected"),
    [(None, "auto", {"inference/0": "0", "trainer/0": "1"}), ("4,6", "auto", {"inference/0": "4", "trainer/0": "6"})],
)
def test_devices_are_the_visible_ones_in_order(
    monkeypatch: pytest.MonkeyPatch, outer: str | None, device: str, expected: dict[str, str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if outer is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", outer)
    plan = plan_of("deployment=disaggregated", f"deployment.device={device}")
    found = {role.name: visible_devices(plan, role) for role in plan.roles if role.devices}
    assert found == expected
    assert visible_devices(plan, next(role for role in plan.roles if role.role == "orchestrator")) == ""


def test_a_cpu_run_sees_no_gpu() -> None:
    plan = plan_of("deployment.device=cpu")
    assert {visible_devices(plan, role) for role in plan.roles} == {""}


# --- view -------------------------------------------------------------------------------------------------------------


def test_a_step_counts_once_it_is_trained(tmp_path: Path) -> None:
    plan = plan_of("max_steps=10")
    orchestrator, trainer = MetricsWriter(tmp_path, "orchestrator"), MetricsWriter(tmp_path, "trainer/0")
    view = RunView(plan, tmp_path)
    orchestrator.log(step=1, reward=0.1)
    orchestrator.log(step=2, reward=0.2)
    assert not view.poll()
    trainer.log(step=1, loss=3.0)
    assert view.poll()
    assert (view.step, view.numbers["reward"]) == (1, 0.1)
    trainer.log(step=2, loss=2.0)
    assert view.poll()
    assert (view.step, view.numbers["reward"]) == (2, 0.2)


def test_tokens_per_second_are_those_of_the_trainer(tmp_path: Path) -> None:
    """Of two batches that come in one breath, the orchestrator's rates are 0 and beyond all measure."""
    orchestrator, trainer = MetricsWriter(tmp_path, "orchestrator"), MetricsWriter(tmp_path, "trainer/0")
    view = RunView(plan_of("max_steps=10"), tmp_path)
    for step, rate in ((1, 0.0), (2, 135_700.0)):
        orchestrator.log(step=step, reward=0.1, tokens_per_s=rate)
        trainer.log(step=step, tokens_per_s=500.0 + step)
    view.poll()
    assert ("tokens/s", "502") in view.cells()


def test_the_final_table_has_the_trainers_tokens_per_second(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    orchestrator, trainer = MetricsWriter(tmp_path, "orchestrator"), MetricsWriter(tmp_path, "trainer/0")
    for step, rate in ((1, 0.0), (2, 135_700.0)):
        orchestrator.log(step=step, reward=0.1, tokens_per_s=rate)
        trainer.log(step=step, tokens_per_s=500.0 + step)
    print_report(plan_of("max_steps=2"), tmp_path)
    shown = capsys.readouterr().out
    assert "501" in shown
    assert "502" in shown
    assert "135700" not in shown


def test_engines_that_are_left_out_are_told_once_and_until_they_serve_again(tmp_path: Path) -> None:
    orchestrator, plan = MetricsWriter(tmp_path, "orchestrator"), plan_of("max_steps=10")
    orchestrator.log(step=0, engine="http://a", engine_lost="of an earlier attempt")
    view = RunView(plan, tmp_path)
    orchestrator.log(step=3, engine="http://b", engine_lost="no answer")
    orchestrator.log(step=3, engine="http://b", engine_lost="no answer")
    view.poll()
    assert (view.take_told(), view.lost_engines) == (["http://b is left out: no answer"], {"http://b": "no answer"})
    assert ("engines left out", "1") in view.cells()
    orchestrator.log(step=5, engine="http://b", engine_lost="")
    view.poll()
    assert (view.take_told(), view.lost_engines) == (["http://b serves again"], {})


def test_the_time_left_follows_the_pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: now[0])
    now, trainer = [1000.0], MetricsWriter(tmp_path, "trainer/0")
    view = RunView(plan_of("max_steps=10"), tmp_path)
    assert view.seconds_left() is None
    for step in (1, 2, 3):
        now[0] += 2.0
        trainer.log(step=step)
    view.poll()
    assert view.seconds_left() == 14.0
    assert ("left", "0:14") in view.cells()


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (75, "1:15"), (3700, "1:01:40")])
def test_clock(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


def test_an_engine_that_overlaps_may_come_back() -> None:
    assert why_final(compose(["deployment=colocated"]), "inference") is not None
    assert why_final(compose(["deployment=colocated_overlapped"]), "inference") is None
