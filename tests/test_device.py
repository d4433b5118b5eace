"""How much of a GPU a process may hold that shares it with another."""

import pytest
import torch

from prl.models.device import CONTEXTS_BYTES, limit_memory, limit_memory_beside_engine, pick_device


def test_a_cpu_has_no_parts():
    device = pick_device("cpu")
    limit_memory(device, 0.5)
    limit_memory_beside_engine(device, 0.5)
    assert device.type == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU's memory is shared out")
@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_neither_side_takes_what_is_the_others(side):
    device, part = pick_device("cuda"), 0.4
    total = torch.cuda.get_device_properties(device).total_memory
    if side == "engine":
        limit_memory(device, part)
        allowed = int(part * total)
    else:
        limit_memory_beside_engine(device, part)
        allowed = int((1 - part) * total) - CONTEXTS_BYTES
    gib = 1024**3
    try:
        kept = torch.empty(allowed - gib, dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * gib, dtype=torch.uint8, device=device)
        del kept
    finally:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, device)
