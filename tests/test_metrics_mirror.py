"""The wandb mirror for real: a run with the mirror in its tree, offline, read back from wandb's own file."""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_tree import Root, wait_for

BLOCK_BYTES, FULL, LAST = 32768, 1, 4
SCRIPT = {"orchestrator": {"step_s": 0.1}, "trainer/0": {"step_s": 0.1}}


def read_log(content: bytes) -> Iterator[bytes]:
    """Records of a .wandb file: LevelDB's log format behind a header of 7 bytes."""
    position, record = 7, b""
    while position + 7 <= len(content):
        if BLOCK_BYTES - position % BLOCK_BYTES < 7:  # too little for a record's header: padding
            position += BLOCK_BYTES - position % BLOCK_BYTES
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (FULL, LAST):
            yield record
            record = b""


def read_offline_run(path: Path) -> tuple[str, list[dict[str, str]]]:
    """Run id, and the history rows of a .wandb file."""
    from wandb.proto import wandb_internal_pb2

    run_id, rows = "", []
    for data in read_log(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            run_id = record.run.run_id
        elif record.WhichOneof("record_type") == "history":
            rows.append({"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item})
    return run_id, rows


@pytest.mark.slow
def test_all_of_a_run_is_in_one_wandb_run_also_after_a_resume(tmp_path: Path) -> None:
    overrides = ("logging.wandb.mode=offline", "max_steps=30")
    root = Root(tmp_path / "run", *overrides, script=SCRIPT)
    try:
        wait_for(lambda: (root.run_dir / "wandb" / "sent.json").exists(), 30)
        root.process.send_signal(signal.SIGTERM)
        assert root.wait()[0] == 143
        (root.run_dir / "stop").unlink()
    finally:
        root.end()
    again = Root(tmp_path / "run", *overrides, script=SCRIPT)
    try:
        code, output = again.wait()
        assert code == 0, output
    finally:
        again.end()
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    read = [read_offline_run(file) for file in files]
    assert len({run_id for run_id, _ in read}) == 1
    rewards = [row["step"] for _, rows in read for row in rows if "orchestrator/reward" in row]
    assert [int(step) for step in rewards] == list(range(1, 31))


@pytest.mark.slow
def test_losing_the_mirror_does_not_end_the_run(tmp_path: Path) -> None:
    root = Root(tmp_path / "run", "logging.wandb.mode=offline", "max_steps=25", script=SCRIPT)
    try:
        root.await_step(2)
        os.kill(root.pid_of("wandb"), signal.SIGKILL)
        code, output = root.wait()
        assert code == 0, output
        assert "the wandb mirror ended, the run goes on" in output
        time.sleep(0.1)
        assert root.alive() == []
    finally:
        root.end()
