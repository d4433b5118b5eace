"""Files that others may write or read at the same time, and that a crash or a full disk may tear.

One way to append a line, one to replace a file, one to change a file that several processes change, one to read each.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shlex
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from prl.config.errors import PassingError, ReadOnlyError, UserError

if TYPE_CHECKING:
    from torch import Tensor

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
INT_DIGITS = sys.float_info.max_10_exp  # at most: a float holds all of so many
NO_RUNS = (".git", "__pycache__", "node_modules", "site-packages")  # names of directories that hold others' files
OF_A_VENV = "pyvenv.cfg"
PARTIAL = ".partial"  # ends the name of a file that is about to replace another one


class LineFile:
    """A file of lines, open for appending: each call adds whole lines or none, and never to a torn one."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)

    def append(self, lines: bytes) -> None:
        """Add lines, each with its end. Raises OSError, and then the file is as before.

        Under a lock, since NFS does not append atomically and the last line must be looked at: writers do not mix.
        """
        with _held(self.fd):
            size = os.fstat(self.fd).st_size
            is_torn = size > 0 and os.pread(self.fd, 1, size - 1) != b"\n"
            data = memoryview(b"\n" + lines if is_torn else lines)
            try:
                while data:
                    data = data[os.write(self.fd, data) :]
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self.fd, size)
                raise

    def close(self) -> None:
        os.close(self.fd)


def append_objects(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Add a line of JSON for each row, all or none. Raises OSError."""
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if lines:
        file = LineFile(path)
        try:
            file.append(lines)
        finally:
            file.close()


def open_regular(path: Path) -> BinaryIO:
    """A file to read. Raises OSError where there is none, or something else: opening a FIFO would wait for a writer."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return open(fd, "rb")
    os.close(fd)
    number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise OSError(number, os.strerror(number), str(path))


def read_regular(path: Path) -> bytes:
    """All of a file. Raises OSError as `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def read_objects(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines; what is torn or something else is left out."""
    try:
        lines = read_regular(path).splitlines()
    except OSError:
        return []
    return [row for line in lines if (row := parse_object(line)) is not None]


def parse_object(text: str | bytes) -> dict[str, Any] | None:
    """A JSON object; None for anything else."""
    try:
        value = parse_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def parse_json(text: str | bytes) -> Any:
    """Raises ValueError for what is no JSON, is too deep, or has an integer that no float can hold."""
    try:
        return json.loads(text, parse_int=_parse_int)
    except RecursionError as error:
        raise ValueError("JSON of too many levels") from error


def _parse_int(digits: str) -> int:
    if len(digits) > INT_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object that a file holds; None if there is no file, or none that can be read."""
    try:
        return parse_object(read_regular(path))
    except OSError:
        return None


def why_no_object(path: Path, groups: Iterable[str] = ()) -> str:
    """A sentence that says why `read_object` has nothing, or no such groups in what it has; "" if it has them."""
    try:
        data = read_regular(path)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if not data.strip(b"\0 \r\n"):  # as a full disk or a power cut leaves it
        return f"{path} cannot be used: it is empty" + (", or holds zeros alone" if data else "")
    try:
        value = parse_json(data)
    except ValueError as error:
        return f"{path} cannot be used: it is no JSON ({error})"
    if not isinstance(value, dict):
        return f"{path} cannot be used: it is JSON, but no object"
    lacking = [group for group in groups if not isinstance(value.get(group), dict)]
    return f"{path} cannot be used: it has no {', '.join(lacking)}" if lacking else ""


def find_directories(root: Path, is_wanted: Callable[[Path], bool]) -> list[Path]:
    """Those at any depth below that are wanted, sorted, not looking into them. Each is there once, however many
    symbolic links lead to it, and under its own name if that lies below the root. Nobody looks into what package
    managers and git keep: that is large, and none of ours.
    """
    found: list[Path] = []
    seen: set[str] = set()
    ahead, links = [(str(root), os.path.realpath(root))], deque[str]()
    while ahead or links:
        if ahead:
            path, whole = ahead.pop()
        else:  # links behind all that can be had without them
            path = links.popleft()
            whole = os.path.realpath(path)  # of a link to itself, too
            if not os.path.isdir(path):
                continue
        if whole in seen:
            continue
        seen.add(whole)
        is_root = path == str(root)
        if not is_root and is_wanted(Path(path)):
            found.append(Path(path))
        elif is_root or not _is_foreign(path):
            with contextlib.suppress(OSError), os.scandir(path) as inside:  # nobody's business, or gone meanwhile
                for inner in inside:
                    if inner.is_symlink():
                        links.append(inner.path)
                    elif inner.is_dir(follow_symlinks=False):
                        ahead.append((inner.path, os.path.join(whole, inner.name)))
    return sorted(found)


def _is_foreign(path: str) -> bool:
    return os.path.basename(path) in NO_RUNS or os.path.exists(os.path.join(path, OF_A_VENV))


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """A safetensors file that others may read as far as the umask lets them; the library leaves it to its owner."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata=metadata)
    path.chmod(mode)


def replace_file(path: Path, content: str | bytes, *, sync: bool = True, mode: int = 0o644) -> None:
    """Write a file as a whole: readers see what was there before or this, also after a crash. Raises OSError.

    Args:
        sync: wait until it is on disk. Without, a machine that loses power may lose both.
        mode: of the file, from its first moment.
    """
    data = content.encode() if isinstance(content, str) else content
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}{PARTIAL}")
    try:
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(fd)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if sync:
        sync_directory(path.parent)


def change_object(path: Path, change: Callable[[dict[str, Any]], None], default: dict[str, Any]) -> None:
    """Read a JSON object, change it, replace it, while nobody else does. Raises UserError if it cannot be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f".{path.name}.lock")):
        content = read_object_or_default(path, default)
        change(content)
        replace_file(path, json.dumps(content, indent=1) + "\n")


def read_object_or_default(path: Path, default: dict[str, Any]) -> dict[str, Any]:
    """The JSON object, or the default where there is no file. Raises UserError for one that is damaged, or nobody's
    business.
    """
    try:
        content = parse_object(read_regular(path))
    except FileNotFoundError:
        return default
    except OSError as error:
        raise unreadable(path, error) from error
    if content is None:
        raise damaged(path, "it holds no JSON object; a disk or a person has changed it")
    return content


def damaged(path: Path, why: str) -> UserError:
    """What is said of a record that cannot be used, and is not made anew by itself."""
    return UserError(
        f"{path} is damaged.",
        where=str(path),
        why=why,
        fix=f"restore it, or move it away: {move_away(path, 'damaged')}",
    )


def move_away(path: Path | str, ending: str) -> str:
    """The command that does it."""
    return f"mv {shlex.quote(str(path))} {shlex.quote(f'{path}.{ending}')}"


def unreadable(path: Path, error: OSError) -> UserError:
    """What is said of a file or a directory that is there, and that this person may not read, say."""
    return UserError(
        f"{path} cannot be read.",
        where=str(path),
        why=error.strerror or str(error),
        fix=f"ls -ld {shlex.quote(str(path))} says whose it is",
    )


def refuse_unreadable(directory: Path) -> None:
    """Raise UserError for a directory of which nobody can say what is in it; nothing for what is none."""
    try:
        os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise unreadable(directory, error) from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file that exists only for that."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with _held(fd):
            yield
    finally:
        os.close(fd)


def create_exclusively(path: Path, content: str) -> bool:
    """Make a file that is not there yet; False if it is. Of several who try, one succeeds."""
    try:
        with path.open("x") as file:
            file.write(content)
    except FileExistsError:
        return False
    return True


def is_full_disk(error: BaseException) -> bool:
    """Whether it says ENOSPC or EDQUOT: by number or, as safetensors' writer in Rust does, in words. Words of others
    may be about another place: NCCL's and PyTorch's about /dev/shm.
    """
    return _says(error, FULL_DISK)


def is_read_only(error: BaseException) -> bool:
    """Whether it says EROFS, by number or in words likewise."""
    return _says(error, (errno.EROFS,))


def _says(error: BaseException, numbers: Collection[int]) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in numbers
    says_so = any(os.strerror(number) in str(error) for number in numbers)
    return says_so and type(error).__name__ in ("SafetensorError", "Error")  # the latter of shutil, of several files


def full_disk_here(error: BaseException, path: Path) -> UserError:
    """What a run says whose directory has no space left."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return PassingError(
        f"The disk is full: {written_of(error) or path} could not be written.",
        where=str(path),
        why=f"{reason}: no space left on the device, or a quota is exceeded",
        fix=f"free space; then the same command, a sweep's too, resumes (a run by itself: with output_dir="
        f"{shlex.quote(str(path))})",
    )


def written_of(error: BaseException) -> str | None:
    """The file that could not be written, of two the one that was to be the other's copy."""
    return getattr(error, "filename2", None) or getattr(error, "filename", None)


def read_only_here(error: BaseException, path: Path) -> UserError:
    """What a run says whose directory can no longer be written to while it runs."""
    return ReadOnlyError(
        f"The file system has become read-only: {getattr(error, 'filename', None) or path} could not be written.",
        where=str(path),
        why="the machine's log (dmesg) says why it was mounted anew, after an error of the disk above all",
        fix=f"make it writable again; then the same command, a sweep's too, resumes (a run by itself: with output_dir="
        f"{shlex.quote(str(path))})",
    )


def directory_in_the_way(error: OSError) -> UserError:
    """What a run says that cannot write a file, since a directory has its name."""
    return UserError(
        f"{error.filename} is a directory, and the run writes a file there.",
        where=str(error.filename),
        why="something else than this run has made it",
        fix=move_away(error.filename, "moved"),
    )


def in_the_way(error: OSError) -> UserError:
    """What a run says of something in its directory that it may not use, or that is something else."""
    named = Path(error.filename)
    place = next(path for path in (named, *named.parents) if os.path.lexists(path))  # what it was to be made in
    lacks = place.is_dir() and not os.access(place, os.R_OK | os.W_OK | os.X_OK)
    closed = isinstance(error, PermissionError) or lacks
    why = "this user may not" if closed else "it is there and is not what a run has under this name"
    return UserError(
        f"{place} cannot be used: {os.strerror(errno.EACCES) if closed else error.strerror}.",
        where=str(place),
        why=why,
        fix=f"ls -ld {shlex.quote(str(place))} says what and whose it is; give it its rights back, or "
        f"{move_away(place, 'moved')}",
    )


def as_user_error(error: BaseException, run_dir: Path) -> UserError | None:
    """What a run says of an error that its user can mend; None for all others."""
    if isinstance(error, UserError):
        return error
    if is_full_disk(error):
        return full_disk_here(error, run_dir)
    if is_read_only(error):
        return read_only_here(error, run_dir)
    if isinstance(error, IsADirectoryError):
        return directory_in_the_way(error)
    if isinstance(error, PermissionError | FileExistsError | NotADirectoryError) and error.filename:
        inside = Path(error.filename).absolute().is_relative_to(run_dir.absolute())
        return in_the_way(error) if inside else None
    return None


def is_held(path: Path) -> bool:
    """Whether a process holds an exclusive lock on this file; False where there is no file, or no locks."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # not to wait at a FIFO
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


@contextlib.contextmanager
def _held(fd: int) -> Iterator[None]:
    with contextlib.suppress(OSError):  # a filesystem without locks: local ones append atomically without
        fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)


def sync_directory(path: Path) -> None:
    """Until what was made or renamed in it is on disk."""
    with contextlib.suppress(OSError):  # some filesystems have no fsync of directories
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
