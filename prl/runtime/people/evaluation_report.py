"""The end of an evaluation: avg@k and pass@k of each environment with their intervals, and where everything lies."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prl.config.console import one_line
from prl.runtime.directory.evaluation import RESULT
from prl.runtime.directory.files import read_object

HEADINGS = ("environment", "tasks", "samples", "", "mean", "95 % interval")
WIDTH = 118


def print_evaluation(run_dir: Path) -> None:
    """By result.json of the run."""
    result = read_object(run_dir / RESULT)
    if result is None:
        return
    print(one_line(f"policy      {_named(result['policy'])}"))
    rows = [HEADINGS, *_rows(result["environments"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    for row in rows:
        cells = [
            cell.ljust(w) if i in (0, 3) else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
    if result["failed_rollouts"]:
        of = f" of {result['rollouts']}" if "rollouts" in result else ""  # as older versions wrote it
        share = f"{result['failed_rollouts']}{of}"
        print(f"rollouts that failed, and count as nothing: {share} (failures.jsonl)")
    print(textwrap.fill(result["about"], WIDTH))
    for label, path in (("run", run_dir), ("result", run_dir / RESULT)):
        print(one_line(f"{label:<12}{path}"))


def _rows(environments: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, told in sorted(environments.items()):
        head = (name, str(told["tasks"]), str(told["samples"]))
        if not told["figures"]:
            yield (*head, "", "no rollout ended", "")
        for figure, values in told["figures"].items():
            interval = values["interval"]
            between = f"{interval[0]:.4f} to {interval[1]:.4f}" if interval else "of one task there is none"
            yield (*head, figure, f"{values['mean']:.4f}", between)
            head = ("", "", "")


def _named(policy: dict[str, Any]) -> str:
    if "run" in policy:
        return f"step {policy['step']} of {policy['run']}"
    if "urls" in policy:
        served = ", ".join(sorted(set((policy.get("served") or {}).values())))
        asked = f"{served}, which " if served else "what "
        return f"{asked}{', '.join(policy['urls'])} serve{'s' * (len(policy['urls']) == 1)}"
    return policy["path"] or f"random weights of {policy['model']}"
