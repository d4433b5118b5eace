"""The child `wandb`: follows all metrics files and mirrors them into one wandb run.

A process of its own, so that a hanging network touches nobody, and nobody else imports wandb. It is the only writer of
the run: wandb's shared mode does not work offline.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from prl.config.schema import RunConfig
from prl.metrics.reader import Row, Tail
from prl.planning.run_plan import RunPlan
from prl.runtime.directory.files import read_object, replace_file
from prl.runtime.directory.hours import summarise

Mode = Literal["online", "offline", "disabled"]
MODES: tuple[Mode, ...] = ("online", "offline", "disabled")
POLL_S = 0.5
SUMMARY_INTERVAL_S = 60.0  # between what a run has cost so far; the last word comes at its end
NICENESS = 10
SENT = "sent.json"  # in <run>/wandb/: metrics file -> newest step that an attempt of this run has sent
NOT_CHARTED = ("time", "role", "generating_spans")


def mirror(
    plan: RunPlan,
    run_dir: Path,
    run_id: str,
    resume_step: int,
    stopped: Callable[[], bool],
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Mirror until `stopped` says so, then once more, so that the last rows are in; then finish.

    Args:
        run_id: id of the wandb run; the same one when a run resumes.
        resume_step: rows up to it that an earlier attempt has sent are not sent again.
        ready: is called once wandb has taken the run.
    """
    os.nice(NICENESS)  # the roles come first
    mode = choose_mode(plan.config, os.environ)
    if mode == "disabled":
        return
    directory = run_dir / "wandb"
    directory.mkdir(exist_ok=True)
    for variable, name in (("WANDB_DIR", ""), ("WANDB_CACHE_DIR", "cache"), ("WANDB_DATA_DIR", "data")):
        os.environ[variable] = str(directory / name)
    temporary = directory / "tmp"
    temporary.mkdir(exist_ok=True)
    tempfile.tempdir = str(temporary)  # wandb makes directories there, which outlive a process that exits as roles do
    import wandb  # reads the variables above

    run = start_run(plan, directory, run_id, mode)
    with contextlib.suppress(OSError):  # a full disk
        ready()
    feed, summarised_s = Feed(run_dir, directory / SENT, resume_step), time.monotonic()
    try:
        while not stopped():
            feed.forward(run)
            if time.monotonic() - summarised_s > SUMMARY_INTERVAL_S:
                run.summary.update(summarise(run_dir))
                summarised_s = time.monotonic()
            time.sleep(POLL_S)
        feed.forward(run)
        run.summary.update(summarise(run_dir))
    finally:
        run.finish()
        wandb.teardown()
        shutil.rmtree(temporary, ignore_errors=True)


def choose_mode(config: RunConfig, environment: Mapping[str, str]) -> Mode:
    """online, offline or disabled. "auto": what WANDB_MODE says, else online with a key and offline without."""
    wanted = config.logging.wandb.mode
    if wanted != "auto":
        return wanted
    for mode in MODES:
        if environment.get("WANDB_MODE") == mode:
            return mode
    return "online" if has_key(environment) else "offline"


def has_key(environment: Mapping[str, str]) -> bool:
    """Whether wandb finds one, in the environment or where `wandb login` leaves it."""
    return bool(environment.get("WANDB_API_KEY")) or "api.wandb.ai" in _read(Path(os.path.expanduser("~/.netrc")))


def run_settings(plan: RunPlan, run_id: str) -> dict[str, Any]:
    """Arguments of wandb.init that say what this run is: group = sweep, name = the swept choices, never random."""
    config, wandb_config = plan.config, plan.config.logging.wandb
    chosen = {key: value for key, value in config.choices.items() if key in ("model", "algo", "env")}
    named = config.swept if config.swept or wandb_config.name else chosen
    words = [*filter(None, [wandb_config.name]), *(f"{key}={value}" for key, value in named.items())]
    return {
        "project": wandb_config.project,
        "entity": wandb_config.entity,
        "group": wandb_config.group or config.sweep or config.name,
        "name": " ".join(words) or config.name,
        "id": run_id,
        "job_type": config.job,
        "tags": list(wandb_config.tags),
        "config": config.model_dump(mode="json") | {"point_id": plan.point_id},
        "resume": "allow",
    }


def start_run(plan: RunPlan, directory: Path, run_id: str, mode: Mode) -> Any:
    import wandb

    settings = wandb.Settings(
        console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True, init_timeout=30
    )
    run = wandb.init(dir=str(directory.parent), mode=mode, settings=settings, **run_settings(plan, run_id))
    run.define_metric("*", step_metric="step")  # files arrive interleaved, so wandb's own step would drop rows
    return run


class Feed:
    """New rows of all files, each sent once."""

    def __init__(self, run_dir: Path, sent_path: Path, resume_step: int) -> None:
        self.metrics_dir, self.sent_path = run_dir / "metrics", sent_path
        self.tails: dict[str, Tail] = {}
        earlier = {stem: step for stem, step in (read_object(sent_path) or {}).items() if isinstance(step, int)}
        self.skip_until = {stem: min(step, resume_step) for stem, step in earlier.items()} if resume_step else {}
        self.sent = dict(self.skip_until)

    def forward(self, run: Any) -> None:
        """Send what has been appended since the last call. `run` is a wandb run (or anything with `log`)."""
        count = 0
        for path in sorted(self.metrics_dir.glob("*.jsonl")):
            tail = self.tails.setdefault(path.stem, Tail(path))
            for row in tail.poll():
                if row.get("step", 0) <= self.skip_until.get(path.stem, -1):
                    continue
                run.log(chart(path.stem, row))
                self.sent[path.stem] = row.get("step", 0)
                count += 1
        if count:
            replace_file(self.sent_path, json.dumps(self.sent), sync=False)


def chart(stem: str, row: Row) -> Row:
    """A row under its role's name: "orchestrator/reward", "trainer.0/loss". `step` is shared by all."""
    named = {f"{stem}/{key}": value for key, value in row.items() if key not in ("step", *NOT_CHARTED)}
    return {"step": row.get("step", 0), **named}


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
