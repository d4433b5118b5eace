"""AdamW over DTensors, stepped as what each rank holds."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from prl.config.schema import OptimConfig
from prl.trainer.optim import ShardedAdamW, build_optimizers, prepare


class Operands(TorchDispatchMode):
    """Which kinds of tensors fused steps are given."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "fused_adamw" in str(func):
            self.seen += [type(tensor) for tensor in args[0]]
        return func(*args, **(kwargs or {}))


def stepped(kind, mesh, operands=None):
    torch.manual_seed(0)
    whole = [torch.randn(size, 8) for size in (5, 1, 16)]
    params = [torch.nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])) for weight in whole[:2]]
    params.append(torch.nn.Parameter(whole[2]))
    optimizer = kind([{"params": params[:2]}, {"params": params[2:]}], 0.1, fused=True)
    for _ in range(3):
        for param in params:
            param.grad = param.detach().clone().sin()
        with operands or Operands():
            optimizer.step()
    return params, optimizer.state_dict()


def test_steps_and_state_are_those_of_torch(world):
    mine, theirs, mesh = Operands(), Operands(), world.dense["fsdp"]
    params, state = stepped(ShardedAdamW, mesh, mine)
    wanted_params, wanted = stepped(torch.optim.AdamW, mesh, theirs)
    assert DTensor in theirs.seen
    assert mine.seen
    assert DTensor not in mine.seen
    assert state["param_groups"] == wanted["param_groups"]
    for param, other in zip(params, wanted_params, strict=True):
        assert type(param) is type(other)
        assert torch.equal(param, other)
    for index, parts in wanted["state"].items():
        for name, part in parts.items():
            found = state["state"][index][name]
            assert isinstance(found, DTensor) == isinstance(part, DTensor)
            assert torch.equal(found, part)
    assert isinstance(state["state"][0]["exp_avg"], DTensor)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton kernel needs a GPU")
def test_the_kernel_steps_as_torch_does():
    """Many programs and few, sizes and addresses that it takes and those that it leaves to PyTorch, with clipping."""
    torch.manual_seed(0)
    odd = torch.randn(4097, device="cuda")[1:]  # not where whole words lie
    weights = [torch.randn(*size, device="cuda") for size in [(16,), (300, 4096), (5,), (4096,), (0, 16), (3, 7)]]
    weights += [odd, torch.randn(64, 32, device="cuda").t()]
    params = [[torch.nn.Parameter(weight.clone()) for weight in weights] for _ in range(2)]
    ours, theirs = (
        kind(each, 3e-3, (0.9, 0.98), 1e-8, 0.1, fused=True)
        for kind, each in zip((ShardedAdamW, torch.optim.AdamW), params, strict=True)
    )
    for step in range(4):
        factor = 0.25 if step % 2 else 1.0
        for mine, other in zip(*params, strict=True):
            mine.grad = None if step == 2 and mine.numel() == 16 else torch.randn_like(mine)
            other.grad = None if mine.grad is None else mine.grad * factor
        if step != 1:
            ours.prepare()
        ours.factor = factor
        ours.step()
        theirs.step()
        for mine, other in zip(*params, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=2e-6)
            for name, value in theirs.state[other].items():
                torch.testing.assert_close(ours.state[mine][name], value, rtol=1e-5, atol=1e-7)


def test_what_is_prepared_is_stepped_or_forgotten(world):
    """In a run the host does it before it waits for the norm, which tells whether there is a step."""
    norms, steps = [], []
    weights = [torch.nn.Parameter(torch.ones(8)) for _ in range(2)]
    optimizers = [
        kind([weight], 0.1, fused=True) for kind, weight in zip((ShardedAdamW, torch.optim.AdamW), weights, strict=True)
    ]
    ours = optimizers[0]
    collect = ours.collect
    ours.collect = lambda group: steps.append(len(norms)) or collect(group)
    for taken in (True, True, False, True):
        for weight in weights:
            weight.grad = torch.full_like(weight, 3.0 + len(norms))
        prepare(optimizers)
        assert (ours.collected is None) == (not norms), "the first step makes the moments"
        norms.append(taken)
        for optimizer in optimizers:
            if taken:
                optimizer.step()
            optimizer.zero_grad()
        assert ours.collected is None
        assert torch.equal(*weights)
    assert steps == [1, 1, 2, 3]  # of how many norms were known then: but for the first step, of those before


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_parameters_of_all_meshes_are_one_group(world, kind):
    """So that a checkpoint has as many groups with expert parallelism as without."""
    model = torch.nn.Module()
    model.plain = torch.nn.Parameter(torch.randn(3))
    for name, mesh in (("dense", world.dense["fsdp"]), ("data", world.data["data"])):
        model.register_parameter(name, torch.nn.Parameter(distribute_tensor(torch.randn(4, 2), mesh, [Shard(0)])))
    (optimizer,) = build_optimizers(model, OptimConfig(type=kind, lr=0.1))
    assert len(optimizer.param_groups) == 1
    before = [param.detach().clone() for param in model.parameters()]
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert not any(torch.equal(param, was) for param, was in zip(model.parameters(), before, strict=True))
