"""Collections of cyclic garbage come when they are asked for, and are told."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from prl.runtime.process.collector import FIRST, FULL_AFTER_S, FULL_EVERY, Collector


class Ring:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    made.begin()
    yield made
    made.end()
    gc.unfreeze()


def old_garbage() -> weakref.ref[Ring]:
    ring = Ring()
    gc.collect(1)  # it lives, and becomes old
    gone = weakref.ref(ring)
    del ring
    return gone


def busy() -> None:
    """As many young objects as would have Python look through the old ones, too."""
    kept = [[[]] for _ in range(300_000)]
    assert kept


def test_old_objects_are_left_alone_until_everything_is_asked_for(collector: Collector) -> None:
    gone = old_garbage()
    busy()
    assert gone() is not None
    collector.everything()
    assert gone() is None


def test_python_by_itself_looks_through_old_ones() -> None:
    gone = old_garbage()
    busy()
    assert gone() is None


def test_young_garbage_goes_by_itself(collector: Collector) -> None:
    ring = Ring()
    gone = weakref.ref(ring)
    del ring
    busy()
    assert gone() is None


def test_steps_collect_in_the_first_ones_and_then_seldom(collector: Collector) -> None:
    found = []
    for step in range(1, 2 * FULL_EVERY + 1):
        gone = old_garbage()
        collector.step(step)
        found.append(gone() is None)
    assert [step for step, full in enumerate(found, 1) if full] == [*range(1, FIRST + 1), FULL_EVERY, 2 * FULL_EVERY]


def test_long_steps_collect_each_time(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only old garbage holds must not wait for fifty steps of minutes."""
    assert not collector.is_due(FULL_EVERY + 1)
    monkeypatch.setattr(collector, "full_at", collector.full_at - FULL_AFTER_S - 1)
    assert collector.is_due(FULL_EVERY + 1)
    collector.everything()
    assert not collector.is_due(FULL_EVERY + 1)


def test_what_collections_took_is_told_once(collector: Collector) -> None:
    collector.row()
    collector.everything()
    row = collector.row()
    assert 0 < row["gc_longest_s"] <= row["gc_s"]
    assert collector.row() == {"gc_s": 0.0, "gc_longest_s": 0.0}
