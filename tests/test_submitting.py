"""Commands that are interrupted or killed while sbatch has not answered: no job is left that no record names."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.slurm_queue import live_jobs
from launch.submitting import SUBMIT_LOCK, adopt, adopt_if_free
from launch.sweep_file import job_of_points, read_sweep
from prl.config.errors import UserError

# what a slow controller is: sbatch takes the job, and answers later
SBATCH = """#!/bin/sh
echo "$1" >> {0}/queue
touch {0}/taken
sleep 2
echo Submitted batch job $(wc -l < {0}/queue)
"""
SQUEUE = """#!/bin/sh
grep -n . {0}/queue | sed 's/:/ /'
"""
SUBMITS = """
import sys
from pathlib import Path
from types import SimpleNamespace
from launch import slurm
from launch.code_copy import FrozenCode
from launch.settings import LauncherSettings
place = Path(sys.argv[1])
shape = SimpleNamespace(describe=lambda: "1 node")
batches = [SimpleNamespace(points=[SimpleNamespace(path=place / name)], is_array=False, shape=shape) for name in "pq"]
slurm.freeze_code = lambda *given: FrozenCode(place, {})
slurm.make_batches = lambda *given: batches
slurm.render = lambda *given: "#!/bin/bash\\n"
try:
    slurm.submit(batches, place, LauncherSettings(max_array_size=9))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bin").mkdir()
    for name, script in (("sbatch", SBATCH), ("squeue", SQUEUE)):
        (tmp_path / "bin" / name).write_text(script.format(tmp_path))
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "sweep").mkdir()
    return tmp_path


def interrupted(cluster: Path, number: int) -> subprocess.CompletedProcess[str]:
    """A command that gets the signal while sbatch has taken its job; as the terminal does, its children get it, too."""
    # what is started in the background of a script ignores Ctrl-C, and hands that on
    command = ["env", "--default-signal=INT", sys.executable, "-c", SUBMITS, str(cluster / "sweep")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not (cluster / "taken").exists():
        assert child.poll() is None, child.communicate()
        time.sleep(0.02)
    os.killpg(child.pid, number)
    out, err = child.communicate(timeout=60)
    return subprocess.CompletedProcess(command, child.returncode, out, err)


def test_ctrl_c_takes_effect_once_the_job_is_recorded(cluster: Path) -> None:
    done = interrupted(cluster, signal.SIGINT)
    assert done.returncode == 130, done.stderr
    assert job_of_points(read_sweep(cluster / "sweep")) == {"p": "1"}
    assert (cluster / "queue").read_text().splitlines() == [str(cluster / "sweep" / "slurm" / "1.sbatch")]
    assert "interrupted; submitted so far: 1; python -m prl.cancel" in done.stderr
    assert not list((cluster / "sweep" / "slurm").glob("*.submitting"))


@pytest.mark.parametrize("how", [adopt, adopt_if_free])
def test_the_job_of_a_killed_command_is_found_by_its_script(cluster: Path, monkeypatch, how) -> None:
    assert interrupted(cluster, signal.SIGKILL).returncode == -signal.SIGKILL
    sweep = cluster / "sweep"
    (sweep / SUBMIT_LOCK).touch()
    assert job_of_points(read_sweep(sweep)) == {}
    os.symlink(sweep, cluster / "link")
    monkeypatch.chdir(cluster)
    for place in (Path("link"), sweep):  # as somebody types it, from wherever
        how(place)
        assert job_of_points(read_sweep(sweep)) == {"p": "1"}
    assert len(read_sweep(sweep)["submissions"]) == 1


def test_who_looks_waits_for_no_command_that_submits(cluster: Path) -> None:
    sweep = cluster / "sweep"
    (sweep / "slurm").mkdir()
    (sweep / "slurm" / "1.submitting").write_text(json.dumps({"time": 1.0, "is_array": False, "points": ["p"]}))
    holder = subprocess.Popen(["flock", sweep / SUBMIT_LOCK, "sleep", "20"], start_new_session=True)
    try:
        while not (sweep / SUBMIT_LOCK).exists():
            time.sleep(0.02)
        time.sleep(0.2)
        started = time.monotonic()
        adopt_if_free(sweep)
        assert time.monotonic() - started < 5
        assert (sweep / "slurm" / "1.submitting").exists()
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.wait()


def test_what_sbatch_never_took_is_forgotten_in_time(cluster: Path) -> None:
    place = cluster / "sweep" / "slurm" / "1.submitting"
    place.parent.mkdir()
    place.write_text(json.dumps({"time": 1.0, "is_array": False, "points": ["p"]}))
    (cluster / "queue").touch()
    adopt(cluster / "sweep")
    assert place.exists()
    os.utime(place, (1.0, 1.0))
    adopt(cluster / "sweep")
    assert not place.exists()
    assert job_of_points(read_sweep(cluster / "sweep")) == {}


def test_slurm_that_does_not_answer_is_told_to_who_submits(cluster: Path) -> None:
    place = cluster / "sweep" / "slurm" / "1.submitting"
    place.parent.mkdir()
    place.write_text("{}")
    (cluster / "bin" / "squeue").write_text("#!/bin/sh\necho slurm_load_jobs error >&2\nexit 1\n")
    with pytest.raises(UserError, match="squeue failed"):
        adopt(cluster / "sweep")
    adopt_if_free(cluster / "sweep")
    with pytest.raises(UserError):
        live_jobs({"1"})
