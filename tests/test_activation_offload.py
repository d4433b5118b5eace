"""Activation offloading: the same numbers to the bit, what moves, and how much is on the device at once."""

import pytest
import torch
import torch.distributed as dist
from test_recompute import DOCS, N, Saved, assert_same_bits, gradients, hidden_of, kernel_attention
from tiny import dense_card, moe_card, random_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef

from prl.config.schema import ActivationCheckpointing, ActivationOffloading
from prl.models.families.hf_causal_lm import build_hf_model
from prl.models.layers.packed_attention import packed_attention
from prl.trainer.memory.activation_offload import apply_activation_offload
from prl.trainer.memory.recompute import apply_checkpointing

LAYERS = 6
CARDS = {"dense": dense_card, "moe": moe_card}
RECOMPUTE = {mode: ActivationCheckpointing(mode=mode) for mode in ("none", "full", "selective")}


def offloaded(kind="dense", limit=1, mode="none", min_bytes=1):
    model = random_model(CARDS[kind](num_hidden_layers=LAYERS), std=0.1)
    apply_checkpointing(model, RECOMPUTE[mode])
    config = ActivationOffloading(enabled=True, max_inflight_activations=limit)
    offload = apply_activation_offload(model, config, torch.device("cpu"), min_bytes)
    return model, offload


def plain(kind="dense"):
    return random_model(CARDS[kind](num_hidden_layers=LAYERS), std=0.1)


@pytest.mark.parametrize("limit", [1, 2, 4, 9])
@pytest.mark.parametrize("mode", RECOMPUTE)
@pytest.mark.parametrize("kind", CARDS)
def test_gradients_are_the_same_to_the_bit(kind, mode, limit):
    model, offload = offloaded(kind, limit, mode)
    assert_same_bits(gradients(model, kernel_attention()), gradients(plain(kind), kernel_attention()))
    assert offload.traffic.bytes_in == offload.traffic.bytes_out
    assert (offload.traffic.bytes_out > 0) == (limit + 1 < LAYERS)
    assert offload.traffic.peak_layers_on_device == min(limit + 1, LAYERS)
    assert offload.traffic.layers_on_device == 0


@pytest.mark.parametrize("limit", [1, 2])
def test_only_so_many_layers_are_on_the_device(limit):
    """Counted by what is really alive while a layer computes."""
    model, offload = offloaded(limit=limit)
    saved: list[set[StorageWeakRef]] = []  # by layer: the floats that autograd saved
    alive: list[int] = []
    begin = offload.begin

    def watched_begin(index, parameters):
        record = begin(index, parameters)
        saved.append(set())
        pack = record.pack

        def watched_pack(tensor):
            if tensor.is_floating_point():
                saved[-1].add(StorageWeakRef(tensor.untyped_storage()))
            return pack(tensor)

        record.pack = watched_pack
        return record

    offload.begin = watched_begin
    own = {StorageWeakRef(p.untyped_storage()) for p in model.parameters()}
    kernel = kernel_attention()

    def attend(layer_idx, q, k, v):
        others = own.union(saved[layer_idx])  # cos and sin, which all layers save
        alive.append(sum(any(not ref.expired() for ref in refs - others) for refs in saved[:layer_idx]))
        return kernel(layer_idx, q, k, v)

    gradients(model, attend)
    assert alive == [min(i, limit) for i in range(LAYERS)]


def test_each_storage_moves_once_and_shared_ones_not_at_all_after_the_first():
    _, offload = run(mode="full", limit=1)
    inputs = (LAYERS - 2) * N * 32 * 4  # the two newest layers stay
    tables = 2 * N * 8 * 4  # cos and sin, seen by layer 0 first
    assert offload.traffic.bytes_out == inputs + tables


def test_parameters_and_small_tensors_stay():
    small = (
        N * 16 * 4
    )  # less than any activation of a whole row, more than what norms and attention keep for each token
    _, offload = run(limit=1, min_bytes=small)
    saved = []
    for layers in (2, LAYERS):
        model = random_model(dense_card(num_hidden_layers=layers), std=0.1)
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        storages = Saved(model, kernel_attention()).storages
        sizes = [t.untyped_storage().nbytes() for p, t in storages.items() if p not in own and t.is_floating_point()]
        saved.append(sum(size for size in sizes if size >= small))
    assert offload.traffic.bytes_out == saved[1] - saved[0] > 0, "all but the two newest layers"


def run(**options):
    model, offload = offloaded(**options)
    gradients(model, kernel_attention())
    return model, offload


@pytest.mark.parametrize("mode", RECOMPUTE)
def test_micro_batches_one_after_another_share_their_host_memory(mode):
    model, offload = offloaded(mode=mode)
    reference, used = plain(), []
    for _ in range(3):
        assert_same_bits(gradients(model, kernel_attention()), gradients(reference, kernel_attention()))
        assert len(offload.arenas) == 1, "all of it has come back"
        used.append(offload.arenas[0].used[:])
    assert used[0] == used[1] == used[2]


def test_two_graphs_may_wait_at_once():
    model, offload = offloaded()
    reference = plain()
    first, second = (hidden_of(model, kernel_attention()).square().sum() for _ in range(2))
    assert len(offload.arenas) == 0
    first.backward()
    assert len(offload.arenas) == 1
    second.backward()
    assert len(offload.arenas) == 2
    for _ in range(2):
        gradients(reference, kernel_attention())
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert one.grad is other.grad is None or torch.equal(one.grad, other.grad)


def test_a_retained_graph_can_be_walked_again():
    model, _ = offloaded()
    assert_same_bits(gradients(model, kernel_attention(), 2), gradients(plain(), kernel_attention(), 2))


def test_without_gradients_nothing_moves():
    model, offload = offloaded()
    with torch.no_grad():
        hidden = hidden_of(model, kernel_attention())
    assert torch.equal(hidden, hidden_of(plain(), kernel_attention()))
    assert offload.traffic.bytes_out == 0


def test_a_graph_without_backward_gives_its_memory_back():
    model, offload = offloaded()
    hidden_of(model, kernel_attention())
    assert len(offload.arenas) == 1
    assert offload.traffic.layers_on_device == 0
    assert offload.traffic.bytes_out > offload.traffic.bytes_in == 0


def test_disabled_is_no_change():
    model = plain()
    assert apply_activation_offload(model, ActivationOffloading(), torch.device("cpu")) is None
    assert "forward" not in vars(model.layers[0])


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", RECOMPUTE)
@pytest.mark.parametrize("kind", CARDS)
def test_with_fsdp(world, kind, mode):
    """Gathered parameters stay where they are: FSDP frees and fills them itself."""
    results, moved = [], []
    for sharded in (False, True):
        model, offload = offloaded(kind, mode=mode)
        if sharded:
            for layer in model.layers:
                if kind == "moe":
                    fully_shard(layer.mlp.experts, mesh=world)
                fully_shard(layer, mesh=world)
            fully_shard(model, mesh=world)
        grads = gradients(model, kernel_attention())[1:]
        results.append([t.full_tensor() for t in grads] if sharded else grads)
        moved.append(offload.traffic.bytes_out)
    assert_same_bits(*results)
    assert moved[0] == moved[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams and pinned memory are a GPU's")
def test_on_a_gpu_the_bound_is_one_on_memory():
    """The peak grows by the activations of one layer for each layer allowed, though the host runs far ahead."""
    device = torch.device("cuda")
    tokens, hidden, layers = 16384, 512, 12
    card = dense_card(num_hidden_layers=layers, hidden_size=hidden, head_dim=128, intermediate_size=4 * hidden)
    ids = torch.arange(tokens, device=device) % 256
    attend = packed_attention([tokens // 8] * 8, device)
    peaks, results = {}, []
    for limit in (None, 1, 3):
        model = random_model(card, std=0.02).to(device, torch.bfloat16)
        enabled = ActivationOffloading(enabled=limit is not None, max_inflight_activations=limit or 1)
        apply_activation_offload(model, enabled, device)
        for step in range(4):
            model.zero_grad()
            if step == 3:
                torch.cuda.reset_peak_memory_stats()
            model(ids, ids, attend).float().square().sum().backward()
        peaks[limit] = torch.cuda.max_memory_allocated() >> 20
        results.append(torch.cat([p.grad.flatten().float() for p in model.layers.parameters()]))
        del model
    layer = tokens * 2 * (4 * hidden + 4 * 2 * 512 + 4 * 4 * hidden) >> 20  # about: MiB that one layer saves
    assert peaks[None] - peaks[1] > 6 * layer
    assert 0 < peaks[3] - peaks[1] < 4 * layer
    for other in results[1:]:
        assert (results[0] - other).norm() < 1e-3 * results[0].norm()


def test_any_model_of_transformers():
    """Its layers get their rotary tables as a tuple, which is left alone."""
    results = []
    for enabled in (False, True):
        model = build_hf_model(None, dense_card(num_hidden_layers=LAYERS))
        apply_checkpointing(model, RECOMPUTE["full"] if enabled else RECOMPUTE["none"])
        config = ActivationOffloading(enabled=enabled, max_inflight_activations=1)
        offload = apply_activation_offload(model, config, torch.device("cpu"), 1)
        model.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(0)
        for param in model.parameters():
            param.data.normal_(0.0, 0.1, generator=generator)
        results.append(gradients(model, packed_attention(DOCS, torch.device("cpu"))))
    assert_same_bits(*results)
    assert offload.traffic.bytes_out == (LAYERS - 2) * N * 32 * 4
