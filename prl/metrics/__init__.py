"""Metrics: each role appends to `metrics/<role>.jsonl`; readers and the wandb mirror follow the files."""
