"""Which rollouts of a step and of an evaluation are kept for people to look at (logging.rollouts), and writing them."""

from __future__ import annotations

import logging
import random
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from prl.config.schema import RolloutsConfig
from prl.metrics import rollouts as files
from prl.metrics.writer import plain_value
from prl.models.text.chat import ChatRenderer
from prl.orchestrator.rollouts.evaluation import Ended
from prl.orchestrator.rollouts.producer import StepGroups
from prl.orchestrator.rollouts.rollout import Group, Rollout, Sample

OF_A_GROUP = 8  # rollouts kept of a group: the best, the worst, and others at random
OF_A_TASK = 2  # samples kept of a held-out task
TOKENS_OF_A_STEP = 100_000  # beyond, rollouts are kept as text alone
ROLLOUTS_SHARE = 0.75  # of the bytes on disk; the rest is for what trainer ranks add
log = logging.getLogger("prl.orchestrator")


@dataclass
class Kept:
    """Rollouts of one step or evaluation. `documents`: names of those samples whose tokens are kept."""

    step: int
    split: str
    rollouts: list[tuple[dict[str, Any], Rollout, bool]] = field(default_factory=list)  # (place, it, with tokens)
    documents: list[str] = field(default_factory=list)
    tokens: int = 0

    def add(self, rollout: Rollout, place: dict[str, Any]) -> None:
        count = sum(len(sample.input_ids) for sample in rollout.samples)
        fits = self.tokens + count <= TOKENS_OF_A_STEP
        if fits:
            self.tokens += count
            self.documents += [files.document_name(sample.input_ids) for sample in rollout.samples]
        self.rollouts.append((place, rollout, fits))


class KeptRollouts:
    """A few groups of each step, and the first tasks of each evaluation, in `<run>/rollouts/`."""

    def __init__(
        self, run_dir: Path, config: RolloutsConfig, renderer: ChatRenderer, seed: int, resume_step: int
    ) -> None:
        self.config, self.renderer, self.seed = config, renderer, seed
        self.is_full = False
        self.known: set[int] = set()  # tokens whose text is on disk
        self.rollouts: files.SegmentedLog | None = None
        self.tokens: files.SegmentedLog | None = None
        if config.groups or config.held_out:
            self._open(run_dir, resume_step)

    def _open(self, run_dir: Path, resume_step: int) -> None:
        max_bytes = int((self.config.max_mib << 20) * ROLLOUTS_SHARE)
        try:
            # never divided: what a token is called is said once
            self.tokens = files.SegmentedLog(run_dir, files.TOKENS, 1 << 60, resume_step)
            self.rollouts = files.SegmentedLog(run_dir, files.ROLLOUTS, max_bytes, resume_step)
        except OSError as error:
            self._complain(error)

    def choose(self, step: StepGroups) -> Kept:
        """Of the groups that a step trains: that of the highest reward, that of the lowest, and others at random."""
        kept = Kept(step.step, "train")
        if self.rollouts is None:
            return kept
        rng = random.Random(f"{self.seed} {step.step}")
        for group, why in choose_groups(step.groups, self.config.groups, rng):
            chosen = set(_extremes([r.reward for r in group.finished], OF_A_GROUP, rng))
            for index, rollout in enumerate(group.finished):
                if index in chosen:
                    kept.add(rollout, {"group": group.index, "index": index, "why": why})
        return kept

    def choose_held_out(self, version: int, ended: Ended) -> Kept:
        """Of an evaluation: the first tasks of each environment, the same ones each time and in all points."""
        kept = Kept(version, "held_out")
        if self.rollouts is None:
            return kept
        for env in sorted({env for env, _ in ended}):
            for task in sorted(task for name, task in ended if name == env)[: self.config.held_out]:
                finished = [r for r in ended[env, task] if isinstance(r, Rollout)]
                for index, rollout in enumerate(finished[:OF_A_TASK]):
                    kept.add(rollout, {"group": task, "index": index, "why": "held_out"})
        return kept

    def write(self, kept: Kept) -> None:
        """In a thread: nobody changes a finished rollout. A disk that is full costs the rows, not the run."""
        if self.rollouts is None or self.tokens is None or not kept.rollouts:
            return
        rows = [plain_value(self._row(kept, *chosen)) for chosen in kept.rollouts]
        samples = [sample for _, rollout, has_tokens in kept.rollouts if has_tokens for sample in rollout.samples]
        new = {token for sample in samples for token in sample.input_ids} - self.known
        try:
            self.tokens.append(0, files.token_rows({token: self.renderer.token_bytes(token) for token in sorted(new)}))
            self.known |= new
            self.rollouts.append(kept.step, rows)
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self.is_full:
            log.warning("rollouts are not kept for reading: %s", error)
        self.is_full = True

    def _row(self, kept: Kept, place: dict[str, Any], rollout: Rollout, has_tokens: bool) -> dict[str, Any]:
        return {
            "step": kept.step,
            "split": kept.split,
            **place,
            "env": rollout.env,
            "task": rollout.task,
            "reward": rollout.reward,
            "advantage": rollout.advantage if kept.split == "train" else None,
            "outcome": rollout.outcome,
            "truncated": rollout.truncated,
            "turns": rollout.turns,
            "prompt_tokens": rollout.prompt_tokens,
            "completion_tokens": rollout.completion_tokens,
            "versions": sorted({v for s in rollout.samples for v in s.versions if v >= 0}),
            "metrics": rollout.metrics,
            "messages": rollout.messages,
            "samples": [_sample_row(sample, rollout.advantage) for sample in rollout.samples] if has_tokens else [],
        }


def choose_groups(groups: list[Group], wanted: int, rng: random.Random) -> list[tuple[Group, str]]:
    """(group, why it was chosen), at most `wanted` of them. Of two or more, one has the highest reward and one the
    lowest; a third and later ones are drawn at random, and so is a single one.
    """
    left = [group for group in groups if group.finished]
    by_reward = sorted(left, key=lambda g: sum(r.reward for r in g.finished) / len(g.finished))
    chosen = [(by_reward[-1], "highest"), (by_reward[0], "lowest")] if wanted > 1 and len(left) > 1 else []
    taken = {group.index for group, _ in chosen}
    others = [group for group in left if group.index not in taken]
    drawn = rng.sample(others, max(0, min(wanted - len(chosen), len(others))))
    return [*chosen, *((group, "random") for group in drawn)]


def _extremes(rewards: list[float], wanted: int, rng: random.Random) -> list[int]:
    """Indices of the highest, of the lowest, and of others at random."""
    if len(rewards) <= wanted:
        return list(range(len(rewards)))
    order = sorted(range(len(rewards)), key=lambda i: rewards[i])
    return [order[0], order[-1], *rng.sample(order[1:-1], wanted - 2)]


def _sample_row(sample: Sample, advantage: float) -> dict[str, Any]:
    own = {} if sample.bonus is None else {"advantages": np.asarray(sample.advantages(advantage))}
    return {
        **{key: files.pack(values[np.asarray(sample.loss_mask).view(bool)], "f") for key, values in own.items()},
        "document": files.document_name(sample.input_ids),
        "input_ids": files.pack(sample.input_ids, "i"),
        "logp": files.pack(_masked(sample.logp_infer, sample.loss_mask), "f"),  # of sampled tokens alone
        "versions": files.pack(_runs(sample.versions, sample.loss_mask), "i"),
    }


def _masked(values: array[float], mask: array[int]) -> np.ndarray:
    return np.asarray(values)[np.asarray(mask).view(bool)]


def _runs(versions: array[int], mask: array[int]) -> np.ndarray:
    """[version, length] of each stretch, one behind the other; -1 for tokens that nobody sampled."""
    marked = np.where(np.asarray(mask), np.asarray(versions), -1)
    starts = np.flatnonzero(np.diff(marked, prepend=marked[:1] - 1))
    return np.stack([marked[starts], np.diff(starts, append=len(marked))], axis=1).reshape(-1)
