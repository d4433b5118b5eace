"""The measurement of a layer's experts over the devices of one machine."""

import re
import subprocess
import sys

import pytest
import torch

from prl.bench.experts import Measured, Sizes, both_ways, card_of, layer_of, rows_of
from prl.models.experts.dispatch import LocalDispatch

CPU = torch.device("cpu")


def bench(*words, **options):
    command = [sys.executable, "-m", "prl.bench.experts", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def test_all_ways_give_the_same_between_two_processes():
    done = bench("tiny_qwen3_moe", "tiny_nemotron_h", "--tokens", "24", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| tiny")]
    assert [row[1] for row in rows] == ["all-to-all", "2 pieces"] * 2
    assert rows[0][0] == "| tiny_qwen3_moe: 8, 2, 128, 64"
    assert all(float(row[2]) > 0 for row in rows)
    assert [rows[i][3] for i in (0, 2)] == ["the same bits |"] * 2
    assert all(re.fullmatch(r"the same bits \||\de-0[678] \|", row[3]) for row in rows), rows


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["qwen3_4b"], 2, "0 experts cannot be spread over 2 ranks"),
        (["tiny_qwen3_moe", "--ranks", "3"], 2, "8 experts cannot be spread over 3 ranks"),
        (["tiny_qwen3_moe", "--ep", "16"], 2, "1 experts cannot be spread over 2 ranks"),
        (["nonsense"], 2, "There is no choice 'nonsense' in group 'model'"),
        (["tiny_qwen3_moe", "--limit", "0.001"], 1, "no answer within 0.001 s"),
    ],
)
def test_what_cannot_be_measured_is_told(words, code, told):
    done = bench(*words)
    assert done.returncode == code, done.stderr
    assert told in done.stderr
    assert 'prl/bench/experts.py", line' not in done.stderr.split("most recent call first")[0]


def test_with_ep_a_rank_has_as_many_experts_as_with_so_many_ranks():
    card = card_of("glm_5_1")
    assert Sizes.of(card, 2, 8) == Sizes(64, 8, 6144, 2048, True)
    assert Sizes.of(card, 2, 0).experts == 256
    assert Sizes.of(card_of("nemotron_3_super"), 4, 4) == Sizes(512, 22, 1024, 2688, False)


def test_every_gradient_is_looked_at():
    sizes = Sizes(4, 2, 16, 8, True)
    layer = layer_of(sizes, 1, CPU, 0)
    layer.dispatch = LocalDispatch()
    weights, chosen = torch.rand(5, 4).topk(2)
    got = both_ways(layer, (torch.randn(5, 16), weights, chosen), torch.randn(5, 16))
    assert [tuple(one.shape) for one in got] == [(5, 16), (5, 16), (5, 2), (4, 16, 16), (4, 16, 8)]
    assert all(one.abs().max() > 0 for one in got)


def test_a_way_takes_as_long_as_its_slowest_rank():
    told = [[Measured("a", [1.0, 9.0, 3.0], 0.0)], [Measured("a", [4.0, 2.0, 5.0], 1e-3)]]
    (row,) = rows_of("m", Sizes(4, 2, 16, 8, True), told)
    assert row == "| m: 4, 2, 16, 8 | a | 5.00 | 1e-03 |"


@pytest.mark.parametrize(
    ("model", "ranks", "ep", "suit"),
    [
        ("glm_5_1", 2, 0, True),
        ("nemotron_3_super", 2, 8, True),
        ("nemotron_3_super", 2, 0, False),  # 256 experts a rank
        ("nemotron_3_super", 4, 0, True),
    ],
)
def test_deepep_is_left_out_where_its_kernels_end(model, ranks, ep, suit):
    assert Sizes.of(card_of(model), ranks, ep).suit_deepep(ranks) is suit


def test_deepep_takes_whole_halves_of_rows():
    assert not Sizes(8, 2, 2056, 768, True).suit_deepep(2)
