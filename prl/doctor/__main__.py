"""`python -m prl.doctor [--json] [overrides]`: what this machine can do, and whether a job can run on it.

Exit code 0: it can, or can be submitted from here; 1: it cannot, and the last lines say why. `-cn sft`: another job.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from prl.config.schema import RunConfig, SlurmConfig
    from prl.doctor.facts import Facts
    from prl.doctor.finding import Finding
    from prl.doctor.needs import Needs
    from prl.doctor.slurm import SlurmFacts


def show_table(config: RunConfig) -> int:
    return _examine(config, as_json=False)


def show_json(config: RunConfig) -> int:
    return _examine(config, as_json=True)


def _examine(config: RunConfig, as_json: bool) -> int:
    from prl.doctor.report import can_run, render, render_json
    from prl.runtime.directory.rundir import OUTPUTS

    began = time.monotonic()
    facts = _look(config.output_dir or str(OUTPUTS), config.cache_dir, config.inference.port)
    needs = needs_on(config, facts.slurm, *_launcher())
    findings = judge(config, facts, needs)
    took_s = time.monotonic() - began
    print((render_json if as_json else render)(findings, needs, took_s).rstrip("\n"))
    return 0 if can_run(findings) else 1


@functools.cache
def _look(output_dir: str, cache_dir: str, port: int) -> Facts:
    """Once for all points of a multirun that ask about the same places."""
    from prl.doctor.asking import Asker
    from prl.doctor.facts import look

    return look({"output_dir": output_dir, "cache_dir": cache_dir}, port, Asker())


def judge(config: RunConfig, facts: Facts, needs: Needs) -> list[Finding]:
    from prl.config.packages import PACKAGES
    from prl.doctor.judging import judge_conflicts, judge_gpus, judge_package, judge_torch
    from prl.doctor.judging_machine import judge_host, judge_scale, judge_slurm, judge_storage, judge_wandb
    from prl.doctor.weights import judge_checkpoint, judge_memory
    from prl.metrics.wandb_mirror import choose_mode, has_key

    return [
        *judge_torch(facts, needs),
        *judge_gpus(facts, needs),
        *(judge_package(package, facts, needs) for package in PACKAGES),
        *judge_conflicts(facts),
        *judge_scale(facts, needs),
        *judge_slurm(facts.slurm, needs),
        *judge_host(facts.host, needs),
        *judge_storage(facts, needs),
        *judge_checkpoint(config, needs),
        *judge_memory(config, needs, bool(facts.torch.gpus), facts.memory_gib),
        *judge_wandb(facts, choose_mode(config, os.environ), has_key(os.environ)),
    ]


def needs_on(config: RunConfig, slurm: SlurmFacts, mode: str, asked: SlurmConfig) -> Needs:
    """What the job needs, here or on nodes: where its launcher sends it, if a cluster is there.

    Args:
        mode: of the launcher: local, slurm, or auto, with which a job that asks for more than CPUs or for several
            nodes is taken to be one for the cluster.
        asked: of SLURM, by the launcher.
    """
    from prl.doctor.needs import needs_of

    own = config.slurm.model_dump(exclude_none=True)
    here = needs_of(config, asked.model_copy(update=own), "here")
    large = here.spans_nodes or here.needs_gpus
    to_cluster = mode == "slurm" or (mode == "auto" and slurm.configured and large)
    where: Literal["here", "nodes"] = "nodes" if to_cluster and not slurm.in_job else "here"
    return needs_of(config, here.slurm, where)


@functools.cache
def _launcher() -> tuple[str, SlurmConfig]:
    """Mode and wishes of `hydra.launcher`. The points of a multirun have no Hydra: there the command line tells."""
    from hydra._internal.utils import get_args_parser
    from hydra.core.hydra_config import HydraConfig

    from launch.reading import settings_of
    from prl.config.composing import compose_yaml

    if HydraConfig.initialized():
        launcher = HydraConfig.get().launcher
    else:
        overrides = get_args_parser().parse_args().overrides
        about_it = [line for line in overrides if line.startswith(("hydra/launcher=", "hydra.launcher."))]
        launcher = compose_yaml(about_it).hydra.launcher
    settings = settings_of(launcher)
    return settings.mode, settings.slurm


def main() -> None:
    """Our flag is taken away first, for Hydra's parser does not know it."""
    try:
        from prl.entry import run_app
    except ImportError as error:
        print(
            f"prl itself cannot start: {error}\n  where: {Path(__file__).parents[1]}\n  do:    pip install -e .",
            file=sys.stderr,
        )
        sys.exit(1)
    as_json = "--json" in sys.argv
    sys.argv = [arg for arg in sys.argv if arg != "--json"]
    run_app(show_json if as_json else show_table, "rl", starts_nothing=True)


if __name__ == "__main__":
    main()
