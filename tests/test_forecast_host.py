"""The forecast of host memory: against what a trainer has, by what it depends on, and against what SLURM gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import moe_checkpoint
from trainer_ranks import Job, build_policy, job_config, train_step

from prl.config.composing import compose
from prl.forecast.forecast import Forecast, forecast
from prl.forecast.hardware import load_hardware
from prl.forecast.host_memory import host_memory, limit_of
from prl.forecast.memory import GIB
from prl.forecast.report import as_json, render
from prl.forecast.setting import Setting
from prl.planning import make_plan
from prl.trainer.memory.optimizer_offload import is_moment
from prl.trainer.world import World

STAGED, MOMENTS, SENT = "checkpoints in the background", "optimizer on the host", "weights for engines"
LARGE = ["model=qwen3_235b_a22b", "model.path=null", "model.tokenizer=byte", "warm_start=none", "inference=vllm",
         "deployment=multi_node", "deployment.num_train_nodes=8", "deployment.num_infer_nodes=8", "inference.tp=8",
         "parallelism.ep=8", "memory=tight", "optim=adamw"]  # fmt: skip


@pytest.mark.parametrize("optim", ["adamw", "muon", "sgd"])
def test_it_is_what_a_trainer_stages_and_keeps_on_the_host(optim: str, world: World, tmp_path: Path) -> None:
    overrides = [f"optim={optim}", "memory_recipe.optim_cpu_offload=true"]
    job = Job(str(moe_checkpoint(tmp_path)), optim={"type": optim, "lr": 0.01}, overrides=overrides)
    policy = build_policy(job, world)
    train_step(policy, 1)
    states = [value for one in policy.optimizers for entry in one.state.values() for value in entry.values()]
    moments = sum(value.nbytes for value in states if is_moment(value))
    masters = sum(param.nbytes for param in policy.model.parameters())
    told = host_memory(Setting(load_hardware(), job_config(job), (64,)))
    assert told[STAGED] == pytest.approx(masters + moments, rel=0.01)
    assert told.get(MOMENTS, 0) == pytest.approx(moments, rel=0.01)


def of(*overrides: str) -> Forecast:
    return forecast(load_hardware(), make_plan(compose([*LARGE, *overrides], "rl")))


def test_each_part_is_there_where_the_configuration_asks_for_it() -> None:
    plain = of("memory=balanced").host
    assert plain.keys() == {STAGED}
    assert plain[STAGED] == pytest.approx(12 * 235e9 / 8, rel=0.01)
    assert not of("memory=balanced", "ckpt.asynchronous=false").host
    assert not of("memory=balanced", "ckpt.interval=0", "ckpt.at_end=false").host
    replicas = of("memory=balanced", "deployment.nodes_per_fsdp_group=4").host
    assert replicas[STAGED] == pytest.approx(plain[STAGED], rel=1e-6), (
        "each of two replicas stages a half of its shards"
    )
    assert of("memory=balanced", "weight_transport=tcp").host[SENT] == pytest.approx(2 * 235e9 / 8, rel=0.01)
    moments = of("memory=balanced", "memory_recipe.optim_cpu_offload=true").host[MOMENTS]
    assert moments == pytest.approx(8 * 235e9 / 8, rel=0.01)
    assert of("memory=balanced", "memory_recipe.optim_cpu_offload=full").host[MOMENTS] == pytest.approx(2 * moments)
    assert of("memory_recipe.ac_offloading.enabled=true").host["activations"] > 0


@pytest.mark.parametrize(
    ("said", "limit"),
    [
        ("null", None),
        ("0", None),
        ("512", 512 << 20),
        ("64G", 64 << 30),
        ("64gb", 64 << 30),
        ("2T", 2 << 40),
        ("8K", 8192),
    ],
)
def test_what_slurm_gives_is_read_as_sbatch_does(said: str, limit: int | None) -> None:
    assert limit_of(compose([f"slurm.mem={said}"])) == limit


def test_more_than_slurm_gives_is_too_large() -> None:
    held = sum(of("memory=balanced").host.values()) / GIB
    (told,) = of("memory=balanced", f"slurm.mem={int(held) - 1}G").too_large
    assert f"{held:,.1f} GiB of host memory" in told
    assert not of("memory=balanced", f"slurm.mem={int(held) + 1}G").too_large


def test_the_table_and_the_json_have_it() -> None:
    told = of("memory=balanced", "weight_transport=tcp")
    assert as_json(told)["host_memory_of_a_node"] == told.host
    lines = render(told).splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("host memory of a node"))
    assert [line.split("  ")[0] for line in lines[begin + 2 : begin + 5]] == [
        STAGED,
        SENT,
        "all, beside the processes' own",
    ]
    assert "host memory" not in render(of("memory=balanced", "ckpt.asynchronous=false"))
