"""Wrong keys and values of hydra.launcher: each refusal says what, where and why, and its remedy works when typed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
from hydra.core.plugins import Plugins
from runs import environment

from launch.hydra_plugin import register_plugins
from launch.points import Point
from launch.reading import settings_of
from launch.settings import LauncherSettings
from launch.submitit_keys import refuse_contradictions
from prl.config import compose
from prl.config.composing import compose_yaml, problems
from prl.config.errors import ConfigError, UserError
from prl.config.search_path import use_directories
from prl.planning.planner import make_plan

NODE = "hydra.launcher."
WRONG = [  # launcher, what is typed, what is to be typed in its place; "": nothing
    ("slurm", "timeout=5", "slurm.time=5"),
    ("slurm", "+timeout=5", "slurm.time=5"),
    ("slurm", "timeout=5m", "slurm.time=1-00:00:00"),
    ("slurm", "walltime=2:00:00", "slurm.time=2:00:00"),
    ("slurm", "timeout_min=5", "slurm.time=5"),
    ("slurm", "slurm.time=5m", "slurm.time=1-00:00:00"),
    ("slurm", "slurm.mem=lots", "slurm.mem=null"),
    ("slurm", "mem_gb=4", "slurm.mem=4G"),
    ("slurm", "name=mine", "slurm.job_name=mine"),
    ("slurm", "partitions=x", "slurm.partition=x"),
    ("slurm", "partition=x", "slurm.partition=x"),
    ("slurm", "slurm.partitions=x", "slurm.partition=x"),
    ("slurm", "slurm.setup=module", "slurm.setup=[module]"),
    ("slurm", "setup=module", "slurm.setup=[module]"),
    ("slurm", "slurm.signal_delay_s=2m", "slurm.signal_delay_s=120"),
    ("slurm", "slurm=5", "slurm.time=2:00:00"),
    ("slurm", "nodes=two", ""),
    ("slurm", "gpus_per_node=8", ""),
    ("slurm", "additional_parameters.exclusive=true", ""),
    ("slurm", "parallel_points=2", "array_parallelism=2"),
    ("slurm", "parallel_points=two", "parallel_points=auto"),
    ("slurm", "max_retries=many", "slurm.max_retries=2"),
    ("auto", "timeout=5", "slurm.time=5"),
    ("local", "timeout=5", "timeout_min=5"),
    ("local", "timeout=5m", "timeout_min=60"),
    ("local", "array_parallelism=2", "parallel_points=2"),
    ("local", "max_array_size=2", "max_array_size=null"),
    ("submitit_slurm", "timeout=5", "timeout_min=5"),
    ("submitit_slurm", "timeout=5m", "timeout_min=60"),
    ("submitit_slurm", "timeout_min=5m", "timeout_min=60"),
    ("submitit_slurm", "timeout_min=-3", "timeout_min=60"),
    ("submitit_slurm", "mem_gb=-3", "mem_gb=null"),
    ("submitit_slurm", "signal_delay_s=0", "signal_delay_s=120"),
    ("submitit_slurm", "max_num_timeout=-1", "max_num_timeout=0"),
    ("submitit_slurm", "cpus_per_task=0", "cpus_per_task=null"),
    ("submitit_slurm", "array_parallelism=0", "array_parallelism=256"),
    ("submitit_slurm", "partitions=x", "partition=x"),
    ("submitit_slurm", "slurm.partition=x", "partition=x"),
    ("submitit_slurm", "nodes=two", "nodes=1"),
    ("submitit_slurm", "parallel_points=two", "array_parallelism=256"),
    ("submitit_slurm", "setup=module", ""),
    ("submitit_local", "timeout=5", "timeout_min=5"),
    ("submitit_local", "timeout_min=-3", "timeout_min=60"),
]


def read(*overrides: str) -> LauncherSettings:
    """As an entry point, with and without -m."""
    register_plugins()
    if found := problems(list(overrides), "rl"):
        raise ConfigError(found)
    return settings_of(compose_yaml(list(overrides)).hydra.launcher)


def of_the_node(key: str) -> str:
    sign = "+" * key.startswith("+")
    return f"{sign}{NODE}{key.removeprefix(sign)}"


def refusal(*overrides: str) -> UserError:
    with pytest.raises(ConfigError) as refused:
        read(*overrides)
    (violation,) = refused.value.violations
    return violation


@pytest.mark.parametrize(("launcher", "typed", "remedy"), WRONG, ids=[f"{of} {typed}" for of, typed, _ in WRONG])
def test_a_wrong_key_is_refused_with_a_remedy_that_works(launcher, typed, remedy):
    told = refusal(f"hydra/launcher={launcher}", of_the_node(typed))
    assert told.where == NODE + typed.lstrip("+").partition("=")[0]
    assert told.what
    assert told.why
    if launcher == "submitit_slurm" and not told.what.startswith("This launcher has no key"):
        assert "slurm." not in told.render(), "keys of the other launchers"
    if remedy:
        assert told.fix == NODE + remedy
        read(f"hydra/launcher={launcher}", told.fix)
    else:
        assert told.fix.startswith("leave it out")


@pytest.mark.parametrize(
    ("choice", "meant"), [("slurmm", "slurm"), ("submitit", "submitit_slurm"), ("loca", "local"), ("x", "auto")]
)
def test_a_launcher_that_there_is_not_is_refused_with_those_that_there_are(choice, meant):
    told = refusal(f"hydra/launcher={choice}")
    assert told.fix == f"hydra/launcher={meant}"
    assert "submitit_slurm" in told.why
    assert "basic" not in told.why
    read(told.fix)


def test_all_wrong_values_of_submitit_are_told_at_once():
    values = [f"{NODE}{value}" for value in ("timeout_min=-5", "mem_gb=-3", "tasks_per_node=2")]
    with pytest.raises(ConfigError) as refused:
        read("hydra/launcher=submitit_slurm", *values)
    assert {told.where for told in refused.value.violations} == {value.partition("=")[0] for value in values}


def mine(folder, text):
    """A file for hydra/launcher of somebody's own."""
    (folder / "hydra/launcher").mkdir(parents=True)
    (folder / "hydra/launcher/mine.yaml").write_text(text)
    return "hydra/launcher=mine"


THEIRS = "_target_: hydra_plugins.hydra_submitit_launcher.submitit_launcher"


def test_a_file_with_submitits_own_class_is_read_as_submitits_launcher(tmp_path):
    """The usual form in other projects: some keys, and no schema beneath."""
    chosen = mine(tmp_path, f"{THEIRS}.SlurmLauncher\npartition: main\ntimeout_min: 30\ncomment: it's mine\n")
    use_directories(str(tmp_path), [])
    try:
        settings = read(chosen)
        assert (settings.mode, settings.slurm.partition, str(settings.slurm.time)) == ("slurm", "main", "30")
        assert settings.slurm.job_name is None
        (line,) = settings.slurm.sbatch
        assert shlex.split(line) == ["--comment=it's mine"]
        assert read(chosen, "+hydra.launcher.dry_run=true").dry_run
        told = refusal(chosen, "hydra.launcher.dry_run=true")
        assert told.fix == "+hydra.launcher.dry_run=true"
        assert refusal(chosen, "+hydra.launcher.dry_runn=true").what.startswith("This launcher has no key 'dry_runn'")
        assert (
            Plugins.instance()
            .instantiate_launcher.__self__.class_name_to_class[
                "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"
            ]
            .__name__
            == "SubmititSlurmLauncher"
        )
    finally:
        use_directories(None, [])


def test_a_file_with_submitits_local_class_is_read_as_that(tmp_path):
    chosen = mine(tmp_path, f"{THEIRS}.LocalLauncher\ntimeout_min: 7\n")
    use_directories(str(tmp_path), [])
    try:
        settings = read(chosen)
        assert (settings.mode, settings.timeout_min) == ("local", 7)
    finally:
        use_directories(None, [])


@pytest.mark.parametrize("target", ["hydra_plugins.hydra_ray_launcher.ray_launcher.RayLauncher", "joblib.Launcher"])
def test_a_launcher_that_is_not_installed_is_told_without_a_trace(tmp_path, target):
    chosen = mine(tmp_path, f"_target_: {target}\n")
    command = [sys.executable, "-m", "prl.sft", "-m", "--config-dir", str(tmp_path), chosen, "seed=1"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert target in done.stderr


def test_what_is_below_another_launcher_in_a_file_is_told_with_its_name(tmp_path):
    (tmp_path / "local").mkdir()
    text = "# @package _global_\nhydra: {launcher: {slurm: {account: me}}}\n"
    (tmp_path / "local/default.yaml").write_text(text)
    use_directories(str(tmp_path), [])
    try:
        told = refusal("hydra/launcher=submitit_slurm")
    finally:
        use_directories(None, [])
    assert told.where == str(tmp_path / "local/default.yaml")
    assert "node `slurm`" in told.fix


def test_a_plan_refuses_what_a_submission_would(tmp_path):
    words = ["hydra/launcher=submitit_slurm", f"{NODE}nodes=2", f"{NODE}timeout_min=-5"]
    command = [sys.executable, "-m", "prl.plan", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stdout
    assert f"leave it out, or {NODE}nodes=1" in done.stderr
    assert f"{NODE}timeout_min=-5 is not valid" in done.stderr


def test_keys_of_a_launcher_pass():
    assert read("hydra/launcher=slurm", f"{NODE}slurm.time=5", f"{NODE}array_parallelism=2").slurm.time == 5
    assert read("hydra/launcher=slurm", f"{NODE}slurm={{time: 5}}").slurm.time == 5
    assert read("hydra/launcher=local", f"{NODE}timeout_min=5", f"{NODE}parallel_points=2").parallel_points == 2
    line = f"{NODE}additional_parameters.exclusive=true"
    assert read("hydra/launcher=submitit_slurm", line).slurm.sbatch == ("--exclusive",)


@pytest.mark.parametrize(
    "line",
    ["--nodes=4", "-N 4", "--ntasks=8", "--ntasks-per-node=8", "--ntasks-per-node=16", "--ntasks-per-gpu 1"]  # noqa: RUF005
    + ["--array=0-3", "--output=x.log", "--error=x.err", "-o x.log", "--exclusive --nodes=2"],
)
def test_lines_of_sbatch_that_contradict_the_plan_are_refused_by_name(line):
    told = refusal("hydra/launcher=slurm", f"{NODE}slurm.sbatch=['{line}']")
    assert (told.where, line in told.what) == (f"{NODE}slurm.sbatch", True)
    option = next(word for word in re.split("[= ]", line) if word != "--exclusive")
    assert told.fix.startswith(f"leave {option} out")


@pytest.mark.parametrize("key", ["nodes", "ntasks", "ntasks_per_node", "ntasks-per-node", "array", "output", "error"])
def test_additional_parameters_that_contradict_the_plan_are_refused_by_name(key):
    told = refusal("hydra/launcher=submitit_slurm", f"{NODE}additional_parameters.{key}=2")
    assert told.where == f"{NODE}additional_parameters.{key}"
    assert told.fix.startswith(f"leave --{key.replace('_', '-')} out")


@pytest.mark.parametrize(
    ("key", "value", "own"),
    [("time", "5", "timeout_min"), ("signal", "USR1@10", "signal_delay_s"), ("job-name", "x", "name"),
     ("no-requeue", "true", "max_num_timeout=0")],
)  # fmt: skip
def test_lines_that_have_keys_of_their_own_are_refused_with_them(key, value, own):
    told = refusal("hydra/launcher=submitit_slurm", f"{NODE}additional_parameters.{key}={value}")
    assert told.where == f"{NODE}additional_parameters.{key}"
    assert f"leave --{key} out; {NODE}{own}" in told.fix
    line = f"--{key}" if value == "true" else f"--{key}={value}"
    told = refusal("hydra/launcher=slurm", f"{NODE}slurm.sbatch=['{line}']")
    assert f"leave --{key} out; slurm." in told.fix


@pytest.mark.parametrize(
    ("lines", "gres", "refused"),
    [
        ([], "gpu:1", "--gres=gpu:1"), ([], "gpu", "--gres=gpu"), ([], "gpu:h100:2,lscratch:9", ""), ([], "gpu:8", ""),
        ([], "lscratch:9", ""), (["--gres=gpu:1"], None, "--gres=gpu:1"), (["--gpus-per-node=h100:1"], None, "h100:1"),
        (["--gpus-per-task 1"], None, "--gpus-per-task 1"), (["--gpus=3"], None, "--gpus=3"), (["--gpus=4"], None, ""),
        (["--gpus-per-socket=1"], None, ""),
    ],
)  # fmt: skip
def test_fewer_gpus_than_a_plan_takes_are_refused_wherever_they_are_asked_for(lines, gres, refused):
    """Two nodes with two devices each."""
    shape = ["deployment=multi_node", "deployment.device=cuda", "deployment.gpus_per_node=2"]
    words = [*shape, *([f"slurm.gres='{gres}'"] if gres else []), f"slurm.sbatch={lines}".replace("'", '"')]
    config = compose([*words, "output_dir=/tmp/point"])
    told = []
    try:
        refuse_contradictions([Point((), make_plan(config))], LauncherSettings())
    except ConfigError as error:
        told = [one.what for one in error.violations]
    assert len(told) == bool(refused)
    assert refused in "".join(told)


def test_other_lines_of_sbatch_pass():
    lines = ["--gres=gpu:h100:8", "--gpus-per-node=h100:8", "--ntasks-per-node=1", "--exclusive", "--nodelist=n1"]
    lines += ["--nice", "-x n7", "--comment=more than -n nodes", "--export=ALL"]
    quoted = ",".join(f"'{line}'" for line in lines)
    assert read("hydra/launcher=slurm", f"{NODE}slurm.sbatch=[{quoted}]").slurm.sbatch == tuple(lines)
    given = f"{NODE}additional_parameters={{gres: 'gpu:h100:8', ntasks_per_node: 1}}"
    found = read("hydra/launcher=submitit_slurm", given).slurm.sbatch
    assert found == ("--gres=gpu:h100:8", "--ntasks-per-node=1")


@pytest.mark.slow
def test_lines_of_a_point_are_refused_before_a_script_is_written(tmp_path):
    words = ["hydra/launcher=slurm", f"{NODE}dry_run=true", "slurm.sbatch=['--nodes=3']"]
    command = [sys.executable, "-m", "prl.rl", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, "slurm.sbatch has '--nodes=3'" in done.stderr) == (2, True), done.stderr
    assert list(tmp_path.rglob("*.sbatch")) == []


@pytest.mark.parametrize("words", [["-m", "seed=1,2"], []], ids=["sweep", "alone"])
def test_an_entry_point_says_it_before_anything_is_made(tmp_path, words):
    line = ["hydra/launcher=slurm", f"{NODE}dry_run=true", f"{NODE}timeout=5"]
    command = [sys.executable, "-m", "prl.rl", *words, *line]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert f"do:    {NODE}slurm.time=5" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["-m", "seed=1,2"], []], ids=["sweep", "alone"])
def test_keys_that_contradict_the_plan_are_told_with_the_others(tmp_path, words):
    wrong = [f"{NODE}{value}" for value in ("tasks_per_node=2", "nodes=2", "gpus_per_node=3", "mem_gb=-3")]
    command = [sys.executable, "-m", "prl.rl", *words, "hydra/launcher=submitit_slurm", *wrong]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("4 problems")
    assert f"do:    leave it out, or {NODE}nodes=1" in done.stderr
    assert f"do:    leave it out, or {NODE}gpus_per_node=2" in done.stderr
    assert f"do:    {NODE}tasks_per_node=1" in done.stderr
