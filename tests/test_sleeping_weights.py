"""Weights of a built-in engine that sleeps."""

from __future__ import annotations

import logging

import pytest
import torch
from tiny import moe_card, random_model

from prl.inference.sleeping_weights import SleepingWeights

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def bits(model: torch.nn.Module) -> list[torch.Tensor]:
    return [x.detach().cpu().clone() for x in (*model.parameters(), *model.buffers())]


def test_they_come_back_to_the_bit(device: torch.device) -> None:
    model = random_model(moe_card()).to(device)
    sleeping, parameters = SleepingWeights(model, device), list(model.parameters())
    for add in (0.0, 1.0, 2.0):
        with torch.no_grad():
            parameters[0] += add
        before = bits(model)
        sleeping.leave(keep=True)
        sleeping.leave(keep=True)  # that is asleep
        assert all(x.device.type == "cpu" for x in model.parameters())
        sleeping.come_back()
        assert all(x.device.type == device.type for x in (*model.parameters(), *model.buffers()))
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(bits(model), before, strict=True))


def test_what_was_dropped_is_not_kept(device: torch.device) -> None:
    model = random_model(moe_card()).to(device)
    sleeping = SleepingWeights(model, device)
    sleeping.leave(keep=False)
    sleeping.leave(keep=True)
    assert all(x.is_meta for x in model.parameters())
    sleeping.come_back()
    assert all(x.device.type == device.type for x in model.parameters())
    with torch.no_grad():
        for x in (*model.parameters(), *model.buffers()):
            x.fill_(0.25)
    sleeping.leave(keep=True)
    sleeping.come_back()
    assert all((x == 0.25).all() for x in model.parameters())


@GPU
def test_they_leave_the_gpu_for_pinned_memory_which_stays(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    device = torch.device("cuda")
    model = random_model(moe_card()).to(device)
    sleeping, awake = SleepingWeights(model, device), torch.cuda.memory_allocated()
    places = []
    for _ in range(2):
        sleeping.leave(keep=True)
        assert torch.cuda.memory_allocated() < awake
        assert all(x.is_pinned() for x in model.parameters())
        places.append([x.data_ptr() for x in model.parameters()])
        sleeping.come_back()
    assert places[0] == places[1]
    empty = torch.empty

    def refuse(*args, pin_memory=False, **options):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    before, other = bits(model), SleepingWeights(model, device)
    with caplog.at_level(logging.WARNING):
        other.leave(keep=True)
    assert caplog.text.count("no pinned host memory") == 1
    other.come_back()
    assert all(torch.equal(a, b) for a, b in zip(bits(model), before, strict=True))
