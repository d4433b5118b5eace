"""parallelism.reduce_dtype: what gradients are added up in."""

import pytest
import torch
from reduce_ranks import LAYOUTS, run_ranks
from tiny import moe_checkpoint

from prl.config import compose
from prl.config.errors import ConfigError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reduced(tmp_path_factory):
    return run_ranks(tmp_path_factory.mktemp("ranks") / "four", str(moe_checkpoint(tmp_path_factory.mktemp("model"))))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "ep4, whole"])
def test_bfloat16_halves_the_bytes_that_ranks_add_up(reduced, layout):
    """Of dense weights and of experts; what arrives is float32 again."""
    wide, narrow = (reduced[layout, dtype]["bytes"] for dtype in ("float32", "bfloat16"))
    assert wide.keys() == {torch.float32}
    assert narrow == {torch.bfloat16: wide[torch.float32] // 2}
    assert reduced[layout, "unsaid"]["bytes"] == wide
    for values in reduced[layout, "bfloat16"]["gradients"].values():
        assert values.dtype == torch.float32


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_differ_by_the_rounding_of_bfloat16(reduced, layout):
    wide, narrow, unsaid = (reduced[layout, dtype]["gradients"] for dtype in ("float32", "bfloat16", "unsaid"))
    for name, values in wide.items():
        assert torch.equal(unsaid[name], values), name
        if layout == "ep4, whole" and ".experts." in name:
            assert torch.equal(narrow[name], values), name
            continue
        # each of four addends and each of three sums is off by at most 2^-9 of itself; rows are added up in float32
        torch.testing.assert_close(narrow[name], values, rtol=0, atol=2**-6 * values.abs().max().item(), msg=name)
        assert not torch.equal(narrow[name], values), name


def test_experts_that_are_whole_on_their_rank_are_not_rounded(reduced):
    """Their gradients go nowhere."""
    narrow = reduced["ep4, whole", "bfloat16"]["bytes"]
    assert narrow == {torch.bfloat16: reduced["ep4, whole", "float32"]["bytes"][torch.float32] // 2}
    assert narrow[torch.bfloat16] < reduced["fsdp", "bfloat16"]["bytes"][torch.bfloat16]


def test_one_rank_adds_up_nothing():
    with pytest.raises(ConfigError, match=r"parallelism\.reduce_dtype has no effect(.|\n)*no gradients are added up"):
        compose(["parallelism.reduce_dtype=bfloat16"])
    assert compose(["parallelism=hsdp2", "parallelism.reduce_dtype=bfloat16", "optim=adamw"])
