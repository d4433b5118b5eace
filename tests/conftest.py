"""Fixtures of more than one file: a session has one of each."""

from slurm_cluster import short_path, slurm

__all__ = ["short_path", "slurm"]
