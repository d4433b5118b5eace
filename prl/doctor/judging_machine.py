"""Facts and needs in, findings out: what lies between GPUs and machines, SLURM, disks, limits, wandb. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from prl.doctor.facts import Facts, PackageFacts
from prl.doctor.finding import Finding, State
from prl.doctor.host import UNLIMITED, HostFacts
from prl.doctor.judging import _base_package
from prl.doctor.needs import Needs
from prl.doctor.slurm import SlurmFacts, SlurmNode

FEW_FILES, FEW_PROCESSES, FEW_PORTS = 1024, 2048, 1000  # a run of eight GPUs takes some hundreds of each
LEAST_FREE_GIB = 2.0  # logs, the tiny model and its checkpoints
LEAST_SHM_GIB = 0.5  # containers have 64 MiB by default
SLOW_MB_S = 30.0


def judge_scale(facts: Facts, needs: Needs) -> Iterator[Finding]:
    gloo = facts.collectives.get("gloo")
    if gloo is not None:
        yield _collective("gloo", gloo.error, "2 processes", gloo.gb_per_s, "runs of several ranks on CPUs", True)
    version = facts.torch.probe.get("nccl")
    nccl = facts.collectives.get("nccl")
    if nccl is not None:
        yield _collective(
            f"NCCL {version}",
            nccl.error,
            "2 GPUs",
            nccl.gb_per_s,
            "several GPUs",
            needs.where == "here" and needs.gpus_in_all > 1,
        )
        yield _between(facts)
    elif version and facts.torch.gpus:
        yield Finding("scale", "NCCL", "ok", f"{version}; one GPU, so it was not tried")
    else:
        yield Finding("scale", "NCCL", "absent", "no GPUs; gloo takes its place", "several GPUs")
    yield from _infiniband(facts.host, needs)


def _collective(name: str, error: str, between: str, speed: float, needed_by: str, matters: bool) -> Finding:
    if not error:
        return Finding("scale", name, "ok", f"all_reduce between {between}: {speed:.2g} GB/s")
    fix = "unset NCCL_* and GLOO_* variables; NCCL_DEBUG=INFO (TORCH_DISTRIBUTED_DEBUG=DETAIL) tells more"
    return Finding("scale", name, "broken", f"all_reduce between {between} failed: {error}", needed_by, fix, matters)


def _between(facts: Facts) -> Finding:
    peers = all(gpu["peers"] == len(facts.torch.gpus) - 1 for gpu in facts.torch.gpus)
    if facts.nvlinks:
        return Finding("scale", "NVLink", "ok", f"{facts.nvlinks} links between any two GPUs")
    told = "not between all GPUs; they reach each other " + ("directly over PCIe" if peers else "through host memory")
    return Finding("scale", "NVLink", "absent", told, "parallelism.ep_comm_backend=deepep; speed of all else")


def _infiniband(host: HostFacts, needs: Needs) -> Iterator[Finding]:
    cards = ", ".join(host.infiniband)
    if cards:
        state: State = "ok" if host.memlock[0] == UNLIMITED else "broken"
        told = cards + ("" if host.peer_memory else "; GPUs cannot be read by it directly (no nvidia_peermem)")
        if state == "broken":
            told += f"; locked memory is limited to {_size(host.memlock[0])}"
        fix = "ulimit -l unlimited (and LimitMEMLOCK=infinity of slurmd)" if state == "broken" else ""
        yield Finding("scale", "InfiniBand", state, told, "deployment=multi_node" if fix else "", fix)
    else:
        told = f"no active port ({', '.join(host.infiniband_down)} down)" if host.infiniband_down else "none"
        lacks: State = "nodes" if needs.spans_nodes and needs.where == "nodes" else "absent"
        yield Finding("scale", "InfiniBand", lacks, told, "speed between nodes (deployment=multi_node)")


def judge_slurm(slurm: SlurmFacts, needs: Needs) -> Iterator[Finding]:
    if not slurm.configured:
        has_programs = "sbatch" not in slurm.missing
        told = "its programs are there, and no cluster that this machine belongs to"
        told = told if has_programs else "sbatch and its like are not on the PATH"
        step = "up" if has_programs else "install"
        fix = f"a login node of a cluster; for development: python -m launch.dev_cluster {step}"
        yield Finding("cluster", "SLURM", "absent", told, "hydra/launcher=slurm", fix, needs.where == "nodes")
        return
    if slurm.error:
        told, fix = f"the controller does not answer: {slurm.error}", "scontrol ping; ask who runs the cluster"
        yield Finding("cluster", "SLURM", "broken", told, "hydra/launcher=slurm", fix, needs.where == "nodes")
        return
    up = {node.name for node in slurm.nodes if node.usable}
    every = {node.name for node in slurm.nodes}
    missing = f"; not on the PATH: {', '.join(slurm.missing)}" if slurm.missing else ""
    yield Finding("cluster", "SLURM", "ok", f"the controller answers; {len(up)} of {len(every)} nodes are up{missing}")
    for name in dict.fromkeys(node.partition for node in slurm.nodes):
        nodes = [node for node in slurm.nodes if node.partition == name]
        star = " (default)" if name == slurm.default_partition else ""
        gpus = ", ".join(sorted({f"{node.gpus} GPUs" for node in nodes}))
        told = f"{sum(node.usable for node in nodes)} of {len(nodes)} nodes with {gpus}, at most {nodes[0].time_limit}"
        yield Finding("cluster", f"partition {name}{star}", "ok", told)
    if needs.where == "nodes":
        yield judge_request(slurm, needs)


def judge_request(slurm: SlurmFacts, needs: Needs) -> Finding:
    """What the job would ask of SLURM, against what there is."""
    from launch.shapes import seconds_of

    asked = needs.slurm
    partitions = asked.partition.split(",") if asked.partition else [slurm.default_partition]
    gpus = 0 if needs.device == "cpu" else needs.gpus_per_node
    shape = f"{needs.nodes} node{'s' * (needs.nodes > 1)} with {gpus} GPUs each"
    nodes = [node for node in slurm.nodes if node.partition in partitions]
    known = sorted({node.partition for node in slurm.nodes})
    told, fix = "", ""
    if not nodes:
        named = f"partition {asked.partition}" if asked.partition else "default partition"
        told, fix = f"there is no {named}", f"slurm.partition={known[0] if known else 'NAME'}"
    elif asked.constraint and not any(asked.constraint in node.features for node in nodes):
        have = sorted({feature for node in nodes for feature in node.features})
        told = f"no node of {', '.join(partitions)} has the feature {asked.constraint} ({', '.join(have) or 'none'})"
        fix = "slurm.constraint=null, or hydra/launcher=slurm"
    else:
        fits = [node for node in nodes if _fits(node, gpus, asked.constraint)]
        up = {node.name for node in fits if node.usable}
        if len({node.name for node in fits}) < needs.nodes:
            told = f"{shape}: {', '.join(partitions)} has {len({node.name for node in fits})} of them"
            most = max(node.gpus for node in nodes)
            fix = f"deployment.gpus_per_node={most}" if most and most < gpus else "slurm.partition, or fewer nodes"
        elif seconds_of(asked.time) > (most_s := max(seconds_of(node.time_limit) for node in fits)):
            told = f"it asks for {asked.time}, and {', '.join(partitions)} gives {most_s / 60:g} minutes at most"
            fix = f"slurm.time={most_s / 60:g}"
        elif len(up) < needs.nodes:
            told, fix = f"{shape}: only {len(up)} are up", "sinfo -R shows why the others are not"
            return Finding("cluster", "this job", "broken", told, "this job", fix)
    if told:
        return Finding("cluster", "this job", "absent", told, "this job", fix, prevents=True)
    return Finding("cluster", "this job", "ok", f"{shape}: {', '.join(partitions)} has them")


def _fits(node: SlurmNode, gpus: int, constraint: str | None) -> bool:
    return node.gpus >= gpus and (constraint is None or constraint in node.features)


def judge_host(host: HostFacts, needs: Needs) -> Iterator[Finding]:
    if host.can_listen:
        told = f"no port of the loopback can be listened on: {host.can_listen}"
        yield Finding("cluster", "ports", "broken", told, "every job", "ip link set lo up", True)
    elif host.port_taken:
        told = f"port {needs.port} is taken: {host.port_taken}"
        here = needs.where == "here"
        yield Finding("cluster", "ports", "broken", told, "inference.port", "inference.port=0 takes a free one", here)
    else:
        few = 0 < host.free_ports < FEW_PORTS
        fix = "sysctl -w net.ipv4.ip_local_port_range='32768 60999'" if few else ""
        reach = f"; other machines reach this one at {host.address}" if host.address else "; no address but loopback"
        told = f"{host.free_ports} to give out{reach}"
        yield Finding("cluster", "ports", "broken" if few else "ok", told, "several nodes, many engines", fix)
    yield _limit("open files", host.open_files, FEW_FILES, "-n")
    yield _limit("processes", host.processes, FEW_PROCESSES, "-u")
    locked = _size(host.memlock[0])
    yield Finding("cluster", "locked memory", "ok", f"{locked}{'' if host.infiniband else '; matters to InfiniBand'}")
    yield _clock(host, needs)


def _limit(name: str, limits: tuple[int, int], least: int, flag: str) -> Finding:
    soft, hard = limits
    told = f"{_count(soft)}, {_count(hard)} at most"
    if soft == UNLIMITED or soft >= least:
        return Finding("cluster", name, "ok", told)
    fix = f"ulimit {flag} {least if hard == UNLIMITED else min(least, hard)}"
    if hard != UNLIMITED and hard < least:
        fix = f"a higher hard limit ({name}) in /etc/security/limits.conf, then ulimit {flag} {least}"
    return Finding("cluster", name, "broken", f"{told}: less than {least}", "many engines, ranks or points", fix)


def _clock(host: HostFacts, needs: Needs) -> Finding:
    fix = "timedatectl set-ntp true"
    if not host.clock_set:
        return Finding("cluster", "clock", "broken", "it shows a time before 2025", "TLS, logs, SLURM's munge", fix)
    if host.clock_synchronised is False and needs.spans_nodes and needs.where == "nodes":
        told = "not synchronised, as far as the kernel knows"
        return Finding("cluster", "clock", "broken", told, "comparing times between nodes", fix)
    said = {True: "synchronised", False: "not synchronised, as only several nodes need it", None: "it is set"}
    return Finding("cluster", "clock", "ok", said[host.clock_synchronised])


def judge_storage(facts: Facts, needs: Needs) -> Iterator[Finding]:
    for key, disk in facts.disks.items():
        where = disk["directory"]
        if "write_mb_s" not in disk:
            told, fix = f"{where} cannot be used: {disk.get('error', '?')}", f"{key}=/path/to/another/place"
            yield Finding("storage", key, "broken", told, "every job", fix, needs.where == "here")
            continue
        kind = f"{disk.get('type', '?')}{', over a network' if disk['network'] else ''}"
        told = (
            f"{where} ({kind}): writes {disk['write_mb_s']:,.0f} MB/s with fsync, reads {disk['read_mb_s']:,.0f}, "
            f"{disk['free_gib']:,.0f} GiB free"
        )
        problems = []
        if not disk["locks"]:
            problems.append(("locks do not hold there: two commands on one run would not notice each other",
                             "mount it with locks (nfs: nolock off), or name another place"))  # fmt: skip
        if disk["free_gib"] < LEAST_FREE_GIB:
            problems.append((f"less than {LEAST_FREE_GIB:g} GiB are free", f"free space, or {key}=/path/to/place"))
        if disk["write_mb_s"] < SLOW_MB_S:
            problems.append(("checkpoints and weights will wait for it", f"{key}=/path/to/a/faster/disk"))
        if problems:
            told = "; ".join([told, *(what for what, _ in problems)])
        state: State = "broken" if problems else "ok"
        yield Finding("storage", key, state, told, "every job" if problems else "", "; ".join(f for _, f in problems))
    yield from _shared_directory(facts, needs)
    yield _shared_memory(facts)


def _shared_directory(facts: Facts, needs: Needs) -> Iterator[Finding]:
    disk = facts.disks.get("output_dir")
    if disk is not None and needs.spans_nodes and needs.where == "nodes" and not disk.get("network", True):
        told = f"{disk['directory']} lies on a disk of this machine, as far as its type ({disk.get('type')}) tells"
        yield Finding("storage", "shared directory", "nodes", told, "deployment=multi_node", "output_dir=/shared/place")


def _shared_memory(facts: Facts) -> Finding:
    size, needed_by = facts.shared_memory_gib, "weight_transport=shared_memory, NCCL, torch"
    if size is None:
        return Finding("storage", "/dev/shm", "absent", "none", needed_by, "mount -t tmpfs tmpfs /dev/shm")
    if size < LEAST_SHM_GIB:
        fix = "mount -o remount,size=50% /dev/shm (docker run --shm-size=16g)"
        return Finding("storage", "/dev/shm", "broken", f"{size:.2g} GiB free", needed_by, fix)
    return Finding("storage", "/dev/shm", "ok", f"{size:,.1f} GiB free")


def judge_wandb(facts: Facts, mode: str, has_key: bool) -> Iterator[Finding]:
    """`mode`: what a run would choose."""
    found = facts.packages.get("wandb", PackageFacts())
    if mode == "disabled":
        yield Finding("logging", "wandb", "ok", "switched off; metrics are in metrics/*.jsonl")
        return
    for finding in _base_package("logging", "wandb", found, "logging.wandb.mode", facts):
        if finding.state != "ok":
            remedy = f"{finding.remedy}, or logging.wandb.mode=disabled"
            yield Finding("logging", "wandb", finding.state, finding.found, finding.needed_by, remedy)
        elif mode == "online" and not has_key:
            fix = "wandb login, or logging.wandb.mode=offline"
            yield Finding("logging", "wandb", "broken", f"{found.version}, no key", "logging.wandb.mode=online", fix)
        else:
            how = "logged in" if mode == "online" else "offline: wandb sync RUN/wandb/offline-* uploads later"
            yield Finding("logging", "wandb", "ok", f"{found.version}, {how}")


def _size(limit: int) -> str:
    return "unlimited" if limit == UNLIMITED else f"{limit / 2**20:,.1f} MiB"


def _count(limit: int) -> str:
    return "unlimited" if limit == UNLIMITED else f"{limit:,}"
