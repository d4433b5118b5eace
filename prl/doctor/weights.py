"""Whether a job's checkpoint is here or can be had, and whether this machine's memory holds the job's weights."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from prl.config.hub import cached_snapshots, fetch_command, hub_cache, is_path
from prl.config.schema import RunConfig
from prl.config.world import world_of
from prl.doctor.asking import Asker
from prl.doctor.finding import Finding, State
from prl.doctor.needs import Needs
from prl.planning.model_size import parameter_count
from prl.runtime.process.free_memory import PROCESS_GIB

REACH_S = 10.0
REACH = "import socket, sys; socket.create_connection((sys.argv[1], 443), 4).close()"
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STATE_BYTES = 12  # of a trained parameter on a CPU beside the weights: gradient and Adam's two moments, in float32


def judge_checkpoint(config: RunConfig, needs: Needs) -> Iterator[Finding]:
    """A line for model.path, unless the weights are made from the model's card."""
    name = config.model.path
    if name is None:
        return
    asked, here = f"model.path={name}", needs.where == "here"
    if is_path(name) or Path(name).is_dir():
        why = _damage(Path(name).expanduser())
        fix = "model.path=/path/to/checkpoint, or model.path=OWNER/NAME of the Hugging Face hub"
        state: State = "ok" if not why else "absent" if here else "nodes"
        yield Finding("storage", "checkpoint", state, why or name, asked, fix if why else "", bool(why) and here)
        return
    snapshot = cached(name)
    if snapshot is not None:
        yield Finding("storage", "checkpoint", "ok", f"{name} is in {snapshot}")
        return
    is_offline = os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")
    can_fetch = not is_offline and Asker(2 * REACH_S).ask(sys.executable, "-c", REACH, _hub()).ok
    how = "HF_HUB_OFFLINE is set" if is_offline else f"{_hub()} answers" if can_fetch else f"{_hub()} does not answer"
    told = f"{name} is not in {hub_cache()}; {how}{': the run fetches it at its start' if can_fetch else ''}"
    fix = f"{fetch_command(name, 'model')}, where there is network, with the same HF_HOME"
    yield Finding("storage", "checkpoint", "absent", told, asked, fix, here and not can_fetch)


def _damage(path: Path) -> str:
    """What a directory lacks to be a Hugging Face checkpoint."""
    if not path.is_dir():
        return f"there is no directory {path}"
    lacking = [name for name in ("config.json", "*.safetensors") if next(path.glob(name), None) is None]
    return f"{path} has no {' and no '.join(lacking)}" if lacking else ""


def cached(name: str) -> Path | None:
    """A snapshot of a model in the hub's cache that has weights."""
    return next((path for path in cached_snapshots(name, "model") if not _damage(path)), None)


def _hub() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").partition("://")[2].partition("/")[0].split(":")[0]


def judge_memory(config: RunConfig, needs: Needs, has_gpus: bool, available_gib: float | None) -> Iterator[Finding]:
    """Weights in this machine's memory: of all roles on a CPU, or of one copy while it is read."""
    if available_gib is None or needs.where != "here":
        return
    count, world = parameter_count(config.model.card), world_of(config)
    weights_gib = count * BYTES.get(config.model.dtype, 4) / 2**30
    wanted_gib, what = weights_gib, "one copy of the weights"
    # without the GPUs that it asks for a job does not run anyway: nothing of it is on the CPU
    if config.deployment.device == "cpu" or (config.deployment.device == "auto" and not has_gpus):
        trained_gib = (weights_gib + count * STATE_BYTES / 2**30) * world.has_trainers
        engines = config.deployment.num_infer_gpus if world.has_engines else 0
        wanted_gib = trained_gib + engines * weights_gib + (world.ranks + engines) * PROCESS_GIB
        what = "processes, weights, gradients, optimizer and engines on the CPU, without activations"
    wanted = f"{wanted_gib:,.0f}" if wanted_gib >= 10 else f"{wanted_gib:.2g}"
    told = f"{available_gib:,.1f} GiB are free, {wanted} GiB are wanted at least ({what})"
    fits = wanted_gib <= available_gib
    fix = "" if fits else "a smaller model=, memory=lora, fewer ranks on a CPU, or a machine with more memory"
    yield Finding("storage", "host memory", "ok" if fits else "absent", told, "this job", fix, not fits)
