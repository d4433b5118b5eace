"""Frozen points as manifests of other schedulers: their fields, their public schemas, and that they run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from runtime_tree import compose_once
from terminals import Terminals, terminals

from prl import plan
from prl.config import compose
from prl.config.errors import UserError
from prl.planning import make_plan
from prl.planning.manifests import Site, dns_label, emit
from prl.planning.render import render_plan
from prl.planning.run_plan import plan_from_json
from prl.runtime.directory.status_file import read_status

NODES = ("deployment=multi_node", "deployment.gpus_per_node=2", "deployment.num_train_nodes=2", "name=Math_v2.1 run")
K8S = Site(image="registry.example/prl:1", volume="shared")
SKY = Site(mount="/mnt/shared", accelerator="H100")
LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


def documents(kind: str, site: Site, *overrides: str, config: str = "rl") -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(emit(compose_once(config, overrides), kind, site)))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Terminals]:
    with terminals(tmp_path) as made:
        yield made


def test_a_kubernetes_job_has_a_pod_for_each_node() -> None:
    plan_map, service, job = documents("k8s", K8S, *NODES)
    name = job["metadata"]["name"]
    assert LABEL.fullmatch(name)
    assert name.startswith("math-v2-1-run-")
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    assert container["image"] == "registry.example/prl:1"
    assert service["spec"]["clusterIP"] == "None"
    assert (pod["subdomain"], service["metadata"]["name"], plan_map["metadata"]["name"]) == (name,) * 3
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    assert container["command"][-2:] == ["--plan=/plan/plan.json", "--node=$(JOB_COMPLETION_INDEX)"]
    plan = plan_from_json(plan_map["data"]["plan.json"])
    assert plan.num_nodes == 3
    assert plan.config.output_dir == container["command"][3] == f"/outputs/math-v2-1-run-{plan.point_id}"
    assert plan.config.cache_dir == "/outputs/cache"


def test_a_cpu_point_asks_for_no_gpu() -> None:
    job = documents("k8s", K8S, "deployment.device=cpu")[-1]
    assert "resources" not in job["spec"]["template"]["spec"]["containers"][0]
    (task,) = documents("skypilot", Site(mount="/mnt"), "deployment.device=cpu")
    assert "resources" not in task


def test_a_skypilot_task_has_a_node_for_each() -> None:
    (task,) = documents("skypilot", SKY, *NODES)
    assert (task["num_nodes"], task["resources"]) == (3, {"accelerators": "H100:2"})
    assert LABEL.fullmatch(task["name"])


@pytest.mark.parametrize(
    ("kind", "site", "overrides", "words"),
    [
        ("k8s", Site(volume="v"), (), "--image=REGISTRY/IMAGE:TAG"),
        ("k8s", Site(image="i"), (), "--volume=CLAIM"),
        ("k8s", Site(), (), "--image=REGISTRY/IMAGE:TAG --volume=CLAIM"),
        ("skypilot", Site(), (), "--mount=/mnt/shared --accelerator=H100"),
        ("skypilot", Site(accelerator="H100"), (), "--mount=/mnt/shared"),
        ("skypilot", Site(mount="/mnt"), (), "--accelerator=H100"),
        ("k8s", K8S, ("output_dir=/elsewhere/run",), "--mount=THE_SHARED_DIRECTORY"),
        ("k8s", Site(image="i", volume="v", mount="outputs"), (), "--mount=/outputs"),
    ],
)
def test_what_a_manifest_lacks_is_asked_for(kind: str, site: Site, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError) as raised:
        documents(kind, site, *overrides)
    assert words in raised.value.render()


@pytest.mark.parametrize(
    ("kind", "site", "words"),
    [
        *(("k8s", Site(image="i", volume=name), "--volume=CLAIM") for name in ("Shared", "a_b", "-a", "a.", "x" * 254)),
        *(("k8s", Site(image=name, volume="v"), "--image=ghcr.io/you/prl:1.0")
          for name in ("https://r/i", "R/I/Upper", "a b", "i:", "i:-x", "i@sha256:12", "a//b")),
        *(("k8s", Site(image="i", volume="v", mount=place), "--mount=/outputs")
          for place in ("/plan", "/plan/a", "/dev", "/dev/shm", "/", "/proc/x", "/a:b")),
        ("k8s", Site(image="i", volume="v", accelerator="H100"), "without --accelerator"),
        ("skypilot", Site(volume="Bad Vol!", mount="/mnt", accelerator="H100"), "--volume=NAME"),
        ("skypilot", Site(image="Up Per", mount="/mnt", accelerator="H100"), "--image=ghcr.io/you/prl:1.0"),
    ],
)  # fmt: skip
def test_names_that_a_cluster_would_refuse_are_refused(kind: str, site: Site, words: str) -> None:
    with pytest.raises(UserError) as raised:
        documents(kind, site)
    assert words in raised.value.render()


@pytest.mark.parametrize("image", ["i", "r.io:5000/a/b-c__d.e:v1_2", "Host.example/a", f"a@sha256:{'0' * 64}"])
def test_names_that_a_cluster_takes_pass(image: str) -> None:
    assert documents("k8s", Site(image=image, volume="a-1.b"))


def test_a_manifest_names_what_its_pods_need() -> None:
    overrides = (
        *("inference.urls=[http://10.1.2.3:8000]", "inference.control_key_var=MY_KEY", "model.path=/data/weights"),
        *("warm_start=none", "logging.wandb.mode=online"),
    )
    text = emit(compose_once("rl", overrides), "k8s", K8S, ["my_envs"])
    notes = [line for line in text.splitlines() if line.startswith("#")]
    assert "MY_KEY (inference.control_key_var), WANDB_API_KEY" in notes[0]
    assert "create secret generic prl --from-literal=MY_KEY=... --from-literal=WANDB_API_KEY=..." in notes[1]
    assert notes[2] == "# modules of your own, installed in the image: my_envs"
    assert notes[3].startswith("# model.path=/data/weights must be there in every pod")
    pod = list(yaml.safe_load_all(text))[-1]["spec"]["template"]["spec"]
    asked = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in pod["containers"][0]["env"]}
    assert asked["MY_KEY"] == {"name": "prl", "key": "MY_KEY", "optional": False}
    assert "--env MY_KEY --env WANDB_API_KEY" in emit(compose_once("rl", overrides), "skypilot", SKY)
    plain = compose_once("rl", ("logging.wandb.mode=disabled",))
    assert "#" not in emit(plain, "k8s", K8S).partition("apiVersion")[0]


@pytest.mark.parametrize("text", ["A_b.c", "3b", "-", "x" * 80, "Überlauf/2", "a--b-"])
def test_names_are_labels_of_dns(text: str) -> None:
    assert LABEL.fullmatch(dns_label(text))
    assert len(dns_label(text, 20)) <= 43


def test_kubernetes_schemas_take_it() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate (108 MB of schemas)")
    for overrides in ((), NODES):
        for document in documents("k8s", K8S, *overrides):
            validate.validate(document, "1.29", strict=True)


def test_skypilots_schema_takes_it() -> None:
    schemas = pytest.importorskip("sky.utils.schemas", reason="pip install skypilot, in an environment of its own")
    import jsonschema

    for site in (SKY, Site(mount="/mnt/shared", accelerator="H100", image="me/prl:1", volume="shared")):
        for overrides in ((), NODES):
            for task in documents("skypilot", site, *overrides):
                jsonschema.validate(task, schemas.get_task_schema())


def sft_on_two_nodes(tmp_path: Path) -> list[str]:
    return [
        "-cn", "sft", f"--mount={tmp_path}", "deployment=multi_node", "deployment.num_train_nodes=2", "max_steps=1",
        "deployment.gpus_per_node=1", "deployment.device=cpu", "output_dir=point", "logging.wandb.mode=disabled",
        "ckpt.export_hf=false", "debug.num_threads=1",
    ]  # fmt: skip


def emitted(*words: str) -> list[dict[str, Any]]:
    told = subprocess.run(
        [sys.executable, "-m", "prl.plan", *words], capture_output=True, text=True, timeout=240, check=False
    )
    assert told.returncode == 0, told.stderr
    return list(yaml.safe_load_all(told.stdout))


@pytest.mark.slow
def test_the_commands_of_a_kubernetes_job_run_on_two_nodes(opened: Terminals, tmp_path: Path) -> None:
    words = ["--emit=k8s", "--image=i", "--volume=v", *sft_on_two_nodes(tmp_path)]
    plan_map, _, job = emitted(*words)
    (tmp_path / "plan.json").write_text(plan_map["data"]["plan.json"])
    python, *command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert python == "python"

    def pod(index: int) -> int:
        as_mounted = [word.replace("/plan/plan.json", str(tmp_path / "plan.json")) for word in command]
        return opened.open(*[word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in as_mounted])

    pods = [pod(index) for index in range(job["spec"]["completions"])]
    assert [opened.code(each) for each in pods] == [0, 0], opened.says(pods[0])
    status = read_status(tmp_path / "point")
    assert status["state"] == "done"
    assert set(status["roles"]) == {"trainer/0", "trainer/1"}
    assert "node" in status["roles"]["trainer/1"], "the second pod has started it"


def test_the_script_of_a_skypilot_task_starts_the_same_agent(tmp_path: Path) -> None:
    (task,) = documents("skypilot", Site(mount="/mnt/shared"), "deployment.device=cpu", 'name="it\'s"')
    program = tmp_path / "bin" / "python"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    environment = {"PATH": f"{program.parent}:/usr/bin:/bin", "HOME": str(tmp_path), "SKYPILOT_NODE_RANK": "1"}
    told = subprocess.run(
        ["bash", "-c", task["run"]], env=environment, capture_output=True, text=True, check=True, timeout=240
    )
    *_, agent, point, plan, node = told.stdout.splitlines()
    assert (agent, node) == ("prl.runtime.agent", "--node=1")
    frozen = json.loads(Path(plan.removeprefix("--plan=")).read_text())
    assert frozen["config"]["output_dir"] == point
    assert frozen["config"]["name"] == "it's"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--emit=skypilot", "--accelerator=H100:4"], "--accelerator=H100,"),
        (["--emit=skypilot", "-m", "--accelerator=H100", "seed=1,2"], "without -m"),
        (["--emit=k8s", "--freeze"], "leave --freeze"),
    ],
)
def test_what_a_manifest_is_not_printed_with(words: list[str], told: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prl.plan", *words], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr


def test_dollars_in_a_pods_command_are_no_variables() -> None:
    config = compose(['output_dir="a$(JOB_COMPLETION_INDEX)$$b"', "deployment.device=cpu"])
    _, _, job = yaml.safe_load_all(emit(config, "k8s", Site(image="i", volume="v")))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][3] == "/outputs/a$$(JOB_COMPLETION_INDEX)$$$$b"
    assert container["command"][-1] == "--node=$(JOB_COMPLETION_INDEX)"


@pytest.mark.parametrize("kind", ["k8s", "skypilot"])
@pytest.mark.parametrize(
    "words",
    [
        ["algo.teacher.urls=[http://127.0.0.1:1]"],
        ["inference.urls=[http://localhost:1]", "inference.control_key_var=K"],
    ],
)
def test_servers_on_loopback_are_not_reached_from_a_node(kind: str, words: list[str]) -> None:
    with pytest.raises(UserError, match="does not reach"):
        emit(compose(words), kind, K8S if kind == "k8s" else SKY)


def test_a_teachers_key_is_a_secret_of_the_pod_and_the_plan_names_the_teacher() -> None:
    config = compose(["algo.teacher.urls=[http://h:1]", "algo.teacher.api_key_var=TEACHERS"])
    assert "--from-literal=TEACHERS=" in emit(config, "k8s", K8S)
    assert "teacher     http://h:1" in render_plan(make_plan(config))


def test_the_help_of_plans_shows_their_own_options(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["prl.plan", "--help"])
    monkeypatch.setattr(plan, "run_app", lambda *given, **more: None)
    plan.main()
    told = capsys.readouterr().out
    assert all(option in told for option in ("--json", "--commands", "--freeze", "--emit=k8s", "--emit=skypilot"))
