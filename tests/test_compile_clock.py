"""The seconds that torch.compile takes are told apart from those of steps."""

from __future__ import annotations

import torch
from torch._dynamo.utils import counters

from prl.models.layers import rope
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


def test_heads_turn_in_one_piece_where_kernels_could_turn_them(monkeypatch) -> None:
    """As on a GPU, where engines have them turned by kernels in inference mode: no compiler traces that question."""
    monkeypatch.setattr(rope, "kernels_turn", lambda x: True)
    x, cos, sin = torch.randn(5, 2, 8), torch.randn(5, 1, 8), torch.randn(5, 1, 8)
    turned = torch.compile(rope.rotate, backend="eager", fullgraph=True)(x, cos, sin)
    torch.testing.assert_close(turned, rope.rotate(x, cos, sin))


def test_what_is_compiled_in_pieces_is_told_once(caplog) -> None:
    clock = CompileClock()

    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break(msg="a test breaks here")
        return x + 1

    counters.clear()
    compiled = torch.compile(broken, backend="eager")
    for dtype in (torch.float32, torch.float64):
        compiled(torch.ones(3, dtype=dtype))
        clock.take()
    assert caplog.text.count("in pieces") == 1
