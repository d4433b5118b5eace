"""Replicas that hold the whole model each: when their gradients travel, and what only one of them saves and sends."""

import pytest
import torch
import torch.distributed as dist
from tiny import moe_card, moe_checkpoint, random_model
from torch.testing._internal.distributed.fake_pg import FakeStore
from trainer_ranks import Job, build_policy, job_mesh, rows_of, train_step

from prl.models.layers.documents import attend_documents
from prl.trainer import replicas
from prl.trainer.checkpoint import TrainerCheckpointer
from prl.trainer.mixed_precision import compute_in
from prl.trainer.owned import owned_by
from prl.trainer.replicas import ReplicaGradients, deal
from prl.trainer.world import build_world
from prl.trainer.writer.process import _divided


def backward(model, row):
    attend = attend_documents(model.card, row.doc_lens.tolist(), torch.device("cpu"))
    ids, positions = torch.from_numpy(row.input_ids), torch.from_numpy(row.positions)
    model(ids, positions, attend, head=torch.nn.functional.linear).float().square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_travel_while_others_are_made(world, monkeypatch, dtype):
    """In bfloat16 the gradients of vectors are made last, all at once: nothing waits for them."""
    monkeypatch.setattr(replicas, "BUCKET_BYTES", 1)
    model = random_model(moe_card(num_hidden_layers=3), std=0.1)
    compute_in(model, dtype)
    sums, sent, names = ReplicaGradients(model, torch.float32), [], {p: n for n, p in model.named_parameters()}
    send, (first,) = sums.send, [param for param, name in names.items() if name == "layers.0.mlp.experts.down_proj"]

    def watched():
        (param,) = sums.buckets[sums.sent].params
        sent.append((names[param], first.grad is None))
        send()

    monkeypatch.setattr(sums, "send", watched)
    for last in (False, True):
        model.zero_grad()
        if last:
            sums.expect_last()
        backward(model, rows_of(1)[0])
        assert len(sent) == (len(names) if last else 0)
    early = [name for name, first_layer_is_to_come in sent if first_layer_is_to_come]
    assert {"layers.2.mlp.experts.down_proj", "layers.1.self_attn.q_proj.weight"} <= set(early)
    assert all(param.grad is None for param in names)
    sums.finish()
    assert all(param.grad.shape == param.shape and param.grad.dtype == param.dtype for param in names)


def test_what_was_not_said_to_be_the_last_is_summed_all_the_same(world):
    model = random_model(moe_card(), std=0.1)
    sums = ReplicaGradients(model, torch.float32)
    backward(model, rows_of(1)[0])
    unused = model.layers[0].self_attn.q_proj.weight
    unused.grad = None
    before = {name: param.grad for name, param in model.named_parameters()}
    for _ in range(2):  # a second time changes nothing in a world of one
        sums.finish()
        for name, param in model.named_parameters():
            assert (param.grad is None) == (param is unused), name
            assert param.grad is None or torch.equal(param.grad, before[name]), name


def test_a_gradient_that_has_left_is_not_added_to(world):
    model = random_model(moe_card(), std=0.1)
    sums = ReplicaGradients(model, torch.float32)
    sums.expect_last()
    sums.send()
    with pytest.raises(AssertionError, match="on its way"):
        backward(model, rows_of(1)[0])


def test_each_gets_about_as_much():
    sizes = [1000, 10, 10, 10, 500, 480, 20, 0]
    owners = deal(sizes, 2)
    assert [sum(s for s, o in zip(sizes, owners, strict=True) if o == rank) for rank in (0, 1)] == [1020, 1010]
    assert deal(sizes, 2) == owners
    assert set(deal(sizes, 1)) == {0}


def test_of_replicas_one_saves_and_sends_what_all_have(tmp_path):
    """Together all of it, and each about as much."""
    path, size = moe_checkpoint(tmp_path), 4
    job = Job(str(path), dp_replicate=size, optim={"type": "adamw", "lr": 0.01})
    saved, sent = [], []
    for rank in range(size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        try:
            policy = build_policy(job, build_world(job_mesh(job), torch.device("cpu")))
            train_step(policy, 1)
            state = TrainerCheckpointer(tmp_path, asynchronous=False)._state(policy.model, policy.optimizers)
            staged = _divided(state)[1]
            saved.append({index.fqn: tensor.nbytes for index, tensor in staged.items()})
            boxes = owned_by(policy.model, None, policy.world).boxes
            sent.append((set(boxes[:, 0].tolist()), int((boxes[:, 2] * boxes[:, 4]).sum())))
        finally:
            dist.destroy_process_group()
    names = {name for name, _ in policy.model.named_parameters()}
    wanted = [f"model.{name}" for name in names]
    wanted += [f"optimizer.state.{name}.{part}" for name in names for part in ("exp_avg", "exp_avg_sq", "step")]
    wanted += [f"random_state.{rank}.torch" for rank in range(size)]
    assert sorted(name for held in saved for name in held) == sorted(wanted)
    numbers = [number for of_rank, _ in sent for number in of_rank]
    assert len(numbers) == len(set(numbers)) == len(owned_by(policy.model, None, policy.world).table.names)
    largest = max(param.numel() for param in policy.model.parameters())
    counts, nbytes = [count for _, count in sent], [sum(held.values()) for held in saved]
    assert max(counts) - min(counts) <= largest
    assert max(nbytes) - min(nbytes) <= 4 * largest
