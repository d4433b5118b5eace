"""All that is asked of a machine, several things at a time."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prl.config.packages import DEEP_GEMM, PACKAGES, VLLM
from prl.doctor.asking import Answer, Asker
from prl.doctor.host import HostFacts, look_at_host, shared_memory_gib
from prl.doctor.slurm import SlurmFacts, ask_slurm
from prl.doctor.versions import Conflict, conflicts, installed
from prl.planning.vllm_arguments import BACKEND
from prl.runtime.process.environment import interfaces
from prl.runtime.process.free_memory import available_bytes
from prl.runtime.process.ports import LOOPBACK
from prl.runtime.process.python_path import python_command, python_path

AT_A_TIME = 3
# what stands for "it works": for vLLM, all that our server needs of it
IMPORTED = {VLLM.module: "prl.inference.vllm.server"}
BASE = ("torch", "transformers", "wandb")
BUNDLED = {DEEP_GEMM.module: (VLLM.module, ("third_party", "deep_gemm"))}  # copies inside other packages
PLUGINS = "vllm.general_plugins"
REINSTALL = "pip install --no-deps -e ."
IMPORT = "import importlib, sys; importlib.import_module(sys.argv[1])"


@dataclass(frozen=True)
class PackageFacts:
    """`error` is the last line of what its import said, None if it went well; `version` None if nobody recorded it."""

    there: bool = False
    version: str | None = None
    error: str | None = None
    module: str = ""  # what was imported


@dataclass(frozen=True)
class TorchFacts:
    """What the driver and torch say of each other; `probe` is the JSON of probe_torch."""

    probe: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """Those that torch sees."""
        return list(self.probe.get("gpus") or [])

    @property
    def driver_gpus(self) -> int:
        return int((self.probe.get("driver") or {}).get("gpus") or 0)

    @property
    def driver_cuda(self) -> tuple[int, int] | None:
        """The newest CUDA that the driver serves."""
        number = (self.probe.get("driver") or {}).get("cuda")
        return (number // 1000, number % 1000 // 10) if number else None


@dataclass(frozen=True)
class Collective:
    error: str = ""
    gb_per_s: float = 0.0


@dataclass(frozen=True)
class Facts:
    packages: Mapping[str, PackageFacts] = field(default_factory=dict)  # by module
    conflicts: tuple[Conflict, ...] = ()
    torch: TorchFacts = field(default_factory=TorchFacts)
    collectives: Mapping[str, Collective] = field(default_factory=dict)  # by backend
    nvlinks: int | None = None  # between two GPUs; None: not known
    slurm: SlurmFacts = field(default_factory=SlurmFacts)
    disks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by key of the configuration
    shared_memory_gib: float | None = None
    host: HostFacts = field(default_factory=HostFacts)
    memory_gib: float | None = None  # of this machine, that can be had; None: not known


def look(directories: Mapping[str, str], port: int, asker: Asker) -> Facts:
    """Ask everything. `directories`: key of the configuration -> the directory to measure."""
    found_conflicts = conflicts(have := installed())
    modules = [*BASE, *(package.module for package in PACKAGES)]
    with ThreadPoolExecutor(AT_A_TIME) as pool, _stopped_with(asker):
        # the disk first, while nothing else reads from it
        disks = pool.submit(lambda: {key: _disk(path, asker) for key, path in directories.items()})
        torch = pool.submit(_torch, asker)
        slurm = pool.submit(ask_slurm, asker)
        gloo = pool.submit(_collective, "gloo", asker)
        imported = {module: pool.submit(_package, module, asker) for module in modules}
        collectives = {"gloo": gloo.result()}
        nvlinks = None
        if len(torch.result().gpus) > 1:
            collectives["nccl"] = pool.submit(_collective, "nccl", asker).result()
            nvlinks = pool.submit(_nvlinks, asker).result()
        packages = {
            module: PackageFacts(found.there, _version(module, have), found.error, found.module)
            for module, found in ((module, future.result()) for module, future in imported.items())
        }
        return Facts(
            packages,
            tuple(found_conflicts),
            torch.result(),
            collectives,
            nvlinks,
            slurm.result(),
            disks.result(),
            shared_memory_gib(),
            look_at_host(port),
            None if (free := available_bytes()) is None else free / 2**30,
        )


@contextlib.contextmanager
def _stopped_with(asker: Asker) -> Iterator[None]:
    """Whoever leaves early (Ctrl-C) does not wait for answers: the threads of a pool are waited for."""
    try:
        yield
    except BaseException:
        asker.stop()
        raise


def _disk(path: str, asker: Asker) -> dict[str, Any]:
    answer = asker.ask_python("prl.doctor.probe_disk", path)
    return answer.parsed() or {"directory": path, "error": answer.last_line}


def _torch(asker: Asker) -> TorchFacts:
    answer = asker.ask_python("prl.doctor.probe_torch")
    found = answer.parsed()
    return TorchFacts(error=answer.last_line) if found is None else TorchFacts(found)


def _collective(backend: str, asker: Asker, ranks: int = 2) -> Collective:
    with tempfile.TemporaryDirectory(prefix="prl-doctor-") as folder:
        store, limit_s = str(Path(folder) / "store"), str(asker.probe_limit_s)
        commands = [
            python_command("prl.doctor.probe_collective", backend, str(rank), str(ranks), store, limit_s)
            for rank in range(ranks)
        ]
        answers = asker.ask_together(commands, {"PYTHONPATH": python_path(), **interfaces(LOOPBACK)})
    failed = [answer for answer in answers if not answer.ok]
    if failed:
        return Collective(_reason(failed))
    return Collective(gb_per_s=float((answers[0].parsed() or {}).get("gb_per_s", 0.0)))


def _reason(failed: list[Answer]) -> str:
    """Who ended by himself knows more than who waited for him."""
    return min(failed, key=lambda answer: answer.code is None).last_line


def _nvlinks(asker: Asker) -> int | None:
    answer = asker.ask("nvidia-smi", "topo", "-m")
    return links_of(answer.out) if answer.ok else None


def links_of(topology: str) -> int:
    """The fewest NVLinks between two GPUs in the table of `nvidia-smi topo -m`; 0 where a pair has none."""
    rows = [line.split() for line in topology.splitlines() if re.match(r"\s*GPU\d+\s", line)]
    rows = [row for row in rows if "X" in row]  # without the heading
    cells = [cell for row in rows for cell in row[1 : 1 + len(rows)] if cell != "X"]
    return min((int(cell[2:]) if re.fullmatch(r"NV\d+", cell) else 0 for cell in cells), default=0)


def _package(module: str, asker: Asker) -> PackageFacts:
    name, there = module, is_there(module)
    if not there and module in BUNDLED and _is_bundled(module):
        owner, path = BUNDLED[module]
        name, there = ".".join((owner, *path)), True
    if not there:
        return PackageFacts()
    target = IMPORTED.get(module, name)
    answer = asker.ask(sys.executable, "-P", "-c", IMPORT, target, env={"PYTHONPATH": python_path()})
    error = None if answer.ok else answer.last_line
    if answer.ok and module == VLLM.module and not entry_points(group=PLUGINS, name=BACKEND):
        error = f"it would not find our weight transfer, the entry point {BACKEND} of {PLUGINS}: {REINSTALL}"
    return PackageFacts(True, None, error, name)


def is_there(module: str) -> bool:
    """Whether its files are there; nothing is imported. A folder that happens to have its name is none."""
    top, *rest = module.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    if not rest:
        return spec.origin is not None
    paths = [Path(root, *rest) for root in spec.submodule_search_locations or ()]
    return any((path / "__init__.py").is_file() or path.with_suffix(".py").is_file() for path in paths)


def _is_bundled(module: str) -> bool:
    owner, path = BUNDLED[module]
    return is_there(".".join((owner, *path)))


def _version(module: str, have: Mapping[str, Any]) -> str | None:
    names = next((package.distributions for package in PACKAGES if package.module == module), (module,))
    return next((have[name].version for name in names if name in have), None)
