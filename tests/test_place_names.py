"""Names of places that no file system takes, and places that cannot be written: told, with another that can."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_compare import make_point

from launch import launching
from prl import cancel, status
from prl.compare import __main__ as compare_main
from prl.config import compose
from prl.config.errors import ConfigError, UserError
from prl.config.place_names import NAME_BYTES, check_length
from prl.runtime import by_hand
from prl.runtime.nodes import torchrun
from prl.runtime.preflight import check_directory
from prl.watch import __main__ as watch_main

LONG = f"/tmp/{'x' * 300}"
KEYS = ("output_dir", "cache_dir", "model.path", "model.tokenizer", "slurm.template_path")


@pytest.mark.parametrize("key", KEYS)
def test_a_name_that_is_too_long_is_refused_where_it_is_given(key):
    with pytest.raises(ConfigError, match="has 300 bytes, and file systems take 255") as told:
        compose([f"{key}={LONG}"])
    assert told.value.violations[0].where == key
    assert "Value error" not in told.value.render()


@pytest.mark.parametrize("main", [status.main, cancel.main, compare_main.main, watch_main.main, None])
def test_commands_that_look_refuse_it_too(monkeypatch, capsys, main):
    monkeypatch.setattr("sys.argv", ["prl", LONG])
    with pytest.raises(SystemExit) as ended:
        main() if main else by_hand.run_role("trainer")
    assert ended.value.code == 2
    assert "has 300 bytes, and file systems take 255" in capsys.readouterr().err


def test_what_file_systems_take_is_taken():
    assert check_length(f"~/{'é' * 127}/{'x' * NAME_BYTES}")
    for name in ("é" * 128, "a/" * 2100):
        with pytest.raises(ValueError, match="bytes"):
            check_length(name)


def test_a_place_that_cannot_be_written_is_not_advised(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/proc/nohome")
    with pytest.raises(UserError) as told:
        check_directory(Path("~/.cache/prl"), "cache_dir", "cache_dir=~/.cache/prl")
    assert told.value.fix == "cache_dir=outputs/cache"
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError) as told:
        check_directory(Path("/proc/x"), "cache_dir", "cache_dir=~/.cache/prl")
    assert told.value.fix == "cache_dir=~/.cache/prl"


def test_commands_to_paste_quote_what_has_a_blank(tmp_path: Path, monkeypatch):
    (tmp_path / "inf rt").mkdir()
    monkeypatch.setattr(launching, "points_without_word", lambda path, sweep: {".": ("not started", "")})
    assert f"python -m prl.status '{tmp_path}/inf rt'" in launching.why_it_does_not_serve(tmp_path / "inf rt")


def test_a_number_of_torchruns_that_is_none_is_named():
    told = dict.fromkeys(torchrun.SET, "1") | {"RANK": "x"}
    with pytest.raises(UserError, match="RANK=x is no number"):
        torchrun.find_torchrun(told)


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path, monkeypatch, capsys):
    def broken(*given):
        raise BrokenPipeError(32, "Broken pipe")

    make_point(tmp_path / "a", [0.0, 0.5])
    monkeypatch.setattr(compare_main, "_write_files", broken)
    monkeypatch.setattr("sys.argv", ["prl.compare", str(tmp_path / "a")])
    with pytest.raises(SystemExit) as ended:
        compare_main.main()
    assert (ended.value.code, capsys.readouterr().err) == (0, "")


def test_a_list_is_called_a_list():
    with pytest.raises(ConfigError, match=r"it must be a list, \[a,b\]"):
        compose(["logging.wandb.tags=x"])


def test_ranks_that_torchrun_has_not_made_are_told_that_they_count_for_nothing():
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host"}
    assert "a run of its own" in torchrun.looks_like_ranks(given)
    for other in (given | {"WORLD_SIZE": "1"}, given | {torchrun.RUN_ID: "x"}, {"RANK": "0"}):
        assert torchrun.looks_like_ranks(other) == ""
