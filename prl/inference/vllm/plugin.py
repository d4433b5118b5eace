"""What vLLM loads into each of its processes: the entry point `prl` of its group `vllm.general_plugins` (setup.py).

It costs a line in a table; the engine is imported by who asks for it by name.
"""

from __future__ import annotations

import contextlib

from prl.inference.vllm.versions import transfer_engine
from prl.planning.vllm_arguments import BACKEND


def register() -> None:
    """Make our weight transfer known to vLLM. May run more than once in a process."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # it is registered already
        WeightTransferEngineFactory.register_engine(BACKEND, *transfer_engine())
