"""`python -m prl.sft` as a real process tree: a run, and the same run interrupted and resumed."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import Moment, finish, kill_root, rows, start, wait_until_stopping

pytestmark = pytest.mark.slow

STEPS = 6


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "squares.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}^2", "completion": str(i * i)}) + "\n" for i in range(3000)))
    return path


def command(run_dir: Path, dataset: Path, *overrides: str) -> list[str]:
    return [
        sys.executable, "-m", "prl.sft", f"output_dir={run_dir}", f"cache_dir={dataset.parent / 'cache'}",
        "data=jsonl", f"sft.data.source={dataset}", f"max_steps={STEPS}", "sft.batch_size=6", "sft.val_interval=3",
        "debug.num_threads=1", "logging.wandb.mode=disabled", "logging.progress=plain", "ckpt.interval=0", *overrides,
    ]  # fmt: skip


def series(run_dir: Path) -> list[tuple]:
    """What must not depend on an interruption."""
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "val_loss")
    return [tuple(row.get(key) for key in keys) for row in rows(run_dir, "trainer.0")]


def run(*args) -> subprocess.CompletedProcess:
    return subprocess.run(command(*args), capture_output=True, text=True, timeout=240)


@pytest.mark.smoke
def test_an_interrupted_run_resumes_to_the_same_losses(dataset, tmp_path):
    whole = tmp_path / "whole"
    done = run(whole, dataset)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = series(whole)
    assert [row[0] for row in expected] == list(range(1, STEPS + 1))
    assert expected[-1][1] < expected[0][1]
    assert [row[-1] is not None for row in expected] == [False, False, True, False, False, True]

    broken = tmp_path / "broken"
    moment = Moment("optimizer step:3", tmp_path / "moment")
    child = start(command(broken, dataset)[3:], tmp_path, "prl.sft", env=moment.env)
    moment.wait(child)
    child.send_signal(signal.SIGINT)
    wait_until_stopping(child, broken)
    moment.go()
    done = finish(child)
    assert done.code == 130, done.output
    stopped_at = len(rows(broken, "trainer.0"))
    assert 2 <= stopped_at < STEPS
    assert (broken / "checkpoints" / f"step_{stopped_at}").is_dir()

    resumed = run(broken, dataset)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"resuming from the checkpoint of step {stopped_at}" in resumed.stdout + resumed.stderr
    assert series(broken) == expected
    exported = [(directory / "export" / "model.safetensors").read_bytes() for directory in (whole, broken)]
    assert exported[0] == exported[1]


def test_a_missing_dataset_is_a_user_error_and_leaves_nothing(tmp_path):
    finished = run(tmp_path / "run", tmp_path / "absent.jsonl")
    assert finished.returncode == 2, finished.stdout + finished.stderr
    assert "the dataset does not exist" in finished.stderr + finished.stdout
    assert "absent.jsonl" in finished.stderr + finished.stdout
    assert not (tmp_path / "run").exists()


def test_a_run_that_has_reached_its_target_trains_no_further_when_it_resumes(dataset, tmp_path):
    """Killed between its last checkpoint and its end."""
    run_dir, moment = tmp_path / "run", Moment("committed", tmp_path / "moment")
    args = command(run_dir, dataset, "sft.target_val_loss=100", "ckpt.export_hf=false")[3:]
    process = start(args, tmp_path, "prl.sft", env=moment.env)
    moment.wait(process)
    kill_root(process)
    done = finish(start(args, tmp_path, "prl.sft"))
    assert done.code == 0, done.output
    assert [row["step"] for row in rows(run_dir, "trainer.0")] == [1, 2, 3]
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_3"]
