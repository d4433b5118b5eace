"""A frozen point as a manifest of another scheduler, which starts one agent on each node. Pure: text out of a plan.

The plan travels inside of the manifest. The run directory lies on a volume that all nodes share: there the agents meet.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from prl.config.errors import UserError
from prl.config.loopback import on_loopback
from prl.config.rules.external import asked_servers
from prl.config.schema import RunConfig
from prl.planning.planner import make_plan
from prl.planning.pod_needs import (
    PLAN_MOUNT,
    SECRET,
    SHM_MOUNT,
    check_accelerator,
    check_claim,
    check_image,
    check_mount,
    check_volume,
    variables_of,
    what_pods_need,
)
from prl.planning.run_plan import RunPlan, plan_to_json

LONGEST_LABEL = 63  # DNS-1123
LARGEST_CONFIG_MAP = 1 << 20  # bytes
MOUNT = "/outputs"
AFTER_STOP_S = 60  # beside deployment.stop_timeout_s, until all processes are gone


@dataclass(frozen=True)
class Site:
    """What the plan cannot know. Empty: not given."""

    image: str = ""  # a container's, with this package installed
    volume: str = ""  # k8s: a PersistentVolumeClaim; skypilot: a volume
    mount: str = ""  # where the nodes see the shared directory
    accelerator: str = ""  # as SkyPilot calls the GPU


def emit(config: RunConfig, kind: str, site: Site, modules: Iterable[str] = ()) -> str:
    """The manifest as YAML, behind comments that name what the pods need beside it. Raises UserError for what it lacks.

    Args:
        modules: the user's own, which the image must have.
    """
    mount = PurePosixPath(site.mount or MOUNT)
    if not mount.is_absolute():
        raise UserError(f"{mount} is no absolute path.", where="--mount", fix=f"--mount={MOUNT}")
    if kind == "k8s" and site.accelerator:
        raise UserError(
            "--accelerator is for SkyPilot.",
            where=f"--accelerator={site.accelerator}, --emit=k8s",
            why="a pod asks for nvidia.com/gpu; which kind its node has is the node pool's",
            fix="without --accelerator",
        )
    if near := [url for urls in asked_servers(config) for url in on_loopback(urls)]:
        raise UserError(
            f"A pod does not reach {near[0]}." if kind == "k8s" else f"A task does not reach {near[0]}.",
            where=f"inference.urls, algo.teacher.urls, --emit={kind}",
            why="on its node, loopback is the node itself",
            fix="the address of the server's host (it is started with inference.host=0.0.0.0, or --host)",
        )
    plan = make_plan(_placed(config, mount))
    if site.image:
        check_image(site.image)
    if kind == "k8s":
        check_mount(mount)
    if site.volume and kind == "k8s":
        check_claim(site.volume)
    if site.volume and kind == "skypilot":
        check_volume(site.volume)
    if site.accelerator and kind == "skypilot":
        check_accelerator(site.accelerator)
    documents = MANIFESTS[kind](plan, site, mount)
    notes = "".join(f"# {line}\n" for line in what_pods_need(config, kind, mount, modules))
    return notes + yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=110)


class Dumper(yaml.SafeDumper):
    """Scripts as they are, line by line."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


Dumper.add_representer(str, Dumper.represent_str)


def dns_label(text: str, room: int = 0) -> str:
    """A name of DNS-1123 that starts with a letter, with room for so many characters behind it."""
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    label = label if label[:1].isalpha() else f"prl-{label}"
    return label[: LONGEST_LABEL - room].strip("-")


def _placed(config: RunConfig, mount: PurePosixPath) -> RunConfig:
    """The run, and what it makes for others, under the shared directory."""
    from prl.config.point import point_id

    name = f"{dns_label(config.name, 16)}-{point_id(config)}"
    point = mount / (config.output_dir or name)  # an absolute one stays as it is
    cache = mount / "cache" if config.cache_dir.startswith("~") else mount / config.cache_dir
    for key, path in {"output_dir": point, "cache_dir": cache}.items():
        if not path.is_relative_to(mount) or ".." in path.parts:
            raise UserError(
                f"{path} does not lie in {mount}.",
                where=f"{key}, --mount",
                why="nodes meet in the run directory, and share what one of them makes"
                + "; a path with .. may lead anywhere" * (".." in path.parts),
                fix=f"a relative path, or --mount=THE_SHARED_DIRECTORY (default {MOUNT})",
            )
    return config.model_copy(update={"output_dir": str(point), "cache_dir": str(cache)})


def _agent(plan: RunPlan, frozen: str, node: str) -> list[str]:
    return ["python", "-m", "prl.runtime.agent", str(plan.config.output_dir), f"--plan={frozen}", f"--node={node}"]


def _gpus(plan: RunPlan) -> int:
    return 0 if plan.config.deployment.device == "cpu" else plan.gpus_per_node


def _refuse_missing(kind: str, wanted: dict[str, tuple[str, str, str]]) -> None:
    """Raise UserError for all options without a value: option -> value, example, why it is wanted."""
    missing = {option: rest for option, (value, *rest) in wanted.items() if not value}
    if missing:
        raise UserError(
            f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing.",
            where=f"prl.plan --emit={kind}",
            why="; ".join(why for _, why in missing.values()),
            fix=" ".join(f"{option}={example}" for option, (example, _) in missing.items()),
        )


def _as_it_is(word: str) -> str:
    """In a pod's command: $(NAME) is a variable there, and $$ a dollar sign."""
    return word.replace("$", "$$")


# --- Kubernetes -------------------------------------------------------------------------------------------------------


def kubernetes(plan: RunPlan, site: Site, mount: PurePosixPath) -> list[dict[str, Any]]:
    """A ConfigMap with the plan, a headless Service, and an indexed Job with a pod for each node."""
    wanted = {
        "--image": (site.image, "REGISTRY/IMAGE:TAG", "pods run this package from an image of yours"),
        "--volume": (site.volume, "CLAIM", "all pods share the run directory: a ReadWriteMany claim"),
    }
    _refuse_missing("k8s", wanted)
    frozen = json.dumps(json.loads(plan_to_json(plan)), sort_keys=True, separators=(",", ":"))
    if len(frozen.encode()) > LARGEST_CONFIG_MAP - 1024:
        raise UserError(
            f"The plan has {len(frozen.encode())} bytes, and a ConfigMap holds {LARGEST_CONFIG_MAP}.",
            where="--emit=k8s",
            fix="python -m prl.plan --freeze output_dir=POINT on the shared volume, and agents there with --node",
        )
    *words, node = _agent(plan, f"{PLAN_MOUNT}/plan.json", "")
    index = f"-{plan.num_nodes - 1}"
    # a pod's host name is the job's and its index
    name = f"{dns_label(plan.config.name, len(index) + 1 + len(plan.point_id))}-{plan.point_id}"
    labels = {"app.kubernetes.io/name": "prl", "app.kubernetes.io/instance": name}
    container: dict[str, Any] = {
        "name": "agent",
        "image": site.image,
        "command": [*map(_as_it_is, words), f"{node}$(JOB_COMPLETION_INDEX)"],
        "volumeMounts": [
            {"name": "plan", "mountPath": PLAN_MOUNT, "readOnly": True},
            {"name": "outputs", "mountPath": str(mount)},
            {"name": "shm", "mountPath": SHM_MOUNT},
        ],
    }
    if variables := variables_of(plan.config):
        container["env"] = [
            {
                "name": variable.name,
                "valueFrom": {
                    "secretKeyRef": {"name": SECRET, "key": variable.name, "optional": not variable.is_required}
                },
            }
            for variable in variables
        ]
    if _gpus(plan):
        container["resources"] = {"limits": {"nvidia.com/gpu": _gpus(plan)}}
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(plan.config.deployment.stop_timeout_s) + AFTER_STOP_S,
        "containers": [container],
        "volumes": [
            {"name": "plan", "configMap": {"name": name}},
            {"name": "outputs", "persistentVolumeClaim": {"claimName": site.volume}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    head = {"name": name, "labels": labels}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": head, "data": {"plan.json": frozen}},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": head,
            "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": dict(labels)},
        },
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": head,
            "spec": {
                "completionMode": "Indexed",
                "completions": plan.num_nodes,
                "parallelism": plan.num_nodes,
                "backoffLimit": 0,  # nodes end together: one pod alone cannot be started again
                "template": {"metadata": {"labels": dict(labels)}, "spec": pod},
            },
        },
    ]


# --- SkyPilot ---------------------------------------------------------------------------------------------------------


def skypilot(plan: RunPlan, site: Site, mount: PurePosixPath) -> list[dict[str, Any]]:
    """One task. The checkout, its working directory, is installed on each node."""
    wanted = {"--mount": (site.mount, "/mnt/shared", "all nodes share the run directory")}
    if _gpus(plan):
        wanted["--accelerator"] = (site.accelerator, "H100", "SkyPilot finds machines by their kind of GPU")
    _refuse_missing("skypilot", wanted)
    name = f"{dns_label(plan.config.name, 1 + len(plan.point_id))}-{plan.point_id}"
    task: dict[str, Any] = {"name": name, "num_nodes": plan.num_nodes}
    resources: dict[str, Any] = {}
    if _gpus(plan):
        resources["accelerators"] = f"{site.accelerator}:{_gpus(plan)}"
    if site.image:
        resources["image_id"] = f"docker:{site.image}"
    if resources:
        task["resources"] = resources
    if site.volume:
        task["volumes"] = {str(mount): site.volume}
    frozen = f"$HOME/.prl/{name}.json"
    *words, node = _agent(plan, "PLAN", "")
    command = shlex.join(word for word in words if not word.startswith("--plan="))
    text = json.dumps(json.loads(plan_to_json(plan)), sort_keys=True, separators=(",", ":"))
    return [
        task
        | {
            "workdir": ".",
            "setup": "python -m pip install -e .\n",
            "run": f"set -e\nmkdir -p ~/.prl\ncat > \"{frozen}\" <<'END_OF_PLAN'\n{text}\nEND_OF_PLAN\n"
            f'exec {command} --plan="{frozen}" {node}"$SKYPILOT_NODE_RANK"\n',
        }
    ]


MANIFESTS: dict[str, Callable[[RunPlan, Site, PurePosixPath], list[dict[str, Any]]]] = {
    "k8s": kubernetes,
    "skypilot": skypilot,
}
