"""Runs of the tiny model with something wrong, and the alarm that has to say so.

`python tests/planted.py table OUT [NAME ...]`: play them, a line each.
`python tests/planted.py healthy OUT FIRST LAST`: runs without a fault, one for each seed, and the alarms that they had.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from runs import environment, run, with_faults

SMALL = [
    "algo.batch_size=64",
    "eval=none",
    "logging.wandb.mode=disabled",
    "logging.alarms.window=5",
    "ckpt.at_end=false",
    "ckpt.export_hf=false",
]


def own(name: str, *more: str) -> list[str]:
    return ["~env", f"+env.mix={{own: {{id: 'alarm_envs:{name}'}}}}", *more]


# name -> overrides, fault of tests/faults/alarms.py, alarm
PLANTED: dict[str, tuple[list[str], str | None, str]] = {
    "reward pays for length": (own("PaysForLength", "max_steps=40"), None, "length_runaway"),
    "max_tokens is too small": (["inference.sampling.max_tokens=8", "max_steps=12"], None, "truncated"),
    "engines keep old weights": (["max_steps=40"], "stale_weights", "mismatch"),
    "wrong chat template": (["max_steps=12", "inference.sampling.max_tokens=64"], "wrong_template", "mismatch"),
    "optimizer is frozen": (["optim.lr=1e-30", "max_steps=12"], None, "frozen_weights"),
    "entropy is punished": (["algo.entropy_coef=-1.0", "optim.lr=0.01", "max_steps=40"], None, "entropy_collapse"),
    "environment raises": (own("Raises", "max_steps=12"), None, "failing_environment"),
    "a loss is not finite": (["max_steps=25"], "nan_loss", "not_finite"),
    "reward is the same for all": (own("SameForAll", "max_steps=12"), None, "no_signal"),
    "environment is slow": (own("Slow", "max_steps=12"), None, "trainer_idle"),
    "trainer is slow": (["max_steps=12"], "slow_trainer", "engines_idle"),
    "some rollouts are slow": (own("Uneven", "max_steps=30"), None, "dropped_stale"),
}


def alarms_of(run_dir: Path) -> dict[str, int]:
    """Each alarm that the run had, and the step at which it came on first."""
    path = run_dir / "metrics" / "alarms.jsonl"
    first: dict[str, int] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        row: dict[str, Any] = json.loads(line)
        for kind, is_on in row.items():
            if kind not in ("time", "role", "step", "active") and is_on:
                first.setdefault(kind, row["step"])
    return first


def play(name: str, directory: Path, *more: str) -> dict[str, int]:
    """Alarms of a planted run."""
    overrides, fault, _ = PLANTED[name]
    env = environment() if fault is None else with_faults("alarms", FAULT=fault)
    run_dir = directory / name.replace(" ", "-")
    done = run([*SMALL, *overrides, *more, f"output_dir={run_dir}"], directory, env=env)
    assert done.code == 0, done.output
    found = alarms_of(run_dir)
    assert all(f"alarm {kind} since step {step}:" in done.output for kind, step in found.items()), done.output
    return found


def main() -> None:
    asked = sys.argv[1:]
    if len(asked) < 2 or asked[0] not in ("table", "healthy") or (asked[0] == "healthy" and len(asked) != 4):
        sys.exit("python tests/planted.py table DIRECTORY [FAULT ...] | healthy DIRECTORY FIRST_SEED LAST_SEED")
    what, out = asked[0], Path(asked[1]).absolute()
    out.mkdir(parents=True, exist_ok=True)
    if what == "table":
        for name in sys.argv[3:] or PLANTED:
            found = play(name, out)
            verdict = "named" if PLANTED[name][2] in found else "MISSED"
            print(f"{name:<28} {PLANTED[name][2]:<20} {verdict:<7} {found}", flush=True)
    else:
        for seed in range(int(sys.argv[3]), int(sys.argv[4]) + 1):
            quiet = ["logging.wandb.mode=disabled", "ckpt.export_hf=false", f"seed={seed}", f"output_dir={out}/{seed}"]
            done = run(quiet, out, timeout_s=1000)
            print(f"seed {seed}: exit {done.code}, alarms {alarms_of(out / str(seed))}", flush=True)


if __name__ == "__main__":
    main()
