"""Who may change what an engine serves: control has a key of its own, and weights come from where they should."""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import signal
import stat
import subprocess
import urllib.error
import urllib.request
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from runs import finish, start

from prl.transport import weights_ipc

CONTROL = (
    *("/pause", "/resume", "/abort_requests", "/sleep", "/wake_up", "/reset_prefix_cache", "/start_weight_update"),
    *("/init_weight_transfer_engine", "/update_weights", "/finish_weight_update"),
)


def announced_ports(process: subprocess.Popen[str]) -> tuple[list[int], str]:
    """Of all servers, once all are up, and what was printed until then."""
    said = ""
    assert process.stdout is not None
    for line in process.stdout:
        said += line
        if line.startswith("serving "):
            return [int(port) for port in re.findall(r"http://127\.0\.0\.1:(\d+)", line)], said
    raise AssertionError(said)


def status_of(port: int, route: str, key: str | None = None, body: object = None) -> int:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = json.dumps({} if body is None else body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{route}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.smoke
@pytest.mark.slow
def test_a_server_for_people_keeps_control_to_who_started_it(tmp_path: Path) -> None:
    """`python -m prl.inference` as the README has it: open for sampling, and for nothing else."""
    process = start([f"cache_dir={tmp_path}/cache", f"output_dir={tmp_path}/run"], tmp_path, "prl.inference")
    try:
        (port,), said = announced_ports(process)
        prompt = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}
        assert status_of(port, "/inference/v1/generate", body=prompt) == 200
        for key in (None, "guess"):
            assert {route: status_of(port, route, key) for route in CONTROL} == dict.fromkeys(CONTROL, 401)
        file = tmp_path / "run" / "control_key"
        key = file.read_text().strip()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert status_of(port, "/pause?mode=keep", key) == status_of(port, "/resume", key) == 200
        segment = Path(f"/dev/shm/prl-test-{os.getpid()}")
        for elsewhere in (
            {"type": "shared_memory", "path": str(segment), "version": 1, "ranks": 1},
            {"type": "filesystem", "path": str(tmp_path / "elsewhere" / "step_1"), "version": 1},
            {"type": "ipc", "host": "127.0.0.1", "port": 1, "version": 1, "timeout_s": 1.0},
        ):
            assert status_of(port, "/start_weight_update", key) == 200
            assert status_of(port, "/update_weights", key, {"update_info": elsewhere}) == 400
    finally:
        process.send_signal(signal.SIGTERM)
        output = finish(process, 200).output
    assert (said + output).count(key) == 1, "it is printed once"
    assert not file.exists(), "it opens nothing any more"


class Boom:
    def __reduce__(self):
        return os.mkdir, (os.environ["PRL_TEST_BOOM"],)


def test_what_a_store_serves_is_never_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRL_TEST_BOOM", str(tmp_path / "boom"))
    monkeypatch.setattr(weights_ipc, "gpu_name", lambda device: "GPU-0")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    for served in (base64.b64encode(pickle.dumps(Boom())).decode(), json.dumps([{"storage_handle": "zz"}])):
        store.set("handles/GPU-0", served)
        info = {"host": "127.0.0.1", "port": store.port, "timeout_s": 5.0, "version": 1}
        with pytest.raises(ValueError, match="handle"):
            next(weights_ipc.receive_ipc(info, torch.device("cuda", 0)))
    assert not (tmp_path / "boom").exists()
