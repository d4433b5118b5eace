"""`<run>/failures.jsonl`: rollouts that came to nothing, for people. The first of a kind, never the flood."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

from prl.models.text.chat import Message
from prl.runtime.directory.files import append_objects

FILE_NAME = "failures.jsonl"
KEPT = 20  # of each outcome while the engines serve one version
MAX_BYTES = 16 << 20  # of the file, whatever attempts wrote it
MAX_MESSAGES, MAX_CHARS = 16, 4000  # of a row: its newest messages, each one's beginning
log = logging.getLogger("prl.orchestrator")


class FailureLog:
    """One line per failed rollout: version, split, group, rollout, env, task, outcome, error, trace, messages."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FILE_NAME
        self.kept: Counter[tuple[int, str]] = Counter()

    def write(self, row: dict[str, Any], messages: list[Message]) -> None:
        """Add a rollout, unless enough like it are there. A disk that is full costs the row, not the run."""
        kind = row["version"], row["outcome"]
        if self.kept[kind] >= KEPT or self._is_full():
            return
        self.kept[kind] += 1
        said = [_shortened(message) for message in messages[-MAX_MESSAGES:]]
        try:
            append_objects(self.path, [{**row, "messages": said, "messages_left_out": len(messages) - len(said)}])
        except OSError as error:
            log.warning("%s was not written: %s", self.path, error)

    def _is_full(self) -> bool:
        try:
            return self.path.stat().st_size >= MAX_BYTES
        except OSError:
            return False


def _shortened(message: Message) -> Message:
    content = str(message["content"])
    return {"role": message["role"], "content": content[:MAX_CHARS]}
