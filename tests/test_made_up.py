"""Random weights for a card: large models are drawn parameter by parameter, and one process makes what several want."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import EACH, family_card
from safetensors.torch import load_file
from tiny import moe_card

from prl.config.config_json import check_card, read_config_json
from prl.config.errors import UserError
from prl.config.schema import ModelConfig
from prl.models.checkpoints import made_up, sources
from prl.models.checkpoints.reading import load_model
from prl.models.checkpoints.sources import random_checkpoint


def config_of(card: Any) -> ModelConfig:
    return ModelConfig(name="tiny", tokenizer="byte", card=card)


@pytest.mark.parametrize("family", EACH.values())
def test_a_large_model_is_drawn_parameter_by_parameter(tmp_path: Path, family: str) -> None:
    config = config_of(family_card(family))
    made_up.write_made_up(config, tmp_path / "small")
    made_up.write_made_up(config, tmp_path / "large", large=0)
    check_card(tmp_path / "large", config.card)
    assert read_config_json(tmp_path / "large")["dtype"] == "bfloat16"
    small, large = (load_file(tmp_path / name / "model.safetensors") for name in ("small", "large"))
    assert small.keys() == large.keys()
    for name, values in large.items():
        assert values.shape == small[name].shape
        assert values.dtype == (torch.bfloat16 if values.ndim > 1 else small[name].dtype)
        spread = small[name].float().std() if small[name].numel() > 1 else torch.tensor(0.0)
        if values.numel() > 1000:
            assert values.float().std() == pytest.approx(float(spread), rel=0.2), name
        elif float(spread) == 0:
            assert torch.equal(values.float(), small[name].float()), name  # ones of norms, zeros of biases
    load_model(tmp_path / "large", config.card, torch.float32, torch.device("cpu"))


def test_a_large_models_numbers_do_not_depend_on_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(moe_card(num_experts=4))
    for threads, ahead in ((1, 1), (8, 1 << 30)):
        monkeypatch.setattr(made_up, "THREADS", threads)
        monkeypatch.setattr(made_up, "AHEAD", ahead)
        monkeypatch.setattr(made_up.os, "sched_getaffinity", lambda _: range(8))
        made_up.write_made_up(config, tmp_path / str(threads), large=0)
    one, eight = (load_file(tmp_path / name / "model.safetensors") for name in ("1", "8"))
    assert one.keys() == eight.keys()
    assert all(torch.equal(values, eight[name]) for name, values in one.items())
    made_up.write_made_up(config.model_copy(update={"init_seed": 1}), tmp_path / "other", large=0)
    other = load_file(tmp_path / "other" / "model.safetensors")
    assert not any(torch.equal(values, other[name]) for name, values in one.items() if values.ndim > 1)
    matrices = [values.flatten()[:64].float() for values in one.values() if values.ndim > 1]
    assert len({tuple(values.tolist()) for values in matrices}) == len(matrices), "two of the same seed"


def test_one_makes_what_several_want(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_checkpoint(config_of(moe_card()), tmp_path / "before")  # what is imported for it, once
    made, both = [], threading.Barrier(2)
    write = made_up.write_made_up

    def slowly(config: ModelConfig, target: Path) -> None:
        made.append(target)
        write(config, target)

    monkeypatch.setattr(made_up, "write_made_up", slowly)
    is_dir, asked = Path.is_dir, threading.local()

    def at_once(path: Path) -> bool:
        found = is_dir(path)
        if path.parent.name == "models" and not hasattr(asked, "before"):
            asked.before = True
            both.wait(30)  # both have looked, and found nothing
        return found

    monkeypatch.setattr(Path, "is_dir", at_once)
    with ThreadPoolExecutor(2) as pool:
        paths = [pool.submit(random_checkpoint, config_of(moe_card()), tmp_path) for _ in range(2)]
        assert len({path.result(60) for path in paths}) == 1
    assert len(made) == 1


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match=r"take \d+ GB, of which 0 are free(.|\n)*cache_dir="):
        made_up.write_made_up(config_of(moe_card()), tmp_path / "model", large=0)
    assert not list(tmp_path.iterdir())
    assert sources.random_checkpoint(config_of(moe_card()), tmp_path / "cache").is_dir()  # small ones: as they were
