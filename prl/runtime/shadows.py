"""Files of the user's own that would be imported instead of a package that the processes of a run need.

They look for modules in the directory where a run starts before installed packages (`process/python_path.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder

from prl.config.errors import UserError
from prl.runtime.process.python_path import python_path

PACKAGES = (
    *("aiohttp", "antlr4", "hydra", "jinja2", "numpy", "omegaconf", "pydantic", "safetensors", "tokenizers", "torch"),
    *("transformers", "triton", "vllm", "wandb", "yaml"),
)


def shadowed() -> Iterator[UserError]:
    """One error for each installed package that the working directory hides from the processes of a run.

    PYTHONPATH may: who sets it says where packages are to come from.
    """
    own, searched = os.getcwd(), python_path().split(os.pathsep)
    said = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if own not in searched or own in said:
        return
    elsewhere = [path for path in sys.path if path and os.path.abspath(path) != own]
    for name in PACKAGES:
        found, hidden = PathFinder.find_spec(name, searched), PathFinder.find_spec(name, elsewhere)
        if found is None or found.origin is None or hidden is None or found.origin == hidden.origin:
            continue
        if found.origin in (os.path.join(own, f"{name}.py"), os.path.join(own, name, "__init__.py")):
            yield UserError(
                f"The package {name} is hidden by a file of the same name.",
                where=found.origin,
                why="processes of a run look for modules in the directory where it starts before they look among "
                f"installed packages, and so do not find {hidden.origin}",
                fix="rename the file, or start elsewhere",
            )
