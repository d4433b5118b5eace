"""What a round of chaos is, and how one is drawn from a seed: the same seed draws the same rounds."""

from __future__ import annotations

import random
from dataclasses import dataclass

STEPS = 6
SMALL = [
    "warm_start=none",
    f"max_steps={STEPS}",
    "algo.batch_size=16",
    "algo.group_size=4",
    "eval.num_tasks=4",
    "eval.interval=3",
    "ckpt.interval=2",
    "inference.sampling.max_tokens=12",
    "env.mix.reverse_text.args.max_chars=10",
    "logging.wandb.mode=disabled",
    "debug.keep_rollouts=true",
    "debug.num_threads=1",  # rounds are played side by side
]


@dataclass(frozen=True)
class Deployment:
    """One way to run the job. `victims`: roles of its children; `restarts`: those that come back by themselves."""

    name: str
    overrides: tuple[str, ...]
    victims: tuple[str, ...]
    restarts: frozenset[str] = frozenset({"inference", "env", "router"})
    synchronous: bool = False
    points: int = 1  # of a sweep
    slurm: bool = False


TWO_ENGINES = ("deployment.num_infer_gpus=2", "inference.router.type=builtin")
SINGLE = ("inference/0", "env/reverse_text", "orchestrator", "trainer/0")
DEPLOYMENTS = [
    Deployment("disaggregated", (), SINGLE),
    Deployment("synchronous", ("algo.max_off_policy_steps=0",), SINGLE, frozenset({"env"}), synchronous=True),
    Deployment("colocated", ("deployment=colocated",), SINGLE, frozenset({"env"})),
    Deployment(
        "two engines behind a router",
        TWO_ENGINES,
        (*SINGLE, "inference/1", "router"),
    ),
    Deployment(
        "two trainers, weights by tcp",
        ("deployment.num_train_gpus=2", "weight_transport=tcp"),
        (*SINGLE, "trainer/1"),
    ),
    Deployment(
        "two nodes, rehearsed",
        ("deployment=multi_node", "deployment.gpus_per_node=1", "deployment.device=cpu"),
        (*SINGLE, "agent"),
    ),
    Deployment(
        "a sweep of two points",
        ("seed=1,2", "hydra.launcher.parallel_points=2", "sweep=s", "hydra.launcher.retry_failed=true"),
        SINGLE,
        points=2,
    ),
]
SWEEP = ("hydra/launcher=slurm", "sweep=s", "seed=1", "hydra.launcher.retry_failed=true")
TWO_NODES = ("deployment=multi_node", "deployment.gpus_per_node=2", "deployment.device=cpu", "weight_transport=tcp")
SLURM = [
    Deployment("SLURM, one node", SWEEP, SINGLE, slurm=True),
    Deployment("SLURM, two nodes", (*SWEEP, *TWO_NODES), (*SINGLE, "agent"), slurm=True),
]
VLLM = [
    Deployment("vLLM", ("inference=vllm",), SINGLE),
    Deployment("vLLM, synchronous", ("inference=vllm", "algo.max_off_policy_steps=0"), SINGLE, frozenset({"env"})),
    Deployment("two vLLMs behind a router", ("inference=vllm", *TWO_ENGINES), (*SINGLE, "inference/1", "router")),
]
KINDS = {"local": DEPLOYMENTS, "slurm": SLURM, "vllm": VLLM}
# where somebody is killed; None: after some seconds, wherever that is. See ../faults/moments.py
ENGINE_RESTART = "engine restart"  # of the first engine, which is killed for it
MOMENTS = [
    None,
    "staging",
    "staged",
    "commit",
    "manifest",
    "before rename",
    "committed",
    "publication",
    "published",
    "update",
    "updated",
    "evaluation",
    "evaluated",
    "optimizer step",
    "stepped",
    "metrics",
    "batch",
    "engine start",
    ENGINE_RESTART,
    "end",
]
COUNTS = {"metrics": 12, "batch": STEPS, "optimizer step": STEPS, "stepped": STEPS}
COUNTS |= dict.fromkeys(("publication", "published", "update", "updated"), STEPS + 1)
COUNTS |= dict.fromkeys(("engine start", ENGINE_RESTART, "end"), 1)
OTHER_COUNTS = 3  # checkpoints and evaluations
ROOT_SIGNALS = ["KILL", "TERM", "INT", "HUP", "STOP", "TERM twice", "terminal closed"]
# whose answer comes too late, or whose connection is closed; see ../faults/network.py
ROUTES = [
    "/train/batch",
    "/train/weights",
    "/train/turn",
    "/train/delivery",
    "/train/checkpoint",
    "/train/done",
    "/inference/v1/generate",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/pause",
    "/resume",
]
SLURM_SIGNALS = ["cancel", "requeue", "node down", "KILL", "TERM"]
CHILD_SIGNALS = ["KILL", "TERM", "INT", "STOP", "ABRT"]
MAX_DELAY_S = 20.0
SECOND_HIT = 0.25  # of the rounds


@dataclass(frozen=True)
class Round:
    """Who is hit how and when, in which deployment."""

    seed: int
    deployment: Deployment
    victim: str  # root, reaper, a child's role, agent (of the second node), http (one answer), disk, or (SLURM's) job
    signal: str
    moment: str | None  # NAME:COUNT, or ROUTE:COUNT
    delay_s: float  # after the start, if there is no moment; else after it
    again_s: float | None = None  # so long after the second start its root gets SIGKILL, too

    @property
    def name(self) -> str:
        when = self.moment or f"after {self.delay_s:.1f} s"
        again = "" if self.again_s is None else f", KILL again {self.again_s:.0f} s later"
        return f"{self.seed}: {self.deployment.name}, {self.victim} {self.signal}, {when}{again}"


def draw(seed: int, kind: str = "local") -> Round:
    """The round of this seed."""
    rng = random.Random(seed)
    deployment = KINDS[kind][seed % len(KINDS[kind])]  # each comes equally often, also in a small slice
    above = ["job", "job", "root"] if deployment.slurm else ["root", "root", "disk", "reaper"]
    victim = rng.choice([*above, "http", *deployment.victims])
    again_s = rng.uniform(1.0, MAX_DELAY_S) if rng.random() < SECOND_HIT and not deployment.slurm else None
    if victim == "http":
        route = f"{rng.choice(ROUTES)}:{rng.randint(1, 4)}"
        return Round(seed, deployment, victim, rng.choice(["delay", "drop"]), route, 0.0, again_s)
    signal = rng.choice(signals_for(victim, deployment))
    name = rng.choice([name for name in MOMENTS if name != ENGINE_RESTART or "inference" in deployment.restarts])
    if name is None:
        return Round(seed, deployment, victim, signal, None, rng.uniform(0.5, MAX_DELAY_S), again_s)
    count = rng.randint(1, COUNTS.get(name, OTHER_COUNTS))
    return Round(seed, deployment, victim, signal, f"{name}:{count}", rng.choice([0.0, 0.0, 0.05, 0.3]), again_s)


def signals_for(victim: str, deployment: Deployment) -> list[str]:
    """What may be done to a victim."""
    special = {"reaper": ["KILL"], "disk": ["full"], "job": SLURM_SIGNALS}
    if victim == "root":
        return [s for s in ROOT_SIGNALS if s != "terminal closed"] if deployment.slurm else ROOT_SIGNALS
    return special.get(victim, CHILD_SIGNALS)
