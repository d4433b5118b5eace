"""`python -m prl.watch`: runs, sweeps and rollouts as a live page."""
