"""`python -m prl.watch [DIR]`: runs, sweeps and rollouts below a directory as a live page on this machine."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
from pathlib import Path

from prl.config.console import one_line, shield_console
from prl.config.errors import UserError
from prl.config.rules.rl import LOOPBACK_HOSTS
from prl.watch.server import make_token, serve
from prl.watch.store import Store

PORT = 8765


def main() -> None:
    """Leaves by SystemExit: 0 when it is interrupted, 2 for a mistake of the user."""
    shield_console()
    parser = argparse.ArgumentParser(prog="prl watch", description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=Path("outputs"), help="default: outputs")
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
    store = Store(root)
    if root.is_dir():
        store.look()
        if store.runs or (root / "sweep.json").exists():
            return store
    raise UserError(
        f"there is no run in {directory}" if root.is_dir() else f"there is no directory {directory}",
        where=str(directory),
        why="a run is a directory with a plan.json, at any depth below the one that is named",
        fix="name the directory of a run, of a sweep or of many, say outputs; python -m prl.rl starts a run",
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
    os._exit(0)  # a thread may still be reading a large directory


if __name__ == "__main__":
    main()
