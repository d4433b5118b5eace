"""Whole runs of every family, experts and context spread over ranks: the engine says what the trainer says, and the
reward rises.
"""

import pytest
from families import EACH, ROUTED
from runs import SMALL, rows, run

pytestmark = pytest.mark.slow

LETTERS = ["env.mix.reverse_text.id=letters_env:Letters", "algo.batch_size=64", "algo.group_size=8", "optim.lr=0.01"]
JOBS = {f"tiny_{family}": "ep2_cp2" if name in ROUTED else "cp2" for family, name in EACH.items()}


@pytest.mark.parametrize("model", JOBS)
def test_reward_rises_within_20_steps(model, tmp_path):
    usual = [line for line in SMALL if not line.startswith(("algo.", "eval."))]
    choices = [f"model={model}", f"parallelism={JOBS[model]}", "eval=none", "max_steps=20", "ckpt.interval=20"]
    done = run([*usual, *LETTERS, *choices], tmp_path)
    assert done.code == 0, done.output
    (run_dir,) = (tmp_path / "outputs").iterdir()
    rewards = [row["reward"] for row in rows(run_dir, "orchestrator") if "reward" in row]
    steps = [row for row in rows(run_dir, "trainer.0") if "mismatch_kl_mean" in row]
    print(model, [round(reward, 3) for reward in rewards], steps[0]["mismatch_kl_mean"])
    assert len(rewards) == 20
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.15
    assert steps[0]["mismatch_kl_mean"] < 1e-9  # on policy: differences of log-probabilities of 1e-5 at most
