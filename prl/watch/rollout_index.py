"""The rollouts that one run kept: an index in memory, and single ones with their tokens from disk."""

from __future__ import annotations

import codecs
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from prl.config.console import one_line
from prl.metrics import rollouts as files
from prl.orchestrator.rollouts.failure_log import FILE_NAME as FAILURES
from prl.runtime.directory.files import parse_json, parse_object
from prl.watch.following import Line, Lines, read_line

Entry = dict[str, Any]
LIGHT = (
    *("step", "split", "group", "index", "why", "env", "task", "reward", "advantage", "outcome", "truncated", "turns"),
    *("prompt_tokens", "completion_tokens", "error"),
)
SORTS = ("step", "reward", "mismatch", "mismatch_max", "completion_tokens", "advantage", "turns")
FILTERS = ("split", "env", "outcome", "step", "group")


class RolloutIndex:
    """Follows `<run>/rollouts/` and `failures.jsonl`; nothing heavy is kept in memory."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.clear()

    def clear(self) -> None:
        self.followed: dict[Path, Lines] = {}
        self.entries: list[Entry] = []
        self.by_id: dict[str, Entry] = {}
        self.trained: dict[tuple[int, str], Entry] = {}  # (step, document) -> what a trainer rank wrote of it
        self.tokens: dict[int, bytes] = {}
        self.lines: Counter[Path] = Counter()  # that were read of each file, and those of them that tell nothing
        self.unreadable: Counter[Path] = Counter()

    def poll(self) -> None:
        """Read what was appended. All anew where a file was cut back or given up."""
        if any(lines.was_replaced() for lines in self.followed.values()):
            self.clear()
        before = len(self.trained)
        fresh = len(self.entries)
        for kind in files.trainer_kinds(self.run_dir):
            for line in self._new(files.segments(self.run_dir, kind)):
                self._count(line, self._take_trained(line))
        for line in self._new(files.segments(self.run_dir, files.TOKENS)):
            row = parse_object(line.data)
            self.tokens |= files.read_tokens([row or {}])
            self._count(line, row is not None)
        for line in self._new(files.segments(self.run_dir, files.ROLLOUTS)):
            self._count(line, self._take(line))
        for line in self._new([self.run_dir / FAILURES]):
            self._count(line, self._take_failure(line))
        for entry in self.entries if len(self.trained) > before else self.entries[fresh:]:
            self._join(entry)

    def _new(self, paths: list[Path]) -> list[Line]:
        found: list[Line] = []
        for path in paths:
            lines = self.followed.setdefault(path, Lines(path))
            lines.was_replaced()
            found += lines.new()
        return found

    def _count(self, line: Line, is_readable: bool) -> None:
        if line.data.strip():
            self.lines[line.path] += 1
            self.unreadable[line.path] += not is_readable

    def faults(self) -> list[str]:
        """A sentence for each file that cannot be read, or of which some lines cannot."""
        found = {path: f"cannot be read: {lines.error}" for path, lines in self.followed.items() if lines.error}
        for path, count in self.unreadable.items():
            if count and path not in found:
                found[path] = f"has lines that cannot be read: {count} of {self.lines[path]}"
        return [one_line(f"{path.relative_to(self.run_dir)} {why}") for path, why in sorted(found.items())]

    def _take(self, line: Line) -> bool:
        """Whether it tells of a rollout."""
        row = parse_object(line.data)
        if row is None or not isinstance(row.get("step"), int):
            return False
        entry = {key: row.get(key) for key in LIGHT}
        documents = [str(sample.get("document")) for sample in _samples(row)]
        self._add(entry, line, documents)
        return True

    def _take_failure(self, line: Line) -> bool:
        row = parse_object(line.data)
        if row is not None:
            known = {key: row.get(key) for key in LIGHT} | {"step": row.get("version"), "why": "failed"}
            self._add(known | {"reward": None, "env": str(row.get("env")), "task": str(row.get("task"))}, line, [])
        return row is not None

    def _add(self, entry: Entry, line: Line, documents: list[Any]) -> None:
        name = f"{line.path.stem}:{line.offset}"  # stays the same, whatever comes or goes
        entry |= {"id": name, "mismatch": None, "mismatch_max": None}
        entry |= {"_place": (line.path, line.offset), "_documents": documents}
        self.entries.append(entry)
        self.by_id[name] = entry

    def _take_trained(self, line: Line) -> bool:
        row = parse_object(line.data)
        if row is None or not isinstance(row.get("step"), int) or not isinstance(row.get("document"), str):
            return False
        kept = {key: row.get(key) for key in ("mismatch", "mismatch_max")}
        self.trained[row["step"], row["document"]] = kept | {"_place": (line.path, line.offset)}
        return True

    def _join(self, entry: Entry) -> None:
        found = [self.trained[at] for name in entry["_documents"] if (at := (entry["step"], name)) in self.trained]
        for key in ("mismatch", "mismatch_max"):
            values = [row[key] for row in found if isinstance(row[key], int | float)]
            entry[key] = max(values) if values else None

    def page(self, sort: str, falling: bool, wanted: dict[str, str], first: int, count: int) -> dict[str, Any]:
        """Some of the entries that have the wanted values, sorted; those without a value come last."""
        found = [e for e in self.entries if all(str(e.get(key)) == value for key, value in wanted.items())]
        having = [e for e in found if isinstance(e.get(sort), int | float)]
        having.sort(key=lambda e: e[sort], reverse=falling)
        lacking = [e for e in found if not isinstance(e.get(sort), int | float)]
        chosen = (having + lacking)[first : first + count]
        choices = {key: sorted({str(e.get(key)) for e in self.entries}) for key in ("split", "env", "outcome")}
        told = {"total": len(found), "first": first, "choices": choices, "faults": self.faults()}
        return told | {"entries": [_shown(e) for e in chosen]}

    def whole(self, name: str) -> dict[str, Any]:
        """One rollout with messages and tokens. Raises LookupError where it is gone."""
        entry = self.by_id.get(name)
        if entry is None:
            raise LookupError("this rollout is not there: given up for newer ones, or its run has begun again")
        row = _read(*entry["_place"])
        samples = [self._sample(entry, sample) for sample in _samples(row)]
        kept = {key: row.get(key) for key in ("messages", "metrics", "versions", "trace")}
        return _shown(entry) | kept | {"samples": samples}

    def _sample(self, entry: Entry, sample: dict[str, Any]) -> dict[str, Any]:
        """Lists of one entry per token: text, log-probabilities (engine's and trainer's), mismatch, version."""
        ids = files.unpack(sample.get("input_ids"), "i")
        runs = files.unpack(sample.get("versions"), "i")
        runs = runs[: len(runs) // 2 * 2].reshape(-1, 2)
        versions = np.repeat(runs[:, 0], np.maximum(runs[:, 1], 0))[: len(ids)]
        mask = versions >= 0
        engine = _spread(files.unpack(sample.get("logp"), "f"), mask)
        trained = self.trained.get((entry["step"], str(sample.get("document"))))
        of_trainer = files.unpack(_read(*trained["_place"]).get("logp"), "f") if trained else np.zeros(0, np.float32)
        trainer = _spread(of_trainer, mask)
        ratio = trainer.astype(np.float64) - engine
        return {
            "tokens": self._texts(ids),
            "ids": ids.tolist(),
            "logp": _plain(engine),
            "trainer_logp": _plain(trainer),
            "mismatch": _plain(np.expm1(ratio) - ratio),  # k3, as the trainer measures it
            "versions": [int(v) if v >= 0 else None for v in versions],
            "advantages": _plain(_spread(files.unpack(sample["advantages"], "f"), mask))
            if sample.get("advantages")  # each token has its own, where there is a teacher
            else [entry["advantage"] if is_ours else None for is_ours in mask.tolist()],
        }

    def _texts(self, ids: np.ndarray) -> list[str]:
        """Characters of several tokens stand at the last of them."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return [decoder.decode(self.tokens.get(token, f"<{token}>".encode())) for token in ids.tolist()]


def _spread(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """[T] with the values where the mask is, NaN elsewhere, and everywhere if there are not as many."""
    spread = np.full(len(mask), np.nan, np.float32)
    if len(values) == int(mask.sum()):
        spread[mask] = values
    return spread


def _plain(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values.tolist()]


def _shown(entry: Entry) -> Entry:
    return {key: value for key, value in entry.items() if not key.startswith("_")}


def _samples(row: dict[str, Any]) -> list[dict[str, Any]]:
    samples = row.get("samples")
    return [sample for sample in samples if isinstance(sample, dict)] if isinstance(samples, list) else []


def _read(path: Path, offset: int) -> dict[str, Any]:
    """Raises LookupError for a row that is gone."""
    try:
        row = parse_json(read_line(path, offset))
    except (OSError, ValueError) as error:
        raise LookupError("this rollout was given up for newer ones, or the run has begun again") from error
    return row if isinstance(row, dict) else {}
