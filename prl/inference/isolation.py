"""A step that fails costs those sequences that fail alone, too; the others go on, and so does the engine."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import torch

from prl.inference.sequences import Sequence

log = logging.getLogger("prl.inference")

MAX_FAILED_STEPS = 3  # in a row, without a sequence that got through: then it is the engine that is broken
Work = Callable[[list[Sequence]], list[Sequence]]


class BrokenWeights(RuntimeError):
    """A forward pass gave no numbers: the weights have left the finite ones. The failure class `diverged`."""


class Steps(Protocol):
    """What is asked of the engine whose steps are isolated."""

    def advance_alone(self, sequence: Sequence) -> list[Sequence]:
        """One token for one sequence; it is returned if it ended."""

    def evict(self, sequence: Sequence) -> None:
        """Take it out of its slot."""

    def probe(self) -> Exception | None:
        """What a request that asks for next to nothing fails with."""


class Isolation:
    """Of one engine."""

    def __init__(self, engine: Steps, finished: Counter[str]) -> None:
        """finished: the engine's count of sequences by how they ended."""
        self.engine, self.finished = engine, finished
        self.failed_steps = 0

    def run(self, work: Work, sequences: list[Sequence]) -> list[Sequence]:
        """Do `work`, which adds a token to each of them; where it raises, to each alone.

        Returns those that have ended, the failed ones with finish_reason "error". Raises what the work raised when
        the engine is broken, or the device is lost.
        """
        before = {sequence: len(sequence.token_ids) for sequence in sequences}
        try:
            ended = work(sequences)
        except Exception as error:
            if _is_final(error):
                raise
            log.exception("a step of %d sequences failed; each is tried alone", len(sequences))
            ended = self._one_by_one(sequences, before)
            failed = [sequence for sequence in ended if sequence.error is not None]
            if len(failed) < len(sequences):
                self.failed_steps = 0
            elif self._is_broken(failed):
                raise
        else:
            self.failed_steps = 0
        return ended

    def _is_broken(self, failed: list[Sequence]) -> bool:
        """Whether it is the engine's fault that everybody failed: one request, however often it comes, says nothing
        while a request that asks for next to nothing is answered.
        """
        prompts = {tuple(sequence.request.prompt_ids) for sequence in failed}
        wrong = self.engine.probe()
        if wrong is None and len(prompts) == 1:
            self.failed_steps = 0
            return False
        self.failed_steps += 1
        # weights do not mend themselves, and a wide engine would fail hundreds of requests in as many steps
        certain = isinstance(wrong, BrokenWeights) and len(prompts) > 1
        return certain or self.failed_steps >= MAX_FAILED_STEPS

    def _one_by_one(self, sequences: list[Sequence], before: dict[Sequence, int]) -> list[Sequence]:
        for sequence in sequences:
            self._take_back(sequence, before[sequence])
        ended = []
        for sequence in sequences:
            try:
                ended += self.engine.advance_alone(sequence)
            except Exception as error:
                if _is_final(error):
                    raise
                log.warning("request %.100s failed: %s", sequence.request.request_id, error)
                self._take_back(sequence, before[sequence])
                sequence.finish_reason, sequence.error = "error", f"{type(error).__name__}: {error}"
                self.finished["error"] += 1
                ended.append(sequence)
        return ended

    def _take_back(self, sequence: Sequence, length: int) -> None:
        """As it was before the step, and in no slot: its KV may be half written."""
        self.engine.evict(sequence)
        generated = length - sequence.num_prompt
        for of_each_token in (sequence.versions, sequence.logprobs, sequence.kept):
            del of_each_token[generated:]  # whichever of them the step had come to
        del sequence.token_ids[length:]
        sequence.finish_reason = sequence.stop_reason = None
        sequence.start_over()


def _is_final(error: Exception) -> bool:
    """Whether the device is lost to this process: every later call fails, too."""
    lost = getattr(torch, "AcceleratorError", None)
    return lost is not None and isinstance(error, lost) and not isinstance(error, torch.OutOfMemoryError)
