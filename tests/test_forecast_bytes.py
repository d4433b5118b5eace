"""The bytes that a forecast counts are those that the trainer's ranks send to each other, and that weights take."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from rank_processes import run_script

from prl.config.composing import compose
from prl.forecast.cost import total
from prl.forecast.hardware import load_hardware
from prl.forecast.layers import layers_in_order
from prl.forecast.publishing import publication
from prl.forecast.setting import Setting
from prl.forecast.training import micro_batch
from prl.planning import make_plan
from prl.planning.model_size import parameter_count
from prl.transport.boxes import Table
from prl.transport.rounds import Schedule

LAYOUT = ["warm_start=none", "model.dtype=bfloat16", "deployment.device=cpu", "deployment.num_train_gpus=4",
          "parallelism.dp_shard=2", "parallelism.cp=2", "parallelism.ep=2", "seq_len=256", "optim=adamw"]  # fmt: skip
CASES = {"qwen3_moe": ["memory=none"], "glm4_moe": ["memory=none"], "recomputed": ["memory_recipe.ac.mode=full"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ranks_send_what_is_counted(name: str, tmp_path: Path) -> None:
    """FSDP's collectives and the exchange of heads to the byte; tokens by the routers' choice, which is only expected
    to be even.
    """
    model = "glm4_moe" if name == "glm4_moe" else "qwen3_moe"
    overrides = [*LAYOUT, f"model=tiny_{model}", *CASES[name]]
    run_script("forecast_ranks.py", tmp_path, 4, *overrides)
    seen = json.loads((tmp_path / "sent.json").read_text())
    done = micro_batch(Setting(load_hardware(), compose(overrides), (256,)))
    counted: Counter[str] = Counter()
    for (what, _), nbytes in total(
        (done.forward, done.repeated, done.backward, done.exposed, done.hidden)
    ).traffic.items():
        counted[" ".join(what.split()[:2]).rstrip(",")] += nbytes
    assert seen["all_gather"] == counted["FSDP gathers"]
    assert seen["reduce_scatter"] == counted["FSDP reductions"]
    assert seen["heads"] == counted["CP, heads"]
    assert seen["tokens"] == pytest.approx(counted["EP dispatch"], rel=0.15)
    setting = Setting(load_hardware(), compose(overrides), (256,))
    assert_gathered_ahead(seen["order"], [layer.experts for layer in layers_in_order(setting) if layer.experts])


def assert_gathered_ahead(order: list[tuple[str, int]], experts: list[int]) -> None:
    """Each layer's experts, of which a rank has half in bfloat16, before the layer before exchanges tokens; in backward
    the layer after.
    """
    n = len(experts)
    gathered = [i for i, (what, nbytes) in enumerate(order) if (what, nbytes) == ("gather", experts[0])]
    exchanged = [i for i, (what, _) in enumerate(order) if what == "tokens"]
    assert len(gathered) == 2 * n
    for places, moments in ((gathered[:n], exchanged[: 2 * n]), (gathered[n:], exchanged[2 * n :])):
        firsts = moments[:: len(moments) // n]  # of the exchanges of each layer
        assert all(place < first for place, first in zip(places[1:], firsts, strict=False)), order


@pytest.mark.parametrize(
    ("overrides", "nbytes", "whole"),
    [
        (["model=deepseek_v3", "inference.tp=8", "inference.quantization=fp8"], 2, True),
        (["model=qwen3_30b_a3b", "inference.tp=4", "inference.quantization=fp8"], 2, True),
        (["model=deepseek_v3", "inference.tp=8"], 2, False),
        (["model=qwen3_30b_a3b", "inference.tp=2", "inference.quantization=fp8_block"], 1, False),
    ],
)
def test_engines_that_quantise_by_themselves_get_all(overrides: list[str], nbytes: int, whole: bool) -> None:
    """Each of their processes; others what they hold, also where attention is latent or weights come in blocks."""
    config = compose(
        ["deployment=multi_node", "deployment.num_train_nodes=2", "deployment.num_infer_nodes=1", "inference=vllm",
         "weight_transport=nccl", "warm_start=none", "parallelism=fsdp", "parallelism.dp_shard=auto",
         "deployment.device=cuda", *overrides]
    )  # fmt: skip
    plan = make_plan(config)
    cost = publication(Setting(load_hardware(), config, (64,)), plan)
    everything = parameter_count(config.model.card) * nbytes * 8 / 16
    share = sum(cost.traffic.values()) / everything
    assert share == pytest.approx(1) if whole else 1 / config.inference.tp <= share < 1.1 / config.inference.tp


def test_a_publication_takes_the_bytes_of_its_plan() -> None:
    """An engine of four processes with tensor parallelism: whole rows of each matrix for each."""
    config = compose(
        ["deployment=multi_node", "deployment.num_train_nodes=1", "deployment.num_infer_nodes=1", "inference=vllm",
         "deployment.gpus_per_node=4", "inference.tp=4", "weight_transport=nccl", "warm_start=none",
         "model=qwen3_4b", "parallelism=fsdp", "deployment.device=cuda"]
    )  # fmt: skip
    plan = make_plan(config)
    sent = sum(publication(Setting(load_hardware(), config, (64,)), plan).traffic.values())
    card, rows = config.model.card, 4096
    numel = sum(np.prod(shape) for shape in _shapes(config))
    columns = int(numel // rows)
    table = Table(["everything"], ["bfloat16"], [[rows, columns]])
    held = [np.array([[0, i * rows // 4, rows // 4, 0, columns]]) for i in range(4)]
    schedule = Schedule.of(table, held, 256 << 20)
    wanted = [np.array([[0, 0, rows, i * (columns // 4), columns // 4]]) for i in range(4)]
    planned = sum(schedule.message(0, 0, boxes).sizes.sum() for boxes in wanted)
    assert sent == pytest.approx(planned, rel=1e-3)
    assert card.num_hidden_layers == 36


def _shapes(config) -> list[tuple[int, ...]]:
    import torch

    from prl.models.families.build import build_decoder

    with torch.device("meta"):
        return [tuple(param.shape) for param in build_decoder(config.model.card).parameters()]
