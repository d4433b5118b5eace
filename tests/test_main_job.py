"""The README's first command, as it stands: it must learn, be quick, and skip its warm start the second time."""

from __future__ import annotations

import re
import time

import pytest
import torch
from runs import rows, run
from transformers import AutoModelForCausalLM

from prl.config import compose
from prl.models.checkpoints.reading import load_model
from prl.models.layers.packed_attention import packed_attention

pytestmark = pytest.mark.slow


@pytest.mark.timed
@pytest.mark.timeout(400)
def test_main_job_learns_within_four_minutes(tmp_path):
    cache = f"cache_dir={tmp_path}/cache"
    started = time.monotonic()
    done = run([cache], tmp_path, timeout_s=360)
    seconds = time.monotonic() - started
    assert done.code == 0, done.output
    (run_dir,) = (tmp_path / "outputs").iterdir()
    held_out = {row["step"]: row["eval/reward"] for row in rows(run_dir, "orchestrator") if "eval/reward" in row}
    print(f"held-out reward {held_out[0]:.3f} -> {held_out[max(held_out)]:.3f} in {seconds:.0f} s")
    assert held_out[0] <= 0.6
    assert held_out[max(held_out)] >= 0.9
    assert seconds < 240
    assert (run_dir / "reward.png").read_bytes()[:4] == b"\x89PNG"
    assert re.search(r"step\s+reward\s+held-out", done.output)

    ids = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(0))
    theirs = AutoModelForCausalLM.from_pretrained(run_dir / "export")(ids[None]).logits[0]
    model = load_model(run_dir / "export", compose([]).model.card, torch.float32, torch.device("cpu"))
    attend = packed_attention([40], ids.device)
    ours = model.logits(model(ids, torch.arange(40), attend))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

    again = run([cache, "max_steps=1", "eval.interval=0"], tmp_path)
    assert again.code == 0, again.output
    assert "warm start: cached, skipped" in again.output
