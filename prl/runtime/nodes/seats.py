"""Who starts which roles of a run: a seat is one agent's place in it. The root has the first one.

Usually there is one for each node. Where people or another scheduler start the roles, there is one for each of their
processes, by the names of its roles: a warm start's trainers sit where the trainers do, whichever node its plan says.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from prl.planning.run_plan import RolePlan, RunPlan

LEADERS = {"rl": "orchestrator", "sft": "trainer", "inference": "inference"}  # job -> the command that is the root
KINDS = {"trainer": ("trainer",), "orchestrator": ("orchestrator", "env"), "inference": ("inference", "router")}


@dataclass(frozen=True)
class Seat:
    """`roles`: their names; None: all that the plan puts on the node. `command` is what takes the seat."""

    name: str
    node: int
    roles: frozenset[str] | None = None
    command: str = ""

    def has(self, role: RolePlan) -> bool:
        return role.node == self.node if self.roles is None else role.name in self.roles


def seats_of_nodes(plan: RunPlan) -> tuple[Seat, ...]:
    return tuple(Seat(f"node {node}", node) for node in range(plan.num_nodes))


def seats_of_ranks(plan: RunPlan) -> tuple[Seat, ...]:
    """One for each trainer rank, of a job that has no other roles. What starts one starts all."""
    return tuple(
        Seat(role.name, role.node, frozenset({role.name}), f"rank {role.rank} of torchrun")
        for role in plan.roles_of("trainer")
    )


def seats_by_hand(plan: RunPlan, point: Path) -> tuple[Seat, ...]:
    """Those of `python -m prl.KIND POINT [--node=K]`, the root's first; at the end one for each rank that torchrun may
    start in place of `prl.trainer`. Seats that share roles exclude each other.
    """
    leader = LEADERS[plan.config.job]
    seats = []
    for kind, names in KINDS.items():
        own = [role for role in plan.roles if role.role in names]
        nodes = sorted({role.node for role in own})
        for node in nodes:
            which = f" --node={node}" if len(nodes) > 1 else ""
            seats.append(
                Seat(
                    kind + (f" of node {node}" if which else ""),
                    node,
                    frozenset(role.name for role in own if role.node == node),
                    f"python -m prl.{kind} {shlex.quote(str(point))}{which}",
                )
            )
    first = next(seat for seat in seats if seat.name.split()[0] == leader)
    ranks = seats_of_ranks(plan) if leader != "trainer" else ()
    return (first, *(seat for seat in seats if seat is not first), *ranks)


def starter_of(seats: tuple[Seat, ...]) -> str:
    """Who starts the roles of a run with these seats: "hand", "torchrun", or "" (none): the run itself."""
    if not seats:
        return ""
    return "torchrun" if "/" in seats[0].name else "hand"


def commands_by_hand(plan: RunPlan, point: Path) -> list[str]:
    """One for each terminal, the root's first."""
    return [seat.command for seat in seats_by_hand(plan, point) if "/" not in seat.name]
