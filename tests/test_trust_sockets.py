"""Where a run listens: on loopback, unless its nodes are several machines."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from runs import SMALL, finish, rows, start

RUN = [*SMALL, "max_steps=1000", "eval.interval=0", "debug.num_threads=1"]
LAYOUTS = {
    "default": [],
    "weights over nccl": ["deployment.num_train_gpus=2", "parallelism.dp_shard=2", "weight_transport=nccl"],
    "colocated": ["deployment=colocated", "weight_transport=tcp"],
    "router": ["deployment.num_infer_gpus=2", "inference.router.type=builtin", "weight_transport=shared_memory"],
    "two nodes in rehearsal": ["deployment=multi_node", "deployment.gpus_per_node=1", "deployment.device=cpu"],
}

REST = {"colocated", "router"}
EXHAUSTIVE = pytest.mark.exhaustive

RANKS = (  # of one engine of vLLM, which meet each other
    ["inference.tp=2", "deployment.num_infer_gpus=2"],
    ["inference.dp=2", "deployment.num_infer_gpus=2", "model=tiny_qwen3"],
)


def tree(root: psutil.Process) -> Iterator[psutil.Process]:
    yield root
    yield from root.children(recursive=True)


def connections(process: psutil.Process) -> list[Any]:
    try:
        return process.net_connections(kind="inet")
    except psutil.NoSuchProcess:  # it has just ended
        return []


def name_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return "gone"


def listening(root: psutil.Process) -> dict[str, set[str]]:
    """Address -> what listens there, TCP and UDP, over all processes of a tree."""
    found: dict[str, set[str]] = {}
    for process in tree(root):
        for socket in connections(process):
            if socket.status == psutil.CONN_LISTEN or (socket.type == 2 and not socket.raddr):
                found.setdefault(socket.laddr.ip, set()).add(name_of(process))
    return found


def watched(overrides: list[str], where: Path, steps: int = 2) -> dict[str, set[str]]:
    """All that has listened at any moment from start to a few steps later."""
    process = start([*RUN, *overrides, f"cache_dir={where}/cache", f"output_dir={where}/run"], where)
    root, seen = psutil.Process(process.pid), {}
    try:
        while True:
            is_last = len([row for row in rows(where / "run", "trainer.0") if "loss" in row]) >= steps
            assert process.poll() is None, finish(process).output
            for address, names in listening(root).items():
                seen.setdefault(address, set()).update(names)
            if is_last:
                return seen
            time.sleep(0.05)  # a look takes a core's 0.1 s, which the run needs
    finally:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        finish(process, 120)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param(x, marks=EXHAUSTIVE if x in REST else ()) for x in LAYOUTS])
def test_a_run_on_one_machine_listens_on_loopback_only(tmp_path: Path, layout: str) -> None:
    seen = watched(LAYOUTS[layout], tmp_path)
    assert any("trainer/0" in name for name in seen["127.0.0.1"]), "what is looked for would be seen"
    assert set(seen) <= {"127.0.0.1", "::1"}, {a: n for a, n in seen.items() if a not in ("127.0.0.1", "::1")}


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize(
    "layout", [[], *(pytest.param(more, marks=pytest.mark.exhaustive) for more in RANKS)], ids=" ".join
)
def test_a_run_with_vllm_listens_on_loopback_only(tmp_path: Path, layout: list[str]) -> None:
    seen = watched(["inference=vllm", *layout], tmp_path)
    assert set(seen) <= {"127.0.0.1", "::1"}, {a: n for a, n in seen.items() if a not in ("127.0.0.1", "::1")}
