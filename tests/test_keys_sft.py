"""Keys of supervised fine-tuning, each by what the trainer does with it; a trainer of one rank, in this process."""

import json

import pytest
import torch
from role_context import context_of
from runs import rows
from safetensors.torch import load_file

from prl.config import compose
from prl.planning import make_plan, warm_start_plan
from prl.trainer.loops.sft_loop import SftTrainer

SMALL = ["max_steps=3", "sft.batch_size=2", "seq_len=64", "sft.val_rows=2", "sft.val_interval=0", "ckpt=none",
         "ckpt.export_hf=false", "ckpt.asynchronous=false"]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "squares.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}^2", "completion": str(i * i)}) + "\n" for i in range(400)))
    return ["data=jsonl", f"sft.data.source={path}"]


@pytest.fixture
def trained(world, data, tmp_path):
    """overrides -> (trainer, its metrics rows, its run directory) at the end of a run."""

    def run(*overrides, name="run"):
        run_dir = tmp_path / name
        trainer = SftTrainer(context_of(run_dir, *data, *SMALL, *overrides, job="sft"), world)
        trainer.run()
        return trainer, rows(run_dir, "trainer.0"), run_dir

    return run


def test_a_step_takes_batch_size_rows(trained):
    for count in (1, 3):
        _, found, _ = trained(f"sft.batch_size={count}", "max_steps=1", name=f"run{count}")
        assert found[0]["padded_tokens"] == 64 * count
        assert found[0]["documents_left_out"] == 0
        assert 64 * count * 0.5 < found[0]["tokens"] <= 64 * count


def test_validation_comes_every_val_interval_steps_and_at_the_end(trained):
    for interval, expected in ((0, []), (2, [2, 3]), (9, [3])):
        _, found, _ = trained(f"sft.val_interval={interval}", name=f"run{interval}")
        assert [row["step"] for row in found if "val_loss" in row] == expected


def test_training_ends_once_the_validation_loss_is_reached(trained):
    for target, steps in (("0", 3), ("1000", 2)):
        _, found, _ = trained("sft.val_interval=2", f"sft.target_val_loss={target}", name=f"run{target}")
        assert [row["step"] for row in found] == list(range(1, steps + 1))


def test_validation_takes_val_rows_rows(trained):
    for count in (1, 2):
        trainer, _, _ = trained(f"sft.val_rows={count}", "max_steps=1", name=f"run{count}")
        assert len(trainer.val_rows) == count


def test_what_a_run_leaves_at_its_end(trained):
    for said in ("true", "false"):
        _, _, run_dir = trained(f"ckpt.at_end={said}", f"ckpt.export_hf={said}", "max_steps=1", name=said)
        assert (run_dir / "checkpoints" / "step_1").is_dir() == (said == "true")
        assert (run_dir / "export" / "model.safetensors").is_file() == (said == "true")


def test_an_export_is_in_the_dtype_that_is_asked_for(trained):
    exports = []
    for dtype in ("float32", "bfloat16"):
        said = ["ckpt=none", "ckpt.export_hf=true", f"ckpt.export_dtype={dtype}", "max_steps=1"]
        exports.append(load_file(trained(*said, name=dtype)[2] / "export/model.safetensors"))
    whole, narrow = exports
    assert all(torch.equal(tensor, whole[name].to(tensor.dtype)) for name, tensor in narrow.items())
    assert {tensor.dtype for tensor in narrow.values() if tensor.ndim > 1} == {torch.bfloat16}


def test_models_made_here_are_kept_in_cache_dir(trained, tmp_path):
    trained("max_steps=1", "model.name=renamed")
    assert len(list((tmp_path / "cache" / "models").glob("renamed-*"))) == 1


def test_a_warm_start_is_the_sft_job_of_its_keys():
    """So that what tests of the job show of `sft.` holds of `warm_start.`, too."""
    changes = {"batch_size": 3, "val_interval": 7, "val_rows": 5, "target_val_loss": 0.25, "seq_len": 96,
               "max_steps": 13, "optim.max_grad_norm": 0.5, "optim.max_skipped_steps": 8, "data.val_fraction": 0.2,
               "data.shuffle": "false", "data.split": "other", "data.loss_roles": "[user]",
               "data.val_source": "env:reverse_text"}  # fmt: skip
    config = compose(["warm_start.seed=3", *(f"warm_start.{key}={value}" for key, value in changes.items())])
    assert config.warm_start != compose([]).warm_start
    job = warm_start_plan(make_plan(config)).config
    assert job.sft.model_dump() == config.warm_start.model_dump(exclude={"seed"})
    assert (job.job, job.optim, job.seq_len, job.max_steps) == ("sft", config.warm_start.optim, 96, 13)
    assert job.seed == 3
