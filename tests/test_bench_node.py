"""The script for one node: its rows, what it keeps, and that it goes on where it stopped."""

import json
import subprocess
import sys

import pytest

from prl.bench.node import Row, apart, command_of, figures_of, forecast_of, run_row, shown, table, told
from prl.bench.node_rows import layouts, rows_for
from prl.config import compose

JOBS = {"sft": "sft", "bench": "bench", "rl": "rl"}


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_every_row_is_a_plan_and_none_is_there_twice(gpus, tiny):
    rows = rows_for(gpus, tiny)
    assert len(set(map(shown, rows))) == len(rows)
    for row in rows:
        if row.job != "experts":
            compose(list(row.words), JOBS[row.job])


def test_eight_gpus_have_what_was_asked_for():
    assert list(layouts(8)) == ["fsdp", "hsdp", "ep2", "ep4", "ep8", "ep2_cp2", "ep8_cp2"]
    assert list(layouts(4)) == ["fsdp", "hsdp", "ep2", "ep4", "ep2_cp2"]
    assert list(layouts(1)) == ["fsdp"]
    commands = [shown(row) for row in rows_for(8, tiny=False)]
    for words in (
        ("prl.bench", "bench.doc_len=65536", "parallelism=ep8_cp2"),
        ("prl.bench", "model.fp8=deep_gemm", "parallelism.ep_comm_backend=deepep"),
        ("prl.bench", "model=qwen3_4b", "memory=lora"),
        ("prl.rl", "parallelism=ep8_cp2", "memory=tight", "deployment=colocated"),
        ("prl.rl", "weight_transport=nccl", "inference.expert_parallel=true", "return_routed_experts=true"),
        ("prl.rl", "return_routed_experts=true", "# inference/0 is killed in the middle"),
        ("prl.rl", "inference.pd.num_prefill_gpus=2", "inference.tp=2"),
    ):
        assert any(all(word in command for word in words) for command in commands), words


def test_an_engine_that_did_not_come_back_is_no_row(tmp_path):
    metrics = tmp_path / "run/metrics"
    metrics.mkdir(parents=True)
    step = {"step": 1, "step_s": 1.0, "publish_s": 0.1, "wait_for_batch_s": 0.5, "mismatch_kl_mean": 0.0}
    (metrics / "trainer.0.jsonl").write_text(json.dumps(step) + "\n")
    row = Row("RL, apart", "rl", ("a=1",), kills="inference/0")
    steps = [{"step": number, "engine_restarts": 0, "since_last_step_s": 1.0} for number in (1, 2)]
    for restarts in (0, 1):
        steps[-1] |= {"engine_restarts": restarts, "since_last_step_s": 7.25}
        (metrics / "orchestrator.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))
        figures = figures_of(row, tmp_path, "")
        if restarts:
            assert told(row, figures, None).endswith("; inference/0 killed, 1 restart, longest step 7.2 s")
        else:
            assert told(row, figures, None) == "failed: inference/0 was not killed, or did not come back"


SINGLE = Row("equality", "sft", ("a=1",))
OTHER = Row("equality", "sft", ("a=2",))
RATE = Row("speed", "bench", ("b=1",))
FOUND = {"tokens_per_s_per_gpu": 1234.5, "mfu": 0.25, "peak_gib": 3.0}


def test_losses_that_part_are_told():
    assert apart([1.0, 2.0], [1.0, 2.00001]) == pytest.approx(5e-6, rel=1e-3)
    assert apart([1.0], [1.0, 2.0]) == float("inf"), "a step is missing"
    assert "TOO FAR" not in told(OTHER, {"losses": [1.0, 2.0]}, [1.0, 2.00001])
    assert "TOO FAR" in told(OTHER, {"losses": [1.0, 2.1]}, [1.0, 2.0])


def test_the_table_has_all_rows_with_their_forecasts():
    found = {
        shown(SINGLE): {"figures": {"losses": [1.0]}, "forecast": ""},
        shown(OTHER): {"figures": {"losses": [1.5]}, "forecast": ""},
    }
    text = table([SINGLE, OTHER, RATE], found)
    assert "| `python -m prl.sft a=1` | losses 1.000000 |  |" in text
    assert "| `python -m prl.sft a=2` | losses 1.500000; 5e-01 from one process: TOO FAR |  |" in text
    assert "| `python -m prl.bench b=1` | not run |  |" in text
    found[shown(RATE)] = {"figures": FOUND, "forecast": "9 tokens/s"}
    text = table([RATE], found)
    assert "| 1,234 tokens/s per GPU, MFU 25.0%, 3.0 GiB | 9 tokens/s |" in text


def test_a_row_is_beside_its_forecast():
    row = next(row for row in rows_for(8, tiny=False) if row.job == "bench")
    assert forecast_of(row).endswith(")")
    assert "tokens/s per GPU (" in forecast_of(row)


def test_what_fails_is_told_with_the_end_of_its_words(tmp_path):
    row = Row("speed", "bench", ("model=tiny_qwen3", "optim.lr=-1"))
    assert f"output_dir={tmp_path / 'run'}" in command_of(row, tmp_path)
    failed = run_row(row, tmp_path)["failed"]
    assert failed.startswith("exit 2: ")
    assert "optim.lr" in failed
    with pytest.raises(FileNotFoundError):
        figures_of(row, tmp_path, "")


@pytest.mark.slow
def test_it_goes_on_where_it_stopped(tmp_path):
    def run(*words):
        command = [sys.executable, "-m", "prl.bench.node", str(tmp_path), "--gpus", "2", "--tiny", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=400)

    none = run("--only", "equality", "--minutes", "0")
    assert none.returncode == 0
    assert none.stdout.count("no time is left for: python -m prl.sft") == 4
    first = run("--only", "parallelism=single")
    assert first.returncode == 0, first.stdout + first.stderr
    rest = run("--only", "equality")
    assert rest.returncode == 0, rest.stdout + rest.stderr
    assert rest.stdout.count("from one process") == 3, rest.stdout
    assert "parallelism=single" not in rest.stdout, "it was there already"
    kept = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(kept) == 4
    assert (tmp_path / "rows.md").read_text().count("| losses ") == 4
