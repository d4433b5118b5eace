"""Batches of points as jobs of SLURM: their scripts, and sbatch."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import submitit

from launch.code_copy import FrozenCode, freeze_code
from launch.points import Point
from launch.settings import LauncherSettings
from launch.shapes import Batch, make_batches
from launch.slurm_queue import max_array_size, run_slurm
from launch.submitting import held_back, intend
from launch.sweep_file import record_job, record_refusal, submission
from prl.config.console import one_line
from prl.config.errors import UserError
from prl.runtime.directory.files import create_exclusively, replace_file
from prl.runtime.nodes.job_nodes import without_job
from prl.runtime.process.python_path import python_command

DEFAULT_TEMPLATE = Path(__file__).parent / "templates" / "default.sbatch.j2"
OF_TEMPLATES = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError)  # what their expressions raise


class PointExecutor(submitit.SlurmExecutor):
    """submitit's submission of a script, with a script of ours: it starts agents and needs no pickles."""

    def __init__(self, folder: Path, place: Path) -> None:
        super().__init__(folder)
        self.place, self.script = place, place.read_text()

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self.script

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        """Of the script in its own place, by which `submitting.adopt` finds it; no Ctrl-C of a terminal gets there."""
        alone = [setsid] if (setsid := shutil.which("setsid")) else []
        return [*alone, *super()._make_submission_command(self.place)]

    def submit_script(self) -> str:
        """Submit. Returns the job's id. Raises UserError with sbatch's reason."""
        try:
            with _outside_of_jobs():
                return self._submit_command("").job_id
        except submitit.core.utils.FailedJobError as error:
            reason = reasons_of(str(error))
            raise UserError(
                f"sbatch refused the job: {reason[-1]}",
                where=str(self.place),
                why="; ".join(reason[:-1]) or "this cluster does not take a line of the script",
                fix="hydra.launcher.dry_run=true shows the script; sinfo and sacctmgr show what this cluster allows",
            ) from error


def reasons_of(said: str) -> list[str]:
    """What sbatch says against a job, the last word last; at least one."""
    own = [line for line in re.findall(r"^sbatch: (?:error: )?(.*)", said, re.MULTILINE) if line.strip()]
    return own or [line for line in said.strip().splitlines() if not line.startswith("Try ")][-1:] or ["without a word"]


@contextlib.contextmanager
def _outside_of_jobs() -> Iterator[None]:
    """Jobs inherit what sbatch does not set anew: the array index of the job that this command may run in."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(without_job(before))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def submit(points: list[Point], sweep_dir: Path, settings: LauncherSettings) -> list[str]:
    """Submit all and return at once. Returns the ids of the jobs, one for each array."""
    if not points:
        return []
    folder = sweep_dir / "slurm"
    folder.mkdir(parents=True, exist_ok=True)
    code = freeze_code(sweep_dir, points)
    jobs = []
    for batch in make_batches(points, settings, settings.max_array_size or max_array_size()):
        try:
            with held_back():
                jobs.append(_submit_batch(batch, sweep_dir, code))
        except KeyboardInterrupt:
            _tell_interrupted(sweep_dir, jobs)
            raise
    print(one_line(f"python -m prl.status {_shown(sweep_dir)} shows what becomes of them"), flush=True)
    return jobs


def _submit_batch(batch: Batch, sweep_dir: Path, code: FrozenCode) -> str:
    """One job, and its record. Returns its id."""
    script = write_script(batch, sweep_dir, code)
    row = submission(sweep_dir, script, batch.points, batch.is_array, code)
    intended = intend(script, row)
    try:
        job_id = PointExecutor(script.parent, script).submit_script()
    except UserError as error:
        with contextlib.suppress(OSError, UserError):
            record_refusal(sweep_dir, batch.points, error.what)
        intended.unlink(missing_ok=True)
        raise
    try:
        record_job(sweep_dir, {**row, "job_id": job_id})
    except (OSError, UserError):
        _take_back(job_id)
        raise
    finally:
        intended.unlink(missing_ok=True)
    what = f"array of {len(batch.points)} points" if batch.is_array else batch.points[0].path.name
    print(one_line(f"job {job_id}: {what}, {batch.shape.describe()}, {script}"), flush=True)
    return job_id


def _tell_interrupted(sweep_dir: Path, jobs: list[str]) -> None:
    done = "no job so far"
    if jobs:
        done = f"submitted so far: {', '.join(jobs)}; python -m prl.cancel {_shown(sweep_dir)} cancels them"
    print(one_line(f"interrupted; {done}; the same command submits what is missing"), file=sys.stderr, flush=True)


def _shown(sweep_dir: Path) -> str:
    return shlex.quote(os.path.relpath(sweep_dir))


def _take_back(job_id: str) -> None:
    """A job that no record names: prl.cancel would not know it, and the same command would submit its points again."""
    with contextlib.suppress(UserError):
        run_slurm("scancel", job_id)
    print(f"job {job_id} was cancelled: it could not be recorded", file=sys.stderr, flush=True)


def write_script(batch: Batch, sweep_dir: Path, code: FrozenCode) -> Path:
    """SWEEP/slurm/N.sbatch, and the list of its points beside it."""
    folder = sweep_dir / "slurm"
    lines = "".join(f"{point.path}\n" for point in batch.points)
    # the number belongs to who makes the list: jobs read it when they start
    number = next(i for i in range(1, 1_000_000) if create_exclusively(folder / f"{i}.points", lines))
    script, listing = folder / f"{number}.sbatch", folder / f"{number}.points"
    replace_file(script, render(batch, sweep_dir, code, listing))
    return script


def refuse_templates(points: list[Point], settings: LauncherSettings) -> None:
    """Raise UserError for a template of one's own that cannot be used, before anything is written for its jobs."""
    for batch in make_batches(points, settings, len(points) or 1):
        if batch.shape.slurm.template_path is not None:
            sweep_dir = batch.points[0].path.parent
            render(batch, sweep_dir, FrozenCode(sweep_dir / "code", {}), sweep_dir / "slurm" / "1.points")


def render(batch: Batch, sweep_dir: Path, code: FrozenCode, listing: Path) -> str:
    """The sbatch script. Raises UserError for a template that is not there or cannot be rendered."""
    path = Path(batch.shape.slurm.template_path or DEFAULT_TEMPLATE).expanduser()
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["quote"] = shlex.quote
    try:
        text = path.read_text()
        return environment.from_string(text).render(template_variables(batch, sweep_dir, code, listing))
    except (OSError, jinja2.TemplateError, *OF_TEMPLATES) as error:
        why = f"line {error.lineno}: {error}" if isinstance(error, jinja2.TemplateSyntaxError) else str(error)
        raise UserError(
            "The sbatch template cannot be used.",
            where=f"slurm.template_path={path}",
            why=str(error.strerror) if isinstance(error, OSError) else why,
            fix=f"start from a copy of {DEFAULT_TEMPLATE}; launch/README.md lists the variables",
        ) from error


def template_variables(batch: Batch, sweep_dir: Path, code: FrozenCode, listing: Path) -> dict[str, Any]:
    """What a template may use; launch/README.md explains each."""
    shape = batch.shape
    return {
        "job_name": shape.slurm.job_name or f"prl-{sweep_dir.name}",
        "project_dir": str(Path.cwd()),
        "output_dir": str(sweep_dir),
        "config_dir": str(listing.parent),
        "num_train_nodes": shape.nodes - shape.infer_nodes,
        "num_infer_nodes": shape.infer_nodes,
        "nodes": shape.nodes,
        "gpus_per_node": shape.gpus_per_node,
        "hf_hub_offline": os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"),
        "array": batch.array,
        "gres": shape.slurm.gres or (f"gpu:{shape.gpus_per_node}" if shape.gpus_per_node else None),
        "log": str(listing.parent / ("%A_%a.log" if batch.is_array else "%j.log")),
        "python_path": code.python_path,
        "command": shlex.join(python_command("prl.runtime.agent", "--list", str(listing))),
        "afterwards": shlex.join(python_command("prl.runtime.afterwards", "--list", str(listing), "--code")),
        "slurm": shape.slurm,
    }
