"""`python -m prl.doctor`: pairs of installed packages that do not go together; places that are none."""

from __future__ import annotations

import json
import re
import sys

import pytest

from prl.doctor import probe_disk
from prl.doctor.facts import Facts
from prl.doctor.judging import judge_conflicts
from prl.doctor.versions import Installed, conflicts


def pairs(*packages: Installed) -> dict[str, Installed]:
    return {package.name: package for package in packages}


PRL = Installed("prl", "0.1.0", ("torch>=2.11,<2.14", "numpy", 'mypy; extra == "dev"', 'nixl<2; extra == "nixl"',
                                 'vllm==0.32.*; extra == "vllm"'), ("dev", "nixl", "vllm"))  # fmt: skip
CONFLICTS = {
    "all is well": ([PRL, Installed("torch", "2.13.0+cpu"), Installed("numpy", "2.3")], ""),
    "vLLM and another torch": (
        [PRL, Installed("numpy", "2.3"), Installed("torch", "2.12.1"),
         Installed("vllm", "0.32.0", ("torch==2.13.0", "torchvision"))],
        r"vllm and torch: vllm 0\.32\.0 wants torch==2\.13\.0; 2\.12\.1 is installed"
        r' -> pip install "torch(<2\.14|,|>=2\.11|==2\.13\.0)+"',
    ),
    "what a dependency of a dependency wants": (
        [PRL, Installed("torch", "2.13.0", ("triton>=3.7",)), Installed("numpy", "2.3"), Installed("triton", "3.1")],
        r"torch and triton: torch 2\.13\.0 wants triton>=3\.7; 3\.1 is installed -> pip install \"triton>=3\.7\"",
    ),
    "what is not there": (
        [PRL, Installed("torch", "2.13.0")], "prl and numpy: prl 0.1.0 wants numpy; it is not installed",
    ),
    "an extra of ours": (
        [PRL, Installed("torch", "2.13.0"), Installed("numpy", "2"), Installed("nixl", "2.1")],
        r"prl\[nixl\] and nixl: prl\[nixl\] wants nixl<2; 2\.1 is installed",
    ),
    "an older vLLM that is supported": (
        [PRL, Installed("torch", "2.11.0"), Installed("numpy", "2"), Installed("vllm", "0.23.0", ("torch==2.11.0",))],
        "",
    ),
    "two that cannot live together": (
        [PRL, Installed("torch", "2.13.0"), Installed("numpy", "2"), Installed("cutlass", "4.6"),
         Installed("vllm", "0.32.0", ("cutlass==4.8",)), Installed("flash-attn-4", "4", ("cutlass==4.6",))],
        r"vllm and cutlass: .*cutlass==4\.8; 4\.6 is installed -> no cutlass serves all of .*environments of their own",
    ),
    "packages that have nothing to do with us": (
        [PRL, Installed("torch", "2.13.0"), Installed("numpy", "2"), Installed("spam", "1", ("numpy<1",))], "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFLICTS)
def test_pairs_that_do_not_go_together_are_named(case: str) -> None:
    packages, expected = CONFLICTS[case]
    facts = Facts(conflicts=tuple(conflicts(pairs(*packages))))
    told = [f"{finding.name}: {finding.found} -> {finding.remedy}" for finding in judge_conflicts(facts)]
    if expected:
        assert len(told) == 1, told
        assert re.search(expected, told[0]), told
    else:
        assert not told


@pytest.mark.parametrize("place", ["file", "file/below", "nothing/yet"])
def test_a_place_behind_a_file_is_not_measured_as_the_folder_above(tmp_path, place, capsys, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(probe_disk, "speed", lambda path: {"write_mb_s": 1.0})
    monkeypatch.setattr(sys, "argv", ["probe", str(tmp_path / place)])
    probe_disk.main()
    told = json.loads(capsys.readouterr().out)
    assert ("write_mb_s" in told) == (place == "nothing/yet")
    if place != "nothing/yet":
        assert told["error"] == "Not a directory"
        assert told["directory"] == str(tmp_path / "file")
