"""Optimizers whose state, or all, is on the host: the same steps, and checkpoints that fit each other."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_recompute import hidden_of, kernel_attention
from tiny import dense_card, moe_card, random_model
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from prl.config.schema import OptimConfig
from prl.trainer.memory.optimizer_offload import (
    HostOptimizer,
    OffloadedState,
    is_moment,
    local_gradients,
    master_weights,
    offload_optimizers,
)
from prl.trainer.optim import ShardedAdamW, build_optimizers

CPU = torch.device("cpu")
OPTIMS = {
    "adamw": OptimConfig(type="adamw", lr=0.01, weight_decay=0.1, eps=1e-5),
    "sgd": OptimConfig(type="sgd", lr=0.01, momentum=0.9),
    "plain sgd": OptimConfig(type="sgd", lr=0.01, momentum=0.0),
    "muon": OptimConfig(type="muon", lr=0.01, weight_decay=0.1),
}
CARDS = {"dense": dense_card, "moe": moe_card}


@pytest.fixture(autouse=True)
def world():
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Trainer:
    def __init__(self, optim="adamw", mode=False, kind="dense", dtype=torch.float32, seed=0, lr=None, device=CPU):
        self.device = device
        self.model = random_model(CARDS[kind](tie_word_embeddings=True), seed=seed, std=0.1).to(device, dtype)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for part in (*self.model.layers, self.model):
            fully_shard(part, mesh=init_device_mesh(device.type, (1,)), mp_policy=policy)
        config = OPTIMS[optim] if lr is None else OPTIMS[optim].model_copy(update={"lr": lr})
        self.optimizers = build_optimizers(self.model, config)
        if isinstance(mode, int) and mode > 1:
            self.optimizers = [OffloadedState(optimizer, device, bucket_bytes=mode) for optimizer in self.optimizers]
        else:
            self.optimizers = offload_optimizers(self.optimizers, mode, device)

    def train(self, steps=3, micro_batches=2, clip=None):
        for _ in range(steps):
            for _ in range(micro_batches):
                (hidden_of(self.model, kernel_attention(self.device)).square().mean() / micro_batches).backward()
            grads = local_gradients(self.model, self.optimizers)
            if clip is not None:
                torch._foreach_mul_(grads, clip)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return self

    def weights(self):
        return {name: param.full_tensor().detach() for name, param in self.model.named_parameters()}

    def state(self):
        model_state, optim_state = get_state_dict(self.model, self.optimizers)
        return {"model": model_state | master_weights(self.model, self.optimizers), "optimizer": optim_state}

    def save(self, path):
        dcp.save(self.state(), checkpoint_id=path)
        return self

    def load(self, path):
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizers, **parts)
        return self


def assert_same_weights(one, other):
    for name, weight in one.weights().items():
        assert torch.equal(weight, other.weights()[name]), name


@pytest.mark.parametrize("bucket_bytes", [True, 2, 20_000], ids=["one bucket", "a parameter each", "some"])
@pytest.mark.parametrize("optim", OPTIMS)
@pytest.mark.parametrize("kind", CARDS)
def test_state_offload_changes_no_bit(kind, optim, bucket_bytes):
    plain = Trainer(optim, kind=kind).train()
    assert_same_weights(Trainer(optim, bucket_bytes, kind).train(), plain)


@pytest.mark.parametrize("optim", ["adamw", "sgd", "plain sgd"])
@pytest.mark.parametrize("kind", CARDS)
def test_the_host_steps_as_the_device_would(kind, optim):
    assert_same_weights(Trainer(optim, "full", kind).train(clip=0.3), Trainer(optim, kind=kind).train(clip=0.3))


def test_moments_never_are_on_the_device_all_at_once():
    trainer = Trainer("adamw", 20_000).train()
    optimizer = trainer.optimizers[0]
    sizes = [sum(2 * p.to_local().nbytes for p in bucket.params) for bucket in optimizer.buckets]
    three = max(sum(sizes[i : i + 3]) for i in range(len(sizes) - 2))
    assert optimizer.peak_moments == three < sum(sizes)


def test_host_memory_is_used_again():
    trainer = Trainer("adamw", 20_000).train(steps=1)
    optimizer = trainer.optimizers[0]

    def moments():
        return [v for state in optimizer.state.values() for v in state.values() if is_moment(v)]

    before = moments()
    numbers = [moment.full_tensor().clone() for moment in before]
    trainer.train(steps=1)
    assert all(a is b for a, b in zip(before, moments(), strict=True))
    assert not any(torch.equal(a, b.full_tensor()) for a, b in zip(numbers, moments(), strict=True))


def test_learning_rates_reach_the_step():
    for mode in (True, "full"):
        trainer = Trainer("adamw", mode)
        before = trainer.weights()
        before = {name: weight.clone() for name, weight in before.items()}
        for group in trainer.optimizers[0].param_groups:
            group["lr"], group["weight_decay"] = 0.0, 0.0
        trainer.train(steps=1)
        assert all(torch.equal(weight, before[name]) for name, weight in trainer.weights().items())


def test_parameters_without_gradient_are_left_alone():
    for mode in (False, True, "full"):
        trainer = Trainer("adamw", mode)
        frozen = trainer.model.layers[0].self_attn.q_proj.weight
        before = frozen.full_tensor().clone()
        loss = hidden_of(trainer.model, kernel_attention()).square().mean()
        loss.backward()
        if mode == "full":
            trainer.optimizers[0].gradients()
            trainer.optimizers[0].masters[frozen].has_gradient = False
        frozen.grad = None
        trainer.optimizers[0].step()
        assert torch.equal(frozen.full_tensor(), before)


def test_masters_keep_what_bfloat16_would_round_away():
    full = Trainer("adamw", "full", dtype=torch.bfloat16, lr=1e-5)
    start = {name: weight.full_tensor().clone() for name, weight in full.state()["model"].items()}
    full.train(steps=20)
    name = "layers.0.mlp.up_proj.weight"
    master = master_weights(full.model, full.optimizers)[name].full_tensor()
    moved = (master - start[name].float()).abs()
    assert moved.median() > 5e-5, "20 steps of about 1e-5"
    assert torch.equal(full.weights()[name], master.bfloat16())
    assert all(p.dtype == torch.bfloat16 and p.grad is None for p in full.model.parameters())


def test_gradients_are_added_up_in_float32():
    full = Trainer("plain sgd", "full", dtype=torch.bfloat16)
    reference = Trainer("plain sgd", dtype=torch.bfloat16)
    parts = []
    for seed in (1, 2, 3):
        for trainer in (full, reference):
            x = hidden_of(trainer.model, kernel_attention())
            (x * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))).mean().backward()
        parts.append([p.grad.full_tensor().clone() for p in reference.model.parameters()])
        reference.model.zero_grad()
    for index, grad in enumerate(local_gradients(full.model, full.optimizers)):
        expected = sum(part[index].float() for part in parts)
        assert torch.equal(grad, expected)
        assert grad.dtype == torch.float32


MODES = {"none": False, "state": True, "full": "full"}


@pytest.mark.parametrize("optim", ["adamw", "sgd"])
@pytest.mark.parametrize("loaded", MODES)
@pytest.mark.parametrize("saved", MODES)
def test_checkpoints_fit_each_other(tmp_path, saved, loaded, optim):
    """Two steps, a checkpoint, two more: the same as four."""
    Trainer(optim, MODES[saved]).train(steps=2).save(tmp_path / "c")
    resumed = Trainer(optim, MODES[loaded], seed=1).load(tmp_path / "c").train(steps=2)
    assert_same_weights(resumed, Trainer(optim).train(steps=4))


def test_masters_survive_a_checkpoint_in_bfloat16(tmp_path):
    def make(seed=0):
        return Trainer("adamw", "full", dtype=torch.bfloat16, seed=seed, lr=1e-5)

    make().train(steps=3).save(tmp_path / "c")
    resumed, straight = make(seed=1).load(tmp_path / "c").train(steps=3), make().train(steps=6)
    masters = [master_weights(trainer.model, trainer.optimizers) for trainer in (resumed, straight)]
    for name, master in masters[0].items():
        assert torch.equal(master.full_tensor(), masters[1][name].full_tensor())


def test_state_is_sharded_as_the_parameters_are():
    for mode in MODES.values():
        trainer = Trainer("adamw", mode).train(steps=1)
        for param, state in trainer.optimizers[0].state.items():
            for value in state.values():
                if is_moment(value):
                    assert isinstance(value, DTensor)
                    assert value.placements == param.placements
                    assert value.device_mesh == param.device_mesh


def test_modes_by_name():
    assert [type(Trainer("adamw", mode).optimizers[0]) for mode in MODES.values()] == [
        ShardedAdamW,
        OffloadedState,
        HostOptimizer,
    ]


GPU = torch.device("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams and pinned memory are a GPU's")
@pytest.mark.parametrize("optim", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("mode", [True, 20_000, "full"])
def test_on_a_gpu(tmp_path, mode, optim):
    if mode == "full" and optim == "muon":
        pytest.skip("refused by rule")
    plain = Trainer(optim, device=GPU).train(steps=2).save(tmp_path / "c").train(steps=3)
    offloaded = Trainer(optim, mode, device=GPU).train(steps=5)
    resumed = Trainer(optim, mode, device=GPU, seed=1).load(tmp_path / "c").train(steps=3)
    expected = plain.weights()
    for trainer in (offloaded, resumed):
        for name, weight in trainer.weights().items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5)
        for optimizer in trainer.optimizers:
            for state in optimizer.state.values():
                for value in state.values():
                    assert not is_moment(value) or value.to_local().device.type == "cpu"
