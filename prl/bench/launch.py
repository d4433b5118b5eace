"""One benchmark from its configuration to its table and JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

from prl.bench.arguments import json_place
from prl.bench.environment import describe_environment
from prl.bench.report import print_report
from prl.config.errors import UserError
from prl.config.schema import RunConfig
from prl.planning.planner import make_plan
from prl.runtime.directory.files import replace_file
from prl.runtime.directory.rundir import claim
from prl.runtime.directory.status_file import StatusFile, read_status
from prl.runtime.launch import run as run_tree
from prl.runtime.process.failures import Failure
from prl.runtime.process.signals import STOP_SIGNALS, StopSignals
from prl.runtime.supervisor import ENTRIES as ROLES

RAW_RESULT = "bench.json"  # in the run directory: what the measuring process found
RESULT = "result.json"  # beside it: the same with what was measured, and where
STACK_RUN = "stack"  # in the run directory: the run that is summarised
ENTRIES = {
    "trainer_rl": "prl.bench.trainer:main",
    "trainer_sft": "prl.bench.trainer:main",
    "transformers": "prl.bench.baseline:main",
    "trl": "prl.bench.trl:main",
}


def run(config: RunConfig, signals: StopSignals | None = None, own_job: bool = False) -> int:
    """Measure, print the table, write result.json and bench.output_json. Returns the exit code; raises as a run does.

    Args:
        signals, own_job: as those of `prl.runtime.launch.run`.
    """
    assert config.bench is not None
    target = config.bench.target
    json_place(config.bench.output_json)  # before anything is measured
    config = config.model_copy(update={"output_dir": config.output_dir or _fresh_dir(config.name)})
    if target in ENTRIES:
        run_dir = _directory(config)
        code = run_tree(config, {**ROLES, "trainer": ENTRIES[target]}, signals, own_job)
        if code == 0:
            _publish(config, json.loads((run_dir / RAW_RESULT).read_text()), run_dir)
        return code
    return _run_beside(config, signals)


def _run_beside(config: RunConfig, signals: StopSignals | None) -> int:
    """What is no run of its own job: directory and status are kept here, so that a sweep sees how it goes."""
    plan, run_dir = make_plan(config), _directory(config)
    claimed = claim(plan)
    try:
        if read_status(run_dir).get("state") == "done":
            print(f"{run_dir} is done already")
            return 0
        status = StatusFile(run_dir, plan.point_id, config.job, config.name, config.max_steps)
        status.update(state="running")
        try:
            with nullcontext(signals) if signals else StopSignals() as signals:
                code, result = _measure(config, run_dir, signals)
        except BaseException as error:
            failure = Failure("config" if isinstance(error, UserError) else "code", "bench", 0, 0, str(error), "")
            status.update(state="failed", failure=failure.to_status())
            raise
        if result is not None:
            _publish(config, result, run_dir)
        inner = read_status(run_dir / STACK_RUN)
        state, step = ("done", config.max_steps) if result else (inner.get("state", "stopped"), inner.get("step", 0))
        status.update(state=state, failure=inner.get("failure"), step=step)
        return code
    finally:
        claimed.release()


def _measure(config: RunConfig, run_dir: Path, signals: StopSignals) -> tuple[int, dict[str, Any] | None]:
    """The exit code, and the result if it is 0."""
    assert config.bench is not None
    if config.bench.target == "inference":
        from prl.bench.inference import measure_engine

        try:
            with _raising(signals):
                return 0, measure_engine(config)
        except Interrupted:
            return signals.exit_code, None
    from prl.bench.stack import summarise_run

    inner = run_dir / STACK_RUN
    code = run_tree(config.model_copy(update={"job": "rl", "bench": None, "output_dir": str(inner)}), signals=signals)
    return code, None if code else summarise_run(inner, config.bench.warmup_steps)


class Interrupted(BaseException):
    """A signal asks to stop. Nobody on the way takes it for an error."""


@contextmanager
def _raising(signals: StopSignals) -> Iterator[None]:
    """Meanwhile the first signal raises Interrupted: what is measured in this process has nothing to save, and no loop
    that would look.
    """
    before: dict[int, Any] = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def stop(number: int, frame: FrameType | None) -> None:
        is_first = not signals.count
        before[number](number, frame)
        if is_first and signals.count:
            raise Interrupted

    try:
        for number in STOP_SIGNALS:
            signal.signal(number, stop)
        if signals.count:
            raise Interrupted
        yield
    finally:
        for handled, handler in before.items():
            signal.signal(handled, handler)


def _directory(config: RunConfig) -> Path:
    assert config.output_dir is not None
    return Path(config.output_dir).expanduser().absolute()


def _publish(config: RunConfig, result: dict[str, Any], run_dir: Path) -> None:
    bench = config.bench
    assert bench is not None
    document = {
        "target": bench.target,
        "model": config.model.name,
        "overrides": sys.argv[1:],
        "environment": describe_environment(),
        "config": config.model_dump(mode="json"),
        "result": result,
    }
    print_report(document)
    print(f"run         {run_dir}")
    for path in (run_dir / RESULT, json_place(bench.output_json)):
        if path is None:
            continue
        replace_file(path, json.dumps(document, indent=1) + "\n")
        print(f"json        {path}")


def _fresh_dir(name: str) -> str:
    """Named by time and process, so that two benchmarks never share one."""
    return f"outputs/{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
