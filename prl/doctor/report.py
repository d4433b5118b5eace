"""Findings as a table for people, and as JSON for programs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from prl.doctor.finding import PURPOSES, Finding
from prl.doctor.needs import Needs

WIDTH = 118
ELSEWHERE = "the job's nodes must have it"


def can_run(findings: Sequence[Finding]) -> bool:
    return not any(finding.prevents for finding in findings)


def render(findings: Sequence[Finding], needs: Needs, took_s: float) -> str:
    """A line for each finding, grouped by purpose, with what brings or mends it; and whether the job can run."""
    name_width = max(len(finding.name) for finding in findings)
    lines = []
    for purpose in PURPOSES:
        own = [finding for finding in findings if finding.purpose == purpose]
        if own:
            lines += [purpose, *(line for finding in own for line in _lines(finding, name_width)), ""]
    return "\n".join([*lines, verdict(findings, needs, took_s)])


def _lines(finding: Finding, name_width: int) -> list[str]:
    head = f"  {finding.state:<7} {finding.name:<{name_width}}  "
    told = finding.found
    if finding.state != "ok":
        told += f"; {ELSEWHERE}" if finding.state == "nodes" else ""
        told += f" [{finding.needed_by}]" if finding.needed_by else ""
    lines = textwrap.wrap(told, max(40, WIDTH - len(head)), break_long_words=False, break_on_hyphens=False)
    shown = [head + lines[0], *(" " * len(head) + line for line in lines[1:])] if lines else [head.rstrip()]
    if finding.state != "ok" and finding.remedy:
        shown.append(f"{' ' * len(head)}-> {finding.remedy}")  # whole, for it is to be pasted
    return shown


def verdict(findings: Sequence[Finding], needs: Needs, took_s: float) -> str:
    counts = ", ".join(
        f"{sum(finding.state == state for finding in findings)} {state}" for state in ("ok", "absent", "broken")
    )
    tail = f"({counts}; {took_s:.0f} s)"
    if can_run(findings):
        if needs.where == "here":
            return f"This job can run here. {tail}"
        elsewhere = [finding.name for finding in findings if finding.state == "nodes"]
        must = f" The job's nodes must have: {', '.join(elsewhere)}." if elsewhere else ""
        return f"This job can be submitted from here.{must} {tail}"
    lines = [f"This job cannot {'run' if needs.where == 'here' else 'be submitted from'} here: {tail}"]
    for finding in findings:
        if finding.prevents:
            lines.append(
                f"  {finding.name}: {finding.found}" + (f" [{finding.needed_by}]" if finding.needed_by else "")
            )
            if finding.remedy:
                lines.append(f"    -> {finding.remedy}")
    return "\n".join(lines)


def render_json(findings: Sequence[Finding], needs: Needs, took_s: float) -> str:
    content = {
        "can_run": can_run(findings),
        "judged_for": "this machine" if needs.where == "here" else "the nodes of a SLURM cluster",
        "took_s": round(took_s, 1),
        "prevented_by": [finding.name for finding in findings if finding.prevents],
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
