"""Runs that go on from a checkpoint of another one (`ckpt.from_run`): what they begin with, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import SMALL, rows, run, series
from torch import nn

from prl.config import compose
from prl.config.branching import RECORD, check_start
from prl.config.errors import ConfigError, UserError
from prl.config.schema import RunConfig
from prl.planning.planner import make_plan
from prl.planning.run_plan import plan_to_json
from prl.runtime.branching import begun_with, first_checkpoint
from prl.runtime.directory.beginning import refuse_other_weights
from prl.runtime.directory.checkpoints import commit, parts_of, staging_dir, step_dir, steps
from prl.runtime.launch import has_worked
from prl.runtime.people.faults import find_faults
from prl.status import render_run
from prl.trainer.checkpoint import TrainerCheckpointer

SAME = [*SMALL, "algo=sync", "debug.num_threads=1", "optim.schedule.type=constant", "ckpt.interval=2"]


def make_run(path: Path, saved: tuple[int, ...] = (2, 4), overrides: tuple[str, ...] = (), job: str = "rl") -> Path:
    """A directory as a run leaves it, with small files for checkpoints."""
    path.mkdir(parents=True)
    (path / "plan.json").write_text(plan_to_json(make_plan(compose(list(overrides), job))))
    (path / "beginning.json").write_text('{"sha256": "of the other"}')
    for step in saved:
        for part in parts_of(job):
            (staging_dir(path, step) / part).mkdir()
            (staging_dir(path, step) / part / "data").write_text(f"{part} at {step}")
        commit(path, step, keep=9, parts=parts_of(job))
    return path


def branch_of(run_dir: Path, *more: str) -> RunConfig:
    config = compose([f"ckpt.from_run={run_dir}", "max_steps=20", *more])
    check_start(config)
    return config


def begin(config: RunConfig, path: Path) -> int:
    path.mkdir(exist_ok=True)
    return first_checkpoint(config, path, lambda line: None)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return make_run(tmp_path / "other")


def test_the_first_checkpoint_is_the_others_and_outlives_it(other: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    assert begin(branch_of(other), mine) == 4
    assert (mine / "checkpoints/step_4/trainer/data").samefile(other / "checkpoints/step_4/trainer/data")
    assert json.loads((mine / "beginning.json").read_text()) == {"sha256": "of the other"}
    shutil.rmtree(other)
    assert (mine / "checkpoints/step_4/orchestrator/data").read_text() == "orchestrator at 4"
    assert steps(mine) == [4]


def test_what_is_not_trained_is_that_of_the_other(other: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    begin(branch_of(other), mine)
    with pytest.raises(UserError, match="have been replaced") as refused:
        refuse_other_weights(mine, tmp_path / "others", "frozen weights")
    assert f"model.path, model.init_seed and warm_start as {other} has them, if they differ" in refused.value.fix


def test_what_it_begins_with_is_no_work_of_its_own(other: Path, tmp_path: Path) -> None:
    """A run that an input error ends at its start removes its directory."""
    mine = tmp_path / "mine"
    begin(branch_of(other), mine)
    assert not has_worked(mine)
    shutil.copytree(step_dir(mine, 4), step_dir(mine, 5))
    assert has_worked(mine)
    assert has_worked(other)


def test_a_run_that_starts_over_begins_where_it_began(other: Path, tmp_path: Path) -> None:
    """`last` is settled once, though the other run has gone on."""
    mine, config = tmp_path / "mine", branch_of(other)
    begin(config, mine)
    shutil.rmtree(mine / "checkpoints")
    staging_dir(mine, 4).joinpath("half").write_text("of an attempt that was killed")
    shutil.copytree(step_dir(other, 4), staging_dir(other, 6), dirs_exist_ok=True)
    commit(other, 6, keep=9, parts=parts_of("rl"))
    assert begin(config, mine) == 4
    assert not (step_dir(mine, 4) / "half").exists()
    assert json.loads((mine / RECORD).read_text())["step"] == 4


def test_files_are_copied_where_they_cannot_be_linked(
    other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Any, target: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    assert begin(branch_of(other, "ckpt.from_step=2"), tmp_path / "mine") == 2
    data = tmp_path / "mine/checkpoints/step_2/trainer/data"
    assert data.read_text() == "trainer at 2"
    assert not data.samefile(other / "checkpoints/step_2/trainer/data")


def test_a_newer_one_is_taken_where_the_last_is_dropped_meanwhile(
    other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, seen = os.link, []

    def dropped_at_first(source: Path, target: Path) -> None:
        if not seen:
            shutil.rmtree(step_dir(other, 4))
        seen.append(source)
        link(source, target)

    monkeypatch.setattr(os, "link", dropped_at_first)
    assert begin(branch_of(other), tmp_path / "mine") == 2
    assert steps(tmp_path / "mine") == [2]


def test_what_was_killed_over_taking_its_first_checkpoint_has_not_begun(other: Path, tmp_path: Path) -> None:
    """And says so; and where the other run is gone by then, that it is."""
    branch = make_run(tmp_path / "mine", saved=())
    config = branch_of(other)
    begin(config, branch)
    assert find_faults(branch) == []
    (branch / "metrics").mkdir()
    (branch / "metrics/trainer.0.jsonl").write_text("{}")
    assert "metrics say that the run has begun" in str(find_faults(branch))
    shutil.rmtree(branch / "checkpoints")
    shutil.rmtree(other)
    with pytest.raises(UserError, match=f"There is no directory {other}"):
        begin(config, branch)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (["ckpt.from_step=3"], "no checkpoint of step 3."),
        (["ckpt.from_step=3"], "here there are: 2, 4"),
        (["max_steps=4"], "Nothing is left to train behind step 4"),
        (["max_steps=4"], "max_steps=8, or an earlier ckpt.from_step"),
    ],
)
def test_what_cannot_be_gone_on_from_is_refused(other: Path, tmp_path: Path, said: list[str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        begin(branch_of(other, *said), tmp_path / "mine")
    assert message in str(refused.value.render())
    assert not steps(tmp_path / "mine")


def test_damaged_checkpoints_are_passed_over_or_refused(other: Path, tmp_path: Path) -> None:
    (step_dir(other, 4) / "trainer/data").write_text("trainer at 5")
    assert begin(branch_of(other), tmp_path / "mine") == 2
    with pytest.raises(UserError, match="The checkpoint of step 4 is damaged"):
        begin(branch_of(other, "ckpt.from_step=4"), tmp_path / "another")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (["model=tiny_qwen3"], "model=tiny_qwen3_moe, as there"),
        (["optim=adamw"], "has optim.type=muon"),
        (["memory=lora"], "has memory_recipe.lora.rank=0"),
        (["model.tokenizer=gpt2"], "has model.tokenizer=byte"),
    ],
)
def test_what_a_checkpoint_has_not_the_state_of_is_refused(other: Path, said: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        branch_of(other, *said)
    assert message in refused.value.render()
    assert "weights alone" not in refused.value.render(), "there is no export"
    (other / "export").mkdir()
    with pytest.raises(ConfigError, match="its weights alone: "):
        branch_of(other, *said)


def test_a_step_that_is_not_there_is_refused_before_any_point_starts(other: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no checkpoint of step 3"):
        branch_of(other, "ckpt.from_step=3")
    with pytest.raises(ConfigError, match=r"Nothing is left to train behind step 4"):
        branch_of(other, "ckpt.from_step=4", "max_steps=4")
    with pytest.raises(ConfigError, match=r"has no checkpoint yet"):
        branch_of(make_run(tmp_path / "young", saved=()))


def test_adapters_are_scaled_as_they_were(tmp_path: Path) -> None:
    source = make_run(tmp_path / "lora", overrides=("memory=lora",))
    branch_of(source, "memory=lora")
    with pytest.raises(ConfigError, match=r"has memory_recipe.lora.alpha=16"):
        branch_of(source, "memory=lora", "memory_recipe.lora.alpha=64")


@pytest.mark.parametrize("name", ["plan.json", "beginning.json", "checkpoints"])
def test_what_may_not_be_read_is_said_to_be_so(other: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root reads everything, so that the refusal of the kernel is put in its place."""

    def refused(method: Any) -> Any:
        def look(path: Path, *args: Any, **kwargs: Any) -> Any:
            if path == other / name:
                raise PermissionError(13, "Permission denied", str(path))
            return method(path, *args, **kwargs)

        return look

    monkeypatch.setattr(Path, "open", refused(Path.open))
    monkeypatch.setattr(Path, "iterdir", refused(Path.iterdir))
    with pytest.raises(ConfigError, match=rf"{name} cannot be read: Permission denied"):
        branch_of(other)


def test_a_damaged_record_of_the_beginning_is_the_others(other: Path, tmp_path: Path) -> None:
    (other / "beginning.json").write_text("[]")
    with pytest.raises(UserError, match=rf"{other}/beginning.json is damaged"):
        begin(branch_of(other), tmp_path / "mine")
    assert not steps(tmp_path / "mine")


def test_it_begins_with_the_weights_of_the_other_while_they_are_there(other: Path, tmp_path: Path) -> None:
    mine, weights = tmp_path / "mine", tmp_path / "weights"
    (other / "beginning.json").write_text(json.dumps({"path": str(weights), "sha256": "of the other"}))
    begin(branch_of(other), mine)
    assert begun_with(mine) is None
    weights.mkdir()
    assert begun_with(mine) == str(weights)
    (mine / RECORD).unlink()
    assert begun_with(mine) is None, "a run that has begun afresh"


def test_only_a_run_of_the_same_job_is_gone_on_from(other: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"python -m prl\.rl"):
        compose([f"ckpt.from_run={other}"], "sft")
    for said, message in (
        (f"ckpt.from_run={tmp_path}", f"ckpt.from_run={other}"),
        ("ckpt.from_run=no", "no directory"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_start(compose([said]))
    for said in (f"ckpt.from_run={other}", "ckpt.from_step=2"):
        with pytest.raises(ConfigError, match=r"ckpt.from_\w+ has no effect"):
            compose([said], "bench")
    with pytest.raises(ConfigError, match=r"ckpt.from_step has no effect"):
        compose(["ckpt.from_step=2"])


def test_a_plan_of_another_version_is_no_traceback(other: Path) -> None:
    plan = json.loads((other / "plan.json").read_text())
    del plan["config"]["optim"]["max_skipped_steps"]  # which has a default
    (other / "plan.json").write_text(json.dumps(plan))
    branch_of(other)
    for damage in ({"optim": {"type": "lion"}}, {"memory_recipe": None}, {"job": 3}):
        (other / "plan.json").write_text(json.dumps({"config": plan["config"] | damage}))
        with pytest.raises(ConfigError, match=r"is no run that trains a model"):
            branch_of(other)


def test_a_run_that_has_begun_needs_the_other_no_more(other: Path, tmp_path: Path) -> None:
    """Also as a point of a sweep, whose directory is known only when it is composed."""
    begin(branch_of(other), tmp_path / "mine")
    shutil.rmtree(other)
    gone = compose([f"ckpt.from_run={other}", "ckpt.from_step=4"])
    with pytest.raises(ConfigError, match="no directory"):
        check_start(gone)
    check_start(gone.model_copy(update={"output_dir": str(tmp_path / "mine")}))


def test_a_path_is_the_same_from_everywhere(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(other.parent)
    assert compose(["ckpt.from_run=other"]).ckpt.from_run == str(other)


@pytest.mark.usefixtures("world")
def test_an_optimizer_keeps_its_own_settings(tmp_path: Path) -> None:
    def make(**settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 3)
        return model, torch.optim.AdamW(model.parameters(), **settings)

    model, optimizer = make(lr=0.1, weight_decay=0.5, betas=(0.8, 0.9))
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    saving = TrainerCheckpointer(tmp_path, asynchronous=False)
    saving.save(1, model, [optimizer])
    saving.finish()
    loaded, mine = make(lr=0.01, weight_decay=0.0, betas=(0.7, 0.95))
    saving.load(staging_dir(tmp_path, 1), loaded, [mine])
    (group,) = mine.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.01, 0.0, (0.7, 0.95))
    assert torch.equal(loaded.weight, model.weight)
    assert torch.equal(mine.state[loaded.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps, synchronous, and their checkpoints of steps 2, 4 and 6."""
    home = tmp_path_factory.mktemp("branching")
    args = [*SAME, "max_steps=6", "ckpt.keep=9", f"cache_dir={home}/cache", f"output_dir={home}/run"]
    done = run(args, home)
    assert done.code == 0, done.output
    return home / "run"


@pytest.mark.slow
def test_a_branch_is_the_run_that_went_on(trained: Path, tmp_path: Path) -> None:
    """To the bit, for the same settings; and it resumes when the other run is gone."""
    source = tmp_path / "source"
    shutil.copytree(trained, source)
    branch = [*SAME, "max_steps=6", f"ckpt.from_run={source}", "ckpt.from_step=4", f"cache_dir={tmp_path}/cache"]
    done = run([*branch, f"output_dir={tmp_path}/branch"], tmp_path)
    assert done.code == 0, done.output
    assert f"going on from step 4 of {source}" in done.output
    for role in ("trainer.0", "orchestrator"):
        assert series(tmp_path / "branch", role, after=4) == series(trained, role, after=4)
    evaluated = [row["step"] for row in rows(tmp_path / "branch", "orchestrator") if "eval/reward" in row]
    assert evaluated == [4, 6], "at its start and at its end"
    assert f"began with step 4 of {source}" in render_run(tmp_path / "branch", "done")
    assert [row["step"] for row in rows(tmp_path / "branch", "trainer.0") if "loss" in row] == [5, 6]
    (tmp_path / "branch/status.json").unlink()
    shutil.rmtree(tmp_path / "branch/checkpoints/step_6")
    shutil.rmtree(source)
    again = run([*branch, f"output_dir={tmp_path}/branch"], tmp_path)
    assert again.code == 0, again.output
    assert series(tmp_path / "branch", "trainer.0", after=4) == series(trained, "trainer.0", after=4)


@pytest.mark.slow
def test_a_sweep_of_branches_on_another_layout(trained: Path, tmp_path: Path) -> None:
    """From two ranks, in another memory recipe, with rates of their own: another rate is another step."""
    args = [*SAME, "-m", f"ckpt.from_run={trained}", "ckpt.from_step=4", "optim.lr=0.0005,0.002", "max_steps=5"]
    args += ["parallelism.dp_shard=2", "deployment.num_train_gpus=2", "memory=tight", "memory_recipe.compile=false"]
    done = run([*args, "sweep=branches", f"cache_dir={tmp_path}/cache"], tmp_path)
    assert done.code == 0, done.output
    points = sorted((tmp_path / "outputs/sweeps/branches").glob("*lr-*"))
    assert len(points) == 2
    steps_of = [[row for row in rows(point, "trainer.0") if "loss" in row] for point in points]
    assert [[row["step"] for row in of] for of in steps_of] == [[5], [5]]
    (fifth,) = [row for row in rows(trained, "trainer.0") if row["step"] == 5 and "loss" in row]
    for (row,) in steps_of:  # the batch of the run that went on, before anything has another rate
        assert row["loss"] == pytest.approx(fifth["loss"], rel=1e-4)
        assert row["grad_norm"] == pytest.approx(fifth["grad_norm"], rel=1e-3)
    digests = {(point / "checkpoints/step_5/manifest.json").read_text() for point in points}
    assert len(digests) == 2

    refused = run([*args, "ckpt.from_step=4,3", "optim.lr=0.001", "sweep=absent"], tmp_path)
    assert refused.code == 2, refused.output
    assert "has no checkpoint of step 3" in refused.output
    assert not list((tmp_path / "outputs/sweeps").glob("absent/*/status.json")), "no point has started"


@pytest.mark.slow
def test_no_warm_start_is_made_while_that_of_the_other_is_there(tmp_path: Path) -> None:
    args = [*(arg for arg in SAME if arg != "warm_start=none"), "memory=lora", f"cache_dir={tmp_path}/cache"]
    first = run([*args, "warm_start.max_steps=1", "max_steps=2", f"output_dir={tmp_path}/first"], tmp_path)
    assert first.code == 0, first.output
    branch = [*args, "warm_start.max_steps=2", "max_steps=3", f"ckpt.from_run={tmp_path}/first"]
    more = run([*branch, f"output_dir={tmp_path}/more"], tmp_path)
    assert more.code == 0, more.output
    assert "warm start" not in more.output
    assert len(list((tmp_path / "cache/warm_start").iterdir())) == 1


@pytest.mark.slow
def test_supervised_runs_go_on_longer(tmp_path: Path) -> None:
    args = ["sft.batch_size=2", "sft.val_interval=0", "ckpt.export_hf=false", "logging.wandb.mode=disabled"]
    args += ["optim.schedule.type=constant", f"cache_dir={tmp_path}/cache", "debug.num_threads=1"]
    whole = run([*args, "max_steps=4", f"output_dir={tmp_path}/whole"], tmp_path, "prl.sft")
    first = run([*args, "max_steps=2", f"output_dir={tmp_path}/first"], tmp_path, "prl.sft")
    branch = [*args, "max_steps=4", f"ckpt.from_run={tmp_path}/first", f"output_dir={tmp_path}/more"]
    more = run(branch, tmp_path, "prl.sft")
    for done in (whole, first, more):
        assert done.code == 0, done.output
    assert series(tmp_path / "more", "trainer.0") == series(tmp_path / "whole", "trainer.0", after=2)
