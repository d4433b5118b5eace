"""The run directory: its files, who holds it, its checkpoints, what they say of the run."""
