"""The process tree: start, supervise, stop; run directory, checkpoints' bookkeeping, status."""
