"""Records of runs in every wrong shape: whoever reads them for people says what can be said, and never breaks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from fuzzing import MANY, anything, many, object_of
from hypothesis import given
from hypothesis import strategies as st

from launch.states import state_in
from prl.cancel import stop_runs
from prl.compare.points import read_directory
from prl.compare.ranking import compare
from prl.compare.table import render_csv, render_json, render_text
from prl.runtime.directory.status_file import ATTEMPTS, StatusFile, read_status
from prl.status import render
from prl.watch.server import VIEWS, to_json
from prl.watch.store import Store

FEW = 60  # files of each kind
NAMES = st.sampled_from(["trainer/0", "wandb", "a\nb", "\udcff", ""])
TEXTS = st.sampled_from(["x", "a\nb\x1b[2J", "\udcff", "", "oom", "config", "127.0.0.1"])
TIMES, COUNTS = st.sampled_from([0.0, 1.0, time.time()]), st.integers(0, 9)
STATES = st.sampled_from(["starting", "running", "stopping", "done", "stopped", "failed", "x"])
ROLE = object_of({"pid": COUNTS, "state": TEXTS, "exit": st.none() | COUNTS, "restarts": COUNTS})
ALARM = object_of({"kind": TEXTS, "since": COUNTS, "message": TEXTS})
FAILURE = object_of({"class": TEXTS, "role": TEXTS, "message": TEXTS, "log_tail": st.lists(TEXTS | anything)})
STATUS = st.fixed_dictionaries({"state": STATES}).flatmap(
    lambda state: object_of(
        {
            **{"failure": FAILURE, "alarms": st.lists(ALARM), "roles": st.dictionaries(NAMES, ROLE)},
            **{"step": COUNTS, "max_steps": COUNTS, "updated": TIMES, "attempt": COUNTS, "began": st.booleans()},
            **{"urls": st.lists(TEXTS), "root": anything, "saved": COUNTS},
        }
    ).map(lambda found: found | state if isinstance(found, dict) else found)
)
LINES: dict[str, st.SearchStrategy[Any]] = {
    ATTEMPTS: object_of({"attempt": COUNTS, "started": TIMES, "ended": TIMES, "node": TEXTS, "class": TEXTS}),
    "../failures.jsonl": object_of({"class": TEXTS, "requeued": st.booleans()}),
    "metrics/trainer.0.jsonl": object_of(
        {"step": COUNTS, "time": TIMES, "step_s": TIMES, "save_s": TIMES, "tokens": COUNTS, "tokens_per_s": TIMES}
    ),
    "metrics/orchestrator.jsonl": object_of(
        {"step": COUNTS, "time": TIMES, "eval/reward": TIMES, "generating_spans": st.lists(st.lists(TIMES))}
    ),
}
WHOLE: dict[str, st.SearchStrategy[Any]] = {
    "status.json": STATUS,
    "hours.json": object_of(
        {
            "attempts": st.lists(
                object_of(
                    {
                        **{"number": COUNTS, "job": st.none() | TEXTS, "devices": st.none() | COUNTS, "began": TIMES},
                        **{"updated": TIMES, "is_over": st.booleans(), "seconds": st.dictionaries(NAMES, TIMES)},
                    }
                )
            )
        }
    ),
    "plan.json": object_of(
        {
            "point_id": TEXTS,
            "config": object_of(
                {"job": st.just("rl"), "swept": st.dictionaries(NAMES, TEXTS), "max_steps": COUNTS, "choices": anything}
            ),
            "roles": st.lists(object_of({"node": COUNTS, "devices": st.lists(COUNTS)})),
        }
    ),
    "../sweep.json": object_of(
        {"points": st.lists(object_of({"dir": st.just("point"), "swept": anything, "point_id": TEXTS}))}
    ),
}


def show_all(sweep: Path, point: Path) -> None:
    for place in (sweep, point):
        text, _ = render(place)
        assert text.isprintable() or all(line.isprintable() for line in text.split("\n"))
        comparison = compare(place.name, read_directory(place), "steps")
        for text in (render_text(comparison), render_csv(comparison), render_json(comparison)):
            text.encode()
    state_in(point), stop_runs(sweep)
    store = Store(sweep)
    for view, query in {"overview": {}, "run": {}, "steps": {}, "sweep": {"sweep": "."}, "rollouts": {}}.items():
        json.loads(to_json(VIEWS[view](store, {"run": "point"} | query)), parse_constant=pytest.fail)


@pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", [*WHOLE, *LINES])
def test_readers_of_a_record_in_any_shape(tmp_path: Path, name: str, examples: int) -> None:
    sweep, point = tmp_path / "s", tmp_path / "s/point"
    (point / "metrics").mkdir(parents=True)
    good = {"plan.json": {"point_id": "p", "config": {"job": "rl"}}, "status.json": {"state": "done", "attempt": 1}}
    for path, content in good.items():
        (point / path).write_text(json.dumps(content))
    contents = WHOLE[name].map(json.dumps) if name in WHOLE else st.lists(LINES[name].map(json.dumps)).map("\n".join)

    @many(examples)
    @given(contents)
    def read(content: str) -> None:
        (point / name).write_text(content + "\n")
        show_all(sweep, point)

    read()


@many(FEW)
@given(STATUS)
def test_a_run_goes_on_after_a_status_in_any_shape(content: Any) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "status.json").write_text(json.dumps(content))
        StatusFile(path, "p", "rl", "r", 9)
        assert read_status(path)["state"] == "starting"
