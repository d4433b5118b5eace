"""`python -m prl.inference`: the inference server alone; `prl.inference POINT`: the engines of a frozen point."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from prl.entry import run_app

if TYPE_CHECKING:
    from prl.config.schema import RunConfig


def launch(config: RunConfig) -> int:
    from prl.runtime.launch import run

    return run(config)


def main() -> None:
    from prl.runtime.by_hand import is_point, run_role

    if is_point(sys.argv[1:]):
        run_role("inference")
    run_app(launch, "inference")


if __name__ == "__main__":
    main()
