"""Run in a process of its own: what torch and the driver say of each other and of the GPUs, as one line of JSON."""

from __future__ import annotations

import ctypes
import json
from typing import Any


def driver() -> dict[str, Any]:
    """What NVIDIA's driver says without torch: the newest CUDA that it serves, as 13000 for 13.0, and its GPUs."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {"cuda": None, "gpus": 0}
    version, count = ctypes.c_int(0), ctypes.c_int(0)
    cuda.cuDriverGetVersion(ctypes.byref(version))
    code = cuda.cuInit(0)
    if code == 0:
        cuda.cuDeviceGetCount(ctypes.byref(count))
    return {"cuda": version.value, "gpus": count.value, "error": code}


def gpu(index: int) -> dict[str, Any]:
    """One GPU, and whether it computes."""
    import torch

    about = torch.cuda.get_device_properties(index)
    try:
        device = torch.device("cuda", index)
        computed, error = float(torch.ones(64, 64, device=device).matmul(torch.ones(64, 64, device=device)).sum()), ""
    except RuntimeError as caught:
        computed, error = 0.0, str(caught).splitlines()[0]
    return {
        "name": about.name,
        "memory_gib": about.total_memory / 2**30,
        "capability": [about.major, about.minor],
        "error": error or ("" if computed == 64**3 else f"a product of ones came to {computed}"),
        "peers": sum(
            torch.cuda.can_device_access_peer(index, other)
            for other in range(torch.cuda.device_count())
            if other != index
        ),
    }


def main() -> None:
    found: dict[str, Any] = {"driver": driver()}
    import torch

    found |= {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "gpus": []}
    if torch.cuda.is_available():
        found["gpus"] = [gpu(index) for index in range(torch.cuda.device_count())]
        found["archs"] = torch.cuda.get_arch_list()
        if torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
