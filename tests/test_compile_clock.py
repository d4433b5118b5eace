"""The seconds that torch.compile takes are told apart from those of steps."""

from __future__ import annotations

import torch

from prl.trainer.compilation import CompileClock


def test_compilation_is_timed_when_it_happens_and_counted_once() -> None:
    clock = CompileClock()
    double = torch.compile(lambda x: 2 * x, backend="eager")
    double(torch.ones(3))
    assert clock.take() > 0
    double(torch.ones(3))
    assert clock.take() == 0
    double(torch.ones(3, 5, dtype=torch.float64))  # what it has not seen yet
    assert clock.take() > 0
