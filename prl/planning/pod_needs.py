"""What the pods of a manifest need beside it: secrets, own modules, files; and whether the names given are names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from prl.config.errors import UserError
from prl.config.hub import is_path
from prl.config.schema import RunConfig

SECRET = "prl"  # the Kubernetes Secret that holds the variables
PLAN_MOUNT, SHM_MOUNT = "/plan", "/dev/shm"  # of a pod, beside the shared directory
LONGEST_SUBDOMAIN, LONGEST_IMAGE = 253, 255
# RFC 1123; a PersistentVolumeClaim's name is a subdomain: labels with dots between them
RESERVED = (PLAN_MOUNT, SHM_MOUNT, "/proc", "/sys", "/etc", "/usr", "/bin", "/lib")
LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
SUBDOMAIN = re.compile(rf"{LABEL}(?:\.{LABEL})*")
# the grammar of github.com/distribution/reference
HOST = r"(?:[a-zA-Z0-9](?:[-a-zA-Z0-9]*[a-zA-Z0-9])?(?:\.[a-zA-Z0-9](?:[-a-zA-Z0-9]*[a-zA-Z0-9])?)*|\[[0-9a-fA-F:]+\])"
PART = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
IMAGE = re.compile(
    rf"(?P<name>(?:{HOST}(?::[0-9]+)?/)?{PART}(?:/{PART})*)(?::\w[\w.-]{{0,127}})?"
    r"(?:@[A-Za-z][A-Za-z0-9]*(?:[-_+.][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,})?",
    re.ASCII,
)


@dataclass(frozen=True)
class Variable:
    """Of the environment of each pod. `is_required`: the run does not start without it."""

    name: str
    why: str
    is_required: bool


def check_claim(name: str) -> None:
    """Raise UserError for what Kubernetes takes for no name of a claim."""
    if len(name) <= LONGEST_SUBDOMAIN and SUBDOMAIN.fullmatch(name):
        return
    raise UserError(
        f"{name!r} is no name of a PersistentVolumeClaim.",
        where=f"--volume={name}",
        why="Kubernetes takes small letters, digits, - and . (RFC 1123), a letter or digit at both ends, "
        f"{LONGEST_SUBDOMAIN} at most",
        fix="--volume=CLAIM, as `kubectl get pvc` lists it",
    )


def check_mount(mount: PurePosixPath) -> None:
    """Raise UserError for where Kubernetes mounts nothing, or a pod has something else."""
    taken = any(mount.is_relative_to(place) or PurePosixPath(place).is_relative_to(mount) for place in RESERVED)
    if not taken and ":" not in str(mount):
        return
    raise UserError(
        f"Nothing can be mounted at {mount}.",
        where=f"--mount={mount}",
        why="a path with : is none to Kubernetes" if not taken else f"a pod has {', '.join(RESERVED)} already",
        fix="--mount=/outputs",
    )


def check_volume(name: str) -> None:
    """Raise UserError for what SkyPilot takes for no name of a volume."""
    if re.fullmatch(r"[A-Za-z0-9](?:[-\w.]*[A-Za-z0-9])?", name, re.ASCII):
        return
    raise UserError(
        f"{name!r} is no name of a volume.",
        where=f"--volume={name}",
        why="SkyPilot takes letters, digits, - . and _, a letter or digit at both ends",
        fix="--volume=NAME, as `sky volumes ls` lists it",
    )


def check_accelerator(name: str) -> None:
    """Raise UserError for what SkyPilot takes for more than the kind of a GPU."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise UserError(
            f"{name!r} is no kind of GPU.",
            where=f"--accelerator={name}",
            why="how many of them a node has follows from the plan",
            fix=f"--accelerator={re.match(r'[A-Za-z0-9.-]*', name)[0] or 'H100'}, as `sky show-gpus` lists it",  # type: ignore[index]
        )


def check_image(name: str) -> None:
    """Raise UserError for what is no reference of an image."""
    found = IMAGE.fullmatch(name)
    if found and len(found["name"]) <= LONGEST_IMAGE:
        return
    raise UserError(
        f"{name!r} is no name of an image.",
        where=f"--image={name}",
        why="it is [REGISTRY[:PORT]/]PATH[:TAG][@DIGEST], without https://, and its path has small letters, digits and "
        "single . _ - between them",
        fix="as `docker pull` takes it, in small letters: --image=ghcr.io/you/prl:1.0",
    )


def variables_of(config: RunConfig) -> list[Variable]:
    """Secrets that this configuration uses."""
    found = []
    for key in ("control_key_var", "api_key_var"):
        if name := getattr(config.inference, key):
            found.append(Variable(name, f"inference.{key}", True))
    if config.job == "rl" and (name := config.algo.teacher.api_key_var):
        found.append(Variable(name, "algo.teacher.api_key_var", True))
    mode = config.logging.wandb.mode
    if config.job != "inference" and mode in ("auto", "online"):
        found.append(Variable("WANDB_API_KEY", f"logging.wandb.mode={mode}", mode == "online"))
    if hub := [f"{key}={name}" for key, name in _sources(config) if not is_path(name)]:
        found.append(Variable("HF_TOKEN", f"{', '.join(hub)}, if gated or private", False))
    return found


def _sources(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Keys that name weights, tokenizers or data, which lie in a file or on the hub."""
    if config.model.path is not None:
        yield "model.path", config.model.path
    if config.model.tokenizer not in (None, "byte"):
        yield "model.tokenizer", str(config.model.tokenizer)
    data = config.sft or config.warm_start
    if data is not None and not data.data.source.startswith("env:"):
        source = data.data.source
        yield (
            "sft.data.source" if config.sft is not None else "warm_start.data.source",
            f"./{source}" if source.endswith(".jsonl") and not is_path(source) else source,
        )
    if config.job in ("rl", "eval") and any(source.id == "hf_math" for source in config.env.mix.values()):
        yield "env", "hf_math"


def what_pods_need(config: RunConfig, kind: str, mount: PurePosixPath, modules: Iterable[str]) -> list[str]:
    """Lines for people."""
    lines = []
    wanted = variables_of(config)
    if wanted:
        told = [f"{v.name} ({v.why}{'' if v.is_required else '; may be left out'})" for v in wanted]
        lines.append(f"variables: {', '.join(told)}")
        given = [f"--from-literal={v.name}=..." if kind == "k8s" else f"--env {v.name}" for v in wanted]
        if kind == "k8s":
            lines.append(f"    kubectl create secret generic {SECRET} {' '.join(given)}")
        else:
            lines.append(f"    sky launch {' '.join(given)} point.yaml")
    if names := ", ".join(modules):
        place = "installed in the image" if kind == "k8s" else "in this checkout, or installed by `setup`"
        lines.append(f"modules of your own, {place}: {names}")
    for key, name in _sources(config):
        if is_path(name) and not PurePosixPath(name).is_relative_to(mount):
            lines.append(f"{key}={name} must be there in every pod: in the image, or below {mount}")
    return lines
