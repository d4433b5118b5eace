"""The router in a run: who gets which port, what is refused, vllm-router's command line, runs that lose processes."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from runs import SMALL, Moment, finish, rows, start, wait_for, wait_for_step

from prl.config import compose
from prl.config.errors import UserError
from prl.config.schema import RunConfig
from prl.inference.router import vllm_router
from prl.inference.router.server import takes_vllm_router
from prl.planning.planner import make_plan
from prl.runtime.process.ports import lease_ports
from prl.runtime.process.restarts import why_final

BUILTIN = "inference.router.type=builtin"
GOLDEN = Path(__file__).parent / "golden/vllm_router.txt"
TWO = "deployment.num_infer_gpus=2"


def composed(*overrides: str, job: str = "rl") -> RunConfig:
    return compose(list(overrides), job)


# --- plan, ports, rules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["auto", "builtin", "vllm_router"])
def test_the_router_is_a_process_on_the_first_node_without_devices(kind):
    roles = make_plan(composed(TWO, f"inference.router.type={kind}")).roles
    (router,) = [role for role in roles if role.role == "router"]
    assert (router.name, router.node, router.devices, router.world_size) == ("router", 0, (), 1)
    assert [role.name for role in roles][:3] == ["inference/0", "inference/1", "router"]


@pytest.mark.parametrize("override", ["inference.router.type=none", "inference.router.type=url"])
def test_no_process_without_a_router_of_our_own(override):
    more = ["inference.router.url=http://h:1"] if "url" in override else []
    assert not make_plan(composed(override, *more)).roles_of("router")


def test_the_router_has_the_port_that_people_know():
    free = vllm_router.free_port()
    plan = make_plan(composed(TWO, BUILTIN, f"inference.port={free}", "inference.host=0.0.0.0",
                              "inference.api_key_var=K", job="inference"))  # fmt: skip
    leases = lease_ports(plan)
    try:
        assert leases.endpoints["router"] == f"http://127.0.0.1:{free}"
        assert leases.sockets["router"].getsockname() == ("0.0.0.0", free)
        for name in ("inference/0", "inference/1"):
            assert leases.sockets[name].getsockname()[0] == "127.0.0.1"
    finally:
        leases.close()


@pytest.mark.parametrize(
    ("job", "overrides", "words"),
    [
        ("rl", ["inference.router.cache_threshold=0.5"], "cache_threshold has no effect"),
        ("rl", [BUILTIN, "inference.router.policy=round_robin", "inference.router.balance_abs_threshold=1"],
         "taking turns looks at neither"),
        ("rl", ["inference.router.url=http://h:1"], "url has no effect"),
        ("rl", ["inference.router.type=url"], "no address"),
        ("rl", ["inference.router.type=url", "inference.router.url=h:8000"], "no address"),
        ("rl", ["inference.router.type=url", "inference.router.url=http://h:1/"], "no address"),
        ("inference", ["inference.router.type=url", "inference.router.url=http://h:1"], "Nobody would send"),
        ("bench", [BUILTIN, "bench.target=inference"], "Nobody would send"),
        ("inference", ["inference.router.type=vllm_router"], "let web pages into"),
        ("rl", ["inference.router.type=auto", "inference=vllm", "deployment.num_infer_gpus=2",
                "inference.pd.num_prefill_gpus=1"], "started here for engines that prefill and decode"),
    ],
)  # fmt: skip
def test_what_a_router_cannot_honour_is_refused(job, overrides, words):
    with pytest.raises(UserError, match=words):
        composed(*overrides, job=job)


def test_only_the_builtin_router_is_started_again():
    assert why_final(composed(BUILTIN), "router") is None
    assert "only the built-in" in why_final(composed("inference.router.type=vllm_router"), "router")


# --- vllm-router ------------------------------------------------------------------------------------------------------


def test_the_command_line_of_vllm_router_is_as_recorded():
    """Record anew, after looking at the difference: PRL_RECORD=1 pytest tests/test_router.py."""
    thresholds = ["cache_threshold=0.5", "balance_abs_threshold=3", "balance_rel_threshold=2"]
    config = composed("inference.router.type=vllm_router", *(f"inference.router.{key}" for key in thresholds))
    words = vllm_router.command(config, "10.0.0.1", 8000, 9000, ["http://10.0.0.1:1", "http://10.0.0.2:2"])
    text = " ".join(words[1:]).replace(" --", "\n--") + "\n"  # without the interpreter
    if os.environ.get("PRL_RECORD"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_vllm_router_is_asked_for_by_name_or_taken_where_it_may_be(monkeypatch):
    for installed in (True, False):
        monkeypatch.setattr(vllm_router, "is_installed", lambda installed=installed: installed)
        assert takes_vllm_router(composed("inference.router.type=auto")) == installed
        assert not takes_vllm_router(composed("inference.router.type=auto", job="inference")), "it guards nothing"
        assert not takes_vllm_router(composed(BUILTIN))
    with pytest.raises(UserError, match=r"\.\[router\]"):
        vllm_router.require()


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_goes_on_when_an_engine_and_then_the_router_are_killed(tmp_path):
    args = [*SMALL, f"cache_dir={tmp_path}/cache", TWO, BUILTIN, "max_steps=14", "eval.interval=0"]
    moment = Moment("optimizer step:9", tmp_path / "moment")  # no further before both were killed
    process = start([*args, "optim.lr=0.01", f"output_dir={tmp_path}/r"], tmp_path, env=moment.env)

    def role(name):
        return json.loads((tmp_path / "r/status.json").read_text())["roles"][name]

    wait_for_step(process, tmp_path / "r", 3)
    os.kill(role("inference/0")["pid"], signal.SIGKILL)
    moment.wait(process)
    wait_for(process, lambda: role("inference/0")["restarts"] == 1, "restart of the engine", 120)
    os.kill(role("router")["pid"], signal.SIGKILL)
    wait_for(process, lambda: role("router")["restarts"] == 1, "restart of the router", 120)
    moment.go()
    done = finish(process)
    assert done.code == 0, done.output
    for name in ("inference/0", "router"):
        assert f"{name} ended (killed by SIGKILL from outside); restart 1 of 3" in done.output
    assert [row["step"] for row in rows(tmp_path / "r", "trainer.0")] == list(range(1, 15))
    steps = [row for row in rows(tmp_path / "r", "orchestrator") if "staleness_hist" in row]
    assert (steps[-1]["engine_restarts"], steps[-1]["failed_rollouts"]) == (1, 0)
    assert max(row["staleness_max"] for row in steps) <= 2
    log = (tmp_path / "r/logs/router.0.0.log").read_text()
    assert "inference/0" in log
    assert "is left out" in log


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["builtin", "vllm_router"])
def test_two_engines_are_served_at_one_address(tmp_path, monkeypatch, kind):
    if kind == "vllm_router" and not vllm_router.is_installed():
        pytest.skip("vllm-router is an extra")
    monkeypatch.setenv("PRL_ROUTER_KEY", "secret")
    args = [f"cache_dir={tmp_path}/cache", TWO, f"inference.router.type={kind}", "inference.api_key_var=PRL_ROUTER_KEY"]
    process = start([*args, "logging.progress=plain", f"output_dir={tmp_path}/i"], tmp_path, "prl.inference")
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if "serving" in line:
                break
        assert line.count("http://") == 1, "".join(said)
        url = line.split(" at ")[1].split(";")[0]
        turn = [{"role": "user", "content": "hello"}]
        reply = ask(url, "/v1/chat/completions", {"messages": turn, "max_tokens": 4, "model": "tiny_qwen3_moe"})
        assert reply["choices"][0]["message"]["role"] == "assistant"
        ids = ask(url, "/inference/v1/generate", {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}})
        assert 1 <= len(ids["choices"][0]["token_ids"]) <= 4
        assert len(ask(url, "/workers")["workers"]) == 2
        for key, route in (("wrong", "/inference/v1/generate"), ("secret", "/pause"), (None, "/pause")):
            with pytest.raises(urllib.error.HTTPError, match=r"40[13]"):
                ask(url, route, {"token_ids": [1]}, key)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=200)
    assert process.returncode == 143


def ask(url, route, body=None, key="secret"):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + route, data, {"Content-Type": "application/json"})
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())
