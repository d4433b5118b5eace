"""The forecast of one optimizer step of a point: seconds by phase, bytes by link, the peak of a rank, an interval."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from prl.config.world import world_of
from prl.forecast.cost import NOTHING, Cost, total
from prl.forecast.hardware import Hardware
from prl.forecast.host_memory import host_memory, limit_of
from prl.forecast.memory import GIB, Bytes, Peak, peak_memory
from prl.forecast.optimizing import optimizer_step
from prl.forecast.publishing import batches, publication
from prl.forecast.rollout import Rollouts, in_turn, number_bytes, rollouts_of
from prl.forecast.setting import Setting
from prl.forecast.training import Pass, micro_batch, step_end
from prl.forecast.workload import Row, Workload, workload_of
from prl.planning.run_plan import RunPlan

STEP = 1.05  # by which a rate is changed for the sensitivity to it
LEAST = 0.0005  # of a sensitivity that is told
ROLLOUT_FACTOR = 2.0  # the interval of rollouts, either way: engines of this size were not measured
NIC_SHARE = 0.6  # of its wire, to which the NIC may fall in the interval
MEASURED_TOKENS = 16384  # of the shortest rows of measured.yaml
OVERLAPPED_SLOWDOWN = 2.0  # of a trainer on whose GPU an engine decodes (prl/inference/vllm/README.md)
BESIDE, TURNS, SHARED, ALONE = "rollouts run beside training", "in turn", "on the same GPUs at once", "no rollouts"


@dataclass(frozen=True)
class Timing:
    """costs: phase -> cost. busy: those of the trainer, one after another."""

    costs: Mapping[str, Cost]
    rollouts: Rollouts | None
    overlap: str
    publication: Cost = field(default=NOTHING)

    @property
    def trainer_s(self) -> float:
        return sum(cost.total for cost in self.costs.values())

    @property
    def rollout_s(self) -> float:
        """Engines stand still while they take weights in."""
        return 0.0 if self.rollouts is None else self.rollouts.seconds + self.publication.total

    @property
    def step_s(self) -> float:
        return self.step_of(self.trainer_s, self.rollout_s, 0.0 if self.rollouts is None else self.rollouts.bound_s)

    def step_of(self, trainer_s: float, rollout_s: float, bound_s: float) -> float:
        if self.overlap == TURNS:
            return trainer_s + rollout_s - self.publication.total
        if self.overlap == SHARED:
            return max(OVERLAPPED_SLOWDOWN * trainer_s, rollout_s, bound_s)
        return max(trainer_s, rollout_s, bound_s)

    @property
    def bound_by(self) -> str:
        if self.rollouts is None or self.overlap == TURNS:
            return "the trainer" if self.trainer_s >= self.rollout_s else "rollouts"
        paths = {
            "the trainer": self.trainer_s * (OVERLAPPED_SLOWDOWN if self.overlap == SHARED else 1.0),
            "rollouts": self.rollout_s,
            "the longest rollout, which algo.max_off_policy_steps + 1 steps must outlast": self.rollouts.bound_s,
        }
        return max(paths, key=paths.__getitem__)


@dataclass(frozen=True)
class Sensitivity:
    """d ln(seconds) / d ln(rate): of the step, and of the two that it waits for, each alone."""

    step: float
    trainer: float
    rollouts: float


Interval = tuple[float, float]


@dataclass(frozen=True)
class Forecast:
    plan: RunPlan
    hardware: Hardware
    work: Workload
    timing: Timing
    peak: Peak
    host: Bytes  # of a node's trainer ranks, in its memory
    interval: Interval  # of the step
    trainer: Interval  # of the trainer's part alone
    sensitivity: dict[str, Sensitivity]

    @property
    def traffic(self) -> dict[tuple[str, str], float]:
        """(what, link) -> bytes that a trainer's GPU sends in a step; of batches, gets."""
        found = total(self.timing.costs.values()).traffic
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def assumptions(self) -> list[str]:
        """Of the work, and where this point leaves what the rates were measured with."""
        config, longest = self.plan.config, max(sum(row) for row in self.work.laps)
        told = list(self.work.told)
        if longest < MEASURED_TOKENS:
            told.append(
                f"rows of {longest:,} tokens at most keep the GPU busy; the shortest measured have {MEASURED_TOKENS:,},"
                " and shorter ones take longer than is said here, for they are bound by the host"
            )
        quantized = config.inference.quantization
        if self.timing.rollouts is not None and quantized is not None and not quantized.startswith("fp8"):
            told.append(f"weights of inference.quantization={quantized} take {number_bytes(config)} bytes a number")
        backend = config.parallelism.ep_comm_backend
        if backend != "torch" and world_of(config).ep_nodes > 1:
            told.append(f"ep_comm_backend={backend} over nodes: by its bytes, for it was never run on GPUs of several")
        return told

    @property
    def memory_gib(self) -> float:
        """Of a GPU, for the trainer: what an engine beside it leaves."""
        return self.hardware.memory_gib * (1 - (world_of(self.plan.config).overlapping_part or 0.0))

    @property
    def too_large(self) -> list[str]:
        """What does not fit a GPU, or a node's memory; seconds are then of no use."""
        memory, rollouts = self.memory_gib, self.timing.rollouts
        told = []
        if self.peak.total / GIB > memory:
            told.append(f"the trainer: a rank holds {self.peak.total / GIB:,.1f} of {memory:.5g} GiB")
        limit, host = limit_of(self.plan.config), sum(self.host.values())
        if limit is not None and host > limit:
            asked = f"slurm.mem={self.plan.config.slurm.mem}"
            told.append(
                f"a node of trainers: {host / GIB:,.1f} GiB of host memory beside that of processes, and {asked}"
            )
        if rollouts is not None and not rollouts.fits:
            told.append(f"engines: weights of {rollouts.weights_gib:,.1f} GiB a GPU leave no room for one sequence")
        return told

    @property
    def tokens_per_s(self) -> float:
        """Of the whole trainer."""
        return self.work.tokens / self.timing.step_s


def forecast(hardware: Hardware, plan: RunPlan, mean: int | None = None, prompt: int | None = None) -> Forecast:
    """mean, prompt: tokens of completions and prompts, as `workload_of` takes them."""
    work = workload_of(plan.config, mean, prompt)
    timing = timing_of(hardware, plan, work)
    heaviest = Setting(hardware, plan.config, max(work.laps, key=sum))
    return Forecast(
        plan,
        hardware,
        work,
        timing,
        peak_memory(heaviest, len(work.laps)),
        host_memory(heaviest),
        *intervals_of(hardware, plan, work, timing),
        sensitivity_of(hardware, plan, work),
    )


def timing_of(hardware: Hardware, plan: RunPlan, work: Workload) -> Timing:
    done = Pass()
    made: dict[Row, Pass] = {}
    for row in work.laps:
        if row not in made:
            made[row] = micro_batch(Setting(hardware, plan.config, row))
        done += made[row]
    s = Setting(hardware, plan.config, work.laps[0])
    done += step_end(s)
    published = publication(s, plan) if work.completions else NOTHING
    costs = {
        "batches": batches(s, work),
        "forward": done.forward,
        "recomputation": done.repeated,
        "backward": done.backward,
        "collectives and copies that show": Cost(done.exposed.seconds, {**done.exposed.traffic}),
        "optimizer": optimizer_step(s),
        "publication": published,
    }
    costs["forward"] += Cost({}, done.hidden.traffic)
    return Timing(costs, rollouts_of(hardware, plan, work), overlap_of(plan), published)


def overlap_of(plan: RunPlan) -> str:
    config = plan.config
    if config.job != "rl" or not plan.roles_of("inference"):
        return ALONE
    if in_turn(config):
        return TURNS
    return SHARED if config.deployment.type == "colocated" else BESIDE


def intervals_of(hardware: Hardware, plan: RunPlan, work: Workload, timing: Timing) -> tuple[Interval, Interval]:
    """(of the step, of the trainer). The trainer's by the error of fits to other rows, its upper end with slower NICs;
    rollouts' by a factor.
    """
    error = math.exp(hardware.constants.error)
    slow = timing_of(hardware.scaled("nic", NIC_SHARE), plan, work)
    trainer = (timing.trainer_s / error, slow.trainer_s * error)
    bound = 0.0 if timing.rollouts is None else timing.rollouts.bound_s
    low = timing.step_of(trainer[0], timing.rollout_s / ROLLOUT_FACTOR, bound / ROLLOUT_FACTOR)
    high = timing.step_of(trainer[1], slow.rollout_s * ROLLOUT_FACTOR, bound * ROLLOUT_FACTOR)
    return (low, high), trainer


def sensitivity_of(hardware: Hardware, plan: RunPlan, work: Workload) -> dict[str, Sensitivity]:
    """Rate -> what it changes, the largest first; rates without any influence are left out."""

    def slope(fast: float, slow: float) -> float:
        return math.log(fast / slow) / (2 * math.log(STEP)) if fast and slow else 0.0

    found = {}
    for name in hardware.rates:
        fast, slow = (timing_of(hardware.scaled(name, f), plan, work) for f in (STEP, 1 / STEP))
        found[name] = Sensitivity(
            slope(fast.step_s, slow.step_s),
            slope(fast.trainer_s, slow.trainer_s),
            slope(fast.rollout_s, slow.rollout_s),
        )
    ordered = sorted(found.items(), key=lambda item: (item[1].step, item[1].trainer + item[1].rollouts))
    return {name: s for name, s in ordered if min(s.step, s.trainer, s.rollouts) <= -LEAST}
