"""Dry runs and sbatch scripts as recorded: PRL_RECORD=1 pytest tests/test_dry_run.py records them anew."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml

from launch.dry_run import differences
from launch.roles import COMMANDS, SECTIONS
from prl.planning.run_plan import RoleName, plan_from_json

GOLDEN = Path(__file__).parent / "golden"
ASKED = [
    "slurm.account=lab",
    "slurm.qos=high",
    "slurm.cpus_per_task=8",
    "slurm.mem=64G",
    "slurm.setup=['module load cuda','export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0']",
    "slurm.container=/images/prl torch.sqsh",
]
SCRIPTS = {
    "slurm": [],
    "slurm_h200": ["hydra/launcher=slurm_h200", "deployment.device=cuda"],
    "slurm_preemptible": ["hydra/launcher=slurm_preemptible"],
    "slurm_asked": [*ASKED, "hydra.launcher.array_parallelism=2", "sweep=with space"],
    "slurm_two_nodes": ["deployment=multi_node", "deployment.device=cuda", "deployment.gpus_per_node=2"],
}


def dry_run(directory: Path, *overrides: str) -> str:
    launcher = [] if any(line.startswith("hydra/launcher") for line in overrides) else ["hydra/launcher=slurm"]
    name = [] if any(line.startswith("sweep=") for line in overrides) else ["sweep=s"]
    command = [sys.executable, "-m", "prl.rl", "-m", "hydra.launcher.dry_run=true", *launcher, *name, *overrides]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def without_places(text: str, directory: Path) -> str:
    """Without what differs between machines, or when a key is added to the schema."""
    text = text.replace(str(directory.resolve()), "DIR").replace(sys.executable, "PYTHON")
    return re.sub(r"\b[0-9a-f]{10}\b", "ID", re.sub(r"code/[0-9a-f]{12}", "code/HASH", text))


def check(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("PRL_RECORD"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_as_recorded(tmp_path, name):
    dry_run(tmp_path, "seed=1,2,3", *SCRIPTS[name])
    (script,) = tmp_path.glob("outputs/sweeps/*/slurm/*.sbatch")
    check(f"{name}.sbatch", without_places(script.read_text(), tmp_path))
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0


@pytest.mark.slow
def test_what_a_dry_run_of_two_nodes_prints(tmp_path):
    """The recorded text leaves out the first point's whole configuration, which changes with every key."""
    printed = dry_run(tmp_path, "seed=1,2", "optim.lr=0.002", *SCRIPTS["slurm_two_nodes"])
    first, second = printed.split("== seed-2")
    first = "".join(line for line in first.splitlines(keepends=True) if not line.startswith("    "))
    check("dry_run_two_nodes.txt", without_places(f"{first}== seed-2{second}", tmp_path))
    for path in tmp_path.glob("outputs/sweeps/s/*/plan.json"):
        plan = plan_from_json(path.read_text())
        roles = {role.role for role in plan.roles}
        assert {file.name for file in (path.parent / "roles").iterdir()} == {f"{role}.yaml" for role in roles} | {
            COMMANDS
        }
        trainer = yaml.safe_load((path.parent / "roles/trainer.yaml").read_text())
        assert trainer["optim"]["lr"] == 0.002
        assert trainer["parallelism"] == plan.config.parallelism.model_dump(mode="json")
        assert trainer["seed"] == plan.config.seed


def test_differences():
    assert differences({"a": {"b": 1, "c": [1]}, "d": 2}, {"a": {"b": 1, "c": [2]}, "e": {"f": 3}}) == {
        "a.c": [1],
        "d": 2,
        "e.f": None,
    }


def test_every_kind_of_role_is_shown():
    assert set(SECTIONS) == set(get_args(RoleName))
