"""Which rollouts a run keeps for reading, in how much space, and what is found in them again."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from watch_directory import make_rollout

from prl.config.schema import RolloutsConfig
from prl.metrics import rollouts as files
from prl.models.text.chat import ChatRenderer
from prl.models.text.tokenizer import save_byte_tokenizer
from prl.orchestrator.rollouts.kept_rollouts import OF_A_GROUP, OF_A_TASK, TOKENS_OF_A_STEP, KeptRollouts
from prl.orchestrator.rollouts.producer import StepGroups
from prl.orchestrator.rollouts.rollout import FailedRollout, Group
from prl.runtime.directory.files import read_objects
from prl.trainer.loops.kept_logp import KeptLogp
from prl.trainer.policy import TokenStats
from prl.watch.rollout_index import RolloutIndex

RENDERER = SimpleNamespace(token_bytes=lambda token: bytes([token]))


def keeper(run_dir: Path, resume_step: int = 0, **config: int) -> KeptRollouts:
    return KeptRollouts(run_dir, RolloutsConfig(**config), RENDERER, 0, resume_step)  # type: ignore[arg-type]


def step_of(number: int, rewards: list[list[float]], text: str = "olleh") -> StepGroups:
    groups = [
        Group(index, "reverse_text", len(several), [make_rollout(f"{text}{r}", reward=r) for r in several])
        for index, several in enumerate(rewards)
    ]
    return StepGroups(number, groups)


def rows_of(run_dir: Path) -> list[dict]:
    return [row for path in files.segments(run_dir, files.ROLLOUTS) for row in read_objects(path)]


def test_groups_at_both_extremes_and_at_random(tmp_path: Path) -> None:
    kept = keeper(tmp_path, groups=4)
    seen = set()
    for number in range(1, 30):
        chosen = kept.choose(step_of(number, [[mean] * 2 for mean in (0.3, 0.9, 0.5, 0.1, 0.4, 0.6, 0.7)]))
        why = {place["group"]: place["why"] for place, _, _ in chosen.rollouts}
        assert len(why) == 4
        assert why[1] == "highest"
        assert why[3] == "lowest"
        seen |= {group for group, reason in why.items() if reason == "random"}
    assert seen == {0, 2, 4, 5, 6}
    assert not keeper(tmp_path, groups=0).choose(step_of(1, [[1.0]])).rollouts


def test_a_large_group_keeps_its_best_and_its_worst(tmp_path: Path) -> None:
    rewards = [number / 64 for number in range(64)]
    chosen = keeper(tmp_path, groups=1).choose(step_of(1, [rewards]))
    found = {rollout.reward for _, rollout, _ in chosen.rollouts}
    assert len(found) == OF_A_GROUP
    assert {0.0, 63 / 64} <= found


def test_the_first_held_out_tasks_are_kept(tmp_path: Path) -> None:
    kept = keeper(tmp_path, held_out=2)
    ended = {("reverse_text", task): [make_rollout(task=f"held_out/{task}") for _ in range(3)] for task in (7, 3, 5)}
    ended["reverse_text", 3][0] = FailedRollout("timeout", "late")  # type: ignore[call-overload]
    kept.write(kept.choose_held_out(4, ended))
    assert [(row["task"], row["step"], row["split"]) for row in rows_of(tmp_path)] == [
        (f"held_out/{task}", 4, "held_out") for task in (3, 5) for _ in range(OF_A_TASK)
    ]


def test_the_disk_is_bounded(tmp_path: Path) -> None:
    kept = keeper(tmp_path, groups=1, max_mib=1)
    for number in range(1, 300):
        kept.write(kept.choose(step_of(number, [[0.0] * 8], text="a" * 500)))
    paths = files.segments(tmp_path, files.ROLLOUTS)
    assert len(paths) == files.SEGMENTS
    assert sum(path.stat().st_size for path in paths) < 1 << 20
    steps = {row["step"] for row in rows_of(tmp_path)}
    assert {1, 299} <= steps  # how it began, and how it stands
    assert 60 not in steps


def test_a_resumed_run_drops_what_it_does_again(tmp_path: Path) -> None:
    kept = keeper(tmp_path, groups=1)
    for number in (1, 2, 3):
        kept.write(kept.choose(step_of(number, [[0.0]])))
    with files.segments(tmp_path, files.ROLLOUTS)[-1].open("a") as file:
        file.write('{"step": 3, "torn')
    again = keeper(tmp_path, resume_step=2, groups=1)
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2]
    again.write(again.choose(step_of(3, [[0.0]])))
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3]
    keeper(tmp_path, resume_step=0, groups=1)
    assert not rows_of(tmp_path)


def test_beyond_so_many_tokens_text_alone_is_kept(tmp_path: Path) -> None:
    long = "a" * (TOKENS_OF_A_STEP // 2)
    kept = keeper(tmp_path, groups=1)
    chosen = kept.choose(step_of(1, [[0.0, 1.0]], text=long))
    kept.write(chosen)
    assert sorted(len(row["samples"]) for row in rows_of(tmp_path)) == [0, 1]
    assert len(chosen.documents) == 1


def test_a_disk_without_room_costs_rows_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = keeper(tmp_path, groups=1)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "append_objects", refuse)
    kept.write(kept.choose(step_of(1, [[0.0]])))
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    assert not keeper(tmp_path / "file", groups=1).choose(step_of(1, [[0.0]])).rollouts


def test_what_was_sampled_is_read_again_with_what_the_trainer_made_of_it(tmp_path: Path) -> None:
    rollout = make_rollout("né", "ab", version=3, advantage=0.25)
    kept = keeper(tmp_path, groups=1)
    chosen = kept.choose(StepGroups(4, [Group(0, "reverse_text", 1, [rollout])]))
    kept.write(chosen)
    other, sample = [1, 2, 3], rollout.samples[0]
    micro = SimpleNamespace(
        doc_lens=np.array([len(other), len(sample.input_ids)]),
        input_ids=np.array([*other, *sample.input_ids], dtype=np.int64),
        loss_mask=np.array([False, True, True, *sample.loss_mask], dtype=bool),
        logp_infer=np.array([0, -1, -1, *sample.logp_infer], dtype=np.float32),
    )
    logp = torch.tensor([-9.0, -9.0, -0.5, -0.6, -0.7], requires_grad=True)
    ctx = SimpleNamespace(
        run_dir=tmp_path,
        resume_step=0,
        plan=SimpleNamespace(config=SimpleNamespace(logging=SimpleNamespace(rollouts=RolloutsConfig()))),
    )
    world = SimpleNamespace(data_rank=0, data_ranks=1, is_first_of_context=True)
    trainer = KeptLogp(ctx, world)  # type: ignore[arg-type]
    trainer.note(set(chosen.documents), micro, TokenStats(torch.arange(5), logp, logp))  # type: ignore[arg-type]
    trainer.write(4)
    index = RolloutIndex(tmp_path)
    index.poll()
    (entry,) = index.page("mismatch", True, {}, 0, 10)["entries"]
    (found,) = index.whole(entry["id"])["samples"]
    assert found["tokens"] == ["a", "b", "n", "", "é"]
    assert found["trainer_logp"] == [None, None, -0.5, -0.6, -0.7]
    assert found["logp"] == [None, None, -0.5, -0.51, -0.52]
    assert found["versions"] == [None, None, 3, 3, 3]
    assert found["advantages"] == [None, None, 0.25, 0.25, 0.25]
    ratio = np.array([0.0, -0.09, -0.18])
    np.testing.assert_allclose(found["mismatch"][2:], np.expm1(ratio) - ratio, rtol=1e-3, atol=1e-9)
    assert entry["mismatch_max"] == pytest.approx(max(found["mismatch"][2:]), rel=1e-3)


def test_a_token_may_be_half_a_character(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_byte_tokenizer(tmp_path)
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(str(tmp_path)))
    assert renderer.token_bytes(ord("a")) == b"a"
    assert b"".join(renderer.token_bytes(token) for token in "né".encode()) == "né".encode()
    assert renderer.token_bytes(257) == b"<|system|>"


def test_rows_are_strict_json(tmp_path: Path) -> None:
    kept = keeper(tmp_path, groups=1)
    rollout = make_rollout(metrics={"odd": float("nan")})
    kept.write(kept.choose(StepGroups(1, [Group(0, "reverse_text", 1, [rollout])])))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    for path in files.segments(tmp_path, files.ROLLOUTS):
        for line in path.read_text().splitlines():
            json.loads(line, parse_constant=refuse)


def test_tokens_have_advantages_of_their_own_where_there_is_a_teacher(tmp_path: Path) -> None:
    step = step_of(1, [[0.5, 1.0]])
    told = {}
    for rollout in step.groups[0].finished:
        (sample,) = rollout.samples
        rollout.advantage = 0.25
        sample.bonus = np.arange(len(sample.input_ids), dtype=np.float32) * np.asarray(sample.loss_mask)
        told[rollout.reward] = sample.advantages(0.25)[np.asarray(sample.loss_mask, bool)].tolist()
    kept = keeper(tmp_path)
    kept.write(kept.choose(step))
    index = RolloutIndex(tmp_path)
    index.poll()
    for entry in index.page("step", True, {}, 0, 10)["entries"]:
        (shown,) = index.whole(entry["id"])["samples"]
        assert [value for value in shown["advantages"] if value is not None] == pytest.approx(told[entry["reward"]])
