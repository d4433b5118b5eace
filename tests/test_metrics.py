"""Metrics files: written whole, read while written, cut at a resume; model FLOPs by hand; the wandb mirror."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from prl.config import compose
from prl.config.schema import ModelCard
from prl.metrics.mfu import packed_flops, utilisation
from prl.metrics.reader import Tail, read_rows, truncate_rows
from prl.metrics.wandb_mirror import Feed, chart, choose_mode, run_settings
from prl.metrics.writer import MetricsWriter, metrics_path
from prl.planning.model_size import active_parameters
from prl.planning.planner import make_plan


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, "trainer/0")
    writer.log(step=1, loss=np.float32(0.5), hist=np.array([1, 2]), note="a\nb", flag=True, nothing=None)
    writer.log(step=2, loss=float("nan"), worst=float("-inf"))
    first, second = read_rows(tmp_path, "trainer/0")
    assert first["step"] == 1
    assert first["role"] == "trainer/0"
    assert (first["loss"], first["hist"], first["note"], first["flag"]) == (0.5, [1, 2], "a\nb", True)
    assert first["nothing"] is None
    assert math.isnan(second["loss"])
    assert second["worst"] == -math.inf
    assert second["time"] >= first["time"]


def test_a_whole_row_counts_without_the_end_of_its_line(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, "x")
    writer.log(step=1, loss=1.0)
    writer.log(step=2, loss=2.0)
    path = metrics_path(tmp_path, "x")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert [row["step"] for row in read_rows(tmp_path, "x")] == [1, 2]
    path.write_bytes(whole[:-5])
    assert [row["step"] for row in read_rows(tmp_path, "x")] == [1]


def test_every_line_is_strict_json(tmp_path: Path) -> None:
    MetricsWriter(tmp_path, "x").log(step=1, loss=float("nan"), nested={"a": [np.float64("inf")]})

    def refuse(text: str) -> None:
        raise AssertionError(text)

    row = json.loads(metrics_path(tmp_path, "x").read_text(), parse_constant=refuse)
    assert row["loss"] == "nan"
    assert row["nested"] == {"a": ["inf"]}


def test_a_tail_sees_only_whole_new_rows(tmp_path: Path) -> None:
    path = metrics_path(tmp_path, "x")
    tail = Tail(path)
    assert tail.poll() == []
    path.parent.mkdir()
    path.write_text('{"step":1}\n{"st')
    assert tail.poll() == [{"step": 1}]
    with path.open("a") as file:
        file.write('ep":2}\n')
    assert tail.poll() == [{"step": 2}]
    assert tail.poll() == []


def test_a_torn_row_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = metrics_path(tmp_path, "x")
    path.parent.mkdir()
    path.write_text('{"step":1}\n{"step":2,"lo')
    MetricsWriter(tmp_path, "x").log(step=3)
    assert [row["step"] for row in read_rows(tmp_path, "x")] == [1, 3]


def test_rows_that_do_not_fit_are_written_when_there_is_room(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, "x")
    disk = os.dup(writer.file.fd)
    os.dup2(os.open("/dev/full", os.O_WRONLY), writer.file.fd)
    writer.log(step=1)
    writer.log(step=2)
    with pytest.raises(OSError, match="No space"):
        writer.flush()
    os.dup2(disk, writer.file.fd)
    writer.log(step=3)
    writer.flush()
    assert [row["step"] for row in read_rows(tmp_path, "x")] == [1, 2, 3]


def test_truncation_cuts_every_file_at_the_checkpoint(tmp_path: Path) -> None:
    for role in ("orchestrator", "trainer/0"):
        writer = MetricsWriter(tmp_path, role)
        for step in range(5):
            writer.log(step=step)
    truncate_rows(tmp_path, 2)
    assert [row["step"] for row in read_rows(tmp_path, "trainer/0")] == [0, 1, 2]
    assert [row["step"] for row in read_rows(tmp_path, "orchestrator")] == [0, 1, 2]
    truncate_rows(tmp_path, 0)
    assert read_rows(tmp_path, "orchestrator") == []


# --- model FLOPs ------------------------------------------------------------------------------------------------------

DENSE = ModelCard(
    family="qwen3",
    num_hidden_layers=2,
    hidden_size=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=3,
    intermediate_size=16,
    vocab_size=10,
    max_position_embeddings=64,
)
MOE = DENSE.model_copy(
    update={"family": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 5}
)


def test_active_params_of_a_dense_model() -> None:
    # q 8*12, o 12*8, k and v 8*6 each: 288; MLP 3*8*16 = 384; head 8*10 = 80
    assert active_parameters(DENSE) == 2 * (288 + 384) + 80


def test_active_params_count_only_the_experts_a_token_visits() -> None:
    # two of eight experts: 2 * 3*8*5 = 240; router 8*8 = 64
    assert active_parameters(MOE) == 2 * (288 + 240 + 64) + 80


def test_flops_of_one_document() -> None:
    # 3 tokens see 1 + 2 + 3 = 6 pairs; 2 layers * 4 heads * 3 dims * (2 QK + 2 PV) * 3 (forward, backward) per pair
    flops, formula = packed_flops(DENSE, [3])
    assert flops == 6 * 1424 * 3 + 6 * (2 * 4 * 3 * 4 * 3)
    assert "heads*(head_dim+value_dim)" in formula


def test_a_frozen_model_has_no_gradients_of_weights() -> None:
    flops, formula = packed_flops(DENSE, [3], frozen=True)
    assert flops == 4 * 1424 * 3 + 6 * (2 * 4 * 3 * 4 * 3)
    assert formula.startswith("4*P_active*T + 3*layers")
    assert "4*P_active" in utilisation(1e9, 2.0, "cpu", formula)[1]


def test_packing_adds_no_attention_across_documents() -> None:
    assert packed_flops(DENSE, [3, 5])[0] == packed_flops(DENSE, [3])[0] + packed_flops(DENSE, [5])[0]
    assert packed_flops(DENSE, [3, 5])[0] < packed_flops(DENSE, [8])[0]


def test_sparse_attention_is_counted_over_the_chosen_keys():
    card = compose(["model=tiny_glm_moe_dsa"]).model.card  # 4 layers, two of which choose; 16 keys
    dense = 6 * active_parameters(card)
    pair = 4 * 6 * card.num_attention_heads * (2 * card.kv_lora_rank + card.qk_rope_head_dim)
    score = 2 * 2 * card.index_n_heads * card.index_head_dim
    assert packed_flops(card, [3])[0] == dense * 3 + pair * 6 + score * 6
    assert packed_flops(card, [20, 3])[0] == dense * 23 + pair * (16 * 17 / 2 + 4 * 16 + 6) + score * (210 + 6)


def test_utilisation_is_work_over_time_over_peak() -> None:
    share, formula = utilisation(1e9, 2.0, "cpu")
    half, _ = utilisation(1e9, 4.0, "cpu")
    assert 0 < share < 10
    assert share == pytest.approx(2 * half)
    assert "FLOP/s (measured" in formula


# --- wandb ------------------------------------------------------------------------------------------------------------


class Recorder:
    """Stands for a wandb run."""

    def __init__(self) -> None:
        self.rows: list[dict] = []

    def log(self, row: dict) -> None:
        self.rows.append(row)


def test_rows_are_named_by_their_role() -> None:
    row = {"time": 1.0, "role": "trainer/0", "step": 3, "loss": 0.5}
    assert chart("trainer.0", row) == {"step": 3, "trainer.0/loss": 0.5}


def test_a_resumed_mirror_sends_only_what_is_new(tmp_path: Path) -> None:
    writer, sent = MetricsWriter(tmp_path, "orchestrator"), tmp_path / "sent.json"
    for step in (1, 2, 3):
        writer.log(step=step)
    first = Recorder()
    Feed(tmp_path, sent, 0).forward(first)
    truncate_rows(tmp_path, 2)
    again = Recorder()
    feed = Feed(tmp_path, sent, 2)
    MetricsWriter(tmp_path, "orchestrator").log(step=3)
    feed.forward(again)
    assert [row["step"] for row in first.rows] == [1, 2, 3]
    assert [row["step"] for row in again.rows] == [3]


def test_a_run_is_named_after_what_was_swept() -> None:
    config = compose(["seed=3"]).model_copy(update={"sweep": "ablation-1", "swept": {"memory": "tight", "seed": "3"}})
    plan = make_plan(config)
    settings = run_settings(plan, "an-id")
    assert settings["name"] == "memory=tight seed=3"
    assert (settings["group"], settings["id"], settings["job_type"]) == ("ablation-1", "an-id", "rl")
    assert settings["config"]["point_id"] == plan.point_id


@pytest.mark.parametrize(
    ("mode", "environment", "expected"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_API_KEY": "x"}, "online"),
        ("auto", {"WANDB_API_KEY": "x", "WANDB_MODE": "disabled"}, "disabled"),
        ("offline", {"WANDB_API_KEY": "x"}, "offline"),
    ],
)
def test_mode(
    mode: str, environment: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert choose_mode(compose([f"logging.wandb.mode={mode}"]), environment) == expected


def test_nothing_heavy_is_imported_by_the_root() -> None:
    code = (
        "import sys, prl.runtime.launch, prl.runtime.process.child;"
        "import prl.metrics.wandb_mirror, prl.metrics.mfu, prl.status;"
        "print([m for m in ('torch', 'wandb', 'vllm', 'transformers', 'matplotlib', 'aiohttp') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
