"""torchrun in front of prl.sft and prl.trainer: its processes are the trainer ranks of one run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_tree import TESTS, make_config, wait_for
from terminals import Terminals, terminals

from prl.config.errors import UserError
from prl.metrics.reader import read_rows
from prl.planning.planner import make_plan
from prl.planning.run_plan import RunPlan
from prl.runtime.directory.checkpoints import steps
from prl.runtime.directory.rundir import claim
from prl.runtime.directory.status_file import read_status
from prl.runtime.nodes.torchrun import check_layout, find_torchrun, refuse_torchrun, take_torchrun

FULL = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2")  # what `torchrun` is


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Terminals]:
    with terminals(tmp_path) as made:
        yield made


def plan_of(*overrides: str, config: str = "sft") -> RunPlan:
    return make_plan(make_config(config, overrides, Path("/nowhere/run")))


@pytest.mark.parametrize("missing", sorted(FULL.keys() - {"TORCHELASTIC_USE_AGENT_STORE"}))
def test_only_the_full_set_of_variables_counts(missing: str) -> None:
    assert find_torchrun(FULL) is not None
    assert find_torchrun({name: value for name, value in FULL.items() if name != missing}) is None


def test_what_torchrun_has_told_goes_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (FULL | {"SLURM_JOB_ID": "7"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"torchrun does not start prl\.rl"):
        refuse_torchrun("prl.rl")
    found = take_torchrun()
    assert found is not None
    assert (found.rank, found.world_size, found.has_store) == (1, 2, True)
    assert take_torchrun() is None
    refuse_torchrun("prl.rl")


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["deployment.num_train_gpus=4"], "torchrun --nproc-per-node=4, or deployment.num_train_gpus=2"),
        (
            ["deployment=multi_node", "deployment.gpus_per_node=1", "deployment.num_train_nodes=2"],
            "torchrun --nproc-per-node=1 --nnodes=2, or deployment=multi_node",
        ),
    ],
)
def test_other_ranks_than_the_plan_has_are_refused(overrides: list[str], fix: str) -> None:
    torchrun = find_torchrun(FULL)
    assert torchrun is not None
    check_layout(plan_of("deployment.num_train_gpus=2"), torchrun)
    with pytest.raises(UserError) as raised:
        check_layout(plan_of(*overrides), torchrun)
    assert raised.value.fix is not None
    assert raised.value.fix.startswith(fix)


def sft(tmp_path: Path, name: str, *overrides: str) -> list[str]:
    return [
        "-m", "prl.sft", "deployment.num_train_gpus=2", f"output_dir={tmp_path / name}", "debug.num_threads=1",
        f"cache_dir={tmp_path / 'cache'}", "logging.wandb.mode=disabled", "logging.progress=plain",
        "seq_len=64", "sft.batch_size=4", "sft.val_interval=0", "ckpt.export_hf=false", *overrides,
    ]  # fmt: skip


@pytest.mark.slow
def test_torchruns_ranks_learn_what_ours_do(opened: Terminals, tmp_path: Path) -> None:
    ranks = opened.open(*TORCHRUN, *sft(tmp_path, "ranks", "max_steps=3"))
    assert opened.code(ranks) == 0, opened.says(ranks)
    ours = opened.open(*sft(tmp_path, "ours", "max_steps=3"))
    assert opened.code(ours) == 0, opened.says(ours)

    def losses(name: str) -> list[float]:
        return [row["loss"] for row in read_rows(tmp_path / name, "trainer.0")]

    assert len(losses("ours")) == 3
    assert losses("ranks") == pytest.approx(losses("ours"), rel=1e-6)
    assert read_status(tmp_path / "ranks")["state"] == "done"
    assert opened.says(ranks).count("run directory") == 1


@pytest.mark.slow
def test_torchruns_sigterm_saves_and_ends_in_order(opened: Terminals, tmp_path: Path) -> None:
    ranks = opened.open(*TORCHRUN, *sft(tmp_path, "ranks", "max_steps=1000", "ckpt.interval=0"))
    opened.await_word(ranks, "[sft] step 1/1000")
    opened.processes[ranks].send_signal(signal.SIGTERM)
    assert opened.code(ranks) != 0
    assert read_status(tmp_path / "ranks")["state"] == "stopped", opened.says(ranks)
    assert steps(tmp_path / "ranks"), opened.says(ranks)


@pytest.mark.slow
def test_a_mistake_is_told_once(opened: Terminals, tmp_path: Path) -> None:
    ranks = opened.open(*TORCHRUN, *sft(tmp_path, "ranks", "deployment.num_train_gpus=1"))
    assert opened.code(ranks) != 0
    assert opened.says(ranks).count("torchrun has started 2 processes, and the plan has 1 trainer ranks.") == 1
    assert not (tmp_path / "ranks").exists()


@pytest.mark.slow
def test_torchrun_starts_the_trainers_of_a_frozen_point(opened: Terminals, tmp_path: Path) -> None:
    """Those of RL: the other roles have terminals of their own."""
    config = make_config("rl", ("deployment.num_train_gpus=2",), tmp_path / "point")
    claim(make_plan(config)).release()
    point, scripted = str(tmp_path / "point"), str(TESTS / "scripted_terminal.py")
    others = [opened.open(scripted, kind, point) for kind in ("orchestrator", "inference")]
    ranks = opened.open(*TORCHRUN, "-m", "prl.trainer", point)
    assert [opened.code(each) for each in (*others, ranks)] == [0, 0, 0], opened.says(others[0])
    assert "trainer/1 joined" in opened.says(others[0])
    wait_for(lambda: read_status(tmp_path / "point").get("state") == "done")
    late = opened.open("-m", "prl.inference", point)
    assert opened.code(late) == 0
    assert "is done already" in opened.says(late)


@pytest.mark.slow
def test_torchrun_fails_with_the_run_and_says_who_was_lost(opened: Terminals, tmp_path: Path) -> None:
    config = make_config("rl", ("deployment.num_train_gpus=2", "max_steps=1000"), tmp_path / "point")
    claim(make_plan(config)).release()
    point, scripted = str(tmp_path / "point"), str(TESTS / "scripted_terminal.py")
    root, inference = (opened.open(scripted, kind, point) for kind in ("orchestrator", "inference"))
    ranks = opened.open(*TORCHRUN, "-m", "prl.trainer", point)
    wait_for(lambda: read_status(tmp_path / "point").get("state") == "running")
    opened.processes[inference].kill()
    assert (opened.code(root), opened.code(ranks)) == (1, 1), opened.says(root)
    assert f"trainer/0: the run has ended: failed: inference ({os.uname().nodename}) is lost" in opened.says(ranks)


@pytest.mark.parametrize(("frozen", "remedy"), [(False, ", or deployment."), (True, ", or a point frozen anew with")])
def test_a_frozen_point_takes_no_overrides(frozen: bool, remedy: str) -> None:
    torchrun = find_torchrun(FULL)
    assert torchrun is not None
    with pytest.raises(UserError) as refused:
        check_layout(plan_of("deployment.num_train_gpus=4"), torchrun, frozen)
    assert remedy in refused.value.fix
