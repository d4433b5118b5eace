"""What a configuration names on the Hugging Face hub, and whether this machine has it or can ask there."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from prl.config.hub import Kind, fetch_command, hub_cache, is_cached, is_hub_data, is_path
from prl.config.schema import RunConfig
from prl.config.world import world_of

PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy")


@dataclass(frozen=True)
class HubName:
    """`kind` is the hub's: "model" or "dataset"."""

    name: str
    where: str
    kind: Kind

    def is_cached(self) -> bool:
        """Whether any of it lies in a cache of this machine."""
        return is_cached(self.name, self.kind)

    @property
    def fix(self) -> str:
        return f"`{fetch_command(self.name, self.kind)}` where there is network, with the same HF_HOME"


def names_of_hub(config: RunConfig) -> Iterator[HubName]:
    """Of the initial weights, and of data whose place in the configuration is known here."""
    path = config.model.path
    if path is not None and not is_path(path) and not Path(path).is_dir() and _loads_weights(config):
        yield HubName(path, f"model.path={path}", "model")
    for name, source in config.env.mix.items() if config.job in ("rl", "eval") else ():
        data = source.args.get("dataset")
        if source.id == "hf_math" and isinstance(data, str) and "/" in data and not is_path(data):
            yield HubName(data, f"env.mix.{name}.args.dataset={data}", "dataset")
    data = "" if config.sft is None else config.sft.data.source
    if "/" in data and is_hub_data(data) and not Path(data).exists():
        yield HubName(data, f"sft.data.source={data}", "dataset")


def _loads_weights(config: RunConfig) -> bool:
    world = world_of(config)
    return world.has_trainers or world.has_engines


def out_of_reach() -> str | None:
    """Why the hub cannot be asked from this machine; None where nothing speaks against it."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE is set, and {hub_cache()} does not have it"
    if any(os.environ.get(name) for name in PROXIES):  # which knows more addresses than this machine
        return None
    host = urlsplit(constants.ENDPOINT).hostname or ""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return f"{host} cannot be reached from here: {error.strerror}"
    return None
