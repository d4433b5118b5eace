"""Faults that alarms are there to tell, one of them by the name in FAULT."""

import os
import sys
import time

STALE_AFTER = 3  # loads


def stale_weights(module):
    """Engines say that they have the new weights, and have not."""
    load, loads = module.load_weights, [0]

    def load_the_first_ones(model, tensors):
        loads[0] += 1
        if loads[0] <= STALE_AFTER:
            load(model, tensors)
        else:
            for _ in tensors:
                pass

    module.load_weights = load_the_first_ones


def wrong_template(module):
    """Rollouts are asked in words that the policy has never seen."""
    if not any("orchestrator" in word for word in sys.argv):
        return
    text = module.ChatRenderer.text

    def other(self, messages, add_generation_prompt, tools=None):
        return (
            text(self, messages, add_generation_prompt, tools).replace("assistant", "### Answer").replace("user", "#")
        )

    module.ChatRenderer.text = other


def slow_trainer(module):
    step = module.Policy.optimizer_step

    def slowly(self, *args, **kwargs):
        time.sleep(4)
        return step(self, *args, **kwargs)

    module.Policy.optimizer_step = slowly


def nan_loss(module):
    """In one step."""
    backward, calls = module.backward_rl, [0]

    def spoiled(algo, micro, stats, denominator):
        calls[0] += 1
        if calls[0] == 20:
            stats.logp = stats.logp * float("nan")
        return backward(algo, micro, stats, denominator)

    module.backward_rl = spoiled


FAULTS = {
    "stale_weights": ("prl.inference.engine", stale_weights),
    "wrong_template": ("prl.models.text.chat", wrong_template),
    "slow_trainer": ("prl.trainer.policy", slow_trainer),
    "nan_loss": ("prl.trainer.loops.rl_loop", nan_loss),
}
module, patch = FAULTS[os.environ["FAULT"]]
PATCHES = {module: patch}
