"""A plain vLLM server, by its own command with our middleware: it takes a run's weights, and says what it lacks."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from runs import UNEVALUATED, environment, rows, run

from prl.config import compose
from prl.config.errors import UserError
from prl.models.checkpoints.sources import resolve_model_path
from prl.runtime.external import LEASE, MIDDLEWARE

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

CONTROL, CLIENT = "0123456789abcdef-control", "fedcba9876543210-client"
TOLD = [
    *MIDDLEWARE.split(), "--weight-transfer-config", '{"backend": "prl"}', "--logprobs-mode", "processed_logprobs",
    "--enable-scale-out", "--enable-server-load-tracking", "--no-enable-chunked-prefill",
]  # fmt: skip
THEIRS = [
    "--enforce-eager", "--dtype", "float32", "--skip-tokenizer-init", "--max-num-seqs", "32", "--max-model-len", "256",
    "--max-num-batched-tokens", "2048",
]  # fmt: skip


def ask(url: str, key: str) -> tuple[int, Any]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, None


def test_a_run_trains_on_a_plain_server(tmp_path: Path) -> None:
    config = compose(["model=tiny_qwen3", f"cache_dir={tmp_path / 'cache'}"])
    model = resolve_model_path(config.model, tmp_path / "cache")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", tmp_path / "vllm.log"
    names = {"PRL_CONTROL_KEY": CONTROL, "PRL_TEST_CLIENT": CLIENT, "VLLM_SERVER_DEV_MODE": "1"}
    env = environment() | names | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--api-key", CLIENT]
    with log.open("w") as out:
        server = subprocess.Popen([*command, *TOLD, *THEIRS], env=env, cwd=tmp_path, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 240
        while b"startup complete" not in log.read_bytes():
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        assert ask(url + "/v1/models", CLIENT)[0] == 200
        assert ask(url + "/v1/models", CONTROL)[0] == 200  # vLLM itself knows the client's key alone
        assert ask(url + "/v1/models", "another")[0] == 401
        assert ask(url + "/is_paused", CLIENT)[0] == 401
        out_dir = tmp_path / "run"
        arguments = ["inference=vllm", f"inference.urls=[{url}]", "inference.control_key_var=PRL_CONTROL_KEY",
                     "inference.api_key_var=PRL_TEST_CLIENT", "model=auto", f"model.path={model}",
                     "model.dtype=float32",
                     "inference.max_model_len=256", "seq_len=256", "algo=sync", *UNEVALUATED, "max_steps=3",
                     "ckpt.export_hf=true",
                     "deployment.device=cpu", "debug.num_threads=1", f"output_dir={out_dir}"]  # fmt: skip
        done = run(arguments, tmp_path, env=env)
        assert done.code == 0, done.output
        kl = [row["mismatch_kl_mean"] for row in rows(out_dir, "trainer.0") if "mismatch_kl_mean" in row]
        assert len(kl) == 3
        assert max(kl) < 1e-9  # an update that is lost is 1e-3: prl/inference/vllm/README.md
        assert ask(url + LEASE, CONTROL)[1]["lease"] is None
        # as a teacher it has the last run's weights, and the policy that begins with them is no other
        taught = ["algo=distill", f"algo.teacher.urls=[{url}]", "algo.teacher.api_key_var=PRL_TEST_CLIENT",
                  "model=auto",
                  f"model.path={out_dir / 'export'}", "model.dtype=float32", "inference.max_model_len=255",
                  "seq_len=255", *UNEVALUATED, "max_steps=1", "deployment.device=cpu", "debug.num_threads=1",
                  f"output_dir={tmp_path / 'taught'}"]  # fmt: skip
        done = run(taught, tmp_path, env=env)
        assert done.code == 0, done.output
        (first,) = [row["teacher_kl"] for row in rows(tmp_path / "taught", "orchestrator") if "teacher_kl" in row]
        assert abs(first) < 1e-5
        assert ask(url + "/is_paused", CONTROL) == (200, {"is_paused": False})
    finally:
        family = [server, *psutil.Process(server.pid).children(recursive=True)] if server.poll() is None else []
        for process in family:
            process.kill()
        server.wait()


def told(changes: dict[str, Any], environ: dict[str, str]) -> str:
    """What a server says that was started as it should be but for `changes`."""
    from prl.inference.vllm.stock import check_started

    args = SimpleNamespace(enable_scale_out=True, enable_server_load_tracking=True, api_server_count=1)
    config = SimpleNamespace(
        model_config=SimpleNamespace(logprobs_mode="processed_logprobs"),
        weight_transfer_config=SimpleNamespace(backend="prl"),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=False),
        parallel_config=SimpleNamespace(data_parallel_size=1, data_parallel_size_local=1, nnodes=1),
    )
    for name, value in changes.items():
        owner, _, field = name.rpartition(".")
        setattr(args if owner == "args" else getattr(config, owner) if owner else config, field, value)
    given = {"PRL_CONTROL_KEY": CONTROL, "VLLM_SERVER_DEV_MODE": "1", "PRL_WEIGHT_SOURCE": "{}"} | environ
    try:
        check_started(args, config, given)
    except UserError as error:
        return error.render()
    return ""


@pytest.mark.parametrize(
    ("changes", "environ", "word"),
    [
        ({}, {}, ""),
        ({"weight_transfer_config": None}, {}, '--weight-transfer-config \'{"backend": "prl"}\''),
        ({"model_config.logprobs_mode": "raw_logprobs"}, {}, "--logprobs-mode processed_logprobs"),
        ({"args.enable_scale_out": False}, {}, "--enable-scale-out"),
        ({"args.enable_server_load_tracking": False}, {}, "--enable-server-load-tracking"),
        ({"args.api_server_count": 4}, {}, "--api-server-count 1"),
        ({"scheduler_config.enable_chunked_prefill": True}, {}, "--no-enable-chunked-prefill"),
        ({"parallel_config.data_parallel_size": 16}, {}, "deployment=multi_node"),
        ({}, {"PRL_CONTROL_KEY": " "}, "export PRL_CONTROL_KEY="),
        ({}, {"VLLM_SERVER_DEV_MODE": "0"}, "export VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_what_a_server_was_not_told_is_said(changes: dict[str, Any], environ: dict[str, str], word: str) -> None:
    said = told(changes, environ)
    assert word in said
    assert bool(said) == bool(word)


def test_the_plugin_says_once_where_the_lease_is() -> None:
    """And only to a vLLM that is to take weights from runs."""
    from prl.inference.vllm.plugin import lend

    plain: dict[str, str] = {}
    lend(plain)
    assert plain == {}
    with pytest.MonkeyPatch.context() as patch:  # and ends one of ours that has no key before it loads anything
        patch.setattr(sys, "argv", ["vllm", "serve", "m", *MIDDLEWARE.split()])
        for none in ({}, {"PRL_CONTROL_KEY": " "}):
            with pytest.raises(SystemExit, match="export PRL_CONTROL_KEY="):
                lend(none)
    lent = {"PRL_CONTROL_KEY": CONTROL}
    lend(lent)
    first = lent["PRL_WEIGHT_SOURCE"]
    lend(lent)  # as in each of vLLM's processes
    assert lent["PRL_WEIGHT_SOURCE"] == first
