"""`python -m prl.sft`: supervised fine-tuning; under torchrun each of its processes is one trainer rank."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from prl.entry import run_app

if TYPE_CHECKING:
    from prl.config.schema import RunConfig


def launch(config: RunConfig) -> int:
    from prl.runtime.launch import run

    return run(config)


def main() -> None:
    from prl.config.errors import UserError
    from prl.runtime.nodes.torchrun import looks_like_ranks, take_torchrun

    try:
        torchrun = take_torchrun()
    except UserError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(2)
    if torchrun is None:
        if told := looks_like_ranks(os.environ):
            print(told, file=sys.stderr)
        run_app(launch, "sft")
        return
    from prl.runtime.by_hand import under_torchrun

    under_torchrun(torchrun, lambda lead: run_app(lead, "sft"))


if __name__ == "__main__":
    main()
