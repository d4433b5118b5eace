"""`python -m prl.sft`: supervised fine-tuning; under torchrun each of its processes is one trainer rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prl.entry import run_app

if TYPE_CHECKING:
    from prl.config.schema import RunConfig


def launch(config: RunConfig) -> int:
    from prl.runtime.launch import run

    return run(config)


def main() -> None:
    from prl.runtime.nodes.torchrun import take_torchrun

    torchrun = take_torchrun()
    if torchrun is None:
        run_app(launch, "sft")
        return
    from prl.runtime.by_hand import under_torchrun

    under_torchrun(torchrun, lambda lead: run_app(lead, "sft"))


if __name__ == "__main__":
    main()
