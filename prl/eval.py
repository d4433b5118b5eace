"""`python -m prl.eval`: a checkpoint, a step of a run, or engines that run already, against environments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prl.entry import run_app

if TYPE_CHECKING:
    from prl.config.schema import RunConfig


def launch(config: RunConfig) -> int:
    from prl.runtime.launch import run

    return run(config)


def main() -> None:
    run_app(launch, "eval")


if __name__ == "__main__":
    main()
