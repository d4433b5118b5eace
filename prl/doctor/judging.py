"""Facts and needs in, findings out: training and inference, which are a matter of packages and GPUs. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prl.config.packages import (
    DATASETS,
    DEEP_EP,
    DEEP_GEMM,
    FLASH_ATTENTION_3,
    FLASH_ATTENTION_4,
    MATH_VERIFY,
    MOONCAKE,
    NIXL,
    OPTUNA,
    ROUTER,
    TRL,
    VERIFIERS,
    VLLM,
    VLLM_VERSIONS,
    Package,
)
from prl.doctor.facts import Facts, PackageFacts
from prl.doctor.finding import Finding, Purpose, State
from prl.doctor.needs import Needs

PURPOSE_OF: dict[str, Purpose] = {
    **{p.module: "train" for p in (FLASH_ATTENTION_4, FLASH_ATTENTION_3, DEEP_GEMM, DATASETS, MATH_VERIFY, VERIFIERS)},
    TRL.module: "train",
    **{p.module: "infer" for p in (VLLM, NIXL, ROUTER, MOONCAKE)},
    DEEP_EP.module: "scale",
    OPTUNA.module: "cluster",
}
REINSTALL = "pip install -e ."
# how a failed import says which two do not go together: its last line -> the other one
OTHER_HALVES = (
    (r"undefined symbol|c10|libtorch|libc10", "torch", "it was built for another torch than {version}"),
    (r"libcudart|libcublas|libnvrtc|libcudnn", "CUDA", "it was built for another CUDA than torch's {cuda}"),
    (r"libnvshmem|nvshmem", "NVSHMEM", "the NVSHMEM that it was built with is not found"),
    (r"libnccl|nccl\w*: symbol", "NCCL", "the NCCL that it was built with is not found"),
    (r"numpy\.dtype size changed|_ARRAY_API|NumPy 1\.x", "numpy", "it was built for another numpy"),
    (r"torchvision::|libtorchvision", "torchvision", "torchvision was built for another torch than {version}"),
)


def explain_import(line: str, facts: Facts) -> str:
    """Which pair is broken, where the last line of an import tells."""
    for pattern, name, why in OTHER_HALVES:
        if re.search(pattern, line):
            probe = facts.torch.probe
            return f"with {name}: " + why.format(version=probe.get("version", "?"), cuda=probe.get("cuda") or "none")
    return ""


def judge_torch(facts: Facts, needs: Needs) -> Iterator[Finding]:
    torch = facts.torch
    if not facts.packages.get("torch", PackageFacts()).there:
        yield Finding("train", "torch", "absent", "not installed", "every job", REINSTALL, prevents=True)
        return
    if torch.error:
        told = f"does not work: {torch.error}"
        yield Finding("train", "torch", "broken", told, "every job", f"pip install --force-reinstall {_pin()}", True)
        return
    build = f"CUDA {torch.probe['cuda']}" if torch.probe.get("cuda") else "CPU only"
    yield Finding("train", "torch", "ok", f"{torch.probe['version']}, built for {build}")
    if needs.needs_gpus and needs.where == "nodes" and not torch.probe.get("cuda"):
        told = "the one here is built for CPUs only, and nodes often share this environment"
        yield Finding("train", "torch for CUDA", "nodes", told, needs.why_gpus())
    transformers = facts.packages.get("transformers", PackageFacts())
    yield from _base_package("train", "transformers", transformers, "checkpoints, tokenizers", facts)


def _pin() -> str:
    return '"torch>=2.11,<2.14"'


def _base_package(purpose: Purpose, name: str, found: PackageFacts, needed_by: str, facts: Facts) -> Iterator[Finding]:
    """One that prl itself installs."""
    if not found.there:
        yield Finding(purpose, name, "absent", "not installed", needed_by, REINSTALL, prevents=True)
    elif found.error is not None:
        told = "; ".join(part for part in (_versioned(found), found.error, explain_import(found.error, facts)) if part)
        fix = f"pip install --force-reinstall --no-deps {name}"
        yield Finding(purpose, name, "broken", told, needed_by, fix, prevents=True)
    else:
        yield Finding(purpose, name, "ok", found.version or "")


def judge_gpus(facts: Facts, needs: Needs) -> Iterator[Finding]:
    """GPUs, torch's build against their driver, and whether they are as many as the job has roles for."""
    torch = facts.torch
    yield from _build_and_driver(facts, needs)
    for index, gpu in enumerate(torch.gpus):
        arch = f"sm_{gpu['capability'][0]}{gpu['capability'][1]}"
        told = f"{gpu['name']}, {gpu['memory_gib']:.0f} GiB, {arch}, reaches {gpu['peers']} of the others directly"
        state: State = "broken" if gpu["error"] else "ok"
        fix = "nvidia-smi -q shows its state; leave it out with CUDA_VISIBLE_DEVICES" if gpu["error"] else ""
        yield Finding("train", f"GPU {index}", state, f"{told}{': ' + gpu['error'] if gpu['error'] else ''}", "", fix)
    if not torch.gpus and not torch.driver_gpus:
        yield _no_gpu(needs)
    elif needs.where == "here" and needs.device != "cpu" and len(torch.gpus) < needs.gpus_in_all:
        lacking = f"{len(torch.gpus)} of the {needs.gpus_in_all} that this job's roles have"
        fix = "deployment=colocated, fewer roles (python -m prl.plan shows them), or deployment.device=cpu"
        yield Finding("train", "GPUs", "absent", lacking, "this job", fix, needs.needs_gpus or needs.spans_nodes)


def _no_gpu(needs: Needs) -> Finding:
    if not needs.needs_gpus:
        return Finding("train", "GPUs", "absent", "none: devices are CPU slots here", "deployment.device=cuda")
    if needs.where == "nodes":
        return Finding("train", "GPUs", "nodes", "none here", needs.why_gpus())
    fix = "a machine with NVIDIA GPUs, hydra/launcher=slurm where there is a cluster, or here: " + " ".join(
        instead for _, instead in needs.only_on_gpus
    )
    return Finding("train", "GPUs", "absent", "none", needs.why_gpus(), fix, prevents=True)


def _build_and_driver(facts: Facts, needs: Needs) -> Iterator[Finding]:
    torch, serves = facts.torch, facts.torch.driver_cuda
    if torch.error or not torch.probe or serves is None:
        return
    cuda, version = torch.probe.get("cuda"), torch.probe["version"]
    release = str(version).partition("+")[0]
    prevents = needs.needs_gpus and needs.where == "here"
    told, fix = "", ""
    if not cuda and torch.driver_gpus:
        told = f"torch {version} is a CPU build, and the driver has {torch.driver_gpus} GPUs"
        fix = f"pip install --force-reinstall torch=={release} (the index's own build is for CUDA)"
    elif cuda and int(cuda.split(".")[0]) > serves[0]:
        told = f"torch {version} is built for CUDA {cuda}, and the driver serves CUDA {serves[0]}.{serves[1]} at most"
        fix = f"a newer NVIDIA driver, or a build of torch {release} for CUDA {serves[0]}: pytorch.org/get-started"
    elif cuda and torch.driver_gpus and not torch.gpus:
        told = f"torch {version} sees none of the driver's {torch.driver_gpus} GPUs"
        fix = "unset CUDA_VISIBLE_DEVICES; nvidia-smi shows whether they answer"
    else:
        archs = torch.probe.get("archs") or []
        newest = max((int(arch[3:].rstrip("af")) for arch in archs if arch.startswith("sm_")), default=0)
        beyond = [gpu["name"] for gpu in torch.gpus if newest and _number(gpu) // 10 > newest // 10]
        if beyond:
            told = f"torch {version} has no kernels for {beyond[0]} (its newest are for sm_{newest})"
            fix = "a newer torch, or one built for a newer CUDA: pytorch.org/get-started"
    if told:
        yield Finding("train", "torch and driver", "broken", told, "deployment.device=cuda", fix, prevents)


def _number(gpu: dict[str, list[int]]) -> int:
    major, minor = gpu["capability"]
    return major * 10 + minor


def judge_package(package: Package, facts: Facts, needs: Needs) -> Finding:
    """One that only some choices need."""
    purpose, found = PURPOSE_OF[package.module], facts.packages.get(package.module, PackageFacts())
    choice = needs.packages.get(package.module)
    needed_by = choice or package.choices
    fix = package.install_here(
        bool(facts.torch.gpus or facts.torch.driver_gpus) or needs.where == "nodes" or needs.device == "cuda"
    )
    elsewhere = needs.where == "nodes"
    if not found.there:
        state: State = "nodes" if choice and elsewhere else "absent"
        return Finding(purpose, package.name, state, "not installed", needed_by, fix, bool(choice) and not elsewhere)
    if found.error is not None and not (elsewhere and _wants_a_gpu(package, facts)):
        told = "; ".join(part for part in (_versioned(found), found.error, explain_import(found.error, facts)) if part)
        return Finding(purpose, package.name, "broken", told, needed_by, fix, bool(choice) and not elsewhere)
    if package is VLLM and found.version and not found.version.startswith(VLLM_VERSIONS):
        told = f"{found.version} is not supported: {', '.join(VLLM_VERSIONS)} are"
        return Finding(purpose, package.name, "broken", told, needed_by, fix, bool(choice) and not elsewhere)
    inside = f", the copy inside {found.module.split('.')[0]}" if found.module != package.module else ""
    return Finding(purpose, package.name, "ok", (found.version or "installed") + inside, choice or "")


def _wants_a_gpu(package: Package, facts: Facts) -> bool:
    """Kernels may refuse to be imported without one; that says nothing of a machine that has one."""
    return package in (FLASH_ATTENTION_3, FLASH_ATTENTION_4, DEEP_GEMM, DEEP_EP) and not facts.torch.gpus


def _versioned(found: PackageFacts) -> str:
    return f"{found.version} is installed and does not import" if found.version else "does not import"


def judge_conflicts(facts: Facts) -> Iterator[Finding]:
    """Pairs of packages, each by name. They prevent nothing by themselves: what breaks of it does not import."""
    inference = {name for package in (VLLM, NIXL, ROUTER) for name in package.distributions}
    for conflict in facts.conflicts:
        owners = {wish.owner.split(" ")[0] for wish in conflict.unmet}
        purpose: Purpose = "infer" if owners & inference else "train"
        name = f"{sorted(owners)[0]} and {conflict.name}"
        yield Finding(purpose, name, "broken", conflict.told(), "", conflict.remedy())
