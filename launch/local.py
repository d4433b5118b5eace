"""Points on this machine: one after another in this process, or several at a time, each on devices of its own."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from launch.points import Point
from launch.settings import LauncherSettings
from prl.config.errors import ConfigError, UserError
from prl.runtime.ledger import record_failure
from prl.runtime.status_file import read_status

if TYPE_CHECKING:
    from prl.config.entry import Session

INTERRUPTED = (130, 143)  # 128 + SIGINT, 128 + SIGTERM
POLL_S = 0.2


def run_points(session: Session, points: list[Point], settings: LauncherSettings) -> None:
    """Run all; a point that fails is remembered in the session, and the others go on."""
    places: list[str | None] = device_places(points, settings) if session.is_frozen else [None]
    if len(places) == 1:
        for point in points:
            run_here(session, point)
        return
    run_side_by_side(session, points, places)


def run_here(session: Session, point: Point) -> None:
    """In this process. An interrupted point ends the sweep."""
    try:
        code = session.job(point.config)
    except UserError as error:
        print(error.render(), file=sys.stderr)
        code, kind, message = 2, "config", error.render()
    except Exception as error:
        traceback.print_exc()
        code, kind, message = 1, "code", repr(error)
    else:
        failure = read_status(point.path).get("failure") or {}
        kind, message = failure.get("class", "code"), failure.get("message", f"exit code {code}")
    if code in INTERRUPTED:
        raise SystemExit(code)
    if code:
        session.failed[str(point.path)] = code
    if code and session.is_frozen:
        attempt = read_status(point.path).get("attempt", 1)
        node = platform.node()
        record_failure(point.path, attempt=attempt, kind=kind, message=message, node=node, job=None, requeued=False)


def device_places(points: list[Point], settings: LauncherSettings) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each point that may run at a time; None: as it is.

    Raises ConfigError when the GPUs do not hold as many as asked for.
    """
    wanted, devices = settings.parallel_points, visible_gpus()
    need = max((point.plan.gpus_per_node * point.plan.num_nodes for point in points), default=1)
    on_cpu = not devices or all(point.config.deployment.device == "cpu" for point in points)
    if on_cpu:
        return [None] * min(1 if wanted == "auto" else wanted, max(len(points), 1))
    fit = len(devices) // need
    if wanted != "auto" and wanted > fit:
        raise ConfigError(
            [
                UserError(
                    f"{wanted} points at a time do not fit on {len(devices)} GPUs.",
                    where=f"hydra.launcher.parallel_points={wanted}",
                    why=f"a point takes up to {need}",
                    fix=f"hydra.launcher.parallel_points={max(fit, 1)}",
                )
            ]
        )
    count = min(fit if wanted == "auto" else wanted, len(points))
    return [",".join(devices[i * need : (i + 1) * need]) for i in range(count)] if count > 1 else [None]


def visible_gpus() -> list[str]:
    """GPUs as CUDA_VISIBLE_DEVICES or nvidia-smi names them; none without either."""
    outer = os.environ.get("CUDA_VISIBLE_DEVICES")
    if outer is not None:
        return [name for name in outer.split(",") if name.strip()]
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    return [str(index) for index, line in enumerate(done.stdout.splitlines()) if line.startswith("GPU ")]


def run_side_by_side(session: Session, points: list[Point], places: list[str | None]) -> None:
    """Each point in a process of its own; its console goes to POINT/console.log. A signal to this process stops all."""
    waiting, free, cores = list(points), list(range(len(places))), share_cores(len(places))
    running: dict[int, tuple[Point, subprocess.Popen[bytes]]] = {}
    try:
        while waiting or running:
            while waiting and free:
                place, point = free.pop(0), waiting.pop(0)
                running[place] = (point, start_agent(point.path, places[place], cores[place]))
                print(f"{point.path.name}: started, console in {point.path / 'console.log'}", flush=True)
            time.sleep(POLL_S)
            for place, (point, process) in list(running.items()):
                code = process.poll()
                if code is not None:
                    del running[place]
                    free.append(place)
                    print(f"{point.path.name}: {'done' if code == 0 else f'failed with exit code {code}'}", flush=True)
                    if code:
                        session.failed[str(point.path)] = code
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.wait()


def share_cores(count: int) -> list[set[int]]:
    """This process's CPU cores in as many parts; where there are fewer cores than parts, parts share them. Only Linux
    can hold a process to some cores.
    """
    if sys.platform != "linux":
        return [set() for _ in range(count)]
    cores = sorted(os.sched_getaffinity(0))
    if count > len(cores):
        return [{cores[i % len(cores)]} for i in range(count)]
    return [set(cores[i * len(cores) // count : (i + 1) * len(cores) // count]) for i in range(count)]


def start_agent(path: Path, devices: str | None, cores: set[int]) -> subprocess.Popen[bytes]:
    """The point's roles take as many threads as there are cores (prl.runtime.environment)."""
    environment = dict(os.environ) if devices is None else os.environ | {"CUDA_VISIBLE_DEVICES": devices}
    with (path / "console.log").open("ab") as console:
        process = subprocess.Popen(
            [sys.executable, "-m", "prl.runtime.agent", str(path)],
            env=environment,
            stdout=console,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    if cores:
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(process.pid, cores)  # what it starts inherits it
    return process
