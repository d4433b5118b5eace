"""`python -m prl.plan [--json] [overrides]`: the layout of a run; nothing starts. `-cn sft` plans another job."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from prl.config.entry import run_app

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


def main() -> None:
    """`--json` is ours and Hydra's parser does not know it, so it is taken away first."""
    as_json = "--json" in sys.argv
    sys.argv = [arg for arg in sys.argv if arg != "--json"]
    run_app(show_json if as_json else show_table, "rl", starts_nothing=True)


if __name__ == "__main__":
    main()
