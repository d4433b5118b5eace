"""Ports are leased by binding them in the root; children inherit the socket, so nobody can take a port in between."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from prl.config.errors import UserError
from prl.planning.run_plan import EnginePlan, RolePlan, RunPlan
from prl.planning.vllm_arguments import kv_side_channel, meeting_point

LOOPBACK = "127.0.0.1"
ANY_HOST = ("0.0.0.0", "")
RENDEZVOUS = "rendezvous"  # of the trainer ranks; its socket goes to trainer/0
BACKLOG = 1024
OUT_OF_SOCKETS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # no mistake of the user's


@dataclass
class Leases:
    """Sockets of one run, bound and listening, by endpoint name."""

    sockets: dict[str, socket.socket] = field(default_factory=dict)
    endpoints: dict[str, str] = field(default_factory=dict)
    reserved: list[socket.socket] = field(default_factory=list)  # bound only, for what children bind by themselves

    def socket_for(self, role_name: str) -> socket.socket | None:
        return self.sockets.get(RENDEZVOUS if role_name == "trainer/0" else role_name)

    def release(self, role_name: str) -> None:
        """Close the root's copy: once its child is dead, connections are refused instead of queued."""
        name = RENDEZVOUS if role_name == "trainer/0" else role_name
        if name in self.sockets:
            self.sockets.pop(name).close()

    def close(self) -> None:
        for leased in (*self.sockets.values(), *self.reserved):
            leased.close()
        self.sockets.clear()
        self.reserved.clear()


def on_first_node(role: RolePlan) -> bool:
    return role.node == 0


def lease_ports(
    plan: RunPlan, is_here: Callable[[RolePlan], bool] = on_first_node, address: str | None = None
) -> Leases:
    """One listening socket for each role here that serves, and one for the trainers' rendezvous if it is here.

    Args:
        is_here: which roles are.
        address: of the node, as other nodes reach it; None for a run that is all on this one.

    Raises UserError when inference.port is taken; all other ports are whichever are free.
    """
    leases = Leases()
    inference, own = plan.config.inference, address or LOOPBACK
    front = "router" if plan.roles_of("router") else "inference"  # what people talk to
    for role in plan.roles:
        if not is_here(role):
            continue
        if role.role == "trainer":
            if role.index == 0:
                leased = leases.sockets[RENDEZVOUS] = _bind(own, 0)
                leases.endpoints[RENDEZVOUS] = f"{own}:{leased.getsockname()[1]}"
            continue
        if role.engine is not None:
            _reserve_for_engine(leases, role, role.engine, own)
            if not role.engine.serves:
                continue
        host, port = (inference.host, inference.port) if role.role == front else (own, 0)
        if address is not None and host == LOOPBACK:  # the default, which the others could not reach
            host = address
        leased = leases.sockets[role.name] = _bind(host, port + role.local_rank if port else 0)
        reachable = own if host in ANY_HOST else host
        leases.endpoints[role.name] = f"http://{reachable}:{leased.getsockname()[1]}"
    return leases


def _reserve_for_engine(leases: Leases, role: RolePlan, engine: EnginePlan, own: str) -> None:
    """Ports that vLLM binds by itself later: held here until then, without listening, which lets it in.

    ZeroMQ sets SO_REUSEADDR; with it on both sides, Linux refuses a second socket only where one listens.
    """
    names = [] if engine.serves else [(role.name, 1)]
    if engine.head == role.name and engine.dp_local < engine.dp:
        names.append((meeting_point(role.name), 1))
    if engine.kind != "both":
        names.append((kv_side_channel(role.name), engine.dp_local))
    for name, count in names:
        reserved = _reserve(own, count)
        leases.endpoints[name] = f"{own}:{reserved[0].getsockname()[1]}"
        leases.reserved += reserved


def _reserve(host: str, count: int) -> list[socket.socket]:
    """Sockets bound to `count` consecutive ports."""
    while True:
        first = _reusable(host, 0)
        port = first.getsockname()[1]
        held = [first]
        try:
            held += [_reusable(host, port + i) for i in range(1, count)]
        except (OSError, OverflowError):  # one is taken, or beyond the last
            for taken in held:
                taken.close()
        else:
            return held


def _reusable(host: str, port: int) -> socket.socket:
    bound = socket.socket()
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # only now: a port reserved already is refused to us
    return bound


def _bind(host: str, port: int) -> socket.socket:
    leased = socket.socket()
    try:
        if port:  # a port that was ours a moment ago is in TIME_WAIT
            leased.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        leased.bind((host, port))
        leased.listen(BACKLOG)
    except (OSError, OverflowError, UnicodeError) as error:  # of a port beyond the last, of a name that is none
        leased.close()
        if isinstance(error, OSError) and error.errno in OUT_OF_SOCKETS:
            raise
        raise UserError(
            f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}",
            where="inference.host, inference.port",
            why="the address belongs to another program or not to this machine"
            if isinstance(error, OSError) and not isinstance(error, socket.gaierror)
            else "no address of this machine has that name",
            fix="inference.port=0 takes a free port; inference.host=127.0.0.1",
        ) from error
    return leased
