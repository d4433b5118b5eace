"""A plan that is to run on this machine alone, and the GPUs that it has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from prl.bench import launch as bench
from prl.config import compose
from prl.config.errors import ConfigError, UserError
from prl.models.device import pick_device
from prl.planning import make_plan
from prl.planning.render import render_plan
from prl.planning.sharing import devices_taking_turns
from prl.runtime import by_hand, launch
from prl.runtime.directory.rundir import claim
from prl.runtime.directory.status_file import read_status
from prl.runtime.nodes.job_nodes import KEY
from prl.runtime.process import environment, gpus

MISSION = ["parallelism=ep8_cp2", "memory=tight"]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A machine whose driver tells of so many GPUs."""

    def with_gpus(count: int) -> None:
        for number in range(count):
            (tmp_path / f"0000:0{number}:00.0").mkdir()
        monkeypatch.setattr(gpus, "GPUS", tmp_path)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return with_gpus


def plan(*overrides: str):
    return make_plan(compose(list(overrides)))


def test_the_first_command_of_the_mission_on_a_node_of_8_is_led_to_the_layout_that_fits(machine):
    machine(8)
    with pytest.raises(UserError, match="do not fit on this machine, which has 8") as refused:
        gpus.refuse_too_few_gpus(plan(*MISSION))
    assert refused.value.fix.startswith("deployment=colocated ")
    assert "deployment=colocated" in render_plan(plan(*MISSION))
    remedied = plan(*MISSION, "deployment=colocated")
    gpus.refuse_too_few_gpus(remedied)
    assert (remedied.num_nodes, remedied.gpus_per_node, gpus.gpus_needed(remedied)) == (1, 8, 8)
    assert {device for role in remedied.roles for device in role.devices} == set(range(8))
    assert "one node" not in render_plan(remedied)


@pytest.mark.parametrize(
    ("count", "visible", "overrides", "refused"),
    [
        (8, None, [], False),
        (1, None, [], False),  # what has no GPU runs on the CPU, and says so
        (1, None, ["parallelism.dp_shard=2"], False),  # all of the trainer's ranks do
        (2, None, ["parallelism.dp_shard=2"], True),  # one of two would, and wait for the other's NCCL
        (2, None, ["parallelism=fsdp", "deployment=colocated"], True),
        (4, None, ["parallelism=fsdp", "deployment=colocated"], False),
        (1, None, ["deployment.device=cuda"], True),
        (1, None, ["deployment.device=cuda", "deployment=colocated"], False),
        (1, None, ["deployment.device=cpu", *MISSION], False),
        (8, "0,1", ["deployment.device=cuda"], False),
        (8, "3", ["deployment.device=cuda"], True),
        (8, None, MISSION, True),
        (9, None, MISSION, True),  # a node has 8
        (16, None, MISSION, False),
        (0, None, ["deployment.device=cuda"], False),  # a driver that tells nothing: the roles will know
        (0, None, ["deployment.device=cuda", *MISSION], True),
    ],
)
def test_gpus_suffice_or_a_remedy_is_named(machine, monkeypatch, count, visible, overrides, refused):
    machine(count)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    made = plan(*overrides)
    if not refused:
        gpus.refuse_too_few_gpus(made)
        return
    with pytest.raises(UserError) as error:
        gpus.refuse_too_few_gpus(made)
    turns = devices_taking_turns(made)
    fits = turns is not None and turns <= len(gpus.visible_gpus())
    assert error.value.fix.startswith("deployment=colocated ") == fits


def test_who_is_left_without_a_gpu_is_named(machine):
    machine(1)
    assert gpus.roles_without_gpu(plan()) == ["trainer/0"]
    assert gpus.roles_without_gpu(plan("deployment=colocated")) == []
    assert gpus.roles_without_gpu(plan("deployment.device=cpu")) == []


def test_what_cannot_take_turns_is_not_offered():
    assert devices_taking_turns(plan()) == 1
    assert devices_taking_turns(plan("deployment=colocated")) is None
    assert devices_taking_turns(plan("deployment.num_infer_gpus=3")) is None  # more engines than ranks


# --- the order of devices ---------------------------------------------------------------------------------------------


def devices(kind: str, *overrides: str) -> list[tuple[int, ...]]:
    return [role.devices for role in plan(*overrides).roles_of(kind)]


def test_each_kind_of_role_takes_the_devices_that_are_named_for_it():
    two = "parallelism=ep2"
    named = [two, "deployment.infer_gpu_ids=[3]", "deployment.train_gpu_ids=[2,0]"]
    assert (devices("inference", *named), devices("trainer", *named)) == ([(3,)], [(2,), (0,)])
    assert devices("trainer", two, "deployment.infer_gpu_ids=[1]") == [(0,), (2,)], "the lowest that are left"
    assert devices("inference", two, "deployment.train_gpu_ids=[1,0]") == [(2,)]
    taking_turns = [two, "deployment=colocated", "deployment.train_gpu_ids=[5,4]"]
    assert (devices("inference", *taking_turns), plan(*taking_turns).gpus_per_node) == ([(5,)], 6)
    wide = ["inference=vllm", "deployment.num_infer_gpus=4", "inference.tp=2", "deployment.infer_gpu_ids=[6,4,1,0]"]
    assert devices("inference", *wide) == [(6, 4), (1, 0)]


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (["deployment.infer_gpu_ids=[0,1]"], "deployment.num_infer_gpus=2"),
        (["deployment.num_infer_gpus=3", "deployment.infer_gpu_ids=[3,4]"], "deployment.num_infer_gpus=2"),
        (["deployment.train_gpu_ids=[3,4]"], "deployment.num_train_gpus=2"),
        (["parallelism=ep2", "deployment.train_gpu_ids=[0,1,2]"], "deployment.train_gpu_ids=null"),  # no such mesh
        (["deployment=colocated", "deployment.infer_gpu_ids=[0,1]"], "deployment.infer_gpu_ids=null"),  # one rank
        (["deployment.infer_gpu_ids=[0,1,2,3,4,5,6,7]"], "deployment.infer_gpu_ids=null"),  # none left to train on
        (
            ["inference=vllm", "deployment.num_infer_gpus=2", "inference.tp=2", "deployment.infer_gpu_ids=[0,1,2]"],
            "deployment.infer_gpu_ids=null",
        ),
        (["parallelism=ep2", "deployment.train_gpu_ids=[1,1]"], "deployment.train_gpu_ids=null"),
        (["deployment.infer_gpu_ids=[1]", "deployment.train_gpu_ids=[1]"], "deployment.train_gpu_ids=null"),
        (
            [
                "parallelism=ep2",
                "deployment.num_infer_gpus=2",
                "deployment.infer_gpu_ids=[3,1]",
                "deployment.train_gpu_ids=[3,7]",
            ],
            "deployment.train_gpu_ids=null",
        ),  # in part the same, so no turns either
        (["deployment=colocated", "deployment.infer_gpu_ids=[1]"], "deployment.infer_gpu_ids=null"),
        ([*MISSION, "deployment.device=cuda", "deployment.infer_gpu_ids=[1]"], "deployment.infer_gpu_ids=null"),
        (["deployment=multi_node", "deployment.train_gpu_ids=[0]"], "deployment.train_gpu_ids=null"),
    ],
)
def test_devices_that_cannot_be_are_refused(overrides, remedy):
    with pytest.raises(ConfigError) as refused:
        compose(overrides)
    (violation,) = refused.value.violations
    assert violation.fix.startswith(remedy)
    assert (remedy,) in violation.remedies
    for words in violation.remedies:
        compose([*overrides, *words])


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["deployment.infer_gpu_ids=[9]"], "deployment.infer_gpu_ids names device 9, and a node has 8."),
        (["parallelism=ep2", "deployment.train_gpu_ids=[8,11]"],
         "deployment.train_gpu_ids names devices 8, 11, and a node has 8."),
    ],
)  # fmt: skip
@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_a_device_that_no_node_has_is_refused_with_its_key(overrides, named, device):
    overrides = [*overrides, f"deployment.device={device}"]
    with pytest.raises(ConfigError) as refused:
        compose(overrides)
    (violation,) = refused.value.violations
    assert violation.what == named
    assert "the last is 7" in violation.why
    assert len(violation.remedies) == 2
    for remedy in violation.remedies:
        compose([*overrides, *remedy])
    compose([*overrides, "deployment.device=cpu"])  # slots are as many as one likes


def test_a_machine_without_a_device_that_is_named_says_so(machine):
    machine(2)
    named = ["deployment.infer_gpu_ids=[5]", "deployment.device=cuda"]
    with pytest.raises(UserError) as refused:
        gpus.refuse_too_few_gpus(plan(*named))
    assert "deployment.infer_gpu_ids=[5]" in refused.value.where
    assert refused.value.fix.startswith("deployment.infer_gpu_ids=null; ")
    gpus.refuse_too_few_gpus(plan(*named, "deployment.infer_gpu_ids=null"))
    turns = refused.value.fix.split("; ")[1].split(" (trainer and engines take turns")[0]
    assert turns == "deployment=colocated deployment.infer_gpu_ids=null", "with the name it would be refused again"
    gpus.refuse_too_few_gpus(plan(*named, *turns.split()))
    three = ["deployment.num_infer_gpus=2", "deployment.infer_gpu_ids=[4,5]", "deployment.device=cuda"]
    with pytest.raises(UserError) as too_few:
        gpus.refuse_too_few_gpus(plan(*three))
    assert not too_few.value.fix.startswith("deployment.infer_gpu_ids=null"), "the lowest are not all there either"


# --- networks between nodes -------------------------------------------------------------------------------------------


def test_nccl_between_nodes_takes_the_adapters_of_infiniband_that_are_up(tmp_path, monkeypatch):
    adapters = {
        "mlx5_0/ports/1": ("4: ACTIVE", "InfiniBand"),
        "mlx5_1/ports/1": ("1: DOWN", "InfiniBand"),
        "mlx5_2/ports/1": ("4: ACTIVE", "Ethernet"),
        "mlx5_3/ports/2": ("4: ACTIVE", "InfiniBand"),
    }
    for name, (state, layer) in adapters.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "state").write_text(f"{state}\n")
        (tmp_path / name / "link_layer").write_text(f"{layer}\n")
    monkeypatch.setattr(environment, "INFINIBAND", tmp_path)
    assert environment.interfaces("10.0.0.1") == {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_3:2"}
    assert "NCCL_IB_HCA" not in environment.interfaces("127.0.0.1")
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_1")
    assert environment.interfaces("10.0.0.1") == {}


BUILDS = {
    "CPU": ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "torch is built without CUDA"),
    "CUDA": ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "torch.cuda.is_available() is false"),
    "ROCm": ("cuda = None\nhip = '6.4'\n", "torch.cuda.is_available() is false"),
}


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("signs", [True, False], ids=["GPUs", "none"])
def test_a_torch_that_can_use_no_gpu_is_refused_before_anything_starts(tmp_path, monkeypatch, build, signs):
    version, why = BUILDS[build]
    (tmp_path / "version.py").write_text(version)
    monkeypatch.setattr(gpus, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path)]))
    monkeypatch.setattr(gpus, "GPUS", tmp_path if signs else tmp_path / "none")
    monkeypatch.setattr(gpus, "DEVICES", ())
    told = gpus.no_usable_gpus(plan("deployment.device=cuda"))
    if signs and build != "CPU":
        assert told is None, "the roles ask the driver"
        return
    assert told is not None  # tests run where torch finds no GPU, or ask a machine that has one
    assert told.what.startswith("torch cannot use" if signs else "There is no sign of a GPU")
    assert told.why == f"2 are needed, and {why}"
    assert told.fix.startswith("deployment.device=cpu")
    assert gpus.no_usable_gpus(plan()) is None
    assert gpus.no_usable_gpus(plan("deployment.device=cpu")) is None


JOBS = ("rl", "sft", "bench", "eval", "inference")


@pytest.mark.parametrize("job", JOBS)
def test_each_job_is_refused_where_it_starts_and_planned_anywhere(tmp_path, monkeypatch, job):
    monkeypatch.setattr(gpus, "_why_torch_has_none", lambda: "torch is built without CUDA")
    config = compose(["deployment.device=cuda", f"output_dir={tmp_path}/run"], job)
    made = make_plan(config)
    claim(made).release()
    start = bench.run if job == "bench" else launch.run
    with pytest.raises(UserError) as refused:
        start(config)
    assert "torch is built without CUDA" in refused.value.render()
    status = read_status(tmp_path / "run")
    assert (status["state"], status["failure"]["class"]) == ("failed", "config")


@pytest.mark.parametrize("kind", ["trainer", "inference", "orchestrator"])
def test_roles_by_hand_are_refused_where_they_start(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.setattr(gpus, "_why_torch_has_none", lambda: "torch is built without CUDA")
    monkeypatch.setattr("sys.argv", [f"prl.{kind}", str(tmp_path / "run")])
    monkeypatch.setenv(KEY, "")  # so that what is set is taken back
    claim(plan("deployment.device=cuda", f"output_dir={tmp_path}/run")).release()
    with pytest.raises(SystemExit) as ended:
        by_hand.run_role(kind)
    assert ended.value.code == 2
    assert "torch is built without CUDA" in capsys.readouterr().err


def test_a_role_that_finds_no_gpu_says_so(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="torch can use no GPU here") as told:
        pick_device("cuda")
    assert "prl.doctor" in told.value.fix
    assert pick_device("auto").type == "cpu"
