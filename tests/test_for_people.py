"""What a server for people tells, and to whom; and which tests pytest runs for who says nothing."""

from __future__ import annotations

import stat
import sys
from types import SimpleNamespace

import pytest
import tiers

from prl.config import compose
from prl.planning import make_plan
from prl.runtime.people import for_people
from prl.runtime.process.keys import make_keys

EVERYWHERE = "inference.host=0.0.0.0"


def plan(*overrides: str):
    return make_plan(compose(list(overrides), "inference"))


def test_addresses_are_those_that_other_machines_know(monkeypatch):
    monkeypatch.setattr(for_people, "own_hosts", lambda: ("node7", "10.0.0.7"))
    endpoints = {"inference/0": "http://127.0.0.1:8000", "router": "http://127.0.0.1:9000"}
    assert for_people.urls_of(plan(), endpoints) == ["http://127.0.0.1:8000"]
    assert for_people.urls_of(plan(EVERYWHERE), endpoints) == ["http://node7:8000"]
    assert for_people.urls_of(plan(EVERYWHERE, "inference.router.type=builtin"), endpoints) == ["http://node7:9000"]


@pytest.mark.parametrize(
    ("overrides", "is_open", "files"),
    [
        ([], True, {"control_key"}),
        ([EVERYWHERE], False, {"control_key", "api_key"}),
        ([EVERYWHERE, "inference.api_key_var=MINE"], False, {"control_key"}),
        (["deployment=multi_node", "deployment.num_infer_nodes=2"], False, {"control_key", "api_key"}),
    ],
)
def test_beyond_loopback_there_is_a_key(tmp_path, overrides, is_open, files):
    made, keys, told = plan(*overrides), make_keys(), []
    assert for_people.is_open(made) == is_open
    for_people.hand_out_keys(made, tmp_path, keys, told.append, False)
    assert {path.name for path in tmp_path.iterdir()} == files
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    assert not any(key in line for line in told for key in (keys.control, keys.generate))
    for_people.hand_out_keys(made, tmp_path, keys, told.append, True)
    assert any(keys.control in line for line in told)
    for_people.take_back_keys(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_log_is_told_no_keys(tmp_path, monkeypatch):
    with (tmp_path / "console.log").open("w") as log:
        monkeypatch.setattr(sys, "stdout", log)
        assert not for_people.is_told_in_private(is_job=False)
    with open("/dev/null", "w") as elsewhere:
        monkeypatch.setattr(sys, "stdout", elsewhere)
        assert for_people.is_told_in_private(is_job=False)
        assert not for_people.is_told_in_private(is_job=True)


@pytest.mark.parametrize(
    ("said", "is_first"),
    [({}, True), ({"markexpr": "slurm"}, False), ({"keyword": "x"}, False), ({"lf": True}, False)],
)
def test_who_says_nothing_gets_the_first_tier(said, is_first):
    usual = {"markexpr": "", "keyword": "", "lf": False, "collectonly": False, "numprocesses": None, "dist": "no",
             "usepdb": False}  # fmt: skip
    options = SimpleNamespace(**usual | said)
    source = pytest.Config.ArgsSource.TESTPATHS
    config = SimpleNamespace(option=options, args_source=source, stash=pytest.Stash())
    tiers.choose(config)  # type: ignore[arg-type]
    assert (options.markexpr == tiers.FIRST) == is_first
    assert (options.numprocesses is not None) == is_first
    assert options.dist == ("loadfile" if is_first else "no")
