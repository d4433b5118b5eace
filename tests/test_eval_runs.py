"""`python -m prl.eval` as a user types it: steps of a run, a served model, one SLURM job."""

from __future__ import annotations

import json
import re
import shutil
import signal

import pytest
from runs import SMALL, finish, rows, run, start, wait_for

from prl.runtime.directory.status_file import read_status

pytestmark = pytest.mark.slow

SETTINGS = ["eval.num_tasks=8", "env.mix.reverse_text.args.max_chars=10", "inference.sampling.max_tokens=12"]
SETTINGS += ["logging.wandb.mode=disabled"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Where a run lies that kept steps 2 and 4, and what it found at 0, 2 and 4; its cache is beside it."""
    home = tmp_path_factory.mktemp("trained")
    schedule = ["max_steps=4", "ckpt.interval=2", "eval.interval=2", "ckpt.export_hf=true"]
    args = [arg for arg in SMALL if not arg.startswith("ckpt.")]
    done = run([*args, *schedule, f"cache_dir={home}/cache", f"output_dir={home}/run"], home)
    assert done.code == 0, done.output
    own = {row["step"]: row["eval/reward"] for row in rows(home / "run", "orchestrator") if "eval/reward" in row}
    assert sorted(own) == [0, 2, 4]
    return home, own


def evaluate(home, *words, expects=0):
    done = run([*words, *SETTINGS, f"cache_dir={home}/cache"], home, module="prl.eval")
    assert done.code == expects, done.output
    return done.output


def test_steps_give_what_the_run_found_itself_and_compare_ranks_them(trained):
    home, own = trained
    evaluate(home, "-m", "hydra/launcher=local", f"eval.run={home}/run", "eval.step=2,last", "sweep=steps")
    points = sorted((home / "outputs/sweeps/steps").glob("step-*"))
    told = [json.loads((point / "result.json").read_text()) for point in points]
    assert [result["step"] for result in told] == [2, 4]
    assert [result["reward"] for result in told] == pytest.approx([own[2], own[4]])
    assert [result["policy"]["path"] for result in told] == [f"{home}/run/checkpoints/step_2", f"{home}/run/export"]
    assert told[0]["environments"]["reverse_text"]["samples"] == 8
    assert (told[0]["failed_rollouts"], told[0]["rollouts"]) == (0, 8)
    assert not (points[0] / "model").exists(), "what was made of the checkpoint is dropped"
    compared = run([str(home / "outputs/sweeps/steps")], home, module="prl.compare")
    assert compared.code == 0, compared.output
    low, high = told[0]["environments"]["reverse_text"]["figures"]["avg@1"]["interval"]
    assert f"{own[2]:.4f} [{low:.3f}, {high:.3f}]" in compared.output


def test_other_weights_at_the_same_place_are_evaluated_anew(trained):
    home, _ = trained
    shutil.copytree(home / "run/export", home / "weights")
    words = ["-m", "hydra/launcher=local", f"model.path={home}/weights", "sweep=replaced"]
    evaluate(home, *words)
    (point,) = (home / "outputs/sweeps/replaced").glob("*/evaluated.json")
    first = json.loads(point.read_text())["weights"]
    assert "done already" in evaluate(home, *words)
    weights = home / "weights/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-200_000:-100_000] = bytes(100_000)
    weights.write_bytes(content)
    assert f"the weights in {home}/weights are others than those that were evaluated" in evaluate(home, *words)
    assert json.loads(point.read_text())["weights"] != first
    assert read_status(point.parent)["attempt"] == 2


def test_a_served_model_gives_the_same_and_is_evaluated_once(trained):
    home, own = trained
    server = start(["inference.port=0", f"cache_dir={home}/cache", f"output_dir={home}/server"], home, "prl.inference")
    try:
        wait_for(server, lambda: read_status(home / "server").get("urls"), "address", 200)
        words = [f"inference.urls=[{read_status(home / 'server')['urls'][0]}]", f"output_dir={home}/served"]
        said = evaluate(home, *words)
    finally:
        server.send_signal(signal.SIGINT)
        finish(server)
    assert json.loads((home / "served/result.json").read_text())["reward"] == pytest.approx(own[0])
    assert re.search(r"reverse_text +8 +8 +avg@1 +\d\.\d{4} +\d\.\d{4} to \d\.\d{4}", said), said
    assert "is done already" in evaluate(home, *words)


def test_slurm_gets_one_job(trained):
    home, _ = trained
    slurm = ["hydra/launcher=slurm", "hydra.launcher.dry_run=true"]
    said = evaluate(home, *slurm, f"eval.run={home}/run", "eval.step=2")
    assert said.count("#!/bin/bash") == 1
    assert "#SBATCH --nodes=1\n" in said
    assert "#SBATCH --array" not in said
