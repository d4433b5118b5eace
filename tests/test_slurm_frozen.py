"""What a queued sweep runs is what was there when it was submitted: from the checkout's root, in the documented way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_cluster import (
    SMALL,
    SMALL_RL,
    TWO_NODES,
    ask,
    copy_checkout,
    points_of,
    states,
    status_of,
    steps_of,
    sweep_of,
    wait_for_queue,
)

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(900), pytest.mark.usefixtures("slurm")]

ENVIRONMENT = """
from prl.envs.protocol import Environment, Task, user
from shout_words import WORDS


class Shout(Environment):
    def tasks(self, split):
        mine = WORDS[::2] if split == "train" else WORDS[1::2]
        return [Task(word, (user(word),), {"answer": word.upper()}) for word in mine]

    def reward(self, task, messages):
        return float(messages[-1]["content"] == task.info["answer"])

    def demonstration(self, task):
        return [*task.prompt, {"role": "assistant", "content": task.info["answer"]}]
"""
OURS = {
    "rl": ['+env.mix={shout: {id: "my_envs.shout:Shout"}}', *SMALL_RL],
    "sft": ['sft.data.source="env:my_envs.shout:Shout"', *SMALL],
}
EDITS = {
    "conf/base.yaml": "broken: [",
    "prl/__init__.py": "raise SystemExit('edited')",
    "prl/trainer/loops/rl_loop.py": "raise SystemExit('edited')",
    "prl/trainer/loops/sft_loop.py": "raise SystemExit('edited')",
    "prl/runtime/process/child.py": "raise SystemExit('edited')",
    "my_envs/shout.py": "raise SystemExit('edited')",
    "shout_words.py": "raise SystemExit('edited')",
}


def make_checkout(path: Path) -> Path:
    """A checkout with an environment of the user's own in it, a package, and a module that this one imports."""
    source = copy_checkout(path)
    (source / "my_envs").mkdir()
    (source / "my_envs" / "shout.py").write_text(ENVIRONMENT)
    (source / "shout_words.py").write_text(f"WORDS = {[f'word{i}' for i in range(40)]}\n")
    return source


@pytest.mark.parametrize(
    ("job", "nodes"),
    [
        pytest.param("rl", 1, id="rl, one node"),
        pytest.param("sft", 1, id="sft, one node", marks=pytest.mark.exhaustive),
        pytest.param("rl", 2, id="rl, two nodes", marks=pytest.mark.exhaustive),
        pytest.param("sft", 2, id="sft, two nodes", marks=pytest.mark.exhaustive),
    ],
)
def test_edits_in_the_checkout_after_submission_change_nothing(tmp_path, job, nodes):
    source = make_checkout(tmp_path / "checkout")
    layout = (
        [] if nodes == 1 else [*TWO_NODES, "deployment.num_train_nodes=2" if job == "sft" else "weight_transport=tcp"]
    )
    command = [sys.executable, "-m", f"prl.{job}", "-m", "hydra/launcher=slurm", "sweep=s", "max_steps=2", *layout]
    held = "slurm.sbatch=['--hold']"  # until all is edited
    lines = [*OURS[job], "max_steps=2", "sft.batch_size=4" if job == "sft" else "seq_len=256", "seed=1", held]
    done = subprocess.run([*command, *lines], cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for name, text in EDITS.items():
        assert (source / name).exists()
        (source / name).write_text(text)
    ask("scontrol", "release", sweep_of(source)["submissions"][0]["job_id"])
    wait_for_queue()
    (point,) = points_of(source)
    assert set(states(source).values()) == {"COMPLETED"}, (point / "logs").exists() and status_of(point)
    assert steps_of(point) == [1, 2]
    (submission,) = sweep_of(source)["submissions"]
    frozen = json.loads((point / "env.json").read_text())["modules"]
    assert frozen == submission["modules"]
    assert set(frozen) == {"my_envs", "shout_words"}
    assert (source / "outputs/sweeps/s/code" / submission["code"] / "my_envs/shout.py").read_text() == ENVIRONMENT
