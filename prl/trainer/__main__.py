"""`python -m prl.trainer POINT [--node=K]`: this role of a frozen point, where others start the other ones."""

from __future__ import annotations

from prl.runtime.by_hand import run_role


def main() -> None:
    run_role("trainer")


if __name__ == "__main__":
    main()
