"""Packages with kernels of their own that are there and do not load."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from prl.config.errors import UserError
from prl.models.experts.deepep import make_buffer
from prl.models.fp8.gemm import deep_gemm
from prl.models.layers.packed_attention import activate_attention

TORCH = f"torch {version('torch')}"


@pytest.fixture(params=[ImportError, OSError, RuntimeError])
def packages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Found by imports, on a Hopper GPU; what they raise depends on who loads the library."""
    for name in ("deep_gemm", "deep_ep"):
        (tmp_path / f"{name}.py").write_text(f"raise {request.param.__name__}('Could not load this library: _C.so')")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", refuse(request.param))
    deep_gemm.cache_clear()


def refuse(error: type[Exception]):
    def activate(name: str) -> None:
        raise error(f"{name}: undefined symbol")

    return activate


@pytest.mark.usefixtures("packages")
def test_one_that_does_not_load_is_told_with_the_versions() -> None:
    with pytest.raises(UserError, match=r"DeepGEMM cannot be imported .Could not load this library: _C.so") as error:
        deep_gemm()
    assert error.value.where == f"model.fp8=deep_gemm, DeepGEMM (no distribution of it), {TORCH}"
    with pytest.raises(UserError, match=r"DeepEP cannot be imported .Could not load this library") as error:
        make_buffer(None, torch.zeros(2, 4), 20)
    assert error.value.where.endswith(f"DeepEP (no distribution of it), {TORCH}")
    with pytest.raises(UserError, match="flash_attention_3 cannot be activated: FA3: undefined symbol") as error:
        activate_attention("flash_attention_3")
    assert error.value.where.endswith(TORCH)
