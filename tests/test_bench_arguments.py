"""What the benchmarks are given on command lines, and what they refuse before they measure anything."""

import importlib
import json
import sys

import pytest

from prl.bench.arguments import json_place
from prl.bench.profile import profile_step
from prl.config.errors import UserError

REFUSED = [
    ("attention --heads 0", "--heads: '0' is no whole number from 1 on"),
    ("attention 64 --heads 3 --kv-heads 2", "--heads 3 --kv-heads 2: as many heads share each"),
    ("attention -- -5", "tokens: '-5' is no whole number"),
    ("checkpoint --device cuda", "GPUs are seen here"),
    ("checkpoint --gib -1", "--gib: '-1' is no finite number above 0"),
    ("checkpoint --gib nan", "--gib: 'nan' is no finite number above 0"),
    ("checkpoint --gib inf", "--gib: 'inf' is no finite number above 0"),
    ("checkpoint --gib 1e6", "--gib 1e+06: takes 1,000,000.0 GiB or more, and"),
    ("checkpoint --ranks 0", "--ranks: '0' is no whole number from 1 on"),
    ("checkpoint /proc/nowhere", "nothing can be written to /proc/nowhere"),
    ("control_plane --in-flight 0", "--in-flight: '0' is no whole number from 1 on"),
    ("control_plane --seq-len 100", "--seq-len 100: a rollout has 32768 tokens"),
    ("control_plane --turns 100 --completion 64", "--turns 100 --completion 64: a turn has two tokens or more"),
    ("control_plane --trainers 1.5", "--trainers: '1.5' is no whole number from 1 on"),
    ("expert_dispatch --nodes 0", "--nodes: '0' is no whole number from 1 on"),
    ("expert_dispatch --nodes --counted", "--nodes and --counted: one of them names a number of nodes"),
    ("experts --ep -1", "--ep: '-1' is no whole number from 0 on"),
    ("node x --gpus 0", "--gpus: '0' is no whole number from 1 on"),
    ("node /proc/nowhere --gpus 2 --tiny", "nothing can be written to /proc/nowhere"),
    ("packing --model nonsense", "do:    model=auto"),
    ("packing --seq-len 0", "--seq-len: '0' is no whole number from 1 on"),
    ("publication --ep 3", "--ep 3: 2 or more, of which 128 experts and 64 trainers are a multiple"),
    ("publication --trainers 4 --ep 1", "--ep 1: 2 or more"),
    ("publication --shrink 128 --layers 1", "do:    model.card.head_dim=2"),
    ("publication --shrink 7", "--shrink 7 does not divide 128, one of the model's dimensions"),
    ("publication --trainers 10 --ep 2", "96 rows of an expert are not cut into 5"),
    ("publication_gpus --model nonsense --device cpu", "do:    model=auto"),
    ("publication_gpus --versions 1", "--versions: 2 or more, for the first is not like the others"),
    ("publication_host --mib 0", "--mib: '0' is no whole number from 1 on"),
    ("publication_host --mib 100000000", "--mib 100000000 --engines 2: takes"),
    ("scan 0", "tokens: '0' is no whole number from 1 on"),
    ("sparse x", "tokens: 'x' is no whole number from 1 on"),
]


@pytest.mark.parametrize(("command", "told"), REFUSED, ids=[command for command, _ in REFUSED])
def test_what_cannot_be_measured_is_refused_at_once(command, told, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    module, *rest = command.split()
    monkeypatch.setattr(sys, "argv", [module, *rest])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"prl.bench.{module}").main()
    assert ended.value.code == 2
    assert told in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("module", ["fp8", "router_replay"])
def test_those_that_take_overrides_say_so_too(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"prl.bench.{module}").main()
    assert ended.value.code == 0
    assert f"python -m prl.bench.{module} model" in capsys.readouterr().out


def test_a_nodes_commands_are_listed_where_there_are_no_gpus(monkeypatch, capsys, tmp_path):
    node = importlib.import_module("prl.bench.node")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["node", str(tmp_path / "node8"), "--list"])
    node.main()
    assert "parallelism=ep8_cp2" in capsys.readouterr().out
    assert not (tmp_path / "node8").exists()


def test_a_broken_bound_is_told_and_not_raised(monkeypatch, capsys):
    publication = importlib.import_module("prl.bench.publication")
    monkeypatch.setattr(sys, "argv", ["publication", "--json"])
    held = {f"{who} holds at most, buckets": size for who, size in (("a rank", 2.25), ("an engine process", 1.0))}
    figures = held | {"a rank sends at least, MB": 1.0, "a rank sends at most, MB": 1.05}
    monkeypatch.setattr(publication, "measure", lambda load: figures)
    with pytest.raises(SystemExit, match=r"a bound is broken: a rank holds 2.25 buckets"):
        publication.main()
    assert json.loads(capsys.readouterr().out) == figures


@pytest.mark.parametrize(
    ("place", "why"), [("", "it is a directory"), ("file/x.json", "File exists"), ("/proc/nowhere/x.json", "/proc")]
)
def test_a_place_for_the_result_is_looked_at_first(place, why, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as error:
        json_place(str(tmp_path / place))
    assert why in error.value.why
    assert str(tmp_path / place) in error.value.where


def test_a_place_for_the_result_is_made(tmp_path):
    assert json_place(None) is None
    place = json_place(f"{tmp_path}/new/x.json")
    assert place == tmp_path / "new/x.json"
    assert list(tmp_path.rglob("*")) == [tmp_path / "new"]


def test_a_profile_counts_calls_on_a_cpu():
    import torch

    a = torch.randn(64, 64)
    profile = profile_step(lambda: [a @ a for _ in range(7)], torch.device("cpu"))
    (product,) = [row for row in profile["top"] if row["name"] == "aten::mm"]
    assert product["calls"] == 7
    assert 0 < product["share"] <= 1
    assert sum(group["share"] for group in profile["groups"].values()) == pytest.approx(1)
