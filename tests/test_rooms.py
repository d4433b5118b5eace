"""Rooms of a folder import only what its README lets them; families are known by name in few places."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prl.config.families import FAMILIES

PRL = Path(__file__).parent.parent / "prl"
ROOMS = {  # each may import those before it
    "runtime": ["directory", "process", "nodes", "people"],
    "orchestrator": ["engines", "rollouts"],
    "models": ["text", "names", "experts", "sparse", "state_space", "layers", "families", "adapters", "fp8",
               "checkpoints"],
    "trainer": ["context", "head", "memory", "writer"],
}  # fmt: skip
BELOW = {"models": ["by_hand", "device", "sharding"]}  # modules of the folder, for all of its rooms


@pytest.mark.parametrize(("folder", "room"), [(folder, room) for folder, rooms in ROOMS.items() for room in rooms])
def test_a_room_imports_from_those_before_it(folder, room):
    rooms = ROOMS[folder]
    allowed = rooms[: rooms.index(room) + 1] + BELOW.get(folder, [])
    modules = sorted((PRL / folder / room).glob("*.py"))
    assert modules
    for module in modules:
        imported = re.findall(rf"^\s*(?:from|import) prl\.{folder}\.(\w+)", module.read_text(), re.MULTILINE)
        assert set(imported) <= set(allowed), f"{module} imports {set(imported) - set(allowed)}"


@pytest.mark.parametrize(("folder", "module"), [(folder, module) for folder in BELOW for module in BELOW[folder]])
def test_a_module_below_the_rooms_imports_from_none(folder, module):
    text = (PRL / folder / f"{module}.py").read_text()
    assert not re.search(rf"^\s*(?:from|import) prl\.{folder}\b", text, re.MULTILINE)


def test_nothing_outside_of_the_models_asks_for_a_familys_name():
    """A new family is a file, a row and a card (CONTRIBUTING.md); who needs to know something asks one of these."""
    names = "|".join(sorted(FAMILIES, key=len, reverse=True))
    tables = {"prl/config/families.py", "prl/config/cards.py", "prl/config/schema_model.py"}
    root = PRL.parent
    modules = [*root.glob("prl/**/*.py"), *root.glob("launch/**/*.py")]
    others = [path for path in modules if not path.relative_to(root).as_posix().startswith("prl/models/")]
    named = {
        path.relative_to(root).as_posix() for path in others if re.search(rf"""["'](?:{names})["']""", path.read_text())
    }
    assert named == tables
