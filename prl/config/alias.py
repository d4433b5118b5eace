"""`memory=tight` as a second name of `memory_recipe=tight`.

The selector group `memory` has an empty node for each file of `conf/memory_recipe/`, and the defaults list says
`- memory_recipe: ${memory}`. The nodes go to the global package: a group at package `memory` would add a key of that name.
"""

from __future__ import annotations

from hydra.core.config_store import ConfigStore

from prl.config.locate import config_groups


def register_memory_alias() -> None:
    """Make the selector group known to Hydra. Safe to call again."""
    store = ConfigStore.instance()
    for choice in config_groups()["memory_recipe"]:
        store.store(group="memory", name=choice, node={}, package="_global_", provider="prl")
