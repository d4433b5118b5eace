"""Ports are leased by binding them in the root; children inherit the socket, so nobody can take a port in between."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass, field

from prl.config.errors import UserError
from prl.planning.run_plan import RunPlan

LOOPBACK = "127.0.0.1"
RENDEZVOUS = "rendezvous"  # of the trainer ranks; its socket goes to trainer/0
BACKLOG = 1024


@dataclass
class Leases:
    """Sockets of one run, bound and listening, by endpoint name."""

    sockets: dict[str, socket.socket] = field(default_factory=dict)
    endpoints: dict[str, str] = field(default_factory=dict)

    def socket_for(self, role_name: str) -> socket.socket | None:
        return self.sockets.get(RENDEZVOUS if role_name == "trainer/0" else role_name)

    def release(self, role_name: str) -> None:
        """Close the root's copy: once its child is dead, connections are refused instead of queued."""
        name = RENDEZVOUS if role_name == "trainer/0" else role_name
        if name in self.sockets:
            self.sockets.pop(name).close()

    def close(self) -> None:
        for leased in self.sockets.values():
            leased.close()
        self.sockets.clear()


def lease_ports(plan: RunPlan, node: int = 0, address: str | None = None) -> Leases:
    """One listening socket for each role of a node that serves, and one for the trainers' rendezvous if it is there.

    Args:
        address: of the node, as other nodes reach it; None for a run that is all on this one.

    Raises UserError when inference.port is taken; all other ports are whichever are free.
    """
    leases = Leases()
    inference, own = plan.config.inference, address or LOOPBACK
    for role in plan.roles:
        if role.node != node:
            continue
        if role.role == "trainer":
            if role.index == 0:
                leased = leases.sockets[RENDEZVOUS] = _bind(own, 0)
                leases.endpoints[RENDEZVOUS] = f"{own}:{leased.getsockname()[1]}"
            continue
        host, port = (inference.host, inference.port) if role.role == "inference" else (own, 0)
        if address is not None and host == LOOPBACK:  # the default, which the others could not reach
            host = address
        leased = leases.sockets[role.name] = _bind(host, port + role.local_rank if port else 0)
        reachable = own if host in ("0.0.0.0", "") else host
        leases.endpoints[role.name] = f"http://{reachable}:{leased.getsockname()[1]}"
    return leases


def _bind(host: str, port: int) -> socket.socket:
    leased = socket.socket()
    try:
        if port:  # a port that was ours a moment ago is in TIME_WAIT
            leased.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        leased.bind((host, port))
        leased.listen(BACKLOG)
    except OSError as error:
        leased.close()
        if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
            raise
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            where="inference.host, inference.port",
            why="the address belongs to another program or not to this machine",
            fix="inference.port=0 takes a free port",
        ) from error
    return leased
