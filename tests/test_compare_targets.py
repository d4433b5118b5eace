"""`prl.compare` over several targets: directories, wandb's own files and groups of wandb, mixed; tables for papers."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from test_compare_wandb import Api, MirroredRun, make_sweep
from wandb.proto import wandb_internal_pb2

from prl.compare import wandb_source
from prl.compare.__main__ import _parser, run
from prl.compare.targets import read_targets
from prl.compare.wandb_file import BLOCK, find_files, read_files
from prl.config.errors import UserError
from prl.metrics.writer import MetricsWriter
from prl.runtime.directory.files import read_object


def write_wandb_file(path: Path, records: list[Any], torn: int = 0) -> Path:
    """As wandb writes it; `torn`: bytes that are missing in the end."""
    data = bytearray(b":W&B" + struct.pack("<HB", 0xBEE1, 0))
    for record in records:
        rest, first = record.SerializeToString(), True
        while rest or first:
            room = BLOCK - len(data) % BLOCK
            if room < 7:
                data += bytes(room)
                continue
            piece, rest = rest[: room - 7], rest[room - 7 :]
            kind = (1 if not rest else 2) if first else (4 if not rest else 3)
            data += struct.pack("<IHB", 0, len(piece), kind) + piece
            first = False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data[: len(data) - torn])
    return path


def offline(mirrored: MirroredRun, directory: Path, exit_code: int | None = 0, torn: int = 0) -> Path:
    """The file of an offline run of which the API would say what `mirrored` says."""
    Record = wandb_internal_pb2.Record
    begin = Record()
    begin.run.run_id, begin.run.display_name, begin.run.run_group = mirrored.id, mirrored.name, mirrored.group
    for key, value in mirrored.config.items():
        begin.run.config.update.add(key=key, value_json=json.dumps(value))
    records = [begin]
    for row in mirrored.scan_history():
        records.append(Record())
        for key, value in row.items():
            records[-1].history.item.add(nested_key=[key], value_json=json.dumps(value))
    if exit_code is not None:
        records.append(Record())
        records[-1].exit.exit_code = exit_code
    return write_wandb_file(directory / f"offline-run-{mirrored.id}" / f"run-{mirrored.id}.wandb", records, torn)


@pytest.fixture
def sweep(tmp_path: Path) -> list[Path]:
    return make_sweep(tmp_path / "sweep")


def mirrored(path: Path) -> MirroredRun:
    """With the id that the mirror gives it."""
    found = MirroredRun(path)
    found.id = read_object(path / "env.json")["run_id"]
    return found


def test_offline_files_give_what_their_directories_give(sweep, tmp_path):
    for path in sweep:
        offline(mirrored(path), tmp_path / "wandb")
    theirs, _ = read_targets([str(tmp_path / "wandb")])
    ours, _ = read_targets([str(tmp_path / "sweep")])
    assert len(theirs) == 4
    by_id = {point.run_id: point for point in ours}
    for point in theirs:
        own = by_id[point.run_id]
        assert (point.state, point.step, point.swept, point.point_id) == ("done", own.step, own.swept, own.point_id)
        assert point.curves.figures == pytest.approx(own.curves.figures)
    (alone,), _ = read_targets([str(find_files(tmp_path / "wandb")[0])])
    assert alone.run_id in by_id


def test_a_file_that_ends_within_a_record_gives_what_is_whole(sweep, tmp_path):
    """Killed while it wrote, in a row that spans two blocks."""
    one = mirrored(sweep[0])
    one.config["long"] = "x" * (2 * BLOCK)
    (whole,) = read_files([offline(one, tmp_path / "whole")])
    (torn,) = read_files([offline(one, tmp_path / "torn", exit_code=None, torn=3)])
    assert whole.config["long"] == torn.config["long"] == "x" * (2 * BLOCK)
    assert (whole.state, torn.state) == ("finished", "running")
    assert torn.history == whole.history[:-1]
    (tmp_path / "not.wandb").write_text("hello")
    with pytest.raises(UserError, match="is no file of wandb's"):
        read_targets([str(tmp_path / "not.wandb")])


def test_local_and_remote_points_are_one_comparison_and_a_run_counts_once(sweep, tmp_path, monkeypatch):
    api = Api([mirrored(path) for path in sweep[1:]])
    monkeypatch.setenv("WANDB_API_KEY", "k")
    monkeypatch.setattr(wandb_source, "connect", lambda target: api)
    here = tmp_path / "here"
    here.mkdir()
    for path in sweep[:2]:
        shutil.copytree(path, here / path.name)
    points, notes = read_targets([str(here), "team/prl/rl"])
    assert [point.name.partition("/")[0] for point in points] == ["here", "here", "rl", "rl"]
    assert len({point.run_id for point in points}) == 4
    (note,) = notes
    assert note.startswith("Runs that were named twice count once; left out: rl/")
    back, _ = read_targets(["team/prl/rl", str(here)])
    assert {p.run_id: p.directory for p in back} == {p.run_id: p.directory for p in points}, "whatever the order"
    apart, _ = read_targets([str(here), "team/prl/rl"], by_target=True)
    assert [point.swept["target"] for point in apart] == ["here", "here", "rl", "rl"]


def test_of_a_run_and_its_copy_the_one_that_is_further_on_counts(sweep, tmp_path):
    """A copy of a run that went on, say on another machine."""
    copy = tmp_path / "copy" / "run"
    shutil.copytree(sweep[0], copy)
    writer = MetricsWriter(sweep[0], "trainer/0")
    writer.log(step=3, tokens=100, step_s=1.0)
    MetricsWriter(sweep[0], "orchestrator").log(step=3, reward=0.9, **{"eval/reward": 0.9})
    for targets in ([sweep[0], copy], [copy, sweep[0]]):
        (point,), notes = read_targets([str(target) for target in targets])
        assert point.step == 3
        assert point.name.startswith(sweep[0].name)
        (note,) = notes
        assert note.startswith("run/run is left out: it is ")
        assert note.endswith("which is here at step 3 (done).")


def test_tables_for_papers_and_notes(sweep, tmp_path, capsys):
    target = str(tmp_path / "sweep")
    files = {kind: tmp_path / f"table.{kind}" for kind in ("latex", "markdown")}
    run(_parser().parse_args([target, *(f"--{kind}={path}" for kind, path in files.items())]))
    said = capsys.readouterr().out
    assert all(f"written {path}" in said for path in files.values())
    markdown, latex = files["markdown"].read_text(), files["latex"].read_text()
    assert "| rank | algo | seeds | held-out reward | ± 95 % |" in markdown
    assert "| ---: | --- | ---: | ---: | ---: |" in markdown
    lines = [line for line in markdown.splitlines() if line.startswith("| ")]
    assert len(lines) == (2 + 2) + (2 + 4)
    assert len({line.count(" | ") for line in lines[:4]}) == 1
    assert r"rank & algo & seeds & held-out reward & $\pm$ 95 \% &" in latex
    assert latex.count(r"\begin{tabular}") == latex.count(r"\bottomrule") == 2
    assert latex.count(r" \\") == 3 + 5
    assert latex.splitlines()[0] == r"% in the preamble: \usepackage{booktabs} \usepackage{graphicx}"
    assert latex.count(r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%") == 2
    assert latex.count("\\end{tabular}%\n}\n") == 2
    assert latex.count("{") - latex.count(r"\{") == latex.count("}") - latex.count(r"\}")
