"""Benchmarks: each target as a real process tree with its JSON, and the arithmetic of the summary."""

import json
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import runs
from tiny import moe_card

from prl.bench.measurement import PHASES, summarise_ranks
from prl.bench.profile import _account_intervals, covered, group_of
from prl.bench.rows import document_lengths, make_rows
from prl.bench.trl import single_turn
from prl.config import compose
from prl.config.errors import ConfigError, UserError
from prl.config.schema import BenchConfig
from prl.envs.reverse_text import ReverseText

QUICK = ["bench.warmup_steps=1", "bench.steps=2", "debug.num_threads=1"]


def bench(tmp_path: Path, *overrides: str) -> dict:
    tmp_path.mkdir(exist_ok=True)
    path = tmp_path / "result.json"
    args = [*QUICK, f"cache_dir={tmp_path / 'cache'}", f"bench.output_json={path}", *overrides]
    finished = runs.run(args, tmp_path, "prl.bench")
    assert finished.code == 0, finished.output
    document = json.loads(path.read_text())
    assert document["overrides"][0] == QUICK[0]
    assert document["config"]["job"] == "bench"
    assert "torch" in document["environment"]["packages"]
    return document["result"]


def check_training(result: dict, tokens_per_step: int, ranks: int) -> None:
    step_s = result["step_s"]["median"]
    assert result["ranks"] == ranks
    assert result["tokens_per_step"] == tokens_per_step
    assert result["tokens_per_s_per_gpu"] == pytest.approx(tokens_per_step / ranks / step_s, rel=0.5)
    assert result["padded_tokens_per_s_per_gpu"] >= result["tokens_per_s_per_gpu"]
    assert step_s == pytest.approx(sum(result["phases_s"][name]["median"] for name in PHASES), rel=0.5)
    assert 0 < result["mfu"] < 2
    assert 1 << 26 < result["peak_allocated_bytes"] <= result["overall_peak_allocated_bytes"] < 1 << 34
    assert len(result["loss"]) == 2


@pytest.mark.exhaustive
@pytest.mark.slow
def test_rl_trainer_on_one_rank_with_a_profile(tmp_path):
    result = bench(tmp_path, "bench.doc_len=[60,30,10]", "bench.micro_batches=2", "bench.profile=true")
    check_training(result, tokens_per_step=200, ranks=1)
    assert abs(result["loss"][0]) < 5, "importance ratios are near 1"
    shares = [group["share"] for group in result["profile"]["groups"].values()]
    assert sum(shares) == pytest.approx(1)
    assert result["profile"]["groups"]["GEMM"]["share"] > 0.01


@pytest.mark.slow
def test_sft_trainer_of_two_ranks_on_variable_lengths(tmp_path):
    result = bench(
        tmp_path, "bench.target=trainer_sft", "bench.doc_len=64", "bench.lengths=variable", "seq_len=256",
        "parallelism.dp_shard=2",
    )  # fmt: skip
    assert result["tokens_per_s_per_gpu"] < result["padded_tokens_per_s_per_gpu"]
    assert 256 < result["tokens_per_step"] < 512
    check_training(result, tokens_per_step=result["tokens_per_step"], ranks=2)
    assert result["loss"][0] == pytest.approx(np.log(264), rel=0.1), "nothing but the vocabulary is to be guessed"


@pytest.mark.slow
def test_context_ranks_share_the_tokens_of_their_row(tmp_path):
    result = bench(tmp_path, "bench.doc_len=64", "parallelism=cp2")
    check_training(result, tokens_per_step=64, ranks=2)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_transformers_sees_the_same_tokens(tmp_path):
    overrides = ["bench.doc_len=[60,30,10]", "model=tiny_qwen3"]
    theirs = bench(tmp_path / "theirs", "bench.target=transformers", *overrides)
    ours = bench(tmp_path / "ours", *overrides)
    check_training(theirs, tokens_per_step=100, ranks=1)
    assert theirs["loss"][0] == pytest.approx(ours["loss"][0], abs=0.2), "advantages of the same documents"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_fp8_with_experts_over_two_ranks(tmp_path):
    result = bench(tmp_path, "bench.doc_len=64", "parallelism=ep2", "memory_recipe.ac.mode=full", "model.fp8=emulated")
    check_training(result, tokens_per_step=128, ranks=2)
    assert abs(result["loss"][0]) < 5


@pytest.mark.slow
def test_fp8_report(tmp_path):
    args = ["model.fp8=emulated", "bench.doc_len=40", "bench.steps=2", f"bench.output_json={tmp_path / 'fp8.json'}"]
    finished = runs.run(args, tmp_path, "prl.bench.fp8")
    assert finished.code == 0, finished.output
    result = json.loads((tmp_path / "fp8.json").read_text())
    assert result["casts"]["differing"] == [0, 0, 0, 0]
    for shape in result["shapes"]:
        assert all(0.01 < error < 0.12 for error in shape["error"])  # in experts two products follow each other
        assert not any(shape["against_emulated"])
        assert shape["speedup"] > 0
    assert len(result["losses"]["fp8"]) == 2
    assert result["losses"]["fp8"] == pytest.approx(result["losses"]["plain"], rel=0.05)


@pytest.mark.slow
def test_inference_engine(tmp_path):
    result = bench(tmp_path, "bench.target=inference", "inference.max_num_seqs=4")
    assert [rate["sequences"] for rate in result["rates"]] == [1, 4, 8]
    assert all(0 < r["tokens_per_s"]["min"] <= r["tokens_per_s"]["median"] for r in result["rates"])


@pytest.mark.smoke
@pytest.mark.slow
def test_stack(tmp_path):
    small = [o for o in runs.SMALL if not o.startswith(("warm_start", "eval"))]
    result = bench(tmp_path, "bench.target=stack", *small)
    assert result["steps"] == 2
    assert 0 < result["trained_tokens_per_s"] < result["trained_tokens_per_busy_s"]
    assert result["generated_tokens_per_s"] > 0
    assert 0 <= result["trainer_waits_for_batch_share"] < 1


@pytest.mark.slow
def test_trl_learns_the_same_task_from_the_same_start(tmp_path):
    small = [o for o in runs.SMALL if not o.startswith(("warm_start", "eval"))]
    start = ["warm_start=reverse_text", "warm_start.max_steps=2"]
    evaluated = ["eval=default", "eval.interval=2", "eval.num_tasks=8"]
    result = bench(tmp_path / "trl", "bench.target=trl", *small, *start, *evaluated)
    assert result["steps"] == 2
    assert 0 < result["step_s_min"] <= result["step_s"] <= result["step_s_max"]
    assert result["tokens_per_s"] > 0
    assert [step for step, _, _ in result["held_out"]] == [0, 2, 3]
    seconds = [seconds for _, seconds, _ in result["held_out"]]
    assert seconds[0] == 0 < seconds[1] < seconds[2]
    ours = bench(tmp_path / "ours", "bench.target=stack", *small, *start, *evaluated)
    assert [step for step, _, _ in ours["held_out"]] == [0, 2, 3]
    assert all(0 <= reward <= 1 for _, _, reward in result["held_out"] + ours["held_out"])


def test_trl_is_asked_for_one_turn():
    mix = compose(["env=alphabet_sort"]).env.mix
    with pytest.raises(UserError, match="one turn"):
        single_turn(mix)
    with pytest.raises(UserError, match="one environment"):
        single_turn(compose(["env=[reverse_text,countdown]"]).env.mix)
    assert isinstance(single_turn(compose([]).env.mix), ReverseText)


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["bench.doc_len=64", "seq_len=32"], "seq_len=64"),
        (["bench.doc_len=[64,32]", "bench.lengths=variable"], "bench.doc_len=64"),
        (["bench.target=transformers", "parallelism=fsdp"], "parallelism=single"),
        (["bench.target=transformers", "memory=lora"], "memory=none"),
        (["bench.target=trl", "optim=muon"], "optim=adamw"),
        (["bench.target=trl", "parallelism=fsdp"], "parallelism=single"),
        (["warm_start=auto"], "warm_start=none"),
        (["bench.target=transformers", "memory_recipe.compile=true"], "memory=none"),
        (["bench.target=transformers", "optim=muon"], "optim=adamw"),
        (["bench.target=transformers", "model.fp8=emulated"], "model.fp8=none"),
        (["bench.target=transformers", "bench.random_weights=false"], "bench.random_weights=true"),
        (["bench.target=stack", "algo.group_size=1"], "algo.group_size=8"),
        (["bench.target=inference", "deployment=colocated"], "deployment=disaggregated"),
    ],
    ids=" ".join,
)
def test_rules(overrides, fix):
    with pytest.raises(ConfigError) as error:
        compose(overrides, "bench")
    assert any(fix in violation.fix for violation in error.value.violations)


def test_document_lengths():
    rng = np.random.default_rng(0)
    assert document_lengths(BenchConfig(doc_len=32), 100, rng) == [32, 32, 32]
    assert document_lengths(BenchConfig(doc_len=(5, 9)), 100, rng) == [5, 9]
    lengths = document_lengths(BenchConfig(doc_len=64, lengths="variable"), 1000, rng)
    assert len(set(lengths)) > 3
    assert 1000 - 64 < sum(lengths) <= 1000
    assert 8 <= min(lengths) <= max(lengths) <= 64


def test_rows_depend_on_the_data_rank_and_on_nothing_else_of_the_mesh():
    bench_config = BenchConfig(doc_len=16, micro_batches=2)
    first, again, other = (make_rows(bench_config, 32, moe_card(), 0, 1, rank) for rank in (0, 0, 1))
    assert (first[0].input_ids == again[0].input_ids).all()
    assert (first[0].input_ids != other[0].input_ids).any()
    assert (first[0].input_ids != first[1].input_ids).any()
    assert first[0].loss_mask.tolist() == ([False] + [True] * 15) * 2


def test_summary_takes_the_slowest_rank_and_adds_the_tokens():
    def rank(seconds: float, tokens: float) -> dict:
        step = {
            "phases_s": {"forward_backward": seconds, "clip_optimizer": 1.0},
            "useful_tokens": tokens, "padded_tokens": 100.0, "flops": 1e12, "loss": 0.5,
        }  # fmt: skip
        return {"steps": [step], "memory": {"peak_allocated_bytes": int(seconds)}}

    result = summarise_ranks([rank(1.0, 60.0), rank(3.0, 40.0)], peak=1e12, formula="f")
    assert result["step_s"]["median"] == 4.0
    assert result["tokens_per_s_per_gpu"] == 100 / 2 / 4
    assert result["mfu"] == pytest.approx(0.25)
    assert result["loss"] == [1.0]
    assert result["peak_allocated_bytes"] == 3


def test_covered_counts_overlaps_once():
    assert covered([(0, 2), (1, 3), (5, 6)]) == 4
    assert covered([(0, 10), (2, 3)]) == 10


def test_profile_tells_exposed_from_hidden_time():
    kernels = [("ampere_gemm", (0.0, 6.0)), ("ncclAllReduce", (4.0, 8.0)), ("vectorized_elementwise", (9.0, 10.0))]
    account = _account_intervals(kernels)
    assert account["idle"] == pytest.approx(0.1)
    assert account["groups"]["GEMM"] == pytest.approx({"share": 0.6, "exposed": 0.4})
    assert account["groups"]["communication"] == pytest.approx({"share": 0.4, "exposed": 0.2})
    assert account["bound_by"].startswith("GEMM")


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "GEMM"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void cunn_SoftMaxForward", "softmax and loss"),
        ("triton_poi_fused_silu_mul_0", "elementwise"),
        ("sm90_fp8_gemm_1d2d_impl", "GEMM"),
    ],
)
def test_kernels_find_their_group(name, group):
    assert group_of(name) == group


@pytest.mark.slow
def test_a_long_step_of_a_benchmark_can_be_stopped(tmp_path):
    """Nothing is saved, and so nothing is waited for; nor is that a failure."""
    args = ["bench.doc_len=100000", f"output_dir={tmp_path}/r", "logging=none"]
    process = runs.start(args, tmp_path, "prl.bench")
    try:
        runs.wait_for(process, lambda: state_of(tmp_path / "r") == "running", "a run", 200)
        time.sleep(2)
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        output = process.communicate(timeout=120)[0]
    finally:
        process.kill()
    assert time.monotonic() - began < 40
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "hang" not in output
    assert state_of(tmp_path / "r") == "stopped"


def state_of(run):
    status = run / "status.json"
    return json.loads(status.read_text())["state"] if status.is_file() else ""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "sweep"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_measurement_of_the_engine_can_be_stopped(tmp_path, number, sweep):
    args = ["bench.target=inference", "bench.steps=100000", f"cache_dir={tmp_path / 'cache'}", "logging=none"]
    a_sweep = ["-m", "hydra/launcher=local", f"hydra.sweep.dir={tmp_path}/s", *args]
    args = a_sweep if sweep else [*args, f"output_dir={tmp_path}/s/1"]
    process = runs.start(args, tmp_path, "prl.bench")
    try:
        runs.wait_for(process, lambda: list(tmp_path.glob("s/*/status.json")), "a status", 200)
        time.sleep(3)
        process.send_signal(number)
        output = process.communicate(timeout=120)[0]
    finally:
        process.kill()
    assert process.returncode == 128 + number, output
    assert "Traceback" not in output
    (status,) = tmp_path.glob("s/*/status.json")
    assert json.loads(status.read_text())["state"] == "stopped"
    assert not list(tmp_path.glob("s/*/result.json"))
