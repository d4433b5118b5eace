"""Weights as files: safetensors under Hugging Face names, in a directory that appears whole or not at all."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from prl.config.errors import PassingError, UserError
from prl.runtime.directory.files import is_full_disk, save_tensors
from prl.transport.buckets import Announce

FILE_BYTES = 1 << 30  # of one file; the writing rank holds no more than this, and one tensor, of a model


class FilesystemPublisher:
    """`weights/step_N/model*.safetensors` with a manifest of their checksums."""

    def __init__(self, weights_dir: Path, keep: int, file_bytes: int = FILE_BYTES) -> None:
        self.dir, self.keep, self.file_bytes = weights_dir, keep, file_bytes
        shutil.rmtree(weights_dir, ignore_errors=True)  # versions of an earlier attempt: the trainer publishes anew
        weights_dir.mkdir(parents=True)

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]], announce: Announce) -> None:
        """Raises UserError when the disk does not take it; PassingError when it is full."""
        from safetensors import SafetensorError

        partial = self.dir / f"step_{version}.partial"
        partial.mkdir(exist_ok=True)
        try:
            checksums = self._write(partial, tensors)
            (partial / "manifest.json").write_text(json.dumps({"version": version, "files": checksums}))
        except (OSError, SafetensorError) as error:  # its Rust writer reports a full disk in its own type
            shutil.rmtree(partial, ignore_errors=True)  # what remains to be written needs its room
            kind = PassingError if is_full_disk(error) else UserError
            raise kind(
                f"the weights of version {version} could not be written: {error}",
                where=str(self.dir),
                why="weight_transport=filesystem needs room for the model there",
                fix="free space, and the same command resumes (a run by itself: with its output_dir), or use "
                "weight_transport=shared_memory",
            ) from error
        final = self.dir / f"step_{version}"
        partial.rename(final)
        versions = sorted(self.dir.glob("step_*[0-9]"), key=lambda p: int(p.name.split("_")[1]))
        for old in versions[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        announce({"type": "filesystem", "path": str(final), "version": version})

    def _write(self, directory: Path, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
        """One file after another, each as soon as it is full. Returns the CRC-32 of each."""
        checksums: dict[str, int] = {}
        held: dict[str, Tensor] = {}

        def flush() -> None:
            path = directory / f"model{f'-{len(checksums)}' if checksums else ''}.safetensors"
            save_tensors(held, path)
            checksums[path.name] = crc32_of(path)
            held.clear()

        size = 0
        for name, tensor in tensors:
            if held and size + tensor.nbytes > self.file_bytes:
                flush()
                size = 0
            held[name] = tensor.detach().cpu().contiguous()
            size += tensor.nbytes
        flush()
        return checksums

    def acknowledge(self) -> None:
        """The newest versions are kept."""


def receive_files(path: Path, verify: bool) -> Iterator[tuple[str, Tensor]]:
    """Named tensors of a version, read as they are asked for. Raises ValueError for a damaged file."""
    from safetensors import safe_open

    for file_path, expected in manifest_of(path):
        check_file(file_path, expected if verify else None)
        with safe_open(file_path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (safe_open is not a dict)
                yield key, file.get_tensor(key)


def manifest_of(path: Path) -> list[tuple[Path, int]]:
    """The files of a version with their CRC-32."""
    files = json.loads((path / "manifest.json").read_text())["files"]
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
