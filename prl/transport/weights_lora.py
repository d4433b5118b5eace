"""LoRA adapters instead of whole models: files in PEFT's layout, which vLLM loads by its own /v1/load_lora_adapter.

A version is as large as the adapters are. Engines hold the base model from the start and never receive it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prl.runtime.directory.files import save_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from prl.transport.buckets import Announce

LORA = "lora"  # update_info["type"]
ADAPTER = "policy"  # the adapter's name in the engines; a request names it as its model
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class AdapterPublisher:
    """`weights/step_N/` with the two files of PEFT; a directory appears whole (rename) or not at all."""

    def __init__(self, weights_dir: Path, keep: int, config: dict[str, Any]) -> None:
        """`config`: what adapter_config.json says."""
        self.dir, self.keep, self.config = weights_dir, keep, config
        shutil.rmtree(weights_dir, ignore_errors=True)
        weights_dir.mkdir(parents=True)

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]], announce: Announce) -> None:
        """`tensors`: under PEFT's names."""
        partial = self.dir / f"step_{version}.partial"
        partial.mkdir(exist_ok=True)
        save_tensors({name: tensor.detach().cpu().contiguous() for name, tensor in tensors}, partial / WEIGHTS)
        (partial / CONFIG).write_text(json.dumps(self.config))
        final = self.dir / f"step_{version}"
        partial.rename(final)
        versions = sorted(self.dir.glob("step_*[0-9]"), key=lambda path: int(path.name.split("_")[1]))
        for old in versions[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        announce({"type": LORA, "path": str(final), "version": version})

    def acknowledge(self) -> None:
        """The newest versions are kept."""


def load_steps(version: int, update_info: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Routes of vLLM, with bodies, that put an adapter in the place of the one before, running requests included."""
    return [
        ("/v1/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": update_info["path"], "load_inplace": True}),
        ("/update_weight_version", {"new_version": str(version)}),
    ]
