"""Files that several processes write, that a crash may tear, or that a full disk leaves without room."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runtime_tree import Start, fill_bytes, mount_small_disk, start
from safetensors import SafetensorError
from safetensors.torch import save_file

from launch.code_copy import FrozenCode
from launch.points import make_points
from launch.session import Session
from launch.slurm import write_script
from launch.sweep_file import job_of_points, read_sweep, record_job, record_points, submission, where_they_are
from prl.compare.points import read_directory
from prl.config.errors import UserError
from prl.metrics.reader import truncate_rows
from prl.metrics.wandb_mirror import Feed
from prl.orchestrator.rollouts.rollout_log import RolloutLog
from prl.runtime.agent import read_attempts, write_attempt
from prl.runtime.directory.checkpoints import steps
from prl.runtime.directory.files import as_user_error
from prl.runtime.directory.status_file import StatusFile, read_status
from prl.status import render

__all__ = ["start"]

WRITER = """
import sys
from pathlib import Path
import time
from types import SimpleNamespace
from launch.sweep_file import record_job, submission

while not Path(sys.argv[3]).exists():
    time.sleep(0.001)
sweep, first, code = Path(sys.argv[1]), int(sys.argv[2]), SimpleNamespace(path=Path("code"), modules={})
for job in range(first, first + 25):
    point = SimpleNamespace(path=sweep / f"point-{job}")
    record_job(sweep, {**submission(sweep, sweep / "1.sbatch", [point], False, code), "job_id": str(job)})
"""
TORN = ['{"step": 1, "ok', '{"step": 9}\n{"step', "[1, 2]\n7\n", "\x00\x00\x00", "\n\n"]


def test_two_writers_of_a_sweeps_record_lose_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen([*command, str(first), str(tmp_path / "go")]) for first in (100, 200)]
    time.sleep(3)  # both have imported what they need
    (tmp_path / "go").touch()
    assert [writer.wait(200) for writer in writers] == [0, 0]
    recorded = {job["job_id"] for job in read_sweep(tmp_path)["submissions"]}
    assert recorded == {str(job) for first in (100, 200) for job in range(first, first + 25)}


def test_two_who_submit_at_once_write_two_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.slurm.render", lambda batch, *rest: str(batch.points[0].path))
    (tmp_path / "slurm").mkdir()
    batches = [SimpleNamespace(points=[SimpleNamespace(path=Path(f"p{number}"))]) for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        scripts = list(pool.map(lambda batch: write_script(batch, tmp_path, FrozenCode(tmp_path, {})), batches))
    assert len(set(scripts)) == 40
    for batch, script in zip(batches, scripts, strict=True):
        assert script.read_text() == str(batch.points[0].path)
        assert script.with_suffix(".points").read_text() == f"{batch.points[0].path}\n"


@pytest.mark.parametrize("torn", TORN, ids=repr)
def test_a_torn_line_of_the_attempts_swallows_no_row(tmp_path: Path, torn: str) -> None:
    (tmp_path / "attempts.jsonl").write_text('{"attempt": 1, "job": "7"}\n' + torn)
    write_attempt(tmp_path, {"attempt": 2, "job": "8"})
    assert [row["attempt"] for row in read_attempts(tmp_path)] == [1, 2]


def group(step: int) -> SimpleNamespace:
    rollout = SimpleNamespace(
        env="e", task="t", reward=1.0, metrics={}, advantage=0.0, samples=[], truncated=False, messages=[]
    )
    return SimpleNamespace(step=step, groups=[SimpleNamespace(index=0, finished=[rollout] * 2)])


@pytest.mark.parametrize("torn", TORN, ids=repr)
def test_a_torn_rollout_log_is_gone_on_with(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "rollouts.jsonl"
    log = RolloutLog(path, 0)
    for step in (1, 2, 3):
        log.write(group(step))
    with path.open("a") as file:
        file.write(torn)
    RolloutLog(path, 2).write(group(3))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("step", ['"abc"', "null", "[]", "1.5e"])
def test_a_row_without_a_step_stops_no_resume(tmp_path: Path, step: str) -> None:
    row = '{"step": 1, "loss": 2.0}\n'
    (tmp_path / "metrics").mkdir()
    for path in (tmp_path / "rollouts.jsonl", tmp_path / "metrics" / "trainer.0.jsonl"):
        path.write_text(f'{row}{{"step": {step}}}\n{row}')
    RolloutLog(tmp_path / "rollouts.jsonl", 1)
    truncate_rows(tmp_path, 1)
    for path in (tmp_path / "rollouts.jsonl", tmp_path / "metrics" / "trainer.0.jsonl"):
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 1]


def test_a_damaged_record_of_a_sweep_leaves_the_table_of_its_runs(tmp_path: Path) -> None:
    good = {"state": "done", "step": 4, "max_steps": 4, "attempt": 1, "updated": 0.0, "failure": None, "roles": {}}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "status.json").write_text(json.dumps(good))
    (tmp_path / "sweep.json").write_text('{"points": [')
    text, _ = render(tmp_path)
    assert "a  " in text
    assert "sweep.json is damaged" in text


@pytest.mark.parametrize("torn", TORN, ids=repr)
def test_a_torn_record_of_what_was_sent_stops_no_mirror(tmp_path: Path, torn: str) -> None:
    (tmp_path / "sent.json").write_text(torn)
    feed = Feed(tmp_path, tmp_path / "sent.json", resume_step=3)
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "trainer.0.jsonl").write_text('{"step": 4, "loss": 1.0}\n')
    feed.forward(SimpleNamespace(log=lambda row: None))
    assert json.loads((tmp_path / "sent.json").read_text())["trainer.0"] == 4


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "7", '{"state": "running"}', "\x00" * 100, "[" * 100_000],
    ids=lambda text: repr(text[:20]),
)
def test_an_unreadable_status_costs_one_row_of_the_table(tmp_path: Path, content: str) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "status.json").write_text(content)
    (tmp_path / "b" / "metrics").mkdir()
    (tmp_path / "b" / "plan.json").write_text('{"config": {}}')
    (tmp_path / "b" / "metrics" / "trainer.0.jsonl").write_text('{"step": 4, "loss": "nan"}\n[3]\n7\n')
    good = {"state": "done", "step": 4, "max_steps": 4, "attempt": 1, "updated": 0.0, "failure": None, "roles": {}}
    (tmp_path / "b" / "status.json").write_text(json.dumps(good))
    text, _ = render(tmp_path)
    rows = [line.split() for line in text.splitlines()[1:]]
    assert [row[0] for row in rows] == ["a", "b"]
    assert rows[0][1] == ("lost" if "running" in content else "unreadable")
    assert rows[1][:4] == ["b", "done", "4/4", "nan"]
    assert "a" in render(tmp_path / "a")[0]


@pytest.fixture
def small_disk(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    yield from mount_small_disk(tmp_path / "disk")


def test_a_status_says_how_a_run_ended_although_the_disk_is_full(small_disk: Path) -> None:
    status = StatusFile(small_disk, "p", "rl", "n", 9)
    filler = fill_bytes(small_disk)
    status.update(state="running", step=3)
    assert read_status(small_disk)["state"] == "starting", "there is room for nothing"
    status.update(state="failed", step=4, failure={"class": "config", "log_tail": ["x" * 1000] * 20})
    assert (read_status(small_disk)["state"], read_status(small_disk)["step"]) == ("failed", 4)
    filler.unlink()
    assert not list(small_disk.glob(".*"))


@pytest.mark.slow
def test_a_directory_in_the_place_of_a_file_is_told_without_a_traceback(start: Start) -> None:
    root = start("max_steps=400", script={"orchestrator": {"raise": "enough", "at": 4}})
    assert root.wait()[0] == 1
    metrics = root.run_dir / "metrics"
    for name in ("orchestrator.jsonl", "trainer.0.jsonl"):
        (metrics / name).rename(metrics / f"{name}.kept")
        (metrics / name).mkdir()
        code, output = start("max_steps=400").wait()
        assert code == 2, output
        assert f"{metrics / name} is a directory, and the run writes a file there" in output
        assert "Traceback" not in output
        (metrics / name).rmdir()
        (metrics / f"{name}.kept").rename(metrics / name)


def test_resuming_with_no_space_left_is_told_without_a_traceback(start: Start, small_disk: Path, tmp_path) -> None:
    """The run directory lies on the full disk; the run goes on once there is room."""
    script = {"orchestrator": {"step_s": 0.05}, "trainer/0": {"step_s": 0.05}}
    arguments = ["max_steps=400", "ckpt.keep=1"]
    root = start(*arguments, name="disk", script=script)
    root.await_step(5)
    root.process.kill()
    root.process.wait()
    root.await_gone()
    filler = fill_bytes(small_disk)
    saved = steps(root.run_dir)
    again = start(*arguments, name="disk", script=script)
    code, output = again.wait()
    assert code == 2, output
    assert "Traceback" not in output
    assert "disk is full" in output.lower()
    assert str(root.run_dir) in output
    filler.unlink()
    assert steps(root.run_dir) == saved
    third = start(*arguments, name="disk", script=script)
    third.await_step(saved[-1] + 2)
    third.process.terminate()
    code, output = third.wait()
    assert code == 143, output
    assert f"resuming from the checkpoint of step {saved[-1]}" in output


@pytest.mark.parametrize("content", ["{}", '{"points": []}', '{"name": "s", "other": 1}'])
def test_a_record_of_a_sweep_that_lacks_parts_is_completed(tmp_path: Path, content: str) -> None:
    (tmp_path / "sweep.json").write_text(content)
    config = SimpleNamespace(swept={})
    points = [SimpleNamespace(path=tmp_path / "a", plan=SimpleNamespace(point_id="a"), config=config)]
    record_points(tmp_path, points)
    row = submission(tmp_path, tmp_path / "1.sbatch", points, True, FrozenCode(tmp_path, {}))
    record_job(tmp_path, {**row, "job_id": "7"})
    sweep = read_sweep(tmp_path)
    assert [point["dir"] for point in sweep["points"]] == ["a"]
    assert job_of_points(sweep) == {"a": "7_0"}


@pytest.mark.parametrize(
    "content",
    [
        {"points": 3},
        {"points": ["a"]},
        {"points": [{"point_id": "a"}]},
        {"commands": None},
        {"submissions": [{}]},
        {"submissions": [{"job_id": 7, "points": ["a"], "is_array": True}]},
    ],
    ids=str,
)
def test_a_record_of_a_sweep_that_says_something_else_is_told(tmp_path: Path, content: dict) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps(content))
    for use in (read_sweep, lambda path: record_points(path, [])):
        with pytest.raises(UserError, match=r"sweep\.json is damaged") as told:
            use(tmp_path)
        assert told.value.fix.startswith("restore it, or move it away: mv ")
    assert json.loads((tmp_path / "sweep.json").read_text()) == content
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.json").write_text("{}")
    assert [point.name for point in read_directory(tmp_path)] == ["run"], "comparing takes what there is"


def test_a_damaged_status_does_not_forget_the_attempts(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        write_attempt(tmp_path, {"attempt": number})
    (tmp_path / "status.json").write_text("[]")
    assert StatusFile(tmp_path, "p", "rl", "n", 4).content["attempt"] == 3  # the agent has begun it already
    (tmp_path / "status.json").write_text('{"state": "stopped", "attempt": 5}')  # some were no agent's
    assert StatusFile(tmp_path, "p", "rl", "n", 4).content["attempt"] == 6


def test_a_full_disk_is_told_of_an_export_too(small_disk: Path) -> None:
    """safetensors writes in Rust, whose error is no OSError."""
    weights = {"w": torch.zeros(100_000)}  # more than the disk holds
    with pytest.raises(SafetensorError) as caught:
        save_file(weights, small_disk / "shard-1.tmp")
    told = as_user_error(caught.value, small_disk)
    assert told is not None
    assert told.what.startswith("The disk is full")
    assert told.fix.startswith("free space")
    assert as_user_error(SafetensorError("Error while serializing: invalid header"), small_disk) is None
    elsewhere = RuntimeError("unable to write to file </torch_12>: No space left on device")  # it is in /dev/shm
    assert as_user_error(elsewhere, small_disk) is None


def test_a_point_is_found_in_its_sweep_whatever_axes_named_it_first(tmp_path, capsys) -> None:
    """Axes in another order, or one that has become a single value, give its directory another name."""
    sweep = tmp_path / "s"

    def places(swept: set[str], *lines: tuple[str, ...]) -> list[str]:
        session = Session(lambda config: 0, swept=swept)
        return [Path(str(config.output_dir)).name for config in where_they_are(session.configs_of(lines, sweep), sweep)]

    first = places({"seed", "optim.lr"}, ("seed=1", "optim.lr=0.001"), ("seed=2", "optim.lr=0.001"))
    assert [name.rpartition("-")[0] for name in first] == ["seed-1_lr-0.001", "seed-2_lr-0.001"]
    points = [{"dir": name, "point_id": name.rpartition("-")[2]} for name in first]
    sweep.mkdir()
    (sweep / "sweep.json").write_text(json.dumps({"points": points}))
    (sweep / first[0]).mkdir()
    capsys.readouterr()
    turned = places({"seed", "optim.lr"}, ("optim.lr=0.001", "seed=1"), ("optim.lr=0.002", "seed=1"))
    assert turned[0] == first[0]
    assert turned[1].startswith("lr-0.002_seed-1-")
    told = capsys.readouterr().err
    assert (
        f"1 of these points are in the sweep already, under other names: lr-0.001_seed-1-{points[0]['point_id']}"
        in told
    )
    assert places({"seed"}, ("seed=1", "optim.lr=0.001"), ("seed=2", "optim.lr=0.001")) == [
        first[0],
        f"seed-2-{points[1]['point_id']}",  # whose directory somebody has removed
    ]
    assert places({"seed", "optim.lr"}, ("seed=1", "optim.lr=0.001")) == [first[0]]
    (sweep / first[0]).rename(sweep / "best")  # by hand
    (sweep / "best" / "plan.json").write_text(json.dumps({"point_id": points[0]["point_id"]}))
    assert places({"seed", "optim.lr"}, ("seed=1", "optim.lr=0.001")) == ["best"]
    session = Session(lambda config: 0, swept={"seed"})
    found = where_they_are(session.configs_of([("seed=1", "optim.lr=0.001")], sweep), sweep)
    record_points(sweep, make_points([("seed=1",)], found))
    listed = {row["dir"]: row["point_id"] for row in read_sweep(sweep)["points"]}
    assert listed == {"best": points[0]["point_id"], first[1]: points[1]["point_id"]}, "once, and where it is"
    (sweep / first[0]).mkdir()  # by its own name it is taken as it is, whatever else has its id
    assert places({"seed", "optim.lr"}, ("seed=1", "optim.lr=0.001")) == [first[0]]
