"""Whether pip can resolve what each extra of the installed package asks for: `python .ci/extras.py PIP`.

The extras are those of the package's metadata. What resolves together does so alone, so those that can be had beside
each other (all but vLLM's two builds) are asked for at once, and one by one only if that fails. pip reads metadata only
(of wheels whose index has none apart, by range requests), so nothing large is downloaded; older pips than 26 may
download each wheel. Exit code 1: one cannot be.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

PACKAGE = "prl"
AT_A_TIME = 2
LIMIT_S = 600
FLAGS = ("--quiet", "--dry-run", "--ignore-installed", "--use-feature=fast-deps", "--retries=10", "--timeout=60")


def requirements(extras: tuple[str, ...]) -> list[str]:
    """Of the package with these extras, as pip takes them."""
    found = [Requirement(line) for line in distribution(PACKAGE).requires or []]
    applying = [
        need for need in found if need.marker is None or any(need.marker.evaluate({"extra": one}) for one in extras)
    ]
    for need in applying:
        need.marker = None
    return [str(need) for need in applying]


def resolve(pip: str, extras: tuple[str, ...]) -> tuple[str, bool]:
    """What is to be said of extras at once, and whether they can be resolved."""
    extra = ", ".join(extras)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [pip, "install", *FLAGS, f"--report={report}", *requirements(extras)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"{extra}: pip found no answer within {LIMIT_S} s", False
        took = f"{time.monotonic() - began:.0f} s"
        if done.returncode:
            reasons = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
            return "\n  ".join([f"{extra}: cannot be resolved ({took})", *reasons[-12:]]), False
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    torch = next(package["version"] for package in found if package["name"] == "torch")
    return f"{extra}: {len(found)} packages, torch {torch} ({took})", True


def main() -> None:
    extras = distribution(PACKAGE).metadata.get_all("Provides-Extra") or []
    assert extras, f"{PACKAGE} is installed without metadata of its extras"
    alone = [(extra,) for extra in extras if extra.startswith("vllm")]
    together = tuple(extra for extra in extras if (extra,) not in alone)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        first, *answers = pool.map(lambda asked: resolve(sys.argv[1], asked), [together, *alone])
        if first[1]:
            answers.append(first)
        else:
            answers += pool.map(lambda extra: resolve(sys.argv[1], (extra,)), together)
    print("\n".join(text for text, _ in answers))
    sys.exit(not all(fine for _, fine in answers))


if __name__ == "__main__":
    main()
