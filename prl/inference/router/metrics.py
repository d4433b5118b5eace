"""The router's own counters in the Prometheus text format."""

from __future__ import annotations

from prl.inference.router.policy import Policy
from prl.inference.router.replicas import Replica


def prometheus_text(replicas: list[Replica], policy: Policy, retries: int) -> str:
    """Per replica: requests, failures, requests in flight, health. Over all: retries, blocks of prompts and those that
    the replica chosen had seen.
    """
    lines = []
    for kind, name, values in (
        ("counter", "requests_total", [r.requests for r in replicas]),
        ("counter", "request_failures_total", [r.failures for r in replicas]),
        ("gauge", "requests_in_flight", [r.in_flight for r in replicas]),
        ("gauge", "replica_healthy", [int(r.healthy) for r in replicas]),
    ):
        lines.append(f"# TYPE prl_router:{name} {kind}")
        for replica, value in zip(replicas, values, strict=True):
            lines.append(f'prl_router:{name}{{replica="{replica.name}"}} {value}')
    for kind, name, total in (
        ("counter", "retries_total", retries),
        ("counter", "prompt_blocks_total", policy.blocks),
        ("counter", "prompt_blocks_matched_total", policy.matched),
        ("gauge", "known_blocks", len(policy.table.seen)),
    ):
        lines += [f"# TYPE prl_router:{name} {kind}", f"prl_router:{name} {total}"]
    return "\n".join(lines) + "\n"
