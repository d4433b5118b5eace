"""Weights that a run began with, of which some are in no checkpoint: replaced ones are refused, not trained on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families import family_card
from test_further_layers import with_further_layers
from tiny import dense_card, moe_checkpoint, random_model

from prl.config.errors import UserError
from prl.config.schema import LoraConfig
from prl.models.adapters.lora import apply_lora
from prl.models.checkpoints.writing import hf_tensors, save_checkpoint
from prl.runtime.directory.beginning import (
    RECORD,
    SPOTS,
    begun_path,
    fingerprint_of,
    note_beginning,
    refuse_other_weights,
)
from prl.trainer.loops.saving import Saving, what_stays


def checkpoint(path: Path, seed: int = 0) -> Path:
    path.mkdir(parents=True)
    save_checkpoint(hf_tensors(random_model(dense_card(), seed=seed)), path, dense_card())
    return path


def saving(run_dir: Path, step: int) -> Saving:
    made = object.__new__(Saving)
    made.ctx, made.world = SimpleNamespace(run_dir=run_dir, resume_step=step), SimpleNamespace(is_main=True)
    made.checkpointer = SimpleNamespace(load=lambda *args: None)
    return made


def adapted():
    model = random_model(dense_card())
    apply_lora(model, LoraConfig(rank=2), torch.float32)
    return SimpleNamespace(model=model, optimizers=[])


def test_adapters_do_not_go_on_over_other_weights(tmp_path):
    base = checkpoint(tmp_path / "base")
    saving(tmp_path, 0).load(adapted(), base)
    saving(tmp_path, 2).load(adapted(), base)
    (base / "README.md").write_text("not weights")
    saving(tmp_path, 2).load(adapted(), base)
    save_checkpoint(hf_tensors(random_model(dense_card(), seed=1)), base, dense_card())
    whole = SimpleNamespace(model=random_model(dense_card()), optimizers=[])
    saving(tmp_path, 2).load(whole, base)  # of which nothing is read again
    with pytest.raises(UserError, match="have been replaced") as refused:
        saving(tmp_path, 2).load(adapted(), base)
    assert "frozen weights are read from there again" in refused.value.why
    (tmp_path / RECORD).unlink()  # as of a run of an older version
    saving(tmp_path, 2).load(adapted(), base)


def test_a_commit_of_the_hub_is_taken_again(tmp_path):
    snapshots = tmp_path / "models--org--Tiny" / "snapshots"
    first, second = checkpoint(snapshots / "aaa"), checkpoint(snapshots / "bbb", seed=1)
    saving(tmp_path, 0).load(adapted(), first)
    assert begun_path(tmp_path, second) == first
    assert begun_path(tmp_path / "other run", second) == second
    elsewhere = checkpoint(tmp_path / "models--org--Tiny2" / "snapshots" / "bbb", seed=1)
    assert begun_path(tmp_path, elsewhere) == elsewhere
    with pytest.raises(UserError) as refused:
        saving(tmp_path, 2).load(adapted(), elsewhere)
    assert "hf download org/Tiny2 --revision aaa" in refused.value.fix


def test_what_no_checkpoint_has(tmp_path):
    plain, sparse = moe_checkpoint(tmp_path / "moe"), family_card("glm_moe_dsa")
    assert what_stays(random_model(dense_card()), plain) == ""
    assert what_stays(adapted().model, plain) == "frozen weights"
    model = random_model(sparse)
    for name, param in model.named_parameters():
        param.requires_grad_("indexer" not in name)
    assert what_stays(model, plain) == "frozen indexers"
    with_further_layers(tmp_path / "further", "glm4_moe")
    assert what_stays(random_model(family_card("glm4_moe")), tmp_path / "further") == "further layers"


def test_each_part_of_a_large_file_counts(tmp_path):
    file = tmp_path / "model.safetensors"
    data = bytearray(SPOTS * (1 << 20))
    file.write_bytes(data)
    seen = {fingerprint_of(tmp_path)}
    for spot in range(SPOTS):
        data[(len(data) - (64 << 10)) * spot // (SPOTS - 1)] = 1
        file.write_bytes(data)
        seen.add(fingerprint_of(tmp_path))
    assert len(seen) == SPOTS + 1
    note_beginning(tmp_path, tmp_path)
    assert json.loads((tmp_path / RECORD).read_text())["commit"] is None


def test_a_damaged_record_is_no_old_runs(tmp_path):
    """Which have none, and are let pass: half a file would let other weights pass."""
    refuse_other_weights(tmp_path, tmp_path, "layers")
    note_beginning(tmp_path, tmp_path)
    whole = (tmp_path / RECORD).read_text()
    for damaged in (whole[:40], "", "[1, 2]"):
        (tmp_path / RECORD).write_text(damaged)
        with pytest.raises(UserError, match=RECORD):
            refuse_other_weights(tmp_path, tmp_path, "layers")
        with pytest.raises(UserError, match=RECORD):
            begun_path(tmp_path, tmp_path)
