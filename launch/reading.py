"""The node hydra.launcher of any of the launchers that hydra_plugin.py has, as settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from launch.settings import LauncherSettings, read_settings
from launch.submitit_keys import local_settings, slurm_settings
from launch.submitit_nodes import MODULE, OURS
from prl.config.errors import ConfigError, UserError

READERS: dict[str, Callable[[Mapping[str, Any]], LauncherSettings]] = {  # class -> what reads its node
    "PointLauncher": read_settings,
    "SubmititSlurmLauncher": slurm_settings,
    "SubmititLocalLauncher": local_settings,
}


def settings_of(node: Mapping[str, Any]) -> LauncherSettings:
    """Of a whole node hydra.launcher, as Hydra composed it. Raises ConfigError, also for one of others."""
    target = str(node.get("_target_"))
    module, _, name = target.rpartition(".")
    module, name = (MODULE, OURS[target]) if target in OURS else (module, name)
    if module != MODULE or name not in READERS:
        raise ConfigError(
            [
                UserError(
                    "This launcher cannot start what prl starts.",
                    where="hydra/launcher",
                    why=f"{target} calls Python functions; here it is processes of a frozen plan that start",
                    fix="hydra/launcher=local, slurm, submitit_local or submitit_slurm",
                )
            ]
        )
    return READERS[name]({key: value for key, value in node.items() if key != "_target_"})
