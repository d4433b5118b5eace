"""The rooms of prl/runtime import only what their README lets them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

RUNTIME = Path(__file__).parent.parent / "prl/runtime"
ROOMS = ["directory", "process", "nodes", "people"]  # each may import those before it


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_from_those_before_it(room):
    allowed = ROOMS[: ROOMS.index(room) + 1]
    modules = sorted((RUNTIME / room).glob("*.py"))
    assert modules
    for module in modules:
        imported = re.findall(r"^\s*(?:from|import) prl\.runtime\.(\w+)", module.read_text(), re.MULTILINE)
        assert set(imported) <= set(allowed), f"{module} imports {set(imported) - set(allowed)}"
