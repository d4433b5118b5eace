"""The page in headless Chromium, and how long its views take with a sweep of 64 points and 100,000 rollouts."""

from __future__ import annotations

import contextlib
import html
import json
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.cookiejar import CookieJar
from pathlib import Path

import pytest
from watch_directory import make_rollout, make_run, rollout_rows

POINTS, ROLLOUTS = 64, 100_000
LIMIT_S = 2.0
EVIL = "<script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\"><b id=evil>"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update"),
    *("--disable-background-networking", "--disable-sync", "--disable-dev-shm-usage", "--virtual-time-budget=6000"),
)
pytestmark = pytest.mark.slow


@contextlib.contextmanager
def watching(directory: Path) -> Iterator[str]:
    """The link of `python -m prl.watch`, which is stopped in the end."""
    command = [sys.executable, "-m", "prl.watch", str(directory), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of the points has half of all rollouts."""
    sweep = tmp_path_factory.mktemp("large") / "s"
    rollout = make_rollout("olleh " * 12, "hello " * 12)
    share = ROLLOUTS // 2 // (POINTS - 1)
    few, many = rollout_rows(rollout, share, 200), rollout_rows(rollout, ROLLOUTS - share * (POINTS - 1), 200)
    for number in range(POINTS):
        run = make_run(sweep / f"p{number:02}", {"optim.lr": str(number // 4), "seed": str(number % 4)}, 200)
        for name, lines in zip(("rollouts", "trainer.0"), few if number else many, strict=True):
            with (run / "rollouts" / f"{name}-000001.jsonl").open("a") as file:
                file.write("".join(lines))
    return sweep


def test_every_view_of_a_large_sweep_comes_within_two_seconds(large: Path) -> None:
    with watching(large) as link:
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        opener.open(link).read()
        base = link.partition("?")[0]

        def ask(view: str, **query: object) -> dict:
            return json.load(opener.open(f"{base}api/{view}?{urllib.parse.urlencode(query)}"))

        total = sum(ask("rollouts", run=f"p{number:02}", split="train", count=1)["total"] for number in range(POINTS))
        assert total == ROLLOUTS + POINTS * 16  # each has a few of its own; and now all of it is known to the index
        entry = ask("rollouts", run="p00", sort="reward", count=1)["entries"][0]
        took = {}
        for view, query in {
            "overview": {},
            "sweep": {"sweep": "."},
            "run": {"run": "p00"},
            "steps": {"run": "p00"},
            "rollouts": {"run": "p00", "sort": "mismatch", "first": 20_000},
            "rollout": {"run": "p00", "id": entry["id"]},
            "tasks": {"one": "p00", "other": "p01"},
        }.items():
            times = []
            for _ in range(3):  # the best: other work on the machine only adds
                began = time.perf_counter()
                ask(view, **query)
                times.append(time.perf_counter() - began)
            took[view] = min(times)
        print({view: f"{seconds:.3f} s" for view, seconds in took.items()})
        assert max(took.values()) < LIMIT_S, took


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (apt-get install chromium)")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    for seed in ("1", "2"):
        make_run(tmp_path / "runs/s" / f"p{seed}", {"seed": seed}, state="failed" if seed == "2" else "done")
    calls = f'<tool_call>{{"name": "add"}}</tool_call>{EVIL}'
    mine, _ = rollout_rows(make_rollout(calls, EVIL), 1, 1)
    path = tmp_path / "runs/s/p1/rollouts/rollouts-000001.jsonl"
    where = path.stat().st_size
    with path.open("a") as file:
        file.write(mine[0])
    evil = f"rollouts-000001:{where}"
    views = {
        "#/": ["s/p1", "failed", "&lt;b&gt;out&lt;/b&gt; of memory"],
        "#/sweep?sweep=s": ["all seeds", "<polygon"],
        "#/run?run=s/p1": ["who waits for whom", "waits for a batch", "mismatch KL", "<path"],
        "#/rollouts?run=s/p1&sort=reward": ["completion tokens", "reward ▼", "train/0"],
        f"#/rollout?run=s/p1&id={evil}": [
            html.escape("<script>document.title", quote=False),
            "tool call",
            "log-probability from",
        ],
        "#/compare?one=s/p1&other=s/p2": ["held_out/0", "log-probability from"],
    }
    with watching(tmp_path / "runs") as link:
        for view, wanted in views.items():
            command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path}/browser", "--dump-dom", link + view]
            page = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False).stdout
            for text in wanted:
                assert text in page, f"{view} lacks {text}: {page[:3000]}"
            assert "<title>prl watch</title>" in page
            assert 'id="evil"' not in page
            assert "<img" not in page
