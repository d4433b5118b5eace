"""Leases of servers that somebody has started by hand: one run at a time, and for no longer than it lives."""

import asyncio
import json
from pathlib import Path

import pytest

from prl.config import compose
from prl.inference.lease import Lease
from prl.runtime.external import LEASE_S
from prl.transport.sources import WeightSource

GENERATE, FINISH = "/inference/v1/generate", "/finish_weight_update"


class Held:
    """A lease on a clock that stands still until told, and how often its engine was resumed."""

    def __init__(self, folder: Path) -> None:
        self.now, self.resumed, self.folder = 100.0, 0, folder
        own = WeightSource("filesystem", "/own/weights", "", (), 1.0, leased=str(folder / "lease.json"))
        self.source = own
        self.lease = Lease(compose([], "inference"), own, self.resume, clock=lambda: self.now)

    async def resume(self) -> None:
        self.resumed += 1

    def claim(self, run: str = "a", life: str = "1", **changes) -> tuple[int, dict]:
        weights = {"transport": "filesystem", "directory": f"/{run}/weights", "hosts": [], "timeout_s": 1.0, **changes}
        body = {"run": run, "life": life, "host": "h", "weights": weights}
        return asyncio.run(self.lease.answer("POST", None, body))


@pytest.fixture
def held(tmp_path):
    return Held(tmp_path)


def test_one_run_at_a_time_says_from_where_weights_come(held) -> None:
    update = {"type": "filesystem", "path": "/a/weights/step_3", "version": 3}
    with pytest.raises(ValueError, match="/own/weights"):
        held.source.check(update)
    status, granted = held.claim("a")
    assert status == 200
    assert granted["grant"]
    assert held.source.check(update) == update
    with pytest.raises(ValueError, match="/a/weights"):
        held.source.check(update | {"path": "/b/weights/step_3"})
    status, told = held.claim("b")
    assert (status, told["lease"]["run"]) == (409, "a")
    assert held.claim("a")[1]["grant"] == granted["grant"]
    asyncio.run(held.lease.answer("DELETE", "b", None))
    assert held.claim("b")[0] == 409
    asyncio.run(held.lease.answer("DELETE", "a", None))
    assert held.resumed == 1
    assert held.claim("b")[0] == 200


def test_a_lease_that_is_not_renewed_runs_out_and_the_engine_goes_on(held) -> None:
    forgotten = []
    held.lease.at_end.append(lambda: forgotten.append(held.now))
    first = held.claim("a")[1]["grant"]
    forgotten.clear()  # of whoever was before
    held.now += LEASE_S - 1
    held.claim("a")
    held.now += LEASE_S - 1
    asyncio.run(held.lease.tick())
    assert held.resumed == len(forgotten) == 0
    held.now += 2
    asyncio.run(held.lease.tick())
    assert held.resumed == len(forgotten) == 1
    assert not (held.folder / "lease.json").exists()
    assert held.lease.refusal("POST", "/pause", None) is None
    assert held.claim("a")[1]["grant"] != first


def test_who_does_not_hold_it_changes_nothing_and_gets_no_tokens_of_old_weights(held) -> None:
    refusal = held.lease.refusal
    assert refusal("POST", "/pause", None) is None
    assert refusal("POST", GENERATE, "a")[0] == 503
    held.claim("a")
    assert refusal("POST", "/pause", None)[0] == 409
    assert refusal("POST", "/pause", "b")[0] == 409
    assert refusal("POST", GENERATE, None) is None
    assert refusal("GET", "/is_paused", None) is None
    assert refusal("POST", FINISH, "a") is None
    assert "no weights" in refusal("POST", GENERATE, "a")[1]
    held.lease.told(FINISH, 400)
    assert refusal("POST", GENERATE, "a")[0] == 503
    held.lease.told(FINISH, 200)
    assert refusal("POST", GENERATE, "a") is None
    held.claim("a")
    assert refusal("POST", GENERATE, "a") is None
    held.claim("a", life="2")
    assert refusal("POST", GENERATE, "a")[0] == 503


@pytest.mark.parametrize("changes", [{"transport": "nccl"}, {"directory": "relative"}, {"timeout_s": 0.0}, {"x": 1}])
def test_a_claim_is_checked_field_by_field(held, changes) -> None:
    with pytest.raises(ValueError, match="weights"):
        held.claim("a", **changes)
    assert json.dumps(held.lease.tell()["lease"]) == "null"
