"""`python -m prl.forecast.alternatives OVERRIDES [--completion-tokens=MEAN]`: the trainer's step with pipeline or
tensor parallelism, which the trainer does not have, beside the one that it has. Arithmetic on the same rates.

A pipeline of p stages: each holds its layers' weights gathered for the whole step, so that FSDP gathers and reduces
once a step and not once a micro-batch; 1F1B, whose first stage waits for p - 1 micro-batches of one stage; a stage is
as long as the longest, layers being whole. Rows are dealt to 1 / p of the data ranks. Sends of activations hide.

Tensor parallelism of t ranks in the place of as many context ranks: attention and dense MLPs are split by heads and
columns, whose outputs are added up over the group once forward, once backward and once where they are repeated, for all
tokens of the group. Experts stay as they are. FSDP's gathers of everything else shrink by t.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from prl.config.arguments import a_count, a_share
from prl.config.composing import compose
from prl.config.errors import UserError
from prl.forecast.cost import NIC, NOTHING, NVLINK, Cost, total
from prl.forecast.forecast import Timing, timing_of
from prl.forecast.hardware import Hardware, load_hardware
from prl.forecast.layers import Layer, layers_of
from prl.forecast.memory import GIB, peak_memory
from prl.forecast.recipe import apply_recipe
from prl.forecast.setting import BF16, FLOAT32, Setting
from prl.forecast.sharding import Group, gathered, layer_units, reduced, ring
from prl.forecast.training import head
from prl.forecast.workload import Workload, workload_of
from prl.planning import make_plan

STAGES, TENSOR = (2, 4, 8, 16), (2, 4, 8)


@dataclass(frozen=True)
class Alternative:
    name: str
    seconds: float  # of the trainer's step
    nic_gb: float  # that a GPU sends for weights and gradients, and between stages
    nvlink_gb: float
    memory_gib: float  # peak of a rank
    note: str


def step_of(timing: Timing, changed: float) -> float:
    """The trainer's step with another time for forward, backward and their collectives."""
    kept = ("batches", "optimizer", "publication")
    return changed + sum(timing.costs[name].total for name in kept)


def moved(cost: Cost, what: str) -> tuple[float, float]:
    """GB over (NIC, NVLink) whose purpose begins so."""
    found = {key: n for key, n in cost.traffic.items() if key[0].startswith(what)}
    nic, nvlink = (sum(n for (_, link), n in found.items() if link == name) / 1e9 for name in (NIC, NVLINK))
    return nic, nvlink


def today(s: Setting, timing: Timing, work: Workload) -> Alternative:
    shown = timing.costs["collectives and copies that show"].total
    peak = peak_memory(s, len(work.laps)).total / GIB
    gigabytes = moved(total(timing.costs.values()), "FSDP")
    return Alternative("as built", timing.trainer_s, *gigabytes, peak, f"collectives show {shown:.1f} s")


def pipeline(s: Setting, timing: Timing, work: Workload, stages: int) -> Alternative:
    """work: rows dealt to the fewer data ranks that pipelines leave."""
    rows = [stage_of(replace(s, lengths=row), stages) for row in work.laps]
    stage, count = sum(seconds for seconds, _ in rows), len(rows)
    bubble = (stages - 1) * stage / count
    layers = layers_of(s)
    once = NOTHING
    for n, layer in layers:
        for what, weights, group in layer_units(s, layer):
            ranks = max(1, group.ranks // stages)
            smaller = Group(ranks, min(group.near, ranks))
            once += (gathered(s, what, weights, smaller) + reduced(s, what, weights, smaller)) * (n / stages)
    nic, near = moved(once, "FSDP")
    sends = 2 * s.card.hidden_size * BF16 * sum(sum(row) for row in work.laps) / s.mesh.cp
    uneven = max(part for _, part in rows)
    note = f"{count} micro-batches, bubble {bubble / (stage + bubble):.0%}, stages uneven by {uneven:.0%}"
    seconds = step_of(timing, stage + bubble + once.total)
    return Alternative(f"pipeline of {stages}", seconds, nic + sends / 1e9, near, staged_gib(s, stages), note)


def stage_of(s: Setting, stages: int) -> tuple[float, float]:
    """(seconds of the longest stage, forward and backward of one row; by what part it is longer than the mean)."""
    recipes = [(n, apply_recipe(s, layer)) for n, layer in layers_of(s)]
    of_layers = sum(n * total((r.forward, r.repeated, r.backward)).total for n, r in recipes)
    of_head, count = head(s).seconds, s.card.num_hidden_layers
    mean = (of_layers + of_head) / stages
    longest = max(of_layers * math.ceil(count / stages) / count, mean)
    return longest, longest / mean - 1


def staged_gib(s: Setting, stages: int) -> float:
    """Of a rank: as built, with the stage's weights gathered and their gradients whole in float32, and the inputs of as
    many micro-batches as there are stages, each with 1 / stages of the layers.
    """
    peak = peak_memory(s)
    weights = sum(n * sum(size for _, size, _ in layer_units(s, layer)) for n, layer in layers_of(s)) / stages
    kept = sum(n * apply_recipe(s, layer).kept for n, layer in layers_of(s)) * s.tokens
    rest = sum(n for name, n in peak.parts.items() if name not in ("gradients", "activations", "gathered layers"))
    return (rest + weights * (BF16 + FLOAT32) + kept) / GIB


def tensor(s: Setting, timing: Timing, work: Workload, ranks: int) -> Alternative:
    """Sums over the group, as a reduction and a gather of all its tokens."""
    laps, group = len(work.laps), Group(ranks, min(ranks, s.node_ranks))
    more = less = NOTHING
    repeated = s.config.memory_recipe.ac.mode == "full"
    for count, layer in layers_of(s):
        sums = summed_outputs(layer) * (3 if repeated else 2)
        more += ring(s, "tensor parallelism", s.tokens * ranks * s.card.hidden_size * BF16, group) * (2 * sums * count)
        exchanged = total(p.forward + p.backward + (p.repeated if repeated else NOTHING) for p in layer.parts)
        of_context = sum(n for (what, _), n in exchanged.traffic.items() if what.startswith("CP"))
        less += Cost({"nvlink_all_to_all": s.hardware.seconds("nvlink_all_to_all", of_context)}) * count
    saved = sum(n for (what, _), n in total(timing.costs.values()).traffic.items() if what.endswith("layers"))
    felt = s.hardware.constants.contention * s.hardware.seconds("nvlink_ring", saved * (1 - 1 / ranks))
    was = sum(cost.total for cost in timing.costs.values())
    seconds = was + laps * (more.total - less.total) - felt
    sent = laps * sum(more.traffic.values()) / 1e9
    note = f"sums {laps * more.total:.1f} s, for {laps * less.total:.1f} s of context and {felt:.1f} s of gathers"
    nic, nvlink = moved(total(timing.costs.values()), "FSDP")
    peak = peak_memory(s, laps).total / GIB
    return Alternative(f"tensor of {ranks}", seconds, nic, nvlink + sent, peak, note)


def summed_outputs(layer: Layer) -> int:
    """Blocks of a layer whose output tensor parallelism has to add up: attention or states, and a dense MLP."""
    names = [(part.name, part.block) for part in layer.parts]
    return sum(name in ("output", "out") or (name, block) == ("down", "mlp") for name, block in names)


def alternatives(hardware: Hardware, words: list[str], mean: int | None) -> Iterator[Alternative]:
    plan = make_plan(compose(words))
    work = workload_of(plan.config, mean)
    timing = timing_of(hardware, plan, work)
    s = Setting(hardware, plan.config, max(work.laps, key=sum))
    yield today(s, timing, work)
    for stages in STAGES:
        if s.mesh.dp_shard % stages == 0 and s.card.num_hidden_layers >= stages:
            fewer = workload_of(plan.config, mean, ranks=s.mesh.data_ranks // stages)
            yield pipeline(s, timing, fewer, stages)
    for ranks in TENSOR:
        if s.mesh.cp % ranks == 0:
            yield tensor(s, timing, work, ranks)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m prl.forecast.alternatives")
    parser.add_argument("--completion-tokens", type=a_count)
    parser.add_argument("--nic", type=a_share, default=1.0, help="share of its wire that a NIC reaches")
    arguments, words = parser.parse_known_args()
    hardware = load_hardware().scaled("nic", arguments.nic)
    try:
        found = list(alternatives(hardware, words, arguments.completion_tokens))
    except UserError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(2)
    if len(found) == 1:
        print("Nothing to compare: dp_shard cannot be cut into stages, nor cp by tensor parallelism.")
        print("A large run is one that names its layout, for example +experiment=math_glm_5.")
    print("| layout | trainer's step, s | GB a GPU: NIC, NVLink | peak, GiB | |\n|---|---|---|---|---|")
    for a in found:
        print(f"| {a.name} | {a.seconds:.0f} | {a.nic_gb:,.0f}, {a.nvlink_gb:,.0f} | {a.memory_gib:.0f} | {a.note} |")


if __name__ == "__main__":
    main()
