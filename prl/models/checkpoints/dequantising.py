"""Matrices of quantised checkpoints behind the interface of safetensors' slices: what is indexed out of one is read
from the file with the scales of its blocks, and comes as float32. Nothing else of the matrix is read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prl.config.quantised import Quantisation

PER_ELEMENT = {"e4m3": 1, "int4": 8, "mxfp4": 2}  # numbers in a stored element
STORED = {"e4m3": ("F8_E4M3",), "int4": ("I32",), "mxfp4": ("U8",)}  # safetensors' names of dtypes
SCALES = {"e4m3": ("F32", "BF16", "F16", "F8_E8M0"), "int4": ("F32", "BF16", "F16"), "mxfp4": ("U8", "F8_E8M0")}
INPUT_SCALE = "input_scale"  # of activations that are quantised statically; trained ones are not
SHAPE = "_shape"  # of packed matrices, whose rows may be padded
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes by code; the fourth bit is the sign
E8M0_BIAS = 127

Span = tuple[int, int]


class Dequantised:
    """One matrix [..., O, I], of whose last two dimensions blocks share a scale."""

    def __init__(self, name: str, how: Quantisation, stored: Any, scales: Any, shape: Any = None) -> None:
        """stored, scales, shape: slices of safetensors. Raises ValueError for what does not belong together."""
        self.name, self.how, self.stored, self.scales = name, how, stored, scales
        for part, known in ((stored, STORED), (scales, SCALES)):
            if part.get_dtype() not in known[how.numbers]:
                raise ValueError(f"{name} is {how.numbers} with {part.get_dtype()} where {known[how.numbers]} belong")
        self.shape = self._whole_shape(shape)
        if 0 in self.shape:  # no number that a scale could be of
            return
        expected = [
            *self.shape[:-2],
            *(-(-size // (block or size)) for size, block in zip(self.shape[-2:], how.block, strict=True)),
        ]
        given = list(scales.get_shape())
        if given != expected and (how.block != (0, 0) or given not in ([], [1])):
            raise ValueError(f"{name} of shape {self.shape} has scales of shape {given}, and needs {expected}")

    def _whole_shape(self, shape: Any) -> list[int]:
        stored = list(self.stored.get_shape())
        if self.how.is_transposed and len(stored) == 4:
            stored = [*stored[:-2], stored[-2] * stored[-1]]  # [E, O, groups, bytes]
        if len(stored) < 2:
            raise ValueError(f"{self.name} is no matrix: {stored}")
        per = PER_ELEMENT[self.how.numbers]
        whole = [*stored[:-1], stored[-1] * per]
        if shape is None:
            return whole
        said = [int(size) for size in shape[:]]
        if said[:-1] != whole[:-1] or not whole[-1] - per < said[-1] <= whole[-1]:
            raise ValueError(f"{self.name} has room for {whole}, and its shape is given as {said}")
        return said

    def get_shape(self) -> list[int]:
        """As the model has it."""
        return [*self.shape[:-2], self.shape[-1], self.shape[-2]] if self.how.is_transposed else list(self.shape)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        """float32; one slice for each dimension from the first on, with steps of 1."""
        shape = self.get_shape()
        given = index if isinstance(index, tuple) else (index,)
        spans = [part.indices(size)[:2] for part, size in zip(given, shape, strict=False)]
        spans += [(0, size) for size in shape[len(spans) :]]
        if any(start >= stop for start, stop in spans):
            return torch.empty([max(stop - start, 0) for start, stop in spans])
        if self.how.is_transposed:
            spans[-2:] = spans[:-3:-1]
            return self._read(spans).transpose(-1, -2).contiguous()
        return self._read(spans)

    def _read(self, spans: list[Span]) -> Tensor:
        *outer, rows, columns = spans
        values = self._numbers(outer, rows, columns)
        block = [size or whole for size, whole in zip(self.how.block, self.shape[-2:], strict=True)]
        held = [(start // size, -(-stop // size)) for (start, stop), size in zip((rows, columns), block, strict=True)]
        scales = self._scales_of(outer, *held)
        if scales.shape[-2] > 1:
            scales = scales.index_select(-2, torch.arange(*rows) // block[0] - held[0][0])
        if scales.shape[-1] > 1 and columns[0] % block[1] == columns[1] % block[1] == 0:
            values.unflatten(-1, (-1, block[1])).mul_(scales.unsqueeze(-1))
            return values
        if scales.shape[-1] > 1:
            scales = scales.index_select(-1, torch.arange(*columns) // block[1] - held[1][0])
        return values.mul_(scales)

    def _numbers(self, outer: list[Span], rows: Span, columns: Span) -> Tensor:
        """float32 [..., rows, columns], without their scales."""
        per = PER_ELEMENT[self.how.numbers]
        first, last = columns[0] // per, -(-columns[1] // per)
        if self.how.is_transposed:  # whole groups: they are a dimension of their own
            width = self.how.block[1] // per
            first, last = first // width * width, -(-last // width) * width
            groups = slice(first // width, last // width)
            stored = self.stored[(*_slices(outer), slice(*rows), groups)].flatten(-2)
        else:
            stored = self.stored[(*_slices(outer), slice(*rows), slice(first, last))]
        values = UNPACK[self.how.numbers](stored)
        return values[..., columns[0] - first * per : columns[1] - first * per]

    def _scales_of(self, outer: list[Span], rows: Span, columns: Span) -> Tensor:
        if self.how.block == (0, 0):
            return self.scales[...].float().reshape(1, 1)
        scales = self.scales[(*_slices(outer), slice(*rows), slice(*columns))]
        if scales.dtype == torch.uint8:
            return torch.ldexp(torch.ones(scales.shape), scales.int() - E8M0_BIAS)
        return scales.float()


def _slices(spans: list[Span]) -> list[slice]:
    return [slice(*span) for span in spans]


def _from_e4m3(stored: Tensor) -> Tensor:
    """e4m3 [..., n] -> [..., n]; two at a time where they lie so, which is faster than a cast."""
    in_pairs = stored.shape[-1] % 2 == 0 and (not stored.is_contiguous() or stored.storage_offset() % 2 == 0)
    return _look_up(stored, torch.int16) if in_pairs else stored.float()


def _from_int4(stored: Tensor) -> Tensor:
    """int32 [..., n] -> [..., 8n]: the first number in the lowest bits, so in the lower half of the first byte."""
    return _look_up(stored, torch.uint8, "int4")


def _from_mxfp4(stored: Tensor) -> Tensor:
    """uint8 [..., n] -> [..., 2n]: the first number in the lower half."""
    return _look_up(stored, torch.uint8, "mxfp4")


def _look_up(stored: Tensor, unit: torch.dtype, numbers: str = "e4m3") -> Tensor:
    """float32, two numbers for each `unit` of the bits of `stored`."""
    table = _pairs(numbers)
    codes = stored.contiguous().view(unit).int().bitwise_and_(len(table) - 1)
    return F.embedding(codes, table).flatten(-2)


@functools.cache
def _pairs(numbers: str) -> Tensor:
    """float32 [codes, 2]: the two numbers of each code."""
    if numbers == "e4m3":
        codes = torch.arange(2**16, dtype=torch.int32, device="cpu").to(torch.uint16)
        return codes.view(torch.float8_e4m3fn).float().view(-1, 2)
    values = [*E2M1, *(-value for value in E2M1)] if numbers == "mxfp4" else [float(code - 8) for code in range(16)]
    single, codes = torch.tensor(values, device="cpu"), torch.arange(2**8, device="cpu")
    return torch.stack((single[codes & 0xF], single[codes >> 4]), -1)


UNPACK = {"e4m3": _from_e4m3, "int4": _from_int4, "mxfp4": _from_mxfp4}


def as_model_tensors(stored: Mapping[str, Any], how: Quantisation | None) -> Iterator[tuple[str, Any]]:
    """(name, slice) of each tensor that a model has, from those of the files: matrices under their own names, and no
    scales of theirs or of activations. Raises ValueError for numbers of 8 bits without scales.
    """
    stems = [] if how is None else list(_stems(stored, how))
    parts = {f"{name}{end}" for name in stems for end in (how.scale if how else "", SHAPE)}
    parts |= {f"{name.removesuffix('weight')}{INPUT_SCALE}" for name in stems}
    for name, tensor in stored.items():
        if name in parts:
            continue
        stem = name.removesuffix(how.stored) if how is not None and name.endswith(how.stored) else None
        if how is not None and stem is not None and f"{stem}{how.scale}" in parts:
            shape = stored.get(f"{stem}{SHAPE}") if how.numbers == "int4" else None
            yield stem, Dequantised(stem, how, tensor, stored[f"{stem}{how.scale}"], shape)
        elif is_scaled(tensor):
            raise ValueError(f"{name} is stored as {tensor.get_dtype()}, and no scales of it are there")
        else:
            yield name, tensor


def is_scaled(tensor: Any) -> bool:
    """Whether a slice's numbers mean nothing without scales."""
    return bool(tensor.get_dtype().startswith("F8_") and 0 not in tensor.get_shape())


def _stems(stored: Mapping[str, Any], how: Quantisation) -> Iterator[str]:
    for name in stored:
        stem = name.removesuffix(how.scale)
        if stem != name and f"{stem}{how.stored}" in stored:
            yield stem
