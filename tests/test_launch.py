"""The launcher without a SLURM: expansion, shapes, scripts, dry runs, and points side by side on this machine."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.code_copy import FrozenCode
from launch.hydra_plugin import PointLauncher
from launch.launching import SUBMIT_LOCK, refuse_impossible
from launch.local import share_cores, start_agent
from launch.points import is_to_start, make_points
from launch.settings import LauncherSettings
from launch.shapes import Shape, make_batches, refuse_too_short, seconds_of
from launch.slurm import PointExecutor, render
from launch.states import state_of
from prl.config import compose
from prl.config.composer import Composer
from prl.config.errors import ConfigError, UserError
from prl.config.point import point_id
from prl.config.sweep import expand, refuse_equal_points, resolve_points
from prl.planning.planner import make_plan
from prl.planning.run_plan import plan_to_json
from prl.runtime.agent import may_go_on, read_attempts
from prl.runtime.process.python_path import python_path

SMALL = ["max_steps=3", "seq_len=64", "sft.batch_size=2", "sft.val_interval=0", "logging=none", "ckpt.export_hf=false"]
FINAL = ("oom", "config", "env", "diverged", "code")  # classes of failure that would come again


def points_of(tmp_path: Path, *lines: str):
    overrides = expand(list(lines))
    configs = resolve_points(overrides, "rl", set())
    placed = [config.model_copy(update={"output_dir": str(tmp_path / str(i))}) for i, config in enumerate(configs)]
    return make_points(map(tuple, overrides), placed)


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "prl.sft", "-m", *SMALL, f"cache_dir={tmp_path}/cache", *arguments]
    path = os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if not Path(part, "sbatch").exists())
    return subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=240
    )


# --- expansion --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        ["seed=3"],
        ["seed=3", "memory=tight"],
        ["memory_recipe=balanced", "optim.lr=1e-4", "parallelism=ep8_cp2"],
        ["env=[reverse_text,countdown]", "algo.group_size=4"],
        ["memory_recipe.ac.mode=selective", "memory_recipe.ac.targets=[norm]"],
        ["logging.wandb.tags=[a,b]", "name=x", "slurm.time=10"],
        ["seq_len=${max_steps}", "max_steps=512"],
        ["logging.wandb.tags=[a,'${name}']", "name=x"],
        ["name='a b=c'", "logging.wandb.group=null", "ckpt.interval=7"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("job", ["rl", "sft"])  # of SFT some keys refer to others
def test_the_fast_way_composes_what_hydra_composes(overrides, job):
    known = [line for line in overrides if job == "rl" or not line.startswith(("env", "algo"))]
    composer = Composer(job)
    for _ in range(2):  # the second time from the base kept
        assert composer.compose(known) == compose(known, job)


def test_the_fast_way_tells_the_same_errors():
    for overrides in (
        ["sede=1"],
        ["seed=x"],
        ["memory=tigth"],
        ["parallelism.ep=3", "seed=1"],
        ["optim=5"],
        ["seed.deep=1"],
        ["name=???"],
    ):
        with pytest.raises(ConfigError) as fast:
            Composer("rl").compose(overrides)
        with pytest.raises(ConfigError) as slow:
            compose(overrides)
        assert str(fast.value) == str(slow.value)


@pytest.mark.slow
def test_a_thousand_points_are_expanded_validated_and_planned_within_ten_seconds():
    started = time.process_time()
    points = expand(["seed=range(250)", "memory=none,tight", "parallelism=single,ep8_cp2"])
    plans = [make_plan(config) for config in resolve_points(points, "rl", {"seed", "memory", "parallelism"})]
    assert len({plan.point_id for plan in plans}) == 1000
    assert time.process_time() - started < 10


def test_two_points_that_are_the_same_are_refused(tmp_path):
    overrides = [("seed=1",), ("seed=1", "name=other")]
    same = [compose(["seed=1"]).model_copy(update={"output_dir": str(tmp_path / "a")}) for _ in range(2)]
    with pytest.raises(ConfigError, match="Two points of the sweep are the same"):
        make_points(overrides, same)


@pytest.mark.parametrize("axis", ["seed=1,1.0", "name=a,b", "logging.wandb.name=a,b", "algo.group_size=4,4"])
def test_points_that_differ_in_words_alone_are_the_same(axis):
    points = expand([axis])
    configs = resolve_points(points, "rl", {axis.partition("=")[0]})
    with pytest.raises(ConfigError) as refused:
        refuse_equal_points(points, configs)
    (violation,) = refused.value.violations
    assert violation.what == "Two points of the sweep are the same."
    assert violation.where == points[1][0]
    assert points[0][0] in violation.why
    assert point_id(configs[0]) in violation.why
    for other in ("seed=1,2", "slurm.partition=a,b"):
        points = expand([other])
        refuse_equal_points(points, resolve_points(points, "rl", {other.partition("=")[0]}))


@pytest.mark.parametrize("module", ["prl.plan", "prl.rl"])
def test_every_command_refuses_equal_points(module, tmp_path):
    words = [sys.executable, "-m", module, "-m", "algo.group_size=4,4"]
    done = subprocess.run(
        words, cwd=tmp_path, env=os.environ | {"HOME": str(tmp_path)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "Two points of the sweep are the same." in done.stderr
    assert not list(tmp_path.iterdir())


# --- shapes and scripts -----------------------------------------------------------------------------------------------


def test_a_point_whose_directory_is_another_runs_names_the_sweeps_remedy(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError) as refused:
        points_of(tmp_path, "seed=1,2")
    (violation,) = refused.value.violations
    assert "holds no run" in violation.what
    assert violation.fix.startswith("hydra.sweep.dir=ANOTHER_DIRECTORY, or mv ")


def test_points_of_one_shape_go_into_one_array_cut_at_the_limit(tmp_path):
    points = points_of(tmp_path, "parallelism=single,ep2_cp2", "seed=1,2,3", "slurm.time=10")
    batches = make_batches(points, LauncherSettings(array_parallelism=2), 1000)
    assert [(len(batch.points), batch.shape.gpus_per_node, batch.array) for batch in batches] == [
        (3, 2, "0-2%2"),
        (3, 3, "0-2%2"),
    ]
    assert [len(batch.points) for batch in make_batches(points, LauncherSettings(), 2)] == [2, 1, 2, 1]


def test_a_points_own_slurm_settings_are_part_of_its_shape(tmp_path):
    points = points_of(tmp_path, "seed=1,2", "slurm.partition=a,b")
    settings = LauncherSettings.model_validate({"slurm": {"partition": "main", "account": "x"}})
    shapes = [Shape.of(point, settings) for point in points]
    assert [(shape.slurm.partition, shape.slurm.account) for shape in shapes] == [("a", "x"), ("b", "x")] * 2
    assert len(make_batches(points, settings, 1000)) == 2


def test_a_job_submitted_from_within_a_job_inherits_nothing_of_it(tmp_path, monkeypatch):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/sh\nenv > {tmp_path}/given\necho Submitted batch job 7\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    monkeypatch.setenv("SLURM_CONF", "/etc/here.conf")
    (tmp_path / "slurm").mkdir()
    (tmp_path / "1.sbatch").write_text("#!/bin/bash\n")
    assert PointExecutor(tmp_path / "slurm", tmp_path / "1.sbatch").submit_script() == "7"
    given = [line for line in (tmp_path / "given").read_text().splitlines() if line.startswith("SLURM_")]
    assert given == ["SLURM_CONF=/etc/here.conf"]
    assert os.environ["SLURM_ARRAY_TASK_ID"] == "3"


def test_a_template_of_ones_own(tmp_path):
    template = tmp_path / "mine.j2"
    names = "job_name project_dir output_dir config_dir num_train_nodes num_infer_nodes gpus_per_node hf_hub_offline"
    template.write_text("\n".join(f"{name}={{{{ {name} }}}}" for name in names.split()))
    points = points_of(tmp_path, "seed=1", f"slurm.template_path={template}")
    (batch,) = make_batches(points, LauncherSettings(), 1000)
    text = render(batch, tmp_path / "sweep", FrozenCode(tmp_path / "code", {}), tmp_path / "sweep/slurm/1.points")
    assert text.splitlines() == [
        "job_name=prl-sweep",
        f"project_dir={Path.cwd()}",
        f"output_dir={tmp_path}/sweep",
        f"config_dir={tmp_path}/sweep/slurm",
        "num_train_nodes=1",
        "num_infer_nodes=0",
        "gpus_per_node=2",
        "hf_hub_offline=False",
    ]
    template.write_text("{{ job_nam }}")
    with pytest.raises(UserError, match="job_nam"):
        render(batch, tmp_path, FrozenCode(tmp_path, {}), tmp_path / "1.points")


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        (90, 5400),
        ("90", 5400),
        ("5:30", 360),  # whole minutes, rounded up
        ("0:01", 60),
        ("1:30", 120),
        ("2:00", 120),
        ("2:00:10", 7260),
        ("1-2", 93600),
        ("1-2:30", 95400),
        ("1-02:30:05", 95460),
        ("UNLIMITED", math.inf),
        *((zero, math.inf) for zero in (0, "0", "0:00", "0-0", "00:00:00")),  # asks for no limit
        (None, math.inf),
    ],
)
def test_time_limits_as_sbatch_reads_them(limit, seconds):
    assert seconds_of(limit) == seconds


def test_a_warning_before_the_beginning_is_refused(tmp_path):
    settings = LauncherSettings.model_validate({"slurm": {"time": "2:00", "signal_delay_s": 30}})
    short, long = (points_of(tmp_path, f"slurm.signal_delay_s={delay}") for delay in (120, 119))
    with pytest.raises(ConfigError, match=r"slurm\.time=2:00 is 120 s") as refused:
        refuse_too_short(short, settings)
    assert "slurm.signal_delay_s=30" in str(refused.value)
    refuse_too_short(long, settings)
    refuse_too_short(points_of(tmp_path, "slurm.time=3"), LauncherSettings())


@pytest.mark.parametrize("time", ["0:01", "1", "1:30", "0-0:01"])
def test_the_remedy_for_a_warning_before_the_beginning_is_accepted(tmp_path, time):
    lines = [f"slurm.time={time}", "slurm.signal_delay_s=120"]
    with pytest.raises(ConfigError) as refused:
        refuse_too_short(points_of(tmp_path, *lines), LauncherSettings())
    remedy = refused.value.violations[0].fix.partition(",")[0]
    refuse_too_short(points_of(tmp_path, lines[0], remedy), LauncherSettings())


@pytest.mark.parametrize("time", ["0", "0:00", "0-0"])
def test_a_time_limit_of_zero_is_none_and_reaches_sbatch(tmp_path, time):
    points = points_of(tmp_path, f"slurm.time={time}", "slurm.signal_delay_s=120")
    refuse_too_short(points, LauncherSettings())
    (batch,) = make_batches(points, LauncherSettings(), 1000)
    listing = tmp_path / "sweep/slurm/1.points"
    text = render(batch, tmp_path / "sweep", FrozenCode(tmp_path / "code", {}), listing)
    assert f"#SBATCH --time={time}\n" in text


# --- what is started --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "state"),
    [
        (None, "missing"),
        ({"state": "done"}, "done"),
        ({"state": "stopped"}, "unfinished"),
        ({"state": "running"}, "unfinished"),  # and nobody holds the lock
        *(({"state": "failed", "failure": {"class": kind}}, "unfinished") for kind in ("node", "hang", "collective")),
        *(({"state": "failed", "failure": {"class": kind}, "began": True, "step": 3}, "failed") for kind in FINAL),
        *(({"state": "failed", "failure": {"class": kind}}, "failed") for kind in FINAL if kind != "config"),
        # before anything was trained, of a first attempt and of one that was to go on
        ({"state": "failed", "failure": {"class": "config"}, "began": True}, "refused"),
        ({"state": "failed", "failure": {"class": "config"}, "step": 3}, "refused"),
        ({"state": "failed"}, "unfinished"),  # killed before it could say why
    ],
)
def test_states_of_a_point(tmp_path, status, state):
    if status is not None:
        (tmp_path / "status.json").write_text(json.dumps(status))
    assert state_of(tmp_path) == state
    assert state_of(tmp_path, {tmp_path}) == "active"
    assert is_to_start(state, LauncherSettings()) == (state in ("missing", "unfinished", "refused"))
    assert is_to_start(state, LauncherSettings(retry_failed=True)) == (state not in ("active", "done"))


def test_retries_are_counted_from_the_last_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("PRL_MAX_RETRIES", "2")
    assert may_go_on([{"step": 0}], 0)
    assert may_go_on([{"step": 0}, {"step": 0}], 0)
    assert not may_go_on([{"step": 0}, {"step": 0}, {"step": 0}], 0)
    assert may_go_on([{"step": 0}, {"step": 0}, {"step": 0}, {"step": 5}], 5)
    (tmp_path / "attempts.jsonl").write_text('{"attempt": 1, "job": "7"}\n{"attempt": 2, "job": "8"}\n{"att')
    assert read_attempts(tmp_path) == [{"class": "node", "attempt": i, "job": str(i + 6)} for i in (1, 2)]


@pytest.mark.slow
def test_a_dry_run_writes_everything_and_starts_nothing(tmp_path):
    done = run(tmp_path, "hydra/launcher=slurm", "hydra.launcher.dry_run=true", "sweep=d", "seed=1,2")
    assert done.returncode == 0, done.stderr
    sweep = tmp_path / "outputs/sweeps/d"
    (script,) = (sweep / "slurm").glob("*.sbatch")
    assert script.read_text() in done.stdout
    points = [Path(line) for line in script.with_suffix(".points").read_text().splitlines()]
    assert [(point / "plan.json").exists() for point in points] == [True, True]
    assert not list(sweep.glob("*/status.json"))
    by_hand = subprocess.run([sys.executable, "-m", "prl.runtime.agent", points[1]], cwd=tmp_path, capture_output=True)
    assert by_hand.returncode == 0
    assert json.loads((points[1] / "status.json").read_text())["state"] == "done"


@pytest.mark.smoke
@pytest.mark.slow
def test_points_run_side_by_side_here(tmp_path):
    done = run(tmp_path, "hydra.launcher.parallel_points=2", "sweep=p", "seed=1,2")
    assert done.returncode == 0, done.stderr
    points = sorted(path.parent for path in (tmp_path / "outputs/sweeps/p").glob("*/status.json"))
    assert [json.loads((point / "status.json").read_text())["state"] for point in points] == ["done", "done"]
    attempts = [read_attempts(point)[0] for point in points]
    assert max(row["started"] for row in attempts) < min(row["ended"] for row in attempts)
    again = run(tmp_path, "hydra.launcher.parallel_points=2", "sweep=p", "seed=1,2")
    assert again.returncode == 0
    assert again.stderr.count("done already") == 2


def test_points_side_by_side_share_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7, 9, 11})
    assert share_cores(1) == [{3, 5, 7, 9, 11}]
    assert share_cores(2) == [{3, 5}, {7, 9, 11}]
    assert share_cores(6) == [{3}, {5}, {7}, {9}, {11}, {3}]
    monkeypatch.undo()
    core = min(os.sched_getaffinity(0))
    process = start_agent(tmp_path, None, {core}, python_path())  # fails for want of a plan, later
    assert os.sched_getaffinity(process.pid) == {core}
    assert process.wait(200) == 2


@pytest.mark.parametrize("module", ["prl.status", "prl.compare"])
def test_a_reader_that_leaves_is_no_error(tmp_path, module):
    point = tmp_path / "point"
    point.mkdir()
    status = {"state": "failed", "step": 1, "max_steps": 2, "attempt": 1, "updated": 0.0, "point_id": "x", "job": "sft"}
    failure = {"class": "oom", "role": "trainer/0", "message": "out of memory", "log_tail": []}
    (point / "status.json").write_text(json.dumps(status | {"failure": failure, "roles": {}}))
    plan = make_plan(compose(["seed=1"], "sft"))
    (point / "plan.json").write_text(plan_to_json(plan))
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", module, str(tmp_path)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=200)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_fits_no_node_is_refused_before_anything_is_written(tmp_path):
    big = ["deployment=colocated", "parallelism.dp_shard=9,12", "sft.batch_size=36"]
    done = run(tmp_path, "hydra/launcher=slurm", "hydra.launcher.dry_run=true", "sweep=d", *big)
    assert done.returncode == 2
    assert done.stderr.count("does not fit on a node") == 2
    assert "its roles take 12 devices" in done.stderr
    assert not list((tmp_path / "outputs/sweeps/d").glob("*/plan.json"))


def test_a_warning_too_early_is_refused_before_anything_is_written(tmp_path):
    early = ["slurm.time=1", "slurm.signal_delay_s=60", "seed=1"]
    done = run(tmp_path, "hydra/launcher=slurm", "hydra.launcher.dry_run=true", "sweep=d", *early)
    assert done.returncode == 2
    assert "slurm.time=1 is 60 s" in done.stderr
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("text", ["{{ job_nam }}", "{% if %}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}", b"\xff", None])
def test_a_template_that_cannot_be_used_is_refused_before_anything_is_written(tmp_path, text):
    template = tmp_path / "mine.j2"
    if text is not None:
        template.write_bytes(text.encode() if isinstance(text, str) else text)
    points = points_of(tmp_path, "seed=1", f"slurm.template_path={template}")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="template cannot be used"):
        refuse_impossible(points, LauncherSettings(), on_slurm=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_refused_sweep_leaves_no_lock(tmp_path):
    launcher = PointLauncher()
    launcher.sweep_dir = tmp_path / "outputs/sweeps/d"
    launcher.made = [launcher.sweep_dir / "multirun.yaml", launcher.sweep_dir, *launcher.sweep_dir.parents[:2]]
    launcher.sweep_dir.mkdir(parents=True)
    for name in ("multirun.yaml", SUBMIT_LOCK):
        (launcher.sweep_dir / name).touch()
    launcher._remove_what_hydra_made()
    assert not (tmp_path / "outputs").exists()


def test_a_sweep_without_m_is_refused(tmp_path):
    command = [sys.executable, "-m", "prl.rl", "+sweep=seeds"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert "-m +sweep=NAME" in done.stderr


@pytest.mark.slow
def test_programs_of_slurm_without_a_cluster_are_no_slurm(tmp_path):
    for name in ("sbatch", "scontrol", "squeue"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\necho 'fatal: Could not establish a configuration source' >&2\nexit 1\n")
        program.chmod(0o755)
    path = f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", "prl.sft", "-m", *SMALL, f"cache_dir={tmp_path}/cache", "sweep=s", "seed=1"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "outputs/sweeps/s").glob("*/status.json"))


def test_slurm_that_is_not_there_is_told(tmp_path):
    done = run(tmp_path, "hydra/launcher=slurm", "seed=1,2")
    assert done.returncode == 2
    assert "There is no SLURM here" in done.stderr
    assert "Traceback" not in done.stderr
