"""`python -m prl.bench`: speed and memory of the trainer, the engine or the whole stack, on made-up data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prl.entry import run_app

if TYPE_CHECKING:
    from prl.config.schema import RunConfig


def launch(config: RunConfig) -> int:
    from prl.bench.launch import run

    return run(config)


def main() -> None:
    run_app(launch, "bench")


if __name__ == "__main__":
    main()
