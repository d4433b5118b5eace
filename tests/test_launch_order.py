"""The modules of launch/ import only from those left of them in launch/README.md, and at start-up nothing heavy."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from runs import environment

LAUNCH = Path(__file__).parent.parent / "launch"
DEFERRING = ("hydra_plugin", "launching")  # for speed; launch/README.md says what
CHAINS = re.findall(r"^ {4,}(?:-> )?[{\w].*->.*$", (LAUNCH / "README.md").read_text(), re.MULTILINE)[:3]


def stages() -> list[list[set[str]]]:
    """Two chains: that of launching, over two lines, and that of the development cluster."""
    first, rest, cluster = CHAINS
    return [[set(re.findall(r"\w+", stage)) for stage in line.split("->")] for line in (f"{first}{rest}", cluster)]


def imports(module: str, *, deferred: bool | None = None) -> set[str]:
    """Modules of launch/ that a module imports anywhere; deferred: only those in (or not in) functions."""
    tree = ast.parse((LAUNCH / f"{module}.py").read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = {node for function in functions for node in ast.walk(function)}
    found = set()
    for node in ast.walk(tree):
        if deferred is not None and (node in inner) != deferred:
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "launch":
            found |= {name.name for name in node.names}
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names = [name.name for name in node.names] if isinstance(node, ast.Import) else names
        found |= {name.split(".")[1] for name in names if name and name.startswith("launch.")}
    return found


MODULES = sorted(path.stem for path in LAUNCH.glob("*.py") if path.stem != "__init__")


def test_the_order_has_each_module_once():
    named = [module for chain in stages() for stage in chain for module in stage]
    assert sorted(named) == MODULES


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_from_those_before_it(module):
    (before,) = (
        set().union(*chain[:place]) for chain in stages() for place, stage in enumerate(chain) if module in stage
    )
    assert imports(module) <= before
    if module not in DEFERRING:
        assert not imports(module, deferred=True), "no cycle is left that would want it"


@pytest.mark.parametrize("module", MODULES)
def test_types_alone_are_no_reason_for_a_cycle(module):
    """What is imported under TYPE_CHECKING is of prl, and heavy."""
    tree = ast.parse((LAUNCH / f"{module}.py").read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    names = [node.module or "" for block in blocks for node in ast.walk(block) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in names if name.startswith("launch")]


@pytest.mark.parametrize(
    ("imported", "spared"),
    [("prl.entry", ("pydantic", "submitit", "jinja2")), ("prl.entry, launch.launching", ("submitit", "jinja2"))],
)
def test_what_is_deferred_is_not_loaded(tmp_path, imported, spared):
    code = f"import sys, {imported}; print([name for name in {spared} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "[]", done.stderr
