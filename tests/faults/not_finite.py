"""The loss of the steps in NOT_FINITE_STEPS (say "3,4") is NaN, with all gradients, on the first trainer rank alone."""

import os

WANTED = {int(step) for step in os.environ.get("NOT_FINITE_STEPS", "").split(",") if step}


def patch_trainer(module):
    train_step, backward = module.RLTrainer.train_step, module.backward_rl
    current = [0]

    def remember(self, batch):
        current[0] = batch.step if self.world.rank == 0 else 0
        return train_step(self, batch)

    def spoiled(algo, micro, stats, denominator):
        if current[0] in WANTED:
            stats.logp = stats.logp * float("nan")
        return backward(algo, micro, stats, denominator)

    module.RLTrainer.train_step, module.backward_rl = remember, spoiled


PATCHES = {"prl.trainer.loops.rl_loop": patch_trainer}
