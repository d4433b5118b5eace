"""Where the YAML lies: `conf/` and `sweeps/`, beside the package in a checkout or an editable install, inside it in a
wheel; and directories of the user's own (`search_path.py`).
"""

from __future__ import annotations

import os
from pathlib import Path

from prl.config.errors import UserError
from prl.config.search_path import directories, yaml_files

SITE_GROUP = "local"  # conf/local/default.yaml: a site's own settings
EXPERIMENT = "experiment"  # conf/experiment: whole recipes
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


def sweep_files() -> dict[str, Path]:
    """Name -> file of every ready-made sweep, the user's own among them; ours come first where names are the same."""
    folders = [*(path / "sweeps" for path in reversed(directories())), sweeps_dir()]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml")) if os.path.isfile(path)}


def config_groups() -> dict[str, list[str]]:
    """Group -> its choices, from the file names, the user's own among them; `memory` stands for `memory_recipe`."""
    groups: dict[str, set[str]] = {}
    for root in (conf_dir(), *directories()):
        for path in yaml_files(root):
            name = path.parent.relative_to(root).as_posix()
            if name.split("/")[0] not in (".", SITE_GROUP, "hydra", "sweeps"):
                groups.setdefault(name, set()).add(path.stem)
    groups["memory"] = groups["memory_recipe"]
    return {name: sorted(groups[name]) for name in sorted(groups)}


def added_groups() -> set[str]:
    """Groups that no job's defaults name: they are chosen with a `+` (`+experiment=NAME`, `+overlay=NAME`)."""
    ours = {path.name for path in conf_dir().iterdir() if path.is_dir()} - {EXPERIMENT} | {"memory"}
    return set(config_groups()) - ours


def file_of_choice(group: str, choice: str) -> Path:
    """Where it lies; in conf/, if nowhere."""
    name = f"{group}/{choice}.yaml"
    found = (root / name for root in (conf_dir(), *directories()) if os.path.isfile(root / name))
    return next(found, conf_dir() / name)


def folders_of(group: str) -> str:
    """The directories that hold files of a group, for people; its name, if it is Hydra's and packages have choices."""
    if group.startswith("hydra/"):
        return f"the group {group}"
    name = "memory_recipe" if group == "memory" else group
    own = [str(root / name) for root in directories() if os.path.isdir(root / name)]
    ours = [f"conf/{name}"] if (conf_dir() / name).is_dir() or not own else []
    return ", ".join(ours + own)


def searched() -> str:
    """The directories in which the files of choices are sought, for people."""
    own = "" if directories() else ", and none of your own: no --config-dir was given"
    return ", ".join(map(str, (conf_dir(), *directories()))) + own
