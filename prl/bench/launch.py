"""One benchmark from its configuration to its table and JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from prl.bench.environment import describe_environment
from prl.bench.report import print_report
from prl.config.schema import BenchConfig, RunConfig
from prl.runtime.launch import run as run_tree

RESULT = "bench.json"  # in the run directory: what the measuring process found
ENTRIES = {
    "trainer_rl": "prl.bench.trainer:main",
    "trainer_sft": "prl.bench.trainer:main",
    "transformers": "prl.bench.baseline:main",
}


def run(config: RunConfig) -> int:
    """Measure, print the table, write bench.output_json. Returns the exit code; raises UserError as a run does."""
    bench = config.bench
    assert bench is not None
    total = bench.warmup_steps + bench.steps
    config = config.model_copy(update={"max_steps": total, "output_dir": config.output_dir or _fresh_dir(config.name)})
    assert config.output_dir is not None
    run_dir = Path(config.output_dir).expanduser().absolute()
    if bench.target == "inference":
        from prl.bench.inference import measure_engine

        result = measure_engine(config)
    else:
        code = _run_processes(config, bench)
        if code:
            return code
        result = _result_of(config, bench, run_dir)
    _publish(config, bench, result, run_dir)
    return 0


def _run_processes(config: RunConfig, bench: BenchConfig) -> int:
    if bench.target == "stack":
        return run_tree(config.model_copy(update={"job": "rl", "bench": None}))
    return run_tree(config, {"trainer": ENTRIES[bench.target]})


def _result_of(config: RunConfig, bench: BenchConfig, run_dir: Path) -> dict[str, Any]:
    if bench.target == "stack":
        from prl.bench.stack import summarise_run

        return summarise_run(run_dir, bench.warmup_steps)
    return json.loads((run_dir / RESULT).read_text())


def _publish(config: RunConfig, bench: BenchConfig, result: dict[str, Any], run_dir: Path) -> None:
    document = {
        "target": bench.target,
        "model": config.model.name,
        "overrides": sys.argv[1:],
        "environment": describe_environment(),
        "config": config.model_dump(mode="json"),
        "result": result,
    }
    print_report(document)
    if run_dir.is_dir():
        print(f"run         {run_dir}")
    if bench.output_json is not None:
        path = Path(bench.output_json).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"json        {path}")


def _fresh_dir(name: str) -> str:
    """Named by time and process, so that two benchmarks never share one."""
    return f"outputs/{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
