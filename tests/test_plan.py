"""Plans: recorded layouts, purity, identity."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prl.config import compose
from prl.planning import make_plan, plan_from_json, plan_to_json, point_id, warm_start_plan

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parent.parent
LAYOUTS = {
    "rl_default": ("rl", []),
    "rl_colocated": ("rl", ["deployment=colocated"]),
    "rl_fsdp": ("rl", ["parallelism=fsdp"]),
    "rl_hsdp2_colocated_2_engines": (
        "rl",
        ["parallelism=hsdp2", "deployment=colocated", "deployment.num_infer_gpus=2"],
    ),
    "rl_2_engines_4_trainers": ("rl", ["deployment.num_infer_gpus=2", "deployment.num_train_gpus=4"]),
    "rl_two_envs": ("rl", ["env=[reverse_text,countdown]"]),
    "sft_default": ("sft", []),
    "sft_fsdp": ("sft", ["parallelism=fsdp"]),
    "inference_2_engines": ("inference", ["deployment.num_infer_gpus=2"]),
}


def layout(name: str) -> str:
    """What a plan decides, without the config that it was given: numbers may be tuned, layouts may not drift."""
    job, overrides = LAYOUTS[name]
    plan = make_plan(compose(overrides, job))
    content = plan.model_dump(mode="json", include={"mesh", "num_nodes", "gpus_per_node", "roles"})
    return json.dumps(content, sort_keys=True, indent=1) + "\n"


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_is_as_recorded(name: str) -> None:
    """Record anew, after looking at the difference: PRL_RECORD=1 pytest tests/test_plan.py."""
    path = GOLDEN / f"{name}.json"
    if os.environ.get("PRL_RECORD"):
        path.write_text(layout(name))
    assert layout(name) == path.read_text()


def test_plan_is_the_same_bytes_in_another_process_and_survives_json(tmp_path: Path) -> None:
    args = [sys.executable, "-m", "prl.plan", "--json", "parallelism=fsdp"]
    done = subprocess.run(
        args,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7", "HOME": "/nowhere", "CUDA_VISIBLE_DEVICES": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    plan = make_plan(compose(["parallelism=fsdp"]))
    assert plan_to_json(plan_from_json(done.stdout)) == done.stdout
    assert plan_from_json(done.stdout).roles == plan.roles
    assert done.stdout == plan_to_json(plan)
    assert list(tmp_path.iterdir()) == []


def test_table_names_every_role(tmp_path: Path) -> None:
    args = [sys.executable, "-m", "prl.plan", "-m", "memory=none,tight"]
    done = subprocess.run(args, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    for role in ("inference/0", "orchestrator", "trainer/0", "env/reverse_text"):
        assert done.stdout.count(f"\n{role} ") == 2
    assert list(tmp_path.iterdir()) == [], "planning a sweep makes no directory"


def test_disaggregated_puts_inference_first_and_the_trainer_next() -> None:
    plan = make_plan(compose(["deployment.num_infer_gpus=2", "deployment.num_train_gpus=4"]))
    assert [role.devices for role in plan.roles_of("inference")] == [(0,), (1,)]
    assert [role.devices for role in plan.roles_of("trainer")] == [(2,), (3,), (4,), (5,)]
    assert plan.mesh.world_size == plan.mesh.dp_shard == 4


@pytest.mark.parametrize("override", ["output_dir=x", "cache_dir=y", "logging=none", "name=z", "sweep=s"])
def test_paths_and_labels_do_not_change_the_point(override: str) -> None:
    assert point_id(compose([override])) == point_id(compose([]))


@pytest.mark.parametrize("override", ["seed=1", "memory=tight", "optim.lr=1", "warm_start=none", "parallelism=fsdp"])
def test_what_is_computed_changes_the_point(override: str) -> None:
    assert point_id(compose([override])) != point_id(compose([]))


def test_two_spellings_of_one_configuration_are_one_point() -> None:
    assert point_id(compose(["algo=sync"])) == point_id(compose(["algo.max_off_policy_steps=0"]))


def test_warm_start_is_an_sft_job_of_the_same_model() -> None:
    plan = make_plan(compose(["warm_start.max_steps=7", "parallelism=fsdp"]))
    warm = warm_start_plan(plan)
    assert warm is not None
    assert (warm.config.job, warm.config.max_steps, warm.config.model) == ("sft", 7, plan.config.model)
    assert [role.name for role in warm.roles] == [f"trainer/{rank}" for rank in range(4)]
    assert warm_start_plan(warm) is None
    assert warm_start_plan(make_plan(compose(["warm_start=none"]))) is None
    assert plan_from_json(plan_to_json(warm)) == warm
