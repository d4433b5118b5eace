"""`python -m prl.plan [--json|--commands] [overrides]`: the layout of a run; nothing starts. `-cn sft`: another job.

--commands prints every process of every node with its environment, and what vLLM is given in it. --freeze writes the
plan into output_dir, for roles that are started by hand. --emit=k8s|skypilot prints a manifest that runs the point.
--forecast says how long a step takes, what bounds it, what goes over which link and what a rank holds at its peak;
--recipes which memory recipes fit, and how fast they are.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import fields
from typing import TYPE_CHECKING

from prl.config.console import one_line
from prl.entry import run_app

if TYPE_CHECKING:
    from collections.abc import Callable

    from prl.config.schema import RunConfig


def show_table(config: RunConfig) -> int:
    from prl.planning import make_plan
    from prl.planning.render import render_plan

    print(render_plan(make_plan(config)))
    return 0


def show_json(config: RunConfig) -> int:
    from prl.planning import make_plan, plan_to_json

    print(plan_to_json(make_plan(config)), end="")
    return 0


def show_commands(config: RunConfig) -> int:
    from prl.planning import make_plan
    from prl.planning.commands import render_commands

    print(render_commands(make_plan(config)), end="")
    return 0


def freeze(config: RunConfig) -> int:
    from prl.planning import make_plan
    from prl.runtime.directory.rundir import claim
    from prl.runtime.nodes.seats import LEADERS, commands_by_hand

    plan = make_plan(config)
    point = claim(plan)
    point.release()
    print(one_line(f"frozen: {point.path}"))
    for command in commands_by_hand(plan, point.path) if plan.config.job in LEADERS else ():
        print(f"    {command}")
    return 0


def manifest_of(arguments: argparse.Namespace) -> Callable[[RunConfig], int]:
    from prl.planning.manifests import Site, emit
    from prl.runtime.directory.own_modules import find_own_modules

    site = Site(**{field.name: getattr(arguments, field.name) for field in fields(Site)})

    def show_manifest(config: RunConfig) -> int:
        print("---\n" + emit(config, arguments.emit, site, find_own_modules(config)), end="")
        return 0

    return show_manifest


def forecast_of(arguments: argparse.Namespace) -> Callable[[RunConfig], int]:
    import json

    as_text = arguments.way is not show_json

    def show_forecast(config: RunConfig) -> int:
        from prl.forecast.forecast import forecast
        from prl.forecast.hardware import load_hardware
        from prl.forecast.report import as_json, render
        from prl.planning import make_plan

        hardware = load_hardware(arguments.hardware) if arguments.hardware else load_hardware()
        told = forecast(hardware, make_plan(config), arguments.completion_tokens, arguments.prompt_tokens)
        print(render(told) if as_text else json.dumps(as_json(told), indent=1))
        return 0

    return show_forecast


def recipes_of(arguments: argparse.Namespace) -> Callable[[RunConfig], int]:
    def show_recipes(config: RunConfig) -> int:
        from prl.forecast.choices import choices, render
        from prl.forecast.hardware import load_hardware

        hardware = load_hardware(arguments.hardware) if arguments.hardware else load_hardware()
        if arguments.gpu_gib is not None:
            hardware = hardware.model_copy(update={"memory_gib": arguments.gpu_gib})
        found = choices(hardware, config, arguments.completion_tokens, arguments.prompt_tokens)
        print(render(found, config, hardware))
        return 0

    return show_recipes


def refuse_with_forecast(arguments: argparse.Namespace) -> None:
    """Leave with code 2 for what a forecast, or a table of recipes, is not printed with."""
    from prl.config.errors import UserError

    error = None
    if arguments.recipes and (arguments.forecast or arguments.emit or arguments.way is not None):
        error = UserError(
            "Memory recipes are printed alone.",
            where="--recipes",
            why="they are a table of many points, and nothing is frozen for it",
            fix="leave --forecast, --json, --emit, --freeze and --commands out",
        )
    elif arguments.forecast and (arguments.emit or arguments.way not in (None, show_json)):
        error = UserError(
            "A forecast is printed alone.",
            where="--forecast",
            why="nothing is frozen for it, and its tables or JSON are all that stands on standard output",
            fix="leave --emit, --freeze and --commands out",
        )
    if error is not None:
        print(error.render(), file=sys.stderr)
        sys.exit(2)


def refuse_with_emit(arguments: argparse.Namespace, rest: list[str]) -> None:
    """Leave with code 2 for what a manifest is not printed with."""
    from prl.config.errors import UserError

    told = None
    if arguments.way is not None:
        told = UserError(
            "A manifest is printed alone.",
            where=f"--emit={arguments.emit}",
            why="it holds its plan, so that nothing has to be frozen or shown beside it",
            fix="leave --freeze, --json and --commands out",
        )
    elif arguments.emit == "skypilot" and {"-m", "--multirun"} & set(rest):
        told = UserError(
            "SkyPilot takes one point in a file.",
            where="--emit=skypilot -m",
            why="several documents are a chain of tasks to it, one after another",
            fix="without -m, a command for each point",
        )
    if told is not None:
        print(told.render(), file=sys.stderr)
        sys.exit(2)


HELP = """\
python -m prl.plan [-cn JOB] [overrides]      which role runs where, and what it takes; with -m of each point of a sweep
  --json                                      the plan as JSON
  --commands                                  the command and environment of every process of the engines
  --freeze output_dir=POINT                   write a point that roles by hand and other schedulers start
  --emit=k8s --image=I --volume=CLAIM [--mount=DIR]
  --emit=skypilot --mount=DIR [--accelerator=GPU] [--image=I] [--volume=V]
                                              the same as a manifest (launch/README.md)
  --forecast [--json] [--hardware=h200_ib400] [--completion-tokens=MEAN] [--prompt-tokens=N]
                                              seconds of a step, bytes by link, peak of a rank (prl/forecast/README.md)
  --recipes [--gpu-gib=N] [--hardware=h200_ib400] [--completion-tokens=MEAN] [--prompt-tokens=N]
                                              memory recipes from the fastest to the smallest, and which of them fit
"""


def main() -> None:
    """Our flags are taken away first, for Hydra's parser does not know them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag, way in {"--json": show_json, "--commands": show_commands, "--freeze": freeze}.items():
        parser.add_argument(flag, dest="way", action="store_const", const=way)
    parser.add_argument("--emit", choices=("k8s", "skypilot"))
    site = [f"--{name}" for name in ("image", "volume", "mount", "accelerator")]
    for flag in site:
        parser.add_argument(flag, default="")
    parser.add_argument("--forecast", action="store_true")
    parser.add_argument("--recipes", action="store_true")
    parser.add_argument("--gpu-gib", type=float)
    of_forecast = {"--hardware": str, "--completion-tokens": int, "--prompt-tokens": int}
    for flag, kind in of_forecast.items():
        parser.add_argument(flag, type=kind)
    arguments, rest = parser.parse_known_args()
    sys.argv = [sys.argv[0], *rest]
    if {"-h", "--help"} & set(rest):  # ours first, then what Hydra says of all keys
        with contextlib.suppress(BrokenPipeError):  # whose reader has seen enough
            print(HELP, flush=True)
    if not arguments.emit and any(getattr(arguments, flag[2:]) for flag in site):
        parser.error(f"{', '.join(site)} belong to --emit=k8s or --emit=skypilot")
    given = [flag for flag in of_forecast if getattr(arguments, flag[2:].replace("-", "_")) is not None]
    if given and not (arguments.forecast or arguments.recipes):
        parser.error(f"{', '.join(of_forecast)} belong to --forecast and --recipes")
    if arguments.gpu_gib is not None and not (arguments.recipes and arguments.gpu_gib > 0):
        parser.error("--gpu-gib belongs to --recipes" if not arguments.recipes else "--gpu-gib is above 0")
    refuse_with_forecast(arguments)
    if arguments.forecast or arguments.recipes:
        arguments.way = (recipes_of if arguments.recipes else forecast_of)(arguments)
    if arguments.emit:
        refuse_with_emit(arguments, rest)
        arguments.way = manifest_of(arguments)
    run_app(arguments.way or show_table, "rl", starts_nothing=True)


if __name__ == "__main__":
    main()
