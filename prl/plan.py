"""`python -m prl.plan [--json|--commands] [overrides]`: the layout of a run; nothing starts. `-cn sft`: another job.

--commands prints every process of every node with its environment, and what vLLM is given in it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from prl.entry import run_app

if TYPE_CHECKING:
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


def main() -> None:
    """Our flags are taken away first, for Hydra's parser does not know them."""
    ways = {"--json": show_json, "--commands": show_commands}
    asked = [ways[arg] for arg in sys.argv if arg in ways]
    sys.argv = [arg for arg in sys.argv if arg not in ways]
    run_app(asked[-1] if asked else show_table, "rl", starts_nothing=True)


if __name__ == "__main__":
    main()
