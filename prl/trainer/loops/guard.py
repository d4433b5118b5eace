"""What keeps numbers that are not finite out of weights, moments, checkpoints and publications."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prl.config.errors import UserError
from prl.models.sharding import local_part
from prl.runtime.directory.checkpoints import step_dir, steps
from prl.trainer.world import sum_over_world

SAMPLED, SAMPLED_TENSORS = 1 << 16, 64  # values, and tensors that they are from


class Diverged(RuntimeError):
    """Training has left the finite numbers and will not come back by itself: the failure class `diverged`."""


class StepGuard:
    """Looks at every optimizer step of a run, and ends the run when it has diverged.

    A step whose loss or gradient norm is not finite was skipped by `Policy.optimizer_step`: its policy version has the
    weights of the one before. The guard counts it (`step_skipped` in the metrics), names the groups of rollouts that it
    held, and raises Diverged after more than `limit` in a row. Weights that a finite gradient made infinite (a learning
    rate that is too high) cannot be brought back, so they end the run at once, before anybody gets them.
    """

    def __init__(self, limit: int, run_dir: Path, settle: Callable[[], None]) -> None:
        """settle: completes the checkpoint in the making, which is of a step before, so that it can be named."""
        self.limit, self.run_dir, self.settle = limit, run_dir, settle
        self.in_a_row = 0
        self.checked_step = 0
        self.sample: Tensor = torch.empty(0)  # of this rank's weights, after the step before

    def begin(self, model: nn.Module) -> None:
        """Call on all ranks before the first step of this attempt, with the weights that it begins with.

        Raises UserError when these are not finite.
        """
        self.sample = sample_weights(model)
        if not has_finite_weights(model, frozen=True):
            bad = [name for name, param in model.named_parameters() if not local_part(param).detach().isfinite().all()]
            named = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" * (len(bad) > 3))
            raise UserError(
                f"The weights that this run begins with are not finite: {named or 'those of another rank'}.",
                where="model.path, or the checkpoint that the run resumes from",
                why="numbers that are infinite or none at all spoil every answer of the model",
                fix="model.path= an intact checkpoint",
            )

    def check(
        self, step: int, row: dict[str, Any], model: nn.Module, groups: list[int], log: Callable[[], None]
    ) -> None:
        """Call on all ranks after each step, before its weights go anywhere.

        Args:
            step: 1-based number of the optimizer step.
            row: its metrics; gets `step_skipped` (0 or 1), if that is 1 `skipped_groups`, and `weights_changed`: share
                of a sample of this rank's weights that the step has changed.
            groups: indices of the groups of rollouts that it trained on; empty for SFT.
            log: writes the row. Called if this raises.

        Raises Diverged on all ranks alike, its message naming the last good checkpoint.
        """
        self.checked_step = step
        before, self.sample = self.sample, sample_weights(model)
        if before.numel():
            row["weights_changed"] = float((before != self.sample).float().mean())
        held = f", groups {', '.join(map(str, groups))}" if groups else ""
        numbers = f"loss {row['loss']:g}, gradient norm {row['grad_norm']:g}"
        if row["step_skipped"]:
            self.in_a_row += 1
            row["skipped_groups"] = groups
            print(f"step {step} is not finite ({numbers}) and changed nothing{held}", flush=True)
            if self.in_a_row <= self.limit:
                return
            what = f"{self.in_a_row} steps in a row, the last one {step}, were not finite ({numbers}{held})"
        elif not has_finite_weights(model):
            what = f"step {step} made weights that are not finite ({numbers}{held})"
        else:
            self.in_a_row = 0
            return
        log()
        raise self._diverged(what)

    def check_end(self) -> None:
        """Call when the last step is done. Raises Diverged if several of the last ones, even if not more than `limit`,
        changed nothing, or all that there were: then nobody knows whether the weights are any good.
        """
        if self.in_a_row and self.in_a_row == self.checked_step:
            raise self._diverged("no step of the run was finite")
        if self.in_a_row > 1:
            raise self._diverged(f"the last {self.in_a_row} steps of the run were not finite")

    def _diverged(self, what: str) -> Diverged:
        """Names the newest checkpoint from which a finite step was made: the weights of the one that the bad steps
        began with may be what spoils them.
        """
        self.settle()
        good = [step for step in steps(self.run_dir) if step < self.checked_step - self.in_a_row]
        last = f"the last good checkpoint is {step_dir(self.run_dir, good[-1])}" if good else "no checkpoint is good"
        remedy = "Lower optim.lr, set optim.max_grad_norm, or look at the rollouts (debug.keep_rollouts=true)"
        return Diverged(f"{what}; {last}. {remedy}")


@torch.no_grad()
def sample_weights(model: nn.Module) -> Tensor:
    """Up to SAMPLED values of this rank's trained weights, out of the middle of tensors all over the model. [N]"""
    weights = [local_part(param.detach()).flatten() for param in model.parameters() if param.requires_grad]
    weights = [weight for weight in weights if weight.numel()]
    chosen = weights[:: max(1, -(-len(weights) // SAMPLED_TENSORS))]
    size = SAMPLED // max(len(chosen), 1)
    parts = [weight[max(0, (weight.numel() - size) // 2) :][:size].float() for weight in chosen]
    return torch.cat([part.to(parts[0].device) for part in parts]) if parts else torch.empty(0)


@torch.no_grad()
def has_finite_weights(model: nn.Module, frozen: bool = False) -> bool:
    """Whether all trained weights are, and `frozen` ones where told so, on all ranks. A collective; reads them once."""
    weights = [local_part(param.detach()) for param in model.parameters() if param.requires_grad or frozen]
    finite = all(
        bool(torch.stack(torch._foreach_norm(group, ord=float("inf"))).isfinite().all()) for group in _by_kind(weights)
    )
    return sum_over_world(torch.tensor([0.0 if finite else 1.0], dtype=torch.float64)).item() == 0


def _by_kind(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Non-empty ones by device and dtype, as one fused kernel takes them."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(kinds.values())
