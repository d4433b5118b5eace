"""What a run reads that others may change: told when it goes on, and whether an evaluation is of what is there now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.code_copy import freeze_code
from launch.states import what_it_needs
from prl.config import compose
from prl.planning import make_plan
from prl.runtime.directory import inputs
from prl.runtime.directory.inputs import describe_inputs, fingerprint, hashes_in, note_changes, what_changed
from prl.runtime.directory.rundir import ENV, claim
from prl.runtime.evaluated import note_evaluated, why_outdated

MODULE = """from prl.envs.protocol import Environment
class Own(Environment):
    def reward(self, task, messages):
        return {}
"""


def test_what_changed_between_attempts_is_named_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module, data = tmp_path / "changing_envs.py", tmp_path / "tasks.jsonl"
    module.write_text(MODULE.format(0.0))
    data.write_text("{}\n")
    mix = "+env.mix={own: {id: 'changing_envs:Own', args: {tasks: tasks.jsonl, words: [one]}}}"
    config = compose([mix, "output_dir=run"])
    claim(make_plan(config)).release()
    record = tmp_path / "run" / ENV
    first = json.loads(record.read_text())
    assert list(first["data"]) == ["tasks.jsonl"]
    assert note_changes(record, config, 2) == []
    assert json.loads(record.read_text()) == first
    module.write_text(MODULE.format(1.0))
    assert note_changes(record, config, 2) == ["changing_envs"]
    assert note_changes(record, config, 3) == [], "told once"
    data.write_text("[]\n")
    assert note_changes(record, config, 4) == ["tasks.jsonl"]
    now = json.loads(record.read_text())
    assert [row["attempt"] for row in now["later"]] == [2, 4]
    assert hashes_in(now, "data") == {"tasks.jsonl": describe_inputs(config)["data"]["tasks.jsonl"]["sha256"]}
    assert now["later"][0]["modules"] == describe_inputs(config)["modules"]
    assert {key: now[key] for key in first} == first, "what the first attempt began with stays"
    module.write_text(MODULE.format(0.0))
    assert what_changed(record, config) == ["changing_envs"]
    monkeypatch.setattr(inputs, "_own_hash", lambda: "edited")
    assert what_changed(record, config) == ["changing_envs", "prl"]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert note_changes(record, config, 5) == ["changing_envs"], "compared with the attempt before, not with the first"


def test_the_code_of_a_sweeps_copy_is_that_of_the_checkout(tmp_path: Path) -> None:
    """Else each point that was done from a copy would be one of other code."""
    recorded = describe_inputs(compose([]))["code"]["prl"]["sha256"]
    copy = freeze_code(tmp_path, []).path / "prl"
    assert inputs.package_hash(copy) == recorded
    (copy / "rl.py").write_text("# edited\n")
    assert inputs.package_hash(copy) != recorded


def test_data_of_fine_tuning_counts(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n')
    assert list(describe_inputs(compose(["data=jsonl", f"sft.data.source={path}"], "sft"))["data"]) == [str(path)]


def test_large_files_are_known_by_their_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "WHOLE_BYTES", 100)
    monkeypatch.setattr(inputs, "ENDS_BYTES", 10)
    file = tmp_path / "large"
    file.write_bytes(bytes(200))
    before = fingerprint(file)
    for at, seen in ((0, True), (199, True), (100, False)):
        content = bytearray(200)
        content[at] = 1
        file.write_bytes(content)
        assert (fingerprint(file) != before) == seen
    assert fingerprint(tmp_path / "absent") is None


def test_an_evaluation_is_of_weights_and_not_of_the_words_for_them(tmp_path: Path) -> None:
    weights = tmp_path / "model"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(b"one")
    config = compose([], "eval").model_copy(update={"output_dir": str(tmp_path / "ev")})
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(weights)})})
    run_dir = tmp_path / "ev"
    run_dir.mkdir()
    (run_dir / "status.json").write_text(json.dumps({"state": "done"}))
    assert what_it_needs(run_dir, config) == "done", "of an older version, which kept nothing"
    note_evaluated(run_dir, config)
    assert (why_outdated(run_dir, config), what_it_needs(run_dir, config)) == ("", "done")
    (weights / "model.safetensors").write_bytes(b"two")
    assert why_outdated(run_dir, config) == f"the weights in {weights} are others than those that were evaluated"
    assert what_it_needs(run_dir, config) == "unfinished"
    (weights / "model.safetensors").unlink()
    weights.rmdir()
    assert why_outdated(run_dir, config) == "", "gone is not changed"
