"""Weights as files: safetensors under Hugging Face names, in a directory that appears whole or not at all."""

from __future__ import annotations

import contextlib
import json
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prl.config.errors import PassingError, UserError
from prl.runtime.directory.files import is_full_disk, save_tensors
from prl.transport.boxes import TENSOR, Boxes, Table, pack_boxes, unpack_boxes
from prl.transport.buckets import Announce
from prl.transport.flat import DTYPES, size_of
from prl.transport.rounds import turns

FILE_BYTES = 1 << 30  # of one file; the writing rank holds no more than this, and one tensor, of a model
Gather = Callable[[bytes], list[bytes]]


@dataclass(frozen=True)
class Held:
    """What one of several ranks holds, [N, 5], and what of it it writes, [N]."""

    boxes: Boxes
    writes: NDArray[np.bool_]


class FilesystemPublisher:
    """`weights/step_N/model*.safetensors` with a manifest of their checksums.

    Of several ranks each writes what it holds, a tensor's part under the tensor's name, and the first one the manifest,
    which says where the parts of a tensor are.
    """

    def __init__(
        self, weights_dir: Path, keep: int, file_bytes: int = FILE_BYTES, rank: int = 0, gather: Gather | None = None
    ) -> None:
        """`gather`: a collective, returns what each rank has called it with; None: this is the only one."""
        self.dir, self.keep, self.file_bytes, self.rank, self.gather = weights_dir, keep, file_bytes, rank, gather
        self.held: list[Held] = []  # of each rank, where there are several
        if rank == 0:
            shutil.rmtree(weights_dir, ignore_errors=True)  # versions of an earlier attempt: the trainer publishes anew
            weights_dir.mkdir(parents=True)

    def hold(self, table: Table, boxes: Boxes) -> None:
        """Tell what this rank holds, in order of the table, and hear it of all others: before the first `publish`.

        Of what several hold, one writes it.
        """
        assert self.gather is not None
        self.table = table
        holdings = [unpack_boxes(packed, table) for packed in self.gather(pack_boxes(boxes))]
        self.held = [Held(boxes, turn == 0) for boxes, (turn, _) in zip(holdings, turns(holdings), strict=True)]

    def publish(self, version: int, tensors: Iterable[Any], announce: Announce) -> None:
        """`tensors`: named whole ones; of several ranks of each box the part that it holds. The first rank announces.

        Raises UserError when the disk does not take it; PassingError when it is full.
        """
        from safetensors import SafetensorError

        partial, final = self.dir / f"step_{version}.partial", self.dir / f"step_{version}"
        partial.mkdir(exist_ok=True)
        try:
            if self.held:
                manifest = {"version": version, **self._write_parts(partial, tensors)}
            else:
                manifest = {"version": version, "files": self._write(partial, tensors)[0]}
            if self.rank == 0:
                (partial / "manifest.json").write_text(json.dumps(manifest))
        except (OSError, SafetensorError) as error:  # its Rust writer reports a full disk in its own type
            shutil.rmtree(partial, ignore_errors=True)  # what remains to be written needs its room
            kind = PassingError if is_full_disk(error) else UserError
            raise kind(
                f"the weights of version {version} could not be written: {error}",
                where=str(self.dir),
                why="weight_transport=filesystem needs room for the model there",
                fix="free space, and the same command resumes (a run by itself: with its output_dir); a run begun anew "
                "may use weight_transport=shared_memory",
            ) from error
        if self.rank:
            return
        partial.rename(final)
        versions = sorted(self.dir.glob("step_*[0-9]"), key=lambda p: int(p.name.split("_")[1]))
        for old in versions[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        announce({"type": "filesystem", "path": str(final), "version": version})

    def _write_parts(self, directory: Path, parts: Iterable[Tensor]) -> dict[str, Any]:
        """This rank's parts; returns what the manifest says of those of all ranks."""
        assert self.gather is not None
        held, table = self.held[self.rank], self.table

        def own() -> Iterator[tuple[str, Tensor]]:
            for part, number, writes in zip(parts, held.boxes[:, TENSOR].tolist(), held.writes.tolist(), strict=True):
                if writes:
                    yield table.names[number], part.detach().to(DTYPES[table.dtypes[number]])

        files, places = self._write(directory, own())
        word = json.dumps([files, places]).encode()
        checksums: dict[str, int] = {}
        where: list[list[Any]] = [[] for _ in table.names]
        for of_rank, told in zip(self.held, self.gather(word), strict=True):
            files, places = json.loads(told)
            checksums |= files
            names = list(files)
            for box, place in zip(of_rank.boxes[of_rank.writes].tolist(), places, strict=True):
                where[box[TENSOR]].append([names[place], *box[1:]])
        tensors = zip(table.names, table.dtypes, table.shapes, where, strict=True)
        return {"files": checksums, "tensors": {name: about for name, *about in tensors}}

    def _write(self, directory: Path, tensors: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, int], list[int]]:
        """One file after another, each as soon as it is full. Returns the CRC-32 of each, and in which one, by number,
        each tensor is.
        """
        checksums: dict[str, int] = {}
        places: list[int] = []
        held: dict[str, Tensor] = {}
        stem = f"rank-{self.rank}" if self.held else "model"

        def flush() -> None:
            path = directory / f"{stem}{f'-{len(checksums)}' if checksums else ''}.safetensors"
            save_tensors(held, path)
            checksums[path.name] = crc32_of(path)
            held.clear()

        size = 0
        for name, tensor in tensors:
            if held and size + tensor.nbytes > self.file_bytes:
                flush()
                size = 0
            held[name] = tensor.detach().cpu().contiguous()
            places.append(len(checksums))
            size += tensor.nbytes
        flush()
        return checksums, places

    def acknowledge(self) -> None:
        """The newest versions are kept."""


def receive_files(path: Path, verify: bool) -> Iterator[tuple[str, Tensor]]:
    """Named tensors of a version, read as they are asked for. Raises ValueError for a damaged file."""
    from safetensors import safe_open

    tensors = read_manifest(path).get("tensors")
    if tensors is not None:
        for file_path, expected in manifest_of(path):
            check_file(file_path, expected if verify else None)
        yield from _join_parts(path, tensors)
        return
    for file_path, expected in manifest_of(path):
        check_file(file_path, expected if verify else None)
        with safe_open(file_path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (safe_open is not a dict)
                yield key, file.get_tensor(key)


def _join_parts(path: Path, tensors: dict[str, list[Any]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of which several ranks have written parts. Raises ValueError where they are not the whole."""
    from safetensors import safe_open

    with contextlib.ExitStack() as stack:
        files: dict[str, Any] = {}
        for name, (dtype, shape, parts) in tensors.items():
            size_of(dtype, shape)
            rows, columns = shape[0] if shape else 1, prod(shape[1:])
            matrix = torch.empty(rows, columns, dtype=DTYPES[dtype], device="cpu")
            left = matrix.numel()
            for file_name, row, height, column, width in parts:
                if file_name not in files:
                    files[file_name] = stack.enter_context(safe_open(path / Path(file_name).name, framework="pt"))
                place = matrix[row : row + height, column : column + width]
                place.copy_(files[file_name].get_tensor(name).view(height, width))
                left -= place.numel()
            if left:
                raise ValueError(f"{path}: the parts of {name} are not the whole")
            yield name, matrix.view(shape)


def read_manifest(path: Path) -> dict[str, Any]:
    return json.loads((path / "manifest.json").read_text())


def manifest_of(path: Path) -> list[tuple[Path, int]]:
    """The files of a version with their CRC-32."""
    files = read_manifest(path)["files"]
    if any(name != Path(name).name for name in files):
        raise ValueError(f"{path / 'manifest.json'} names files elsewhere")
    return [(path / name, crc32) for name, crc32 in files.items()]


def check_file(path: Path, expected: int | None) -> None:
    """`expected`: its CRC-32; None asks only whether it is there. Raises ValueError when it is another."""
    if expected is None:
        path.stat()
    elif (found := crc32_of(path)) != expected:
        raise ValueError(f"{path} is damaged: CRC-32 {found:08x}, written as {expected:08x}")


def crc32_of(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return value
