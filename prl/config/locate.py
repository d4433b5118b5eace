"""Where the YAML lies: `conf/` and `sweeps/`, beside the package in a checkout or an editable install, inside it in a
wheel.
"""

from __future__ import annotations

from pathlib import Path

from prl.config.errors import UserError

PACKAGE_DIR = Path(__file__).resolve().parent.parent


def conf_dir() -> Path:
    """Absolute path of the folder with the primary configs. Raises UserError when the installation lacks it."""
    for candidate in (PACKAGE_DIR / "conf", PACKAGE_DIR.parent / "conf"):
        if (candidate / "rl.yaml").is_file():
            return candidate
    raise UserError(
        "The configuration files of prl are missing.",
        where=f"{PACKAGE_DIR / 'conf'} or {PACKAGE_DIR.parent / 'conf'}",
        why="conf/ ships inside the wheel and lies beside prl/ in a checkout",
        fix="reinstall: pip install --force-reinstall --no-deps prl, or pip install -e . in a checkout",
    )


def sweeps_dir() -> Path:
    """Absolute path of the folder with the ready-made sweeps."""
    return conf_dir().parent / "sweeps"


def config_groups() -> dict[str, list[str]]:
    """Group -> its choices, from the file names; `memory` stands for `memory_recipe`. Nested groups do not exist."""
    groups = {
        folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
        for folder in sorted(conf_dir().iterdir())
        if folder.is_dir() and folder.name != "local"
    }
    groups = {name: choices for name, choices in groups.items() if choices}
    groups["memory"] = groups["memory_recipe"]
    return groups
