"""`python -m prl.watch [DIR]`: runs, sweeps and rollouts below a directory as a live page on this machine."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import os
import shlex
import signal
import socket
import sys
from pathlib import Path

from prl.config.console import leave_interrupted, one_line, shield_console
from prl.config.errors import UserError
from prl.config.loopback import LOOPBACK_HOSTS
from prl.config.place_names import a_path
from prl.runtime.directory.files import find_directories, refuse_unreadable
from prl.runtime.people.faults import holds_run
from prl.watch.server import make_token, serve
from prl.watch.store import Store

PORT = 8765
OUTPUTS = Path("outputs")  # where runs lie by default


def main() -> None:
    """Leaves by SystemExit: 0 when it is told to end while it serves, 130 before, 2 for a mistake of the user."""
    shield_console()
    try:
        _watch()
    except KeyboardInterrupt:  # before it serves
        leave_interrupted()


def _watch() -> None:
    parser = argparse.ArgumentParser(prog="prl watch", description=__doc__)
    parser.add_argument("directory", type=a_path, nargs="?", default=str(OUTPUTS), help="default: outputs")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine alone)")
    parser.add_argument("--port", type=int, help=f"default: {PORT}, or any that is free if it is taken; 0: any")
    arguments = parser.parse_args()
    try:
        store = open_store(arguments.directory)
        with listen(arguments.host, arguments.port) as listen_socket:
            asyncio.run(watch(store, listen_socket, arguments.host))
    except UserError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(2)


def open_store(directory: Path) -> Store:
    """Raises UserError where there is no run to be seen."""
    root = directory.expanduser().resolve()
    refuse_unreadable(root)
    store = Store(root)
    if root.is_dir():
        store.look()
        if store.runs or (root / "sweep.json").exists():
            return store
    raise _nothing_to_see(directory, root)


def _nothing_to_see(directory: Path, root: Path) -> UserError:
    """There is no run below; those near by are named, if there are any."""
    shown = "No directory was named, and outputs, where runs lie by default," if directory == OUTPUTS else str(root)
    found = "holds no run" if root.is_dir() else "is no directory" if root.exists() else "is not there"
    near = [path for path in (OUTPUTS.absolute(), *(folder / OUTPUTS for folder in root.parents)) if path != root]
    full = [path for path in dict.fromkeys(near) if path.is_dir() and find_directories(path, holds_run)]
    begin = "python -m prl.rl starts a run, which lies below outputs of the directory where it is started"
    fix = f"python -m prl.watch {shlex.quote(str(full[0]))}" if full else f"{begin}; then: python -m prl.watch"
    return UserError(
        f"{shown} {found}.",
        where=str(root),
        why="a run is a directory with a plan.json, at any depth below the one that is named"
        + (f"; the command was given in {Path.cwd()}" if not directory.is_absolute() else ""),
        fix=fix if full else f"{fix}; or, where there are runs elsewhere: cd there, or name their directory",
    )


def listen(host: str, port: int | None) -> socket.socket:
    """A listening socket. Raises UserError where the address cannot be had."""
    if not host:
        raise _no_host(host, "it is empty")
    for wanted in [PORT, 0] if port is None else [port]:
        try:
            return socket.create_server((host, wanted), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except (OSError, OverflowError, UnicodeError) as error:
            reason = error
    number = getattr(reason, "errno", None) or 0
    if isinstance(reason, UnicodeError) or number < 0:  # what getaddrinfo(3) says is below 0
        raise _no_host(host, "it is no address, and no name that this machine knows") from reason
    if number in (errno.EADDRNOTAVAIL, errno.EINVAL):
        raise _no_host(host, "it is the address of another machine, or of none") from reason
    raise UserError(
        f"{host}:{port} cannot be listened at: {reason}",
        where="--host, --port",
        fix="another port, or 0 for any that is free",
    ) from reason


def _no_host(host: str, why: str) -> UserError:
    return UserError(
        f"{one_line(host)} is no address of this machine.",
        where=f"--host={one_line(host)}",
        why=why,
        fix="leave --host out: the page is then for this machine alone (ssh -L brings it elsewhere); --host=0.0.0.0 "
        "listens at all of its addresses",
    )


async def watch(store: Store, listen_socket: socket.socket, host: str) -> None:
    """Serve until SIGINT or SIGTERM."""
    token = make_token()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    runner = await serve(store, token, listen_socket)
    port = listen_socket.getsockname()[1]
    name = f"[{host}]" if ":" in host else host
    with contextlib.suppress(OSError):
        print(f"http://{name}:{port}/?token={token}", flush=True)
    if host not in LOOPBACK_HOSTS:
        warning = f"others can reach {host}, and who reads the network reads the token: a tunnel (ssh -L) is safer"
        print(warning, file=sys.stderr)
    await stopped.wait()
    await runner.cleanup()
    with contextlib.suppress(OSError):
        print("stopped", file=sys.stderr, flush=True)
    os._exit(0)  # a thread may still be reading a large directory


if __name__ == "__main__":
    main()
