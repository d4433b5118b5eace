"""`python -m prl.orchestrator POINT [--node=K]`: this role of a frozen point, where others start the other ones."""

from __future__ import annotations

from prl.runtime.by_hand import run_role


def main() -> None:
    run_role("orchestrator")


if __name__ == "__main__":
    main()
