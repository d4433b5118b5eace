"""What can be seen of a configuration without running it, for test_keys_take_effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tiny import moe_card, random_model

from launch.points import Point
from launch.settings import LauncherSettings
from launch.shapes import Shape
from prl.config.schema import OptimConfig, RunConfig, SamplingConfig
from prl.models.families.build import build_decoder
from prl.models.layers.documents import attend_documents
from prl.planning import make_plan, warm_start_plan
from prl.planning.commands import render_commands
from prl.planning.model_size import parameter_count
from prl.runtime.process.environment import child_environment
from prl.trainer.losses import LOSSES, LossInputs
from prl.trainer.optim import build_optimizers, lr_factor


def observe(config: RunConfig) -> dict[str, Any]:
    """Name -> something that a run with this configuration would do, start or compute."""
    plan = make_plan(config)
    warm = warm_start_plan(plan)
    seen = {
        "size": parameter_count(config.model.card),
        "layout": (plan.mesh, plan.roles, plan.num_nodes, plan.gpus_per_node),
        "commands": render_commands(plan),
        "environment": child_environment(plan, plan.roles[-1], "marker"),
        "slurm": Shape.of(Point((), plan), LauncherSettings(slurm={"time": "1:00"})),
        "optim": optimizer_of(config.optim),
        "loss": loss_of(config),
        "evaluation samples": own_sampling(config),
        "warm start": None if warm is None else (warm.mesh, warm.config.max_steps, warm.config.seq_len),
        "warm start optim": None if warm is None else optimizer_of(warm.config.optim),
    }
    if config.model.card.is_native and config.model.card.hidden_size < 512:
        seen["logits"] = logits_of(config)
    return seen


def own_sampling(config: RunConfig) -> Any:
    """How evaluations sample, other than training; what training does is measured, not read from the configuration."""
    return config.eval.sampling(SamplingConfig())


def optimizer_of(optim: OptimConfig) -> list[Any]:
    model = random_model(moe_card())
    groups = [
        (type(optimizer).__name__, {key: value for key, value in group.items() if key != "params"})
        for optimizer in build_optimizers(model, optim)
        for group in optimizer.param_groups
    ]
    return [groups, [lr_factor(step, 20, optim.schedule) for step in range(1, 21)]]


def loss_of(config: RunConfig) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    logp = -3 * torch.rand(64, generator=generator)
    inputs = LossInputs(
        logp=logp,
        logp_infer=-3 * torch.rand(64, generator=generator),
        advantages=torch.randn(64, generator=generator),
        doc_ids=torch.arange(64) // 16,
        num_docs=4,
    )
    return LOSSES[config.algo.loss](inputs, config.algo).tolist()


def logits_of(config: RunConfig) -> list[float]:
    """Of the model as its checkpoint begins, with the weights of a larger spread, so that every part counts."""
    card = config.model.card
    model = build_decoder(card)
    model.init_weights(torch.Generator().manual_seed(config.model.init_seed), 0.1)
    model.to(getattr(torch, config.model.dtype))
    tokens = torch.arange(24)  # more than the keys that sparse attention sees
    with torch.no_grad():
        hidden = model(tokens % card.vocab_size, tokens, attend_documents(card, [24], torch.device("cpu")))
    return model.logits(hidden).flatten().tolist()


def differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for name in before:
        if before[name] != after.get(name):
            yield name
