"""Muon: as torch.optim.Muon in one process, and in several as in one."""

import gc

import muon_ranks
import pytest
import torch
from muon_ranks import OPTIONS, SHAPES, STEPS, gradients, weights
from rank_processes import run_script
from torch.distributed.tensor import DTensor

from prl.trainer import muon
from prl.trainer.muon import Muon, Stack, newton_schulz


def train(kind, steps=range(STEPS), state=None, params=None, **options):
    params = params or [torch.nn.Parameter(weight) for weight in weights()]
    optimizer = kind(params, **{**OPTIONS, **options})
    if state is not None:
        optimizer.load_state_dict(state)
    for step in steps:
        for param, gradient in zip(params, gradients(step), strict=True):
            param.grad = gradient
        optimizer.step()
    return params, optimizer


def assert_moved_alike(one, other, share=0.05):
    """Their movement agrees but for bfloat16, to which torch's rounds a step's products."""
    for shape, begun, a, b in zip(SHAPES, weights(), one, other, strict=True):
        error = (a.detach() - b.detach()).norm() / (a.detach() - begun).norm()
        assert error < share, (shape, float(error))


@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False}, {"weight_decay": 0.0}, {"adjust_lr_fn": "original"}], ids=str
)
def test_one_process_steps_as_torch_does(options):
    assert_moved_alike(train(Muon, **options)[0], train(torch.optim.Muon, **options)[0])


def test_state_goes_from_torchs_to_ours_and_back():
    unbroken, _ = train(torch.optim.Muon)
    for first, then in ((torch.optim.Muon, Muon), (Muon, torch.optim.Muon)):
        params, optimizer = train(first, steps=range(1))
        params, _ = train(then, steps=range(1, STEPS), state=optimizer.state_dict(), params=params)
        assert_moved_alike(params, unbroken)


def test_orthogonal_to_about_a_third():
    for shape in ((3, 24, 96), (3, 96, 24), (2, 32, 32)):
        matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        values = torch.linalg.svdvals(newton_schulz(matrices.bfloat16(), (3.4445, -4.7750, 2.0315), 5).float())
        assert values.max() < 1.35
        assert values.median() > 0.65


def test_a_matrix_without_gradient_stays():
    params = [torch.nn.Parameter(weight) for weight in weights()]
    optimizer = Muon(params, **OPTIONS)
    params[1].grad = gradients(0)[1]
    optimizer.step()
    moved = [not torch.equal(param, weight) for param, weight in zip(params, weights(), strict=True)]
    assert moved == [False, True] + [False] * (len(SHAPES) - 2)
    assert list(optimizer.state) == [params[1]]


def test_three_stacks_are_in_memory_at_a_time(monkeypatch):
    monkeypatch.setattr(muon, "STACK_BYTES", 1)
    most, apply = 0, Stack.apply

    def counted(stack):
        nonlocal most
        held = [s for s in gc.get_objects() if type(s) is Stack and hasattr(s, "buffer")]
        most = max(most, len(held))
        apply(stack)

    monkeypatch.setattr(Stack, "apply", counted)
    train(Muon)
    assert 2 <= most <= 3


@pytest.fixture(scope="module", params=[3, 4])
def ranks(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("muon")
    run_script(muon_ranks.__file__, directory, request.param)
    return [torch.load(directory / f"found_{rank}.pt") for rank in range(request.param)]


def test_ranks_step_as_one_process(ranks):
    alone, _ = train(Muon)
    for key, (params, _) in ranks[0].items():
        assert_moved_alike(params, alone, share=1e-5)
        for other in ranks[1:]:
            assert all(torch.equal(a, b) for a, b in zip(params, other[key][0], strict=True)), key


def test_each_matrix_has_one_owner_and_ranks_about_as_much_to_do(ranks):
    for key, (_, stacks) in ranks[0].items():
        assert all(other[key][1] == stacks for other in ranks)
        assert sum(sum(owned) for _, owned in stacks) == len(SHAPES), key
        work = [[min(shape) ** 2 * max(shape) * count for count in owned] for shape, owned in stacks]
        shares = [sum(column) for column in zip(*work, strict=True)]
        assert max(shares) - min(shares) <= 16 * 16 * 32, (key, shares)  # a matrix of the largest kind


def test_columns_are_refused(monkeypatch):
    from torch.distributed.tensor import Shard

    class Mesh:
        def size(self, dim):
            return 2

    param = torch.nn.Parameter(torch.ones(2, 2))
    monkeypatch.setattr(muon, "DTensor", torch.nn.Parameter)
    monkeypatch.setattr(param, "placements", (Shard(1),), raising=False)
    monkeypatch.setattr(param, "device_mesh", Mesh(), raising=False)
    assert not isinstance(param, DTensor)
    with pytest.raises(ValueError, match="whole rows"):
        muon.owners_of(param)
