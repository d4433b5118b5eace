"""Every `model.attn` side by side, and what the parts that ask for kernels by name make of FlashAttention 3."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from prl.bench import attention, checkpoint
from prl.config import compose
from prl.forecast.hardware import load_hardware
from prl.forecast.setting import Setting
from prl.planning import make_plan


def test_the_measurement_has_rows_of_errors_and_of_each_length(capsys, monkeypatch) -> None:
    monkeypatch.setattr(
        "sys.argv", ["attention", "40", "80", "--heads", "2", "--kv-heads", "1", "--widths", "24", "16"]
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    attention.main()
    errors, *rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [float(error) for error in errors[1:5]] == [0, 0, 0, 0], "in float32 it is held against itself"
    assert [row[:2] for row in rows] == [["auto", "40"], ["auto", "80"]]
    assert all(float(figure) > 0 for row in rows for figure in row[2:])


def test_errors_are_those_of_the_kernel(monkeypatch) -> None:
    """An attention that is off by a thousandth is found to be."""
    real = attention.packed_attention

    def off(lengths, device, impl="auto"):
        attend = real(lengths, device, impl)
        return attend if impl == "sdpa" else lambda *args: attend(*args) * 1.001

    monkeypatch.setattr(attention, "packed_attention", off)
    monkeypatch.setattr(attention, "DOCUMENTS", [20, 7])
    found = attention.errors("auto", attention.Sizes(2, 1, 16, 16), torch.device("cpu"))
    assert found == pytest.approx([1e-3] * 4, rel=1e-2)


def test_kernels_that_are_not_installed_are_told(capsys) -> None:
    sizes = attention.Sizes(2, 1, 16, 16)
    (row,) = attention.rows("flash_attention_3", [16], sizes, torch.device("cpu"))
    assert "not here: pip install" in row


STAND_IN = """
import torch

library = torch.library.Library("flash_attn_3", "DEF")
library.define("fwd(Tensor x) -> Tensor")
library.define("bwd(Tensor x) -> Tensor")
"""
ACTIVATE_IT = """
import torch
from torch.nn.attention import current_flash_attention_impl
from prl.models.layers.attention_kernels import width_of_values
from prl.models.layers.packed_attention import activate_attention

keys, values = torch.zeros(5, 2, 192), torch.zeros(5, 2, 128)
assert width_of_values(keys, values) == 192
activate_attention("flash_attention_3")
assert current_flash_attention_impl() == "FA3"
assert width_of_values(keys, values) == 128
assert width_of_values(keys, torch.zeros(5, 2, 64)) == 192
"""


def test_flash_attention_3_takes_latent_attentions_widths_as_they_are(tmp_path) -> None:
    (tmp_path / "flash_attn_interface.py").write_text(STAND_IN)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", ACTIVATE_IT], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("model", "attn", "kernel"),
    [
        ("qwen3_0_6b", "flash_attention_3", "fa3"),
        ("deepseek_v3", "flash_attention_3", "fa3"),
        ("qwen3_0_6b", "flash_attention_4", "fa4"),
        ("deepseek_v3", "flash_attention_4", "fa4"),
        ("qwen3_0_6b", "flash_attention_2", "flash"),
        ("tiny_qwen3", "flash_attention_3", "flash"),
    ],
)
def test_forecasts_know_the_rate_of_each(model, attn, kernel) -> None:
    overrides = [
        f"model={model}",
        "model.path=null",
        "model.tokenizer=byte",
        "model.dtype=bfloat16",
        f"model.attn={attn}",
    ]
    config = compose([*overrides, "deployment.device=cuda"])
    hardware = load_hardware()
    setting = Setting.__new__(Setting)
    object.__setattr__(setting, "config", make_plan(config).config)
    assert Setting.kernel.fget(setting) == kernel
    card = config.model.card
    assert hardware.attention_variant(kernel, card.head_dim) in hardware.rates["attention_backward"].by


def test_checkpoints_are_measured_in_a_directory_that_is_made(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["checkpoint", str(tmp_path / "a" / "b"), "--variants", "prl"])
    monkeypatch.setattr(checkpoint, "measure", lambda variant, said: [])
    checkpoint.main()
    assert (tmp_path / "a" / "b").is_dir()
