"""What vLLM's loaders do with tensors that arrive, operation by operation, so that it can be repeated without them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from prl.inference.vllm.copies import Copies, Copy
from prl.transport.buckets import Chunk


@dataclass(frozen=True)
class Arrived:
    """A tensor that came: the bytes it lies in, and whether these still are its own."""

    name: str
    dtype: torch.dtype
    first: int
    end: int
    storage: StorageWeakRef

    @staticmethod
    def of(name: str, tensor: Tensor) -> Arrived:
        first = tensor.data_ptr()
        end = first + tensor.numel() * tensor.element_size()
        return Arrived(name, tensor.dtype, first, end, StorageWeakRef(tensor.untyped_storage()))

    def holds(self, place: int) -> bool:
        return self.first <= place < self.end and not self.storage.expired()


class Recorder(TorchDispatchMode):
    """Watches a model's loaders: which part of what arrives is copied to which part of which parameter, also by way of
    tensors in between that are copied to a parameter as they are.

    `complete` turns False when parameters are written in any other way, and nothing may be repeated then.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        """`parameters`: what the model computes with, where it lies."""
        super().__init__()
        self.storages = {_storage_of(tensor) for tensor in parameters}
        self.arrived: dict[int, list[Arrived]] = {}  # by storage
        self.between: dict[int, list[tuple[str, Copy]]] = {}  # by storage: what was copied there
        self.copies = Copies()
        self.is_understood = True

    @property
    def complete(self) -> bool:
        return self.is_understood and not self.between

    def named(self, chunks: Iterable[Chunk]) -> Iterator[tuple[str, Tensor]]:
        """The tensors, each known from when it is handed out until the next chunk is asked for."""
        for chunk in chunks:
            self.arrived = {}
            for name, tensor in chunk:
                self._meet(name, tensor)
                yield name, tensor

    def cloned(self, chunks: Iterable[Chunk]) -> Iterator[tuple[str, Tensor]]:
        """Copies of the tensors, each known as long as somebody has it."""
        for chunk in chunks:
            for name, tensor in chunk:
                clone = tensor.clone()
                self.arrived.pop(_storage_of(clone), None)  # where another was
                self._meet(name, clone)
                yield name, clone

    def _meet(self, name: str, tensor: Tensor) -> None:
        self.arrived.setdefault(_storage_of(tensor), []).append(Arrived.of(name, tensor))
        self.copies.of[name] = []
        self.copies.form[name] = tensor.shape, tensor.dtype
        if not tensor.is_contiguous():
            self._give_up()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.is_understood:
            if func is torch.ops.aten.copy_.default:
                self._note(*args[:2])
            elif func._schema.is_mutable and not _is_padding(func, args) and any(map(self._is_watched, args)):
                self._give_up()
        return func(*args, **(kwargs or {}))

    def _give_up(self) -> None:
        self.is_understood = False
        self.between = {}  # which holds memory

    def _is_watched(self, arg: Any) -> bool:
        return isinstance(arg, Tensor) and (self._is_parameter(arg) or _storage_of(arg) in self.between)

    def _is_parameter(self, tensor: Tensor) -> bool:
        return not tensor.is_meta and _storage_of(tensor) in self.storages

    def _note(self, target: Tensor, source: Tensor) -> None:
        if not source.numel() or target.is_meta or _is_same(target, source):
            return
        name, copy = self._copy_of(target, source)
        if self._is_parameter(target):
            if copy is not None:
                self.copies.of[name].append(copy)
            elif not self._arrives_by_way_of(source, target):
                self._give_up()
        elif copy is not None:
            self.between.setdefault(_storage_of(target), []).append((name, copy))
        elif self._is_watched(target) or _storage_of(source) in self.between:
            self._give_up()

    def _copy_of(self, target: Tensor, source: Tensor) -> tuple[str, Copy | None]:
        """Of something that arrived, its name and part; or nothing."""
        place = source.data_ptr()
        for arrived in reversed(self.arrived.get(_storage_of(source), ())):
            if arrived.holds(place) and source.dtype == arrived.dtype:
                offset = (place - arrived.first) // source.element_size()
                return arrived.name, Copy(target, tuple(source.shape), tuple(source.stride()), offset)
        return "", None

    def _arrives_by_way_of(self, source: Tensor, target: Tensor) -> bool:
        """Whether `source`, which becomes a parameter, is what was made of things that arrived, all of it, as it is."""
        found = self.between.pop(_storage_of(source), None)
        alike = (source.shape, source.stride(), source.dtype) == (target.shape, target.stride(), target.dtype)
        whole = source.numel() * source.element_size() == source.untyped_storage().nbytes()
        if found is None or not alike or not whole or any(copy.target.dtype != target.dtype for _, copy in found):
            return False
        for name, copy in found:
            there, offset = (
                copy.target,
                target.storage_offset() + copy.target.storage_offset() - source.storage_offset(),
            )
            into = target.as_strided(there.shape, there.stride(), offset)
            self.copies.of[name].append(Copy(into, copy.size, copy.stride, copy.offset))
        return True


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_same(target: Tensor, source: Tensor) -> bool:
    """Whether a tensor is copied onto itself."""
    of_both = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (target, source)]
    return of_both[0] == of_both[1]


def _is_padding(func: Any, args: tuple[Any, ...]) -> bool:
    """Zeros beyond what a checkpoint has, which stay as they are."""
    zeroes = func is torch.ops.aten.zero_.default
    return zeroes or (func is torch.ops.aten.fill_.Scalar and args[1] == 0)
