"""`python -m prl.doctor`: what this machine can do, and whether a job can run on it."""
