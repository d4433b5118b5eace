"""What happens to the tensors that autograd saves for backward, in hooks that nest.

`torch.autograd.graph.saved_tensors_hooks` obeys the innermost hooks alone. Here inner ones (recomputation) can hand a
tensor on to those around them (offloading).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Stored(Protocol):
    """Stands for a saved tensor until backward fetches it."""

    def fetch(self) -> Tensor: ...


# tensor (detached) -> what autograd keeps of it: the tensor itself, or something in its stead
Pack = Callable[[Tensor], Tensor | Stored]


def keep(tensor: Tensor) -> Tensor:
    return tensor


_pack: ContextVar[Pack] = ContextVar("pack", default=keep)  # of the innermost hooks; backward threads see `keep`


def current_pack() -> Pack:
    """What the hooks in force do with a tensor."""
    return _pack.get()


@contextmanager
def packing(pack: Pack) -> Iterator[None]:
    """Have `pack` decide about every tensor that autograd saves inside."""
    token = _pack.set(pack)
    try:
        with saved_tensors_hooks(pack, _unpack):
            yield
    finally:
        _pack.reset(token)


def _unpack(stored: Tensor | Stored) -> Tensor:
    return stored if isinstance(stored, Tensor) else stored.fetch()
