"""On what a figure was measured: versions, device, state of the source."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "triton", "deep_gemm", "flash_attn", "flash_attn_interface", "vllm")


def describe_environment() -> dict[str, Any]:
    import torch

    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    cuda = torch.cuda.is_available()
    return {
        "git": git_state(),
        "packages": versions,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "devices": torch.cuda.device_count() if cuda else 0,
        "cpu_count": os.cpu_count(),
    }


def git_state() -> str | None:
    """Commit of the source, with "+" if it has been changed since; None outside a checkout."""
    here = Path(__file__).parent

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
