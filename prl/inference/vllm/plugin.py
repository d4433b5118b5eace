"""What vLLM loads into each of its processes: the entry point `prl` of its group `vllm.general_plugins` (setup.py).

It costs a line in a table; the engine is imported by who asks for it by name. Where PRL_CONTROL_KEY is set, a plain
`vllm serve` is to take weights from runs (`stock.py`), and its processes are told from where.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from prl.config.errors import UserError
from prl.inference.vllm.versions import pass_over_flash_attention_4, transfer_engine
from prl.planning.vllm_arguments import BACKEND
from prl.runtime.external import MIDDLEWARE
from prl.transport.sources import VARIABLE, WeightSource

KEY = "PRL_CONTROL_KEY"  # the variable that holds the control key of a plain `vllm serve`


def register() -> None:
    """Make our weight transfer known to vLLM, and flash-attn-4 harmless to it. May run more than once in a process."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    lend()
    pass_over_flash_attention_4()
    with contextlib.suppress(ValueError):  # it is registered already
        WeightTransferEngineFactory.register_engine(BACKEND, *transfer_engine())


def lend(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have this vLLM's processes, which are yet to start, find the lease where its server will keep it. Ends a server
    of ours that has no key, before its model is loaded: SystemExit, for vLLM passes over what else a plugin raises.
    """
    if VARIABLE not in environment and not environment.get(KEY, "").strip() and MIDDLEWARE.split()[1] in sys.argv:
        raise SystemExit(
            UserError(
                f"the environment variable {KEY} is not set or empty",
                where=MIDDLEWARE,
                why="it holds the control key, with which a run brings its weights",
                fix=f"export {KEY}=$(openssl rand -hex 16), here and for the run",
            ).render()
        )
    if environment.get(KEY) and VARIABLE not in environment:
        file = Path(tempfile.gettempdir()) / f"prl-lease-{os.getpid()}-{secrets.token_hex(8)}.json"
        environment.update(WeightSource("filesystem", "/nowhere", "", (), 0.0, str(file)).to_environment())
