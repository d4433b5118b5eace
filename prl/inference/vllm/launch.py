"""From an inference child with inference.engine=vllm to vLLM: is it there, does it import, what must it find set."""

from __future__ import annotations

import importlib
import os
from importlib.metadata import entry_points
from importlib.util import find_spec

from prl.config.errors import UserError
from prl.config.packages import NIXL, VLLM, VLLM_VERSIONS
from prl.config.schema import RunConfig
from prl.config.world import takes_turns
from prl.inference.vllm.versions import installed_version, is_old
from prl.planning.vllm_arguments import BACKEND, address_environment, vllm_defaults
from prl.runtime.process.child import ChildContext
from prl.transport.sources import WeightSource


def launch(ctx: ChildContext) -> None:
    """Serve until asked to stop. Raises UserError when vLLM is not there or does not fit."""
    require_vllm()
    refuse_unsafe_sleep(ctx.plan.config)
    refuse_unnamed_adapters(ctx.plan.config)
    require_nixl(ctx.plan.config)
    set_environment(ctx.plan.config)
    os.environ.update(address_environment(ctx.role, ctx.endpoints) | WeightSource.of(ctx).to_environment())
    try:
        server = importlib.import_module("prl.inference.vllm.server")
    except (ImportError, RuntimeError, OSError) as error:  # what broken installations of compiled packages raise
        raise UserError(
            f"vLLM is installed, but cannot be imported: {type(error).__name__}: {error}",
            where="inference.engine=vllm",
            why="torchvision, torchaudio and torchcodec of the package index do not match a CPU build of torch; "
            "vLLM works without them",
            fix=VLLM.install,
        ) from error
    server.main(ctx)


def require_vllm() -> None:
    """Raises UserError unless a vLLM that this package knows is installed, and knows this package."""
    found = installed_version()
    if found is None:
        raise UserError("vLLM is not installed.", where="inference.engine=vllm", why="it is an extra", fix=VLLM.install)
    if not found.startswith(VLLM_VERSIONS):
        raise UserError(
            f"vLLM {found} is not supported.",
            where="inference.engine=vllm",
            why=f"its interfaces change between versions; these are known: {', '.join(VLLM_VERSIONS)}",
            fix=VLLM.install,
        )
    if not entry_points(group="vllm.general_plugins", name=BACKEND):
        raise UserError(
            "vLLM does not find our weight transfer.",
            where="inference.engine=vllm, entry point prl of vllm.general_plugins",
            why="this package was installed before it had that entry point",
            fix="pip install --no-deps -e .",
        )


def require_nixl(config: RunConfig) -> None:
    """Raises UserError when KV is to travel and what carries it is not installed."""
    if config.inference.pd.num_prefill_gpus and find_spec("nixl") is None:
        raise UserError(
            "NIXL is not installed.",
            where=f"inference.pd.num_prefill_gpus={config.inference.pd.num_prefill_gpus}",
            why="it carries KV from prefill to decode engines",
            fix=f"{NIXL.install}; or inference.pd.num_prefill_gpus=0",
        )


def refuse_unsafe_sleep(config: RunConfig) -> None:
    """Raises UserError for the one level that vLLM 0.23 cannot be woken from in two steps."""
    if is_old() and takes_turns(config) and config.inference.sleep_level == 2:
        raise UserError(
            f"vLLM {installed_version()} cannot sleep at level 2 here.",
            where="inference.sleep_level=2",
            why="it would generate as soon as its weights are awake, and these are undefined until the next update",
            fix="inference.sleep_level=1, or vLLM 0.32",
        )


def refuse_unnamed_adapters(config: RunConfig) -> None:
    """Raises UserError for adapters with vLLM 0.23, which cannot be told the version of what it has loaded."""
    if is_old() and config.weight_transport.type == "lora":
        raise UserError(
            f"vLLM {installed_version()} does not know which version an adapter is.",
            where="weight_transport=lora",
            why="/update_weight_version came later",
            fix="weight_transport=filesystem, or vLLM 0.32",
        )


def set_environment(config: RunConfig) -> None:
    """Variables that vLLM reads when it is imported. All but the first give way to what the user has set."""
    variables = vllm_defaults(config)
    os.environ["VLLM_SERVER_DEV_MODE"] = variables["VLLM_SERVER_DEV_MODE"]
    if "VLLM_PLUGINS" in os.environ:
        names = {*os.environ["VLLM_PLUGINS"].split(","), BACKEND}
        os.environ["VLLM_PLUGINS"] = ",".join(sorted(names - {""}))
    for name, value in variables.items():
        os.environ.setdefault(name, value)
