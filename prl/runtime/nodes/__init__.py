"""Several nodes: how their agents find and trust each other, what they say, and the SLURM job around them."""
