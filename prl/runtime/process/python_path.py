"""How processes of a run start Python: always with the code that their parent runs, whatever lies where they start.

`python -m` puts the current directory before everything else; -P leaves it out (not PYTHONSAFEPATH, which programs that
an environment starts would inherit). What must be found comes by PYTHONPATH: this package, then what the user has set,
then, unless the code is a frozen copy that holds all it needs, the current directory with modules of the user's own.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import prl

FROZEN_RECORD = "modules.json"  # beside the copy of the package: the user's own modules that were copied with it


def python_command(module: str, *arguments: str) -> list[str]:
    """The command line of `python -m MODULE ...`, which needs `python_path` in its environment."""
    return [sys.executable, "-P", "-m", module, *arguments]


def code_dir() -> Path:
    """Where the package that runs now lies."""
    return Path(prl.__file__).absolute().parent.parent


def is_frozen(code: Path | None = None) -> bool:
    """Whether that is a copy made at submission."""
    return ((code or code_dir()) / FROZEN_RECORD).exists()


def python_path() -> str:
    """PYTHONPATH of a child."""
    before = [str(Path(part).absolute()) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    own = [] if is_frozen() else [os.getcwd()]
    # an installed package is found anyway, and its folder before the standard library would shadow parts of that
    installed = {Path(sysconfig.get_path(kind)).absolute() for kind in ("purelib", "platlib")}
    code = [] if code_dir() in installed else [str(code_dir())]
    return os.pathsep.join(dict.fromkeys([*code, *before, *own]))
