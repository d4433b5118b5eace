"""What Hydra must know before it composes: the selector group `memory`, and the resolver of our YAML.

`memory=tight` is a second name of `memory_recipe=tight`: the selector group `memory` has an empty node for each file of
`conf/memory_recipe/`, and the defaults list says `- memory_recipe: ${memory}`. The nodes go to the global package: a
group at package `memory` would add a key of that name.
"""

from __future__ import annotations

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from prl.config.locate import config_groups


def register() -> None:
    """Make both known to Hydra. Safe to call again."""
    # ${first_set:${sweep},...}: the first value that is not null (oc.select falls back for absent keys only)
    OmegaConf.register_new_resolver("first_set", _first_set, replace=True)
    OmegaConf.register_new_resolver("row_tokens", _row_tokens, replace=True)
    store = ConfigStore.instance()
    for choice in config_groups()["memory_recipe"]:
        store.store(group="memory", name=choice, node={}, package="_global_", provider="prl")


def _row_tokens(doc_len: int | list[int]) -> int:
    """Tokens of a row that holds one document of that length, or all documents of a list."""
    return doc_len if isinstance(doc_len, int) else sum(doc_len)


def _first_set(*values: object) -> object:
    return next((value for value in values if value is not None), None)
