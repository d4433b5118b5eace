"""`hydra/launcher=submitit_slurm` and `submitit_local` as choices: all keys of hydra-submitit-launcher, for launchers
of ours. `submitit_keys.py` says what becomes of the keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra_plugins.hydra_submitit_launcher.config import LocalQueueConf, SlurmQueueConf

MODULE = "hydra_plugins.prl"  # what Hydra knows launch/hydra_plugin.py as


@dataclass
class SubmititSlurm(SlurmQueueConf):
    _target_: str = f"{MODULE}.SubmititSlurmLauncher"
    dry_run: bool = False
    retry_failed: bool = False


@dataclass
class SubmititLocal(LocalQueueConf):
    _target_: str = f"{MODULE}.SubmititLocalLauncher"
    dry_run: bool = False
    retry_failed: bool = False


# their launchers' classes, which nodes written for them name -> ours
OURS: dict[str, str] = {
    SlurmQueueConf()._target_: "SubmititSlurmLauncher",
    LocalQueueConf()._target_: "SubmititLocalLauncher",
}


def register_nodes() -> None:
    """In place of those that hydra-submitit-launcher registers. Safe to call again."""
    Plugins.instance()  # which reads all plugins, theirs among them
    for name, node in (("submitit_slurm", SubmititSlurm()), ("submitit_local", SubmititLocal())):
        ConfigStore.instance().store(group="hydra/launcher", name=name, node=node, provider="prl")
