"""conf/experiment: each composes with axes, plans the nodes that it says, and is ready to be submitted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from runs import environment

from prl.config import compose
from prl.config.errors import ConfigError
from prl.config.locate import config_groups
from prl.config.sweep import compose_points
from prl.planning import make_plan

LAYOUTS = {  # experiment -> job, nodes, devices of a node, engines, trainer ranks
    "lora_one_gpu": ("rl", 1, 1, 1, 1),
    "math_qwen3_4b": ("rl", 1, 8, 4, 4),
    "math_qwen3_30b_a3b": ("rl", 2, 8, 4, 8),
    "math_glm_5": ("rl", 28, 8, 12, 128),
    "sft_qwen3_30b_a3b": ("sft", 4, 8, 0, 32),
}


@pytest.mark.parametrize("name", config_groups()["experiment"])
def test_it_takes_the_devices_that_it_says(name):
    job, *layout = LAYOUTS[name]
    config = compose([f"+experiment={name}"], job)
    plan = make_plan(config)
    roles = [len(plan.roles_of(kind)) for kind in ("inference", "trainer")]
    assert [plan.num_nodes, plan.gpus_per_node, *roles] == layout
    assert (config.name, config.choices["experiment"]) == (name, name)
    assert config.model.path is not None


@pytest.mark.parametrize("name", config_groups()["experiment"])
def test_axes_and_overrides_go_on_top_of_it(name):
    job = LAYOUTS[name][0]
    points = compose_points([f"+experiment={name}", "memory=balanced,tight", "optim.lr=0.5", "seed=1,2"], job)
    assert [(point.choices["memory_recipe"], point.seed) for point in points] == [
        ("balanced", 1),
        ("balanced", 2),
        ("tight", 1),
        ("tight", 2),
    ]
    assert {point.optim.lr for point in points} == {0.5}
    assert {point.model.name for point in points} == {compose([f"+experiment={name}"], job).model.name}


@pytest.mark.slow
@pytest.mark.parametrize("name", config_groups()["experiment"])
def test_its_seeds_are_ready_to_be_submitted(name, tmp_path: Path):
    job = LAYOUTS[name][0]
    words = [f"+experiment={name}", "+sweep=seeds", "hydra/launcher=slurm", "hydra.launcher.dry_run=true"]
    line = [sys.executable, "-m", f"prl.{job}", "-m", *words]
    done = subprocess.run(line, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (script,) = (tmp_path / "outputs/sweeps/seeds/slurm").glob("*.sbatch")
    assert f"#SBATCH --nodes={LAYOUTS[name][1]}\n" in script.read_text()
    assert "#SBATCH --array=0-7\n" in script.read_text()


@pytest.mark.parametrize(("name", "job", "right"), [("sft_qwen3_30b_a3b", "rl", "sft"), ("lora_one_gpu", "sft", "rl")])
def test_one_of_another_job_is_refused_with_that_job(name, job, right):
    with pytest.raises(ConfigError) as refused:
        compose([f"+experiment={name}"], job)
    (violation,) = refused.value.violations
    assert f"python -m prl.{right}" in violation.fix
    compose([f"+experiment={name}"], right)
