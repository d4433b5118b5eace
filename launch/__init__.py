"""Starting points: on this machine, or as SLURM arrays."""
