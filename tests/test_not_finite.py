"""Numbers that are not finite: they change nothing, they are counted, and in the end they have a failure class."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.distributed as dist
from runs import SMALL, rows, run, series, with_faults
from tiny import moe_card, moe_checkpoint, random_model
from trainer_ranks import Job, run_job, run_ranks

from prl.config import compose
from prl.config.errors import UserError
from prl.config.schema import AlgoConfig
from prl.orchestrator.engines.answers import EngineError, parse_choice
from prl.planning.run_plan import MeshPlan
from prl.runtime.directory.checkpoints import find_damage, parts_of
from prl.trainer.expert_balance import ExpertBalance
from prl.trainer.loops.guard import Diverged, StepGuard
from prl.trainer.losses import LOSSES, LossInputs
from prl.trainer.world import build_world

# steps 1 to 6 by a synchronous run, a checkpoint after each
RUN = [*SMALL, "max_steps=6", "algo.max_off_policy_steps=0", "eval.interval=6", "ckpt.interval=1", "ckpt.keep=9"]
MESHES = {"dp_shard=2": {"dp_shard": 2}, "dp_replicate=2": {"dp_replicate": 2}, "ep=2": {"dp_shard": 2, "ep": 2}}
OPTIMS = {"adamw": {"type": "adamw", "lr": 0.01}, "muon": {"type": "muon", "lr": 0.01}, "sgd": {"type": "sgd"}}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(moe_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def assert_as_if_left_out(spoiled, expected):
    (first, bad, last) = spoiled["history"]
    assert math.isnan(bad[1])
    assert [first, last] == expected["history"]
    for name, weight in expected["weights"].items():
        assert torch.equal(spoiled["weights"][name], weight), name


@pytest.mark.parametrize(
    ("optim", "offload"),
    [(o, mode) for o in OPTIMS for mode in ("false", "true", "full") if (o, mode) != ("muon", "full")],
)
def test_a_step_that_is_not_finite_leaves_no_trace(alone, model_path, optim, offload):
    overrides = [
        f"optim={optim}",
        f"memory_recipe.optim_cpu_offload={offload}",
    ]
    jobs = [
        Job(model_path, optim=OPTIMS[optim], overrides=overrides, **what) for what in ({"bad": [2]}, {"left_out": [2]})
    ]
    assert_as_if_left_out(*map(run_job, jobs))


def test_router_biases_stay_where_they_are_in_a_step_that_is_not_finite(alone):
    model = random_model(moe_card())
    balance = ExpertBalance(
        model, build_world(MeshPlan(dp_replicate=1, dp_shard=1, cp=1, ep=1), torch.device("cpu")), update_rate=0.1
    )
    for moves in (False, True):
        balance.load.counts[:, 0] = 5
        balance.step(moves)
        assert all(bool(mlp.router_bias.any()) == moves for mlp in balance.layers.values())
        assert not balance.load.counts.any()


@pytest.mark.slow
def test_one_bad_rank_stops_the_step_of_all(model_path, tmp_path):
    jobs = [Job(model_path, **mesh, **what) for mesh in MESHES.values() for what in ({"bad": [2]}, {"left_out": [2]})]
    results = run_ranks(tmp_path / "jobs", 2, jobs)
    for spoiled, expected in zip(results[::2], results[1::2], strict=True):
        assert_as_if_left_out(spoiled, expected)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_finite_however_far_apart_the_logprobs_are(name):
    far = [(-0.01, -300.0), (-300.0, -0.01), (-1.0, -1.0), (-5.0, -200.0)]
    values = [(train, infer, advantage) for train, infer in far for advantage in (-1.0, 0.0, 1.0)]
    logp, infer, advantages = (torch.tensor(column) for column in zip(*values, strict=True))
    logp.requires_grad_()
    loss = LOSSES[name](LossInputs(logp, infer, advantages, torch.arange(len(values)), len(values)), AlgoConfig())
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logp.grad.isfinite().all()


@pytest.mark.parametrize("logprob", [math.nan, -math.inf, math.inf, None, "high"])
def test_a_reply_whose_logprobs_are_no_numbers_is_the_engines_fault(logprob):
    with pytest.raises(EngineError, match="token 1"):
        parse_choice({"token_ids": [5, 6], "token_logprobs": [-0.5, logprob], "finish_reason": "stop"}, known=3)


@pytest.mark.parametrize(
    "override", ["optim.lr=inf", "algo.entropy_coef=nan", "algo.mask_high=inf", "deployment.stop_timeout_s=inf"]
)
def test_settings_are_finite(override):
    with pytest.raises(UserError, match=override.split("=")[0]):
        compose([override])


@pytest.mark.slow
def test_a_run_goes_on_behind_bad_steps_and_says_what_they_held(tmp_path):
    run_dir = tmp_path / "run"
    args = [*RUN, f"cache_dir={tmp_path}/cache", f"output_dir={run_dir}", "debug.keep_rollouts=true"]
    done = run(args, tmp_path, env=with_faults("not_finite", NOT_FINITE_STEPS="2,3,5"))
    assert done.code == 0, done.output
    trained = {row["step"]: row for row in series(run_dir, "trainer.0")}
    assert [trained[step]["step_skipped"] for step in range(1, 7)] == [0, 1, 1, 0, 1, 0]
    assert trained[2]["loss"] == "nan"
    rollouts = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    assert trained[2]["skipped_groups"] == sorted({row["group"] for row in rollouts if row["step"] == 2})
    # engines got the weights of the step before as the next version, and so the two agree
    assert all(trained[step]["mismatch_kl_mean"] < 1e-6 for step in (1, 4, 6))
    saved = sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step_*"))
    assert saved == [1, 4, 6]  # those of 2 and 3, which changed nothing, are made up for by that of 4
    (held_out,) = [
        row["eval/reward"] for row in rows(run_dir, "orchestrator") if row.get("eval/reward") and row["step"]
    ]
    assert math.isfinite(held_out)
    assert "3 optimizer steps were skipped" in done.output


@pytest.mark.slow
def test_several_bad_steps_in_a_row_are_a_failure_of_their_own(tmp_path):
    run_dir = tmp_path / "run"
    args = [*RUN, f"cache_dir={tmp_path}/cache", f"output_dir={run_dir}", "optim.max_skipped_steps=1"]
    done = run(args, tmp_path, env=with_faults("not_finite", NOT_FINITE_STEPS="3,4"))
    assert done.code == 1
    failure = json.loads((run_dir / "status.json").read_text())["failure"]
    assert failure["class"] == "diverged"
    # 2 is whence 3 would have been made
    assert f"the last good checkpoint is {run_dir}/checkpoints/step_1." in failure["message"]
    assert find_damage(run_dir / "checkpoints" / "step_1", parts_of("rl")) is None
    assert [row["step_skipped"] for row in series(run_dir, "trainer.0")] == [0, 0, 1, 1]
    assert series(run_dir, "trainer.0")[-1]["skipped_groups"], "the row that ends the run says so, too"
    again = run(args, tmp_path)  # without the fault
    assert again.code == 0, again.output


@pytest.mark.slow
@pytest.mark.parametrize("module", ["prl.rl", "prl.sft"])
def test_weights_that_are_not_finite_go_nowhere(module, tmp_path):
    """A learning rate beyond anything: the gradient is finite, the weights behind it are not."""
    failure = diverge(module, tmp_path, "optim.weight_decay=100")
    assert "step 1 made weights that are not finite" in failure["message"]
    assert not list((tmp_path / "run/checkpoints").glob("step_*"))


@pytest.mark.slow
def test_a_run_that_ends_with_bad_steps_is_not_done(tmp_path):
    """Weights that are finite, but so large that nothing computed from them is; fewer bad steps than are allowed."""
    failure = diverge("prl.rl", tmp_path, "max_steps=3")
    assert "the last 2 steps of the run were not finite; no checkpoint is good" in failure["message"]


def test_weights_that_are_not_finite_to_begin_with_are_not_blamed_on_training(alone, tmp_path):
    guard, model = StepGuard(8, tmp_path, lambda: None), torch.nn.Linear(2, 2)
    guard.begin(model)
    model.weight.requires_grad_(False)[0, 1] = math.nan  # frozen ones, too
    with pytest.raises(UserError, match=r"begins with are not finite: weight\."):
        guard.begin(model)


@pytest.mark.parametrize(("skipped", "told"), [([1], "no step of the run was finite"), ([0, 1], None), ([1, 0], None)])
def test_a_run_without_a_finite_step_is_not_done(alone, skipped, told, tmp_path):
    guard = StepGuard(8, tmp_path, lambda: None)
    for step, is_skipped in enumerate(skipped, 1):
        row = {"loss": math.nan, "grad_norm": 1.0, "step_skipped": is_skipped}
        guard.check(step, row, torch.nn.Linear(1, 1), [], lambda: None)
    if told is None:
        guard.check_end()
        return
    with pytest.raises(Diverged, match=told):
        guard.check_end()


SMALL_SFT = ["seq_len=64", "sft.batch_size=2", "sft.val_interval=0", "debug.num_threads=1", "logging=none"]


def diverge(module, tmp_path, *overrides):
    optim = ["optim=sgd", "optim.lr=1e38", "optim.max_grad_norm=0"]
    small = [*SMALL_SFT, "ckpt.interval=1"] if module == "prl.sft" else RUN
    where = [f"cache_dir={tmp_path}/cache", f"output_dir={tmp_path}/run"]
    done = run([*small, *optim, *where, *overrides], tmp_path, module)
    assert done.code == 1, done.output
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert status["failure"]["class"] == "diverged"
    return status["failure"]
