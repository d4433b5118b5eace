"""Directories as runs leave them, made in no time: a sweep with metrics and kept rollouts in the real formats."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from prl.metrics import rollouts as files
from prl.orchestrator.engines.generation import Generation
from prl.orchestrator.rollouts.rollout import Rollout, Sample

START_S = 1_790_000_000.0


def make_rollout(
    text: str = "olleh", prompt: str = "hello", reward: float = 0.5, version: int = 0, **more: Any
) -> Rollout:
    """A conversation of one turn whose tokens are bytes."""
    sample = Sample()
    sample.append_prompt(list(prompt.encode()))
    ids = list(text.encode())
    logprobs = [-0.5 - 0.01 * i for i in range(len(ids))]
    sample.append_generation(Generation(ids, logprobs, [version] * len(ids), "stop", None))
    said = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
    known = {"env": "reverse_text", "task": "train/1", "turns": 1, "truncated": False}
    counts = {"prompt_tokens": len(prompt.encode()), "completion_tokens": len(ids)}
    return Rollout(**known | counts | {"reward": reward, "samples": [sample], "messages": said} | more)


def rollout_rows(rollout: Rollout, count: int, steps: int, split: str = "train") -> tuple[list[str], list[str]]:
    """Lines of the orchestrator and of a trainer rank, all of one rollout and each with numbers of its own."""
    rng = random.Random(0)
    sample = rollout.samples[0]
    mine, theirs = [], []
    logp = [value for value, ours in zip(sample.logp_infer, sample.loss_mask, strict=True) if ours]
    shared = {
        "input_ids": files.pack(sample.input_ids, "i"),
        "logp": files.pack(logp, "f"),
        "versions": files.pack([-1, rollout.prompt_tokens, 0, rollout.completion_tokens], "i"),
    }
    for number in range(count):
        step, document = 1 + number * steps // count, f"{number:016x}"
        row = {
            "step": step, "split": split, "group": number // 8, "index": number % 8, "why": "random",
            "env": rollout.env, "task": f"{split}/{number // 8}", "reward": rng.random(), "advantage": rng.gauss(0, 1),
            "outcome": rollout.outcome, "truncated": False, "turns": 1, "prompt_tokens": rollout.prompt_tokens,
            "completion_tokens": rng.randrange(1, 500), "versions": [0], "metrics": {}, "messages": rollout.messages,
            "samples": [{"document": document, **shared}],
        }  # fmt: skip
        mine.append(json.dumps(row) + "\n")
        known = {"step": step, "document": document, "mismatch": rng.random(), "mismatch_max": 1.0}
        theirs.append(json.dumps({**known, "logp": shared["logp"]}) + "\n")
    return mine, theirs


def make_run(path: Path, swept: dict[str, str], steps: int = 6, state: str = "done", rollouts: int = 16) -> Path:
    """A run directory of a sweep's point."""
    (path / "metrics").mkdir(parents=True)
    (path / "rollouts").mkdir()
    config = {"job": "rl", "swept": swept, "max_steps": steps, "seed": int(swept.get("seed", 0))}
    (path / "plan.json").write_text(json.dumps({"config": config, "point_id": "p", "roles": []}))
    status: dict[str, Any] = {"state": state, "step": steps, "max_steps": steps, "job": "rl", "updated": START_S}
    if state == "failed":
        status["alarms"] = [{"kind": "truncated", "since": 3, "message": "<i>most</i> of them"}]
        status["failure"] = {"class": "oom", "role": "trainer/0", "message": "<b>out</b> of memory", "log_tail": ["x"]}
    (path / "status.json").write_text(json.dumps(status))
    seed = int(swept.get("seed", 0))
    trainer, orchestrator = [], []
    for step in range(1, steps + 1):
        at = START_S + 2.0 * step
        trainer.append({
            "time": at, "role": "trainer/0", "step": step, "loss": 0.1, "entropy": 1.0 / step, "mismatch_kl_mean": 1e-3,
            "grad_norm": 0.1, "step_s": 2.0, "wait_for_batch_s": 0.5, "forward_backward_s": 1.0, "optim_s": 0.2,
            "publish_s": 0.2, "save_s": 0.1, "tokens_per_s": 100.0, "peak_memory_bytes": 1 << 30,
        })  # fmt: skip
        orchestrator.append({
            "time": at - 1.5, "role": "orchestrator", "step": step, "reward": step / steps + 0.01 * seed,
            "staleness_mean": 1.0, "completion_tokens": 9.0, "wait_for_rollouts_s": 0.5,
            "generating_spans": [[at - 2, at - 0.3]],
        })  # fmt: skip
    for name, rows in (("trainer.0", trainer), ("orchestrator", orchestrator)):
        (path / "metrics" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mine, theirs = rollout_rows(make_rollout(), rollouts, steps)
    held_out, _ = rollout_rows(make_rollout(), 16, steps, "held_out")
    tokens = files.token_rows({byte: bytes([byte]) for byte in range(256)})
    for name, lines in {
        "rollouts-000001": [*mine, *held_out],
        "trainer.0-000001": theirs,
        "tokens-000000": [json.dumps(row) + "\n" for row in tokens],
    }.items():
        (path / "rollouts" / f"{name}.jsonl").write_text("".join(lines))
    return path
