"""Whole runs with vLLM itself as the inference engine, on a CPU: what they learn, and what comes of dead engines."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path

import psutil
import pytest
from runs import SMALL, UNEVALUATED, Moment, environment, finish, rows, run, start

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(700),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.mark.timeout(700)
def test_the_main_job_learns(tmp_path: Path) -> None:
    """With a task that a policy learns in a few steps, after a word of warm start."""
    small = [arg for arg in SMALL if not arg.startswith(("warm_start", "algo."))]
    args = [
        *(*small, "warm_start.max_steps=2", "warm_start.target_val_loss=0", "inference=vllm", "debug.num_threads=1"),
        *("env.mix.reverse_text.id=letters_env:Letters", "algo.batch_size=64", "algo.group_size=8", "optim.lr=0.01"),
        *("max_steps=12", "eval.interval=12", f"cache_dir={tmp_path}/cache", f"output_dir={tmp_path}/run"),
    ]
    done = run(args, tmp_path, timeout_s=500)
    assert done.code == 0, done.output
    held_out = {
        row["step"]: row["eval/reward"] for row in rows(tmp_path / "run", "orchestrator") if "eval/reward" in row
    }
    assert held_out[12] > held_out[0] + 0.3, held_out
    first = next(row for row in rows(tmp_path / "run", "trainer.0") if "mismatch_kl_max" in row)
    assert first["mismatch_kl_max"] < 1e-6, "the engine did not sample from the trainer's weights"


@pytest.mark.exhaustive
def test_a_synchronous_run_samples_from_each_version(tmp_path: Path) -> None:
    """Without staleness every token must be the newest weights', to rounding."""
    args = [*SMALL, f"cache_dir={tmp_path}/cache", f"output_dir={tmp_path}/run", "inference=vllm", "max_steps=3"]
    args.append("weight_transport=shared_memory")
    done = run([*args, "algo.max_off_policy_steps=0", "optim.lr=0.01", "eval.interval=0"], tmp_path, timeout_s=300)
    assert done.code == 0, done.output
    mismatch = [row["mismatch_kl_max"] for row in rows(tmp_path / "run", "trainer.0") if "mismatch_kl_max" in row]
    assert len(mismatch) == 3
    assert max(mismatch) < 1e-6


@pytest.mark.timeout(700)
def test_truncated_sampling_keeps_the_mean_ratio_at_1(tmp_path: Path) -> None:
    args = [*UNEVALUATED, "inference=vllm", f"cache_dir={tmp_path}/cache", f"output_dir={tmp_path}/run", "max_steps=1"]
    truncated = ["inference.sampling.top_k=20", "inference.sampling.top_p=0.9", "memory=tight"]
    done = run([*args, *truncated, "algo=sync", "debug.num_threads=1"], tmp_path, timeout_s=300)
    assert done.code == 0, done.output
    (row,) = rows(tmp_path / "run", "trainer.0")
    assert row["importance_ratio_mean"] == pytest.approx(1, abs=1e-3)
    assert row["mismatch_kl_max"] < 1e-4


STRICT = """
from vllm.v1.sample.logits_processor import LogitsProcessor

class Strict(LogitsProcessor):
    def __init__(self, *args):
        pass

    def is_argmax_invariant(self):
        return False

    def update_state(self, update):
        pass

    def apply(self, logits):
        raise ArithmeticError("these logits are not to my taste")
"""


@pytest.mark.timeout(300)
def test_an_engine_that_dies_of_a_request_says_of_what(tmp_path: Path) -> None:
    """Of a user's processor of logits, which fails at the first token that is sampled."""
    (tmp_path / "strict.py").write_text(STRICT)
    args = [
        *SMALL,
        "inference=vllm",
        "inference.vllm.logits_processors=[strict:Strict]",
        "algo=sync",
    ]  # where none is started again
    args.append(f"output_dir={tmp_path}/run")
    ended = run(args, tmp_path, timeout_s=250, env={**environment(), "PYTHONPATH": str(tmp_path)})
    failure = json.loads((tmp_path / "run/status.json").read_text())["failure"]
    assert ended.code == 1, ended.output
    assert failure["role"].startswith("inference"), failure
    assert "vLLM's engine died: ArithmeticError: these logits are not to my taste" in failure["message"], failure


@pytest.mark.timeout(900)
def test_a_killed_server_comes_back_and_nothing_is_trained_twice(tmp_path: Path) -> None:
    """With one engine: its requests wait for the restart, and it must have the weights of that day."""
    args = [*SMALL, f"cache_dir={tmp_path}/cache", f"output_dir={tmp_path}/run", "inference=vllm", "max_steps=8"]
    args += ["weight_transport=tcp", "env.rollout_timeout_s=600"]  # on cores that others share a start takes minutes
    args += ["debug.num_threads=1", "eval.interval=0", "debug.keep_rollouts=true"]
    moment = Moment("request to vLLM:100", tmp_path / "moment")  # of 256
    process = start(args, tmp_path, env=moment.env)
    server = psutil.Process(moment.wait(process))
    family = [server, *server.children(recursive=True)]
    server.kill()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive, "the engine core outlived its server"
    done = finish(process, 400)
    assert done.code == 0, done.output
    assert "inference/0 ended (killed by SIGKILL from outside); restart 1 of 3" in done.output
    assert [row["step"] for row in rows(tmp_path / "run", "trainer.0")] == list(range(1, 9))
    steps = [row for row in rows(tmp_path / "run", "orchestrator") if "staleness_hist" in row]
    assert [row["step"] for row in steps] == list(range(1, 9))
    assert (steps[-1]["engine_restarts"], steps[-1]["failed_rollouts"]) == (1, 0)
    assert steps[-1]["retried_requests"] > 0
    kept = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_text().splitlines()]
    assert max(Counter(row["group"] for row in kept).values()) == 4, "a group was trained twice"
