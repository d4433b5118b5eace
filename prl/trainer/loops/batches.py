"""Where a trainer rank gets its batches: the orchestrator's HTTP server.

Calls without an answer are repeated, posts too: all of its routes may be called twice.
"""

from __future__ import annotations

import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from prl.transport.batch import TrainBatch
from prl.transport.kinds import NO_PUBLICATION

log = logging.getLogger("prl")

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # another node of the job is behind no proxy
PAUSE_S = 0.2  # after the first call without an answer; twice as long after each further one
LONG_POLL_S = 30.0  # above the orchestrator's own 5 s, so that only a dead orchestrator runs into it


class BatchClient:
    """Synchronous client of the orchestrator's /train routes."""

    def __init__(self, url: str, key: str, beat: Callable[[], None]) -> None:
        self.url, self.beat = url, beat
        self.headers = {"Authorization": f"Bearer {key}"}

    def fetch(self, step: int, data_rank: int, publications: int) -> TrainBatch:
        """Wait for the batch of `step`, or for word to publish again or to stop; beats while waiting. `publications`:
        how often this rank has published. Raises OSError when the orchestrator is gone.
        """
        while (body := self.poll(step, data_rank, publications)) is None:
            pass
        return TrainBatch.from_bytes(body)

    def poll(self, step: int, data_rank: int, publications: int) -> bytes | None:
        """What `fetch` returns, as it comes, or None if there is nothing yet after some seconds. Beats once."""
        self.beat()
        route = f"/train/batch?step={step}&data_rank={data_rank}&publications={publications}"
        status, body = self._call(route, None, LONG_POLL_S)
        return body if status == 200 else None

    def wait_for_engines(self) -> None:
        """Return once they can take weights, so that the time which loading takes them is not a transfer's; beats."""
        while self._outcome(NO_PUBLICATION) is None:
            self.beat()

    def wait_for_turn(self, publication: int) -> None:
        """Return once engines are being told of it: behind an evaluation, which may take longer than any transfer.

        Trainers of several ranks meet in gathers, and there wait for deployment.hang_timeout_s at most.
        """
        while self._call(f"/train/turn?publication={publication}", None, LONG_POLL_S)[0] != 200:
            pass

    def wait_for_delivery(self, publication: int) -> bool:
        """Return once engines are done with it.

        True if they serve it. False if there was none, all being started again, or one died where all had to meet.
        """
        while (taken := self._outcome(publication)) is None:
            pass
        return taken

    def _outcome(self, publication: int) -> bool | None:
        status, body = self._call(f"/train/delivery?publication={publication}", None, LONG_POLL_S)
        return json.loads(body)["taken"] if status == 200 else None

    def start_commit(self, step: int, in_haste: bool) -> None:
        """The trainer's part of a checkpoint is on disk: the orchestrator adds its own, and commits beside its work."""
        self.post("/train/checkpoint", {"step": step, "in_haste": in_haste})

    def commit_took(self, step: int) -> float | None:
        """The seconds that it took; None if it has not ended, for which this waits a moment."""
        status, body = self._call(f"/train/checkpoint?step={step}", None, LONG_POLL_S)
        return json.loads(body)["took_s"] if status == 200 else None

    def say_done(self, step: int) -> None:
        """The last word. Where its answer is lost, nobody may listen any more: the orchestrator ends upon it."""
        try:
            self.post("/train/done", {"step": step})
        except OSError as error:
            if not _is_refused(error):
                raise
            log.warning("the orchestrator has ended: %s", error)

    def post(self, route: str, payload: dict[str, Any], timeout_s: float = LONG_POLL_S) -> None:
        self._call(route, payload, timeout_s)

    def _call(self, route: str, payload: dict[str, Any] | None, timeout_s: float) -> tuple[int, bytes]:
        data = None if payload is None else json.dumps(payload).encode()
        headers = self.headers | ({"Content-Type": "application/json"} if data else {})
        request = urllib.request.Request(self.url + route, data=data, headers=headers)
        for attempt in range(5):  # the orchestrator may still be starting
            try:
                with DIRECT.open(request, timeout=timeout_s) as response:
                    return response.status, response.read()
            except urllib.error.HTTPError as error:
                detail = error.read().decode(errors="replace")[:500]
                raise OSError(f"{route}: the orchestrator answered {error.code}: {detail}") from error
            except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
                if attempt == 4:
                    raise OSError(f"{route}: no answer from the orchestrator at {self.url}: {error}") from error
                time.sleep(PAUSE_S * 2**attempt)
        raise AssertionError("unreachable")


def _is_refused(error: BaseException | None) -> bool:
    """Whether nobody listens there: the process is gone, which its supervisor judges."""
    while error is not None:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, ConnectionRefusedError):
            return True
        error = error.__cause__
    return False
