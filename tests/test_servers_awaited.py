"""Servers that run already, before a run begins: their keys, who is not there yet, and who stops waiting for them."""

import signal
import socket
import threading
import time

import pytest
from runs import UNEVALUATED, environment, finish, start, wait_for
from test_external_engines import ELSEWHERE, KEY, VARIABLE

from prl.config import compose
from prl.config.errors import UserError
from prl.runtime import external
from prl.runtime.directory.status_file import read_status
from prl.runtime.launch import run as launch


@pytest.mark.parametrize("job", ["rl", "eval"])
def test_who_is_started_with_a_run_is_waited_for(job) -> None:
    """One of several is enough for a run that trains; a name that is none is nobody's to wait for."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    said: list[str] = []

    def listen() -> None:
        while not (said or over.is_set()):  # who waits has found nobody
            time.sleep(0.01)
        time.sleep(0.5)
        with socket.create_server(("127.0.0.1", int(url.rpartition(":")[2]))) as late:
            over.wait(20)
            del late

    def wait(urls: str, seconds: float) -> float:
        keys = [ELSEWHERE[1]] if job == "rl" else []
        config = compose([f"inference.urls=[{urls}]", *keys, f"deployment.start_timeout_s={seconds}"], job)
        began = time.monotonic()
        external.await_listeners(config, said.append, lambda: False)
        return time.monotonic() - began

    over, thread = threading.Event(), threading.Thread(target=listen)
    thread.start()
    try:
        assert 0.5 <= wait(url, 20) < 10
        assert said == [f"{url}: nobody listens there yet; waiting, 20 s at most (deployment.start_timeout_s)"]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            assert (wait(f"{url},http://127.0.0.1:{free.getsockname()[1]}", 1) < 0.9) == (job == "rl")
        assert wait("http://no-such-host.invalid:80", 20) < 10
    finally:
        over.set()
        thread.join()


def test_a_run_starts_nothing_without_its_keys(monkeypatch, tmp_path) -> None:
    """However it would use them: an evaluation of what is served failed in its orchestrator."""
    monkeypatch.delenv(VARIABLE, raising=False)
    for job, more in (("eval", ["inference.urls=[http://127.0.0.1:1]"]), ("rl", ["warm_start=none"])):
        out = tmp_path / job
        config = compose([f"inference.api_key_var={VARIABLE}", f"output_dir={out}", *more], job)
        with pytest.raises(UserError, match=f"{VARIABLE} is not set or empty"):
            launch(config)
        assert not list((out / "logs").glob("*"))


@pytest.mark.parametrize(
    ("value", "what"), [(" ", "is not set or empty"), ("a\nb", "no HTTP header"), ("é", "no HTTP")]
)
def test_keys_that_are_none_are_told_before_anything_starts(monkeypatch, value, what) -> None:
    monkeypatch.setenv(VARIABLE, value)
    for job, more in (("eval", ["inference.urls=[http://h:1]"]), ("rl", []), ("inference", [])):
        config = compose([f"inference.api_key_var={VARIABLE}", *more], job)
        with pytest.raises(UserError, match=what) as told:
            external.check_keys(config)
        assert f"inference.api_key_var={VARIABLE}" in told.value.render()


@pytest.mark.slow
def test_who_stops_a_run_that_waits_for_engines_starts_nothing(tmp_path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    out, env = tmp_path / "run", environment() | {VARIABLE: KEY}
    waiting = start([f"inference.urls=[{url}]", ELSEWHERE[1], *UNEVALUATED, f"output_dir={out}"], tmp_path, env=env)
    wait_for(waiting, lambda: read_status(out).get("state") == "starting", "start", 100)
    time.sleep(0.5)
    waiting.send_signal(signal.SIGTERM)
    ended = finish(waiting)
    assert ended.code == 143, ended.output
    assert read_status(out)["state"] == "stopped"
    assert "stopped at step 0, no checkpoint" in ended.output
    assert not list((out / "logs").glob("*")), "of processes that had to be stopped again"
