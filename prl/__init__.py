"""prl: a Hydra-driven research sweep harness for reinforcement learning of language models."""

__version__ = "0.1.0"
