"""Roles that are started by hand on a frozen point, each in a terminal of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_tree import TESTS, make_config, wait_for
from terminals import LIMIT_S, Terminals, terminals

from prl.config.errors import UserError
from prl.metrics.reader import read_rows
from prl.planning.planner import make_plan
from prl.planning.run_plan import RunPlan
from prl.runtime import by_hand
from prl.runtime.directory.rundir import claim
from prl.runtime.directory.status_file import read_status
from prl.runtime.nodes.seats import seats_by_hand, seats_of_ranks, starter_of
from prl.status import render

SCRIPTED = str(TESTS / "scripted_terminal.py")
MANY = "max_steps=1000"
SLOW_STEPS = json.dumps({name: {"step_s": 0.1} for name in ("orchestrator", "trainer/0", "trainer/1")})


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Terminals]:
    with terminals(tmp_path) as made:
        yield made


def frozen(tmp_path: Path, *overrides: str, config: str = "rl") -> Path:
    claimed = claim(make_plan(make_config(config, overrides, tmp_path / "point")))
    claimed.release()
    return claimed.path


def plan_of(*overrides: str, config: str = "rl") -> RunPlan:
    return make_plan(make_config(config, overrides, Path("/nowhere/run")))


def open_all(opened: Terminals, point: Path) -> tuple[int, int, int]:
    """Terminals of the trainer, the engines and, last, the orchestrator."""
    trainer, inference = (opened.open(SCRIPTED, kind, str(point)) for kind in ("trainer", "inference"))
    return trainer, inference, opened.open(SCRIPTED, "orchestrator", str(point), ROLE_SCRIPT=SLOW_STEPS)


def await_running(point: Path) -> None:
    wait_for(lambda: read_status(point).get("state") == "running")


def test_three_terminals_are_one_run(opened: Terminals, tmp_path: Path) -> None:
    point = frozen(tmp_path, "deployment.num_train_gpus=2")
    root = opened.open(SCRIPTED, "orchestrator", str(point))
    opened.await_word(root, f"waiting for python -m prl.inference {point}, python -m prl.trainer {point}")
    trainer = opened.open(SCRIPTED, "trainer", str(point))
    opened.await_word(root, f"trainer joined from {os.uname().nodename}; waiting for python -m prl.inference {point}\n")
    second = opened.open(SCRIPTED, "trainer", str(point))
    assert opened.code(second) == 2
    assert "trainer has somebody already" in opened.says(second)
    inference = opened.open(SCRIPTED, "inference", str(point))
    assert [opened.code(each) for each in (root, trainer, inference)] == [0, 0, 0], opened.says(root)
    assert read_status(point)["state"] == "done"
    assert "trainer/0, trainer/1: the run has ended: done" in opened.says(trainer)
    assert not (point / "nodes.json").exists(), "it held a token"


def test_a_killed_terminal_ends_the_others_and_is_named(opened: Terminals, tmp_path: Path) -> None:
    point = frozen(tmp_path, MANY)
    trainer, inference, root = open_all(opened, point)
    await_running(point)
    opened.processes[trainer].kill()
    assert (opened.code(root), opened.code(inference)) == (1, 1), opened.says(root)
    for terminal in (root, inference):
        assert f"trainer ({os.uname().nodename}) is lost: its connection closed" in opened.says(terminal)
    assert f"python -m prl.trainer {point}" in opened.says(root)
    assert read_status(point)["failure"]["class"] == "node"


def test_who_comes_to_a_run_that_has_begun_is_told_so(opened: Terminals, tmp_path: Path) -> None:
    point = frozen(tmp_path, MANY)
    early = opened.open(SCRIPTED, "trainer", str(point))
    wait_for(lambda: "waiting for" in opened.says(early), 60)
    opened.processes[early].send_signal(signal.SIGINT)
    assert opened.code(early) == 130
    assert "trainer/0: stopped before the run began" in opened.says(early)
    root = open_all(opened, point)[2]
    await_running(point)
    for kind in ("trainer", "inference"):
        late = opened.open(SCRIPTED, kind, str(point))
        assert opened.code(late) == 2
        assert f"{kind} has somebody already" in opened.says(late)
        assert "waiting for" not in opened.says(late)
    opened.processes[root].send_signal(signal.SIGINT)
    assert opened.code(root) == 130


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1, 2])
def test_ctrl_c_in_any_terminal_stops_all_in_order(opened: Terminals, tmp_path: Path, which: int) -> None:
    point = frozen(tmp_path, MANY)
    opened_ones = open_all(opened, point)
    await_running(point)
    opened.processes[opened_ones[which]].send_signal(signal.SIGINT)
    assert opened.code(opened_ones[2]) == 130, opened.says(opened_ones[2])
    assert read_status(point)["state"] == "stopped"
    codes = [opened.code(each) for each in opened_ones[:2]]
    assert codes == [130 if number == which else 143 for number in range(2)]
    assert "stopping: saving a checkpoint" in opened.says(opened_ones[2])


def test_a_role_that_waits_in_vain_names_the_command_that_leads(opened: Terminals, tmp_path: Path) -> None:
    point = frozen(tmp_path, "deployment.start_timeout_s=1")
    trainer = opened.open(SCRIPTED, "trainer", str(point))
    assert opened.code(trainer) == 2
    assert f"start it, too: python -m prl.orchestrator {point}" in opened.says(trainer)


def test_the_status_of_roles_by_hand_names_their_commands(opened: Terminals, tmp_path: Path) -> None:
    point = frozen(tmp_path / "two words", "deployment.start_timeout_s=1")
    root = opened.open(SCRIPTED, "orchestrator", str(point))
    assert opened.code(root) == 1
    said = render(point)[0].splitlines()[-1]
    ways = "; ".join(f"python -m prl.{kind} '{point}'" for kind in ("orchestrator", "trainer", "inference"))
    assert said == f"to go on: each in its terminal, {ways}"
    starter = starter_of(seats_of_ranks(plan_of("deployment.num_train_gpus=2")))
    (point / "status.json").write_text(json.dumps(read_status(point) | {"started_by": starter}))
    assert "to go on: the same torchrun command" in render(point)[0]


@pytest.mark.slow
def test_a_terminal_whose_root_is_killed_ends(opened: Terminals, tmp_path: Path) -> None:
    point = frozen(tmp_path, MANY)
    trainer, inference, root = open_all(opened, point)
    await_running(point)
    opened.processes[root].kill()
    assert (opened.code(trainer), opened.code(inference)) == (1, 1)
    assert "the run has ended: its root is gone" in opened.says(trainer)


def test_who_has_not_come_in_time_is_named_with_the_command(opened: Terminals, tmp_path: Path) -> None:
    point = frozen(tmp_path, "deployment.start_timeout_s=1")
    root = opened.open(SCRIPTED, "orchestrator", str(point))
    assert opened.code(root) == 1
    said = f"waiting for python -m prl.inference {point}, python -m prl.trainer {point}: they did not join within"
    assert said in opened.says(root)


def test_a_trainer_that_others_count_as_a_rank_says_what_it_is(opened: Terminals, tmp_path: Path) -> None:
    point = frozen(tmp_path, config="inference")
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    trainer = opened.open("-m", "prl.trainer", str(point), **ranks)
    assert opened.code(trainer) == 2, "it has no trainer"
    assert "so this is the whole trainer of its node, not one rank of a run" in opened.says(trainer)


@pytest.mark.parametrize(
    ("kind", "config", "words"),
    [
        ("orchestrator", "sft", "This point has no orchestrator."),
        ("trainer", "inference", "This point has no trainer."),
        ("trainer", "bench", "has no roles to start by hand"),
    ],
)
def test_a_role_that_the_point_has_not_is_refused(
    opened: Terminals, tmp_path: Path, kind: str, config: str, words: str
) -> None:
    terminal = opened.open("-m", f"prl.{kind}", str(frozen(tmp_path, config=config)))
    assert opened.code(terminal) == 2
    assert words in opened.says(terminal)


def test_seats_of_several_nodes_have_their_number() -> None:
    plan = plan_of("deployment=multi_node", "deployment.gpus_per_node=2", "deployment.num_train_nodes=2")
    seats = seats_by_hand(plan, Path("/a b/point"))
    assert [seat.command for seat in seats if "/" not in seat.name] == [
        "python -m prl.orchestrator '/a b/point'",
        "python -m prl.trainer '/a b/point' --node=1",
        "python -m prl.trainer '/a b/point' --node=2",
        "python -m prl.inference '/a b/point'",
    ]
    assert [seat.roles for seat in seats_of_ranks(plan)] == [{f"trainer/{rank}"} for rank in range(4)]
    for role in plan.roles:
        assert sum(seat.has(role) for seat in seats if "/" not in seat.name) == 1


@pytest.mark.parametrize(
    ("seen", "trainers_see"),
    [
        (["a", "b", "c"], None),  # all of the node: the plan's numbers hold
        (["x", "y"], "y,x,y"),  # its own alone; a warm start's two, counted from 0, are these as well
    ],
)
def test_a_terminal_may_see_its_own_gpus_alone(
    monkeypatch: pytest.MonkeyPatch, seen: list[str], trainers_see: str | None
) -> None:
    plan = plan_of("deployment.num_train_gpus=2")
    trainer = next(seat for seat in seats_by_hand(plan, Path("/p")) if seat.name == "trainer")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that what is set below is taken back
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(by_hand, "visible_gpus", lambda: seen)
    monkeypatch.setattr(by_hand, "no_usable_gpus", lambda plan: None)
    by_hand.place_devices(plan, trainer)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == trainers_see
    monkeypatch.setattr(by_hand, "visible_gpus", lambda: ["x"])
    with pytest.raises(UserError, match="takes the GPUs 1, 2 of its node, and 1 are seen here"):
        by_hand.place_devices(plan_of("deployment.num_train_gpus=2", "deployment.device=cuda"), trainer)


@pytest.mark.slow
def test_what_three_terminals_learn_is_what_one_command_learns(opened: Terminals, tmp_path: Path) -> None:
    places = [f"cache_dir={tmp_path / 'cache'}", "logging.wandb.mode=disabled", "debug.num_threads=1"]
    overrides = ["warm_start=none", "algo=sync", "eval=none", "max_steps=2", *places]
    point = tmp_path / "by_hand"
    words = [*overrides, f"output_dir={point}"]
    told = subprocess.run(
        [sys.executable, "-m", "prl.plan", "--freeze", *words], capture_output=True, text=True, timeout=LIMIT_S
    )
    commands = [line.split()[1:] for line in told.stdout.splitlines() if line.startswith("    python")]
    assert len(commands) == 3, told.stdout + told.stderr
    codes = [opened.code(terminal) for terminal in [opened.open(*command) for command in commands]]
    assert codes == [0, 0, 0], opened.says(0)
    whole = opened.open("-m", "prl.rl", *overrides, f"output_dir={tmp_path / 'whole'}")
    assert opened.code(whole) == 0, opened.says(whole)

    def series(run: Path) -> list[tuple]:
        return [(row["step"], row["loss"], row["grad_norm"]) for row in read_rows(run, "trainer.0")]

    assert len(series(point)) == 2
    assert series(point) == series(tmp_path / "whole")
