"""The page's server: who may ask, what it answers, and that it follows files that grow."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, CookieJar
from test_compare import make_point
from watch_directory import make_run

from prl.compare import curves
from prl.compare.points import read_directory, read_point
from prl.compare.ranking import compare
from prl.config.errors import UserError
from prl.metrics.rollouts import ROLLOUTS, segments
from prl.status import find_runs as status_runs
from prl.status import render
from prl.watch import series
from prl.watch.__main__ import listen, open_store
from prl.watch.server import MOST_ROWS, VIEWS, serve
from prl.watch.store import Store
from prl.watch.timeline import timeline

TOKEN = "a-token-of-this-test"
ASSETS = Path(series.__file__).parent / "assets"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("watch")
    for lr in ("0.1", "0.2"):
        for seed in ("1", "2"):
            make_run(root / "sweeps/s" / f"lr-{lr}-seed-{seed}", {"optim.lr": lr, "seed": seed})
    make_run(root / "sweeps/s/failed", {"optim.lr": "9", "seed": "1"}, state="failed")
    points = [{"dir": path.name, "swept": {}} for path in sorted((root / "sweeps/s").iterdir())]
    points.append({"dir": "never", "swept": {}})
    (root / "sweeps/s/sweep.json").write_text(json.dumps({"points": points, "jobs": {}, "submissions": []}))
    return root


def asked(root: Path, ask: Callable[[ClientSession, str], Awaitable[Any]]) -> Any:
    """What a client finds at a server of this directory, that has its own port and ends with it."""

    async def go() -> Any:
        with listen("127.0.0.1", 0) as listen_socket:
            runner = await serve(Store(root), TOKEN, listen_socket)
            try:
                async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as session:
                    return await ask(session, f"http://127.0.0.1:{listen_socket.getsockname()[1]}")
            finally:
                await runner.cleanup()

    return asyncio.run(go())


def view(root: Path, name: str, **query: Any) -> Any:
    """The JSON of one view, for one who has the link."""

    async def ask(session: ClientSession, url: str) -> Any:
        async with session.get(f"{url}/?token={TOKEN}") as page:
            assert page.status == 200
        async with session.get(f"{url}/api/{name}", params=query) as answer:
            return answer.status, await answer.json()

    return asked(root, ask)


NO_LINES = {  # file of a run -> lines that tell nothing, whatever wrote them
    "metrics/trainer.0.jsonl": ["[" * 200_000, '{"step": 1%s}' % ("0" * 400), '{"step": [1], "loss": 1}'],
    "metrics/orchestrator.jsonl": [
        "[" * 200_000,
        '{"step": 2, "reward": 1%s}' % ("0" * 400),
        '{"reward": 1, "step": {}}',
    ],
    "rollouts/tokens-000000.jsonl": ["[" * 200_000, '{"tokens": [1]}', '{"tokens": {"1": 2}}'],
    "rollouts/rollouts-000001.jsonl": ["[" * 200_000, '{"step": 2%s}' % ("0" * 400)],
}


def test_lines_that_cannot_be_read_count_as_none(tmp_path: Path) -> None:
    run = make_run(tmp_path / "s/run", {"seed": "1"})
    views = (("overview", {}), ("run", {"run": "s/run"}), ("rollouts", {"run": "s/run", "first": 0, "count": 50}))
    before, figures = [view(tmp_path, name, **query) for name, query in views], read_point(run, "run").figures
    for name, lines in NO_LINES.items():
        bad, good = "".join(line + "\n" for line in lines), (run / name).read_text() if (run / name).exists() else ""
        (run / name).write_text(bad + good if name.startswith("metrics") else good + bad)  # offsets are rollouts' names
    after = [view(tmp_path, name, **query) for name, query in views]
    assert all(" has lines that cannot be read: " in fault for fault in after[2][1].pop("faults"))
    assert before[2][1].pop("faults") == []
    assert after == before
    assert read_point(run, "run").figures == figures
    assert before[0][0] == before[1][0] == before[2][0] == 200
    assert curves.is_number(1)
    assert not curves.is_number(10**400)


def test_rollouts_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"seed": "1"})
    (run / "rollouts/trainer.0-000001.jsonl").unlink()
    (run / "rollouts/trainer.0-000001.jsonl").mkdir()
    (run / "rollouts/rollouts-000001.jsonl").write_text("{torn\n[]\n\n")
    (run / "failures.jsonl").write_text('{"version": 1}\n{"version"\n')
    _, found = view(tmp_path, "rollouts", run="run")
    assert found["total"] == 1
    assert found["faults"] == [
        "failures.jsonl has lines that cannot be read: 1 of 2",
        "rollouts/rollouts-000001.jsonl has lines that cannot be read: 2 of 2",
        "rollouts/trainer.0-000001.jsonl cannot be read: Is a directory",
    ]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["status.json", "plan.json", "metrics/trainer.0.jsonl", "failures.jsonl", ".lock"])
def test_a_fifo_in_a_run_directory_keeps_nobody_waiting(name: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "s/run", {"seed": "1"}, state="running")
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    store, done = Store(tmp_path), threading.Event()

    def look() -> None:
        store.warm()
        assert [row["name"] for row in store.overview()["runs"]] == ["s/run"]
        assert "run" in render(tmp_path)[0]
        read_point(run, "run")
        done.set()

    threading.Thread(target=look, daemon=True).start()
    assert done.wait(30)


def test_links_do_not_multiply_runs(tmp_path: Path) -> None:
    root = tmp_path / "root"
    run = make_run(root / "s/run", {"seed": "1"})
    make_run(tmp_path / "elsewhere", {"seed": "2"})
    (root / "s/loop").symlink_to(root)
    (root / "a-latest").symlink_to(run)
    (root / "b").symlink_to(tmp_path / "elsewhere")
    assert [row["name"] for row in Store(root).overview()["runs"]] == ["b", "s/run"]
    assert status_runs(root) == [root / "b", run]


def test_nothing_is_told_without_the_token(sweep: Path) -> None:
    async def ask(session: ClientSession, url: str) -> list[int]:
        paths = ["/", "/?token=", "/?token=wrong", "/assets/watch.js", "/api/overview", f"/api/overview?token={TOKEN}"]
        found = []
        for path in paths:
            async with session.get(url + path, headers={"Cookie": "prl_watch=x"}) as answer:
                found.append(answer.status)
                assert "sweeps" not in await answer.text()
        return found

    assert asked(sweep, ask) == [401] * 6


def test_the_link_s_token_moves_into_a_cookie_and_every_answer_forbids_foreign_scripts(sweep: Path) -> None:
    async def ask(session: ClientSession, url: str) -> None:
        async with session.get(f"{url}/?token={TOKEN}", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (303, "/")
            assert "HttpOnly" in answer.headers["Set-Cookie"]
            assert "SameSite=Strict" in answer.headers["Set-Cookie"]
        for path in ("/", "/assets/watch.js", "/api/overview", "/api/nothing", "/assets/nothing.js"):
            async with session.get(url + path) as answer:
                assert (answer.status == 200) == ("nothing" not in path)
                policy = answer.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
        for path in ("/assets/..%2Fserver.py", "/assets/%2e%2e/server.py", "/assets/style.css%00"):
            async with session.get(url + path) as answer:
                assert answer.status in (400, 404)

    asked(sweep, ask)


def test_states_and_causes_by_point(sweep: Path) -> None:
    _, found = view(sweep, "overview")
    states = {Path(run["name"]).name: (run["state"], run["why"]) for run in found["runs"]}
    assert states["lr-0.1-seed-1"] == ("done", "")
    assert states["failed"] == ("failed", "oom: trainer/0: <b>out</b> of memory")
    assert states["never"] == ("missing", "there is no never/plan.json")
    alarms = {Path(run["name"]).name: [alarm["kind"] for alarm in run.get("alarms", [])] for run in found["runs"]}
    assert (alarms["failed"], alarms["lr-0.1-seed-1"]) == (["truncated"], [])


def test_seeds_are_one_curve_with_an_interval(sweep: Path) -> None:
    _, found = view(sweep, "sweep", sweep="sweeps/s")
    reward = next(chart for chart in found["charts"] if chart["title"] == "reward")
    (line,) = [line for line in reward["lines"] if line["name"] == "optim.lr=0.1"]
    step, mean, half, seeds = line["points"][-1]
    assert (step, seeds) == (6, 2)
    assert mean == pytest.approx(1.015)
    assert half == pytest.approx(12.706 * 0.01 / 2, rel=1e-3)  # t(0.975, 1) s/√2, of 1.01 and 1.02


def test_runs_that_differ_in_more_than_the_seed_are_curves_of_their_own_as_in_compare(tmp_path: Path) -> None:
    for name, others in {
        "a": ("seed=1", "optim.lr=0.01"),
        "b": ("seed=2", "optim.lr=0.01"),
        "again": ("seed=2", "optim.lr=0.01"),
        "c": ("seed=1", "optim.lr=0.02"),
    }.items():
        make_point(tmp_path / name, [0.0, 0.5 if name == "again" else 0.25], others=others)
    store = Store(tmp_path)
    rewards = next(chart for chart in store.sweep_charts(".")["charts"] if chart["title"] == "reward")
    lines = {line["name"]: line["points"][-1] for line in rewards["lines"]}
    comparison = compare("runs", read_directory(tmp_path), "steps")
    assert comparison.group_columns == ["optim.lr"]
    assert set(lines) == {f"optim.lr={value}" for group in comparison.groups for value in group.key}
    step, mean, half, seeds = lines["optim.lr=0.01"]
    assert (step, mean, seeds) == (1, pytest.approx((0.125 + (0.125 + 0.25) / 2) / 2), 2), "a repeated seed counts once"
    assert half is not None
    assert lines["optim.lr=0.02"] == (1, 0.125, None, 1)
    make_point(tmp_path / "d", [0.0, 0.1], others=("seed=1", "optim.lr=0.01", "algo.batch_size=64"))
    store.looked_s = -1e9
    lines_now = next(chart for chart in store.sweep_charts(".")["charts"] if chart["title"] == "reward")["lines"]
    assert len(lines_now) == 3, "plans that have come are read"


def test_a_point_whose_metrics_were_cut_is_named_and_not_drawn(tmp_path: Path) -> None:
    for seed in ("1", "2", "3"):
        make_run(tmp_path / f"s/seed-{seed}", {"seed": seed})
    with (tmp_path / "s/seed-3/metrics/trainer.0.jsonl").open("r+b") as file:
        file.truncate(50)
    _, overview = view(tmp_path, "overview")
    runs = {Path(run["name"]).name: run for run in overview["runs"]}
    assert (runs["seed-3"]["state"], runs["seed-2"]["state"]) == ("unreadable", "done")
    assert "ends at step 0, and status.json says that step 6 was reached: it was cut" in runs["seed-3"]["why"]
    _, found = view(tmp_path, "sweep", sweep="s")
    assert [fault.partition(":")[0] for fault in found["faults"]] == ["seed-3 is not drawn"]
    seeds = {point[3] for chart in found["charts"] for line in chart["lines"] for point in line["points"]}
    assert seeds == {2}
    _, alone = view(tmp_path, "run", run="s/seed-3")
    assert "it was cut" in alone["state"]["why"]


def test_a_run_s_curves_and_the_timeline_of_a_step(sweep: Path) -> None:
    name = "sweeps/s/lr-0.1-seed-1"
    _, found = view(sweep, "run", run=name)
    assert {"reward", "loss", "mismatch KL", "entropy", "staleness, steps", "peak memory, bytes"} <= {
        chart["title"] for chart in found["charts"]
    }
    _, step = view(sweep, "steps", run=name, step=3)
    rows = {row["role"]: row["spans"] for row in step["rows"]}
    assert rows["trainer/0"][:3] == [
        [0.0, 0.5, "waits for a batch"],
        [0.5, 1.5, "forward, backward"],
        [1.5, 1.7, "optimizer"],
    ]
    assert rows["orchestrator"] == [[0.0, 0.5, "waits for rollouts"]]
    assert rows["engines"] == [[0.0, 1.7, "generates"]]


def test_a_timeline_of_nothing() -> None:
    assert timeline({}, None)["step"] is None
    with pytest.raises(LookupError, match="none yet"):
        timeline({}, 3)


def test_rollouts_are_sorted_filtered_and_paged(sweep: Path) -> None:
    name = "sweeps/s/lr-0.1-seed-1"
    for sort in ("reward", "mismatch", "completion_tokens"):
        _, found = view(sweep, "rollouts", run=name, sort=sort, order="rising", split="train", count=5, first=5)
        values = [entry[sort] for entry in found["entries"]]
        assert (found["total"], len(values)) == (16, 5)
        assert values == sorted(values)
    _, one = view(sweep, "rollout", run=name, id=found["entries"][0]["id"])
    assert [message["role"] for message in one["messages"]] == ["user", "assistant"]
    assert "".join(one["samples"][0]["tokens"]) == "helloolleh"


@pytest.mark.parametrize(
    ("name", "query", "status"),
    [
        ("rollouts", {"run": "sweeps/s/failed", "sort": "__class__"}, 400),
        ("rollouts", {"run": "sweeps/s/failed", "first": "-1"}, 400),
        ("rollouts", {"run": "../s"}, 404),
        ("rollout", {"run": "sweeps/s/failed", "id": "../../etc/passwd:0"}, 404),
        ("run", {}, 404),
        ("steps", {"run": "sweeps/s/failed", "step": "x"}, 400),
        ("steps", {"run": "sweeps/s/failed", "step": "99999"}, 404),
        ("rollouts", {"run": "sweeps/s/failed", "count": "x"}, 400),
    ],
)
def test_plain_refusals(sweep: Path, name: str, query: dict[str, str], status: int) -> None:
    found, body = view(sweep, name, **query)
    assert found == status
    assert "Traceback" not in body["error"]


def test_a_page_of_rollouts_has_an_end_whatever_is_asked_for(tmp_path: Path) -> None:
    make_run(tmp_path / "s/run", {"seed": "1"}, rollouts=MOST_ROWS + 9)
    for count in (0, 3, MOST_ROWS + 1, 10**10):
        _, found = view(tmp_path, "rollouts", run="s/run", count=count)
        assert len(found["entries"]) == min(count, MOST_ROWS)
    assert found["total"] > MOST_ROWS


def test_numbers_that_are_none_are_null_and_take_no_time(tmp_path: Path) -> None:
    run = make_run(tmp_path / "s/run", {"seed": "1"}, rollouts=1)
    with (run / "metrics/trainer.0.jsonl").open("a") as file:
        file.write('{"step": 7, "time": [], "step_s": 2}\n{"step": 8, "time": 1, "step_s": {}}\n')
        file.write('{"step": 9, "time": 1790000018, "step_s": 2, "optim_s": "x", "save_s": NaN, "tokens_per_s": NaN}\n')
    with (run / "metrics/orchestrator.jsonl").open("a") as file:
        file.write('{"step": 9, "time": 1790000017, "eval_s": [], "generating_spans": [1, [2], ["a", 3], {}]}\n')
        file.write('{"step": 9, "time": 1790000017, "wait_for_rollouts_s": "x", "generating_spans": 7}\n')
    with (run / "rollouts/rollouts-000001.jsonl").open("a") as file:
        file.write('{"step": 9, "split": "train", "reward": NaN, "samples": [], "env": "e"}\n')
    _, found = view(tmp_path, "steps", run="s/run")
    assert (found["step"], found["steps"], found["rows"]) == (9, [1, 9], [])
    assert view(tmp_path, "rollouts", run="s/run", step=9)[1]["entries"][0]["reward"] is None
    assert view(tmp_path, "overview")[0] == view(tmp_path, "run", run="s/run")[0] == 200


def test_two_points_on_the_same_held_out_task(sweep: Path) -> None:
    one, other = "sweeps/s/lr-0.1-seed-1", "sweeps/s/lr-0.2-seed-2"
    _, found = view(sweep, "tasks", one=one, other=other)
    task = found["tasks"][0]
    assert task["task"].startswith("held_out/")
    for name, several in zip((one, other), task["rollouts"], strict=True):
        _, rollout = view(sweep, "rollout", run=name, id=several[0]["id"])
        assert rollout["task"] == task["task"]


def test_only_what_was_appended_is_read_and_a_resumed_run_is_read_anew(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", {})
    store = Store(tmp_path)
    index = store.run("r").rollouts
    index.poll()
    (path,) = segments(run, ROLLOUTS)
    lines = path.read_bytes().splitlines(keepends=True)
    with path.open("r+b") as file:  # what was read is not looked at again
        file.write(b"x" * len(lines[0]))
        file.seek(0, os.SEEK_END)
        file.write(lines[0][:-5])
    index.poll()
    assert len(index.entries) == 32  # a torn line waits for its rest
    with path.open("ab") as file:
        file.write(lines[0][-5:])
    index.poll()
    assert len(index.entries) == 33
    path.write_bytes(lines[1])
    index.poll()
    assert len(index.entries) == 1
    read = store.run("r").series
    read.poll()
    assert max(read.values["trainer.0", "loss"]) == 6
    (run / "metrics/trainer.0.jsonl").write_text('{"step": 1, "loss": 3.0}\n')
    read.poll()
    assert read.values["trainer.0", "loss"] == {1: 3.0}


@pytest.mark.parametrize(
    ("name", "what"), [("gone", "is not there"), ("empty", "holds no run"), ("file", "is no directory")]
)
def test_a_wrong_directory_is_refused(tmp_path: Path, name: str, what: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"{tmp_path}/{name} {what}"):
        open_store(tmp_path / name)


def test_a_port_that_is_taken_is_said() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(UserError, match="cannot be listened at"):
        listen("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize("host", ["300.1.1.1", "192.0.2.1", "no.such.name.invalid", "::zz", "", "x" * 300])
def test_a_host_that_is_none_is_told_with_a_remedy_that_works(host: str) -> None:
    with pytest.raises(UserError) as told:
        listen(host, 0)
    assert "--host=0.0.0.0" in told.value.fix
    listen("0.0.0.0", 0).close()


def test_the_command_prints_a_link_that_opens(sweep: Path) -> None:
    command = [sys.executable, "-m", "prl.watch", str(sweep), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as process:
        try:
            assert process.stdout is not None
            link = process.stdout.readline().strip()

            async def ask() -> str:
                async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as session, session.get(link) as page:
                    return await page.text()

            assert "/assets/watch.js" in asyncio.run(ask())
            process.send_signal(signal.SIGINT)
            assert process.wait(200) == 0
        finally:
            process.kill()


def test_no_markup_is_ever_made_of_text() -> None:
    for path in ASSETS.glob("*.js"):
        for forbidden in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "http://",
            "https://",
        ):
            text = path.read_text().replace("http://www.w3.org/2000/svg", "")
            assert forbidden not in text, f"{path.name} has {forbidden}"


def test_every_view_has_a_test() -> None:
    assert set(VIEWS) == {"overview", "sweep", "run", "steps", "rollouts", "rollout", "tasks"}


@pytest.mark.parametrize("path", ["/api/nothing", "/api/run/more", "/api/"])
def test_routes_of_data_that_there_are_not_answer_in_json(sweep: Path, path: str) -> None:
    async def ask(session: ClientSession, url: str) -> list[Any]:
        found = []
        for token in ("", f"/?token={TOKEN}"):
            async with session.get(f"{url}{token}"):
                pass
            async with session.get(f"{url}{path}") as answer:
                found.append((answer.status, answer.content_type, (await answer.json())["error"]))
        async with session.post(f"{url}/api/overview") as answer:
            found.append((answer.status, answer.content_type, (await answer.json())["error"]))
        return found

    unknown, *others = asked(sweep, ask)
    assert unknown == (
        401,
        "application/json",
        "This page wants the token of the link that `python -m prl.watch` has printed.",
    )
    assert others[0][:2] == (404, "application/json")
    assert others[0][2].startswith(f"there is no {path}; there are /api/overview, /api/sweep, ")
    assert others[1] == (405, "application/json", "Method Not Allowed")


def test_who_starts_it_where_nothing_is_is_told_what_was_looked_for_and_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        open_store(Path("outputs"))
    told = refused.value
    assert told.what == "No directory was named, and outputs, where runs lie by default, is not there."
    assert (told.where, f"given in {tmp_path}" in told.why) == (str(tmp_path / "outputs"), True)
    assert told.fix.startswith("python -m prl.rl starts a run")
    make_run(tmp_path / "outputs/a b", {"seed": "1"})
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    for named in (Path("outputs"), Path("."), Path("nowhere")):
        with pytest.raises(UserError) as refused:
            open_store(named)
        assert refused.value.fix == f"python -m prl.watch {tmp_path / 'outputs'}"
    assert list(open_store(Path(refused.value.fix.split()[-1])).runs) == ["a b"]
