"""Ranks that share rows fetch them once. As `python test_shared_fetch.py DIR RANK SIZE` one of these ranks."""

from __future__ import annotations

import http.server
import json
import threading
from collections import Counter
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import torch
from rank_processes import run_script, serve_rank

from prl.planning.run_plan import MeshPlan
from prl.trainer.loops.batches import BatchClient
from prl.trainer.loops.shared_fetch import SharedFetch
from prl.trainer.world import build_world
from prl.transport.batch import TrainBatch
from prl.transport.documents import Document
from prl.transport.packing import build_micro_batch

TOKENS = 50_000


def batch_of(step: int, data_rank: int) -> TrainBatch:
    rng = np.random.default_rng([step, data_rank])
    routed = rng.integers(0, 128, (TOKENS, 4, 2), dtype=np.uint8)
    ids, zeros = rng.integers(0, 1000, TOKENS), np.zeros(TOKENS)
    row = build_micro_batch([Document(ids, zeros, zeros, zeros, zeros, [routed])])
    return TrainBatch(step, [row], 1, 1, {"stop": False})


def make_orchestrator(asked: Counter[str]) -> http.server.HTTPServer:
    """It counts what it is asked, and has nothing at the first time."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = {key: int(value) for key, (value,) in parse_qs(urlsplit(self.path).query).items()}
            asked[self.path] += 1
            is_first = asked[self.path] == 1
            body = b"" if is_first else bytes(batch_of(query["step"], query["data_rank"]).to_message())
            self.send_response(204 if is_first else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def work(directory: Path, rank: int, size: int) -> None:
    """Two data ranks of two ranks each."""
    world = build_world(MeshPlan(dp_replicate=1, dp_shard=2, cp=2, ep=1), torch.device("cpu"))
    asked: Counter[str] = Counter()
    address = [make_orchestrator(asked).server_address[1] if rank == 0 else None]
    torch.distributed.broadcast_object_list(address, src=0)
    beats: list[int] = []
    client = BatchClient(f"http://127.0.0.1:{address[0]}", "t", lambda: beats.append(1))
    shared = SharedFetch(world, client)
    for step in (1, 2):
        got, expected = shared.fetch(step, 1), batch_of(step, world.data_rank)
        assert (got.step, got.meta) == (step, {"stop": False})
        for name in ("input_ids", "routed_experts"):
            assert np.array_equal(getattr(got.micro_batches[0], name), getattr(expected.micro_batches[0], name))
    assert len(beats) == 4, "each rank shows life while it waits"
    torch.distributed.barrier()
    if rank == 0:
        (directory / "asked.json").write_text(json.dumps(asked))


def test_a_context_group_asks_once(tmp_path: Path) -> None:
    run_script(__file__, tmp_path, 4)
    asked = json.loads((tmp_path / "asked.json").read_text())
    paths = [f"/train/batch?step={step}&data_rank={rank}&publications=1" for step in (1, 2) for rank in (0, 1)]
    assert asked == dict.fromkeys(paths, 2)


if __name__ == "__main__":
    serve_rank(work)
