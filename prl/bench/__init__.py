"""`python -m prl.bench`: how fast, and in how much memory."""
