"""Checkpoints written by a process of its own, from memory that it shares with its trainer rank."""
