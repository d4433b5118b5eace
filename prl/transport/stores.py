"""Stores that carry what is small beside weights: who is ready, who takes part, what a bucket holds."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

from prl.transport.addresses import family_of

BACKLOG = 1024


def serve_store(address: str, timeout: timedelta) -> dist.TCPStore:
    """A store at a free port of one address of this host.

    torch itself would listen on all of them, and asks nobody who he is: so it is given a socket that listens already.
    """
    listener = socket.create_server((address, 0), family=family_of(address), backlog=BACKLOG)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )
