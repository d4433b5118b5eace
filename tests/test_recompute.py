"""Activation checkpointing: the same numbers to the bit, what is dropped and what is kept, and what runs how often."""

import pytest
import torch
import torch.distributed as dist
from families import family_card
from tiny import VOCAB, dense_card, moe_card, random_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from prl.config.schema import ActivationCheckpointing
from prl.models.layers import packed_sparse_attention
from prl.models.layers.attention_kernels import PackedAttention
from prl.models.layers.documents import attend_documents
from prl.models.layers.packed_attention import packed_attention
from prl.trainer.compilation import apply_compile
from prl.trainer.memory.recompute import DEFAULT_TARGETS, apply_checkpointing
from prl.trainer.memory.saved_tensors import packing

DOCS = [5, 19, 8]
N = sum(DOCS)
CARDS = {"dense": dense_card, "moe": moe_card}
MODES = {
    "full": ActivationCheckpointing(mode="full"),
    "every second": ActivationCheckpointing(mode="full", freq=2),
    "default": ActivationCheckpointing(mode="selective"),
    "norm": ActivationCheckpointing(mode="selective", targets=("norm",)),
    "act": ActivationCheckpointing(mode="selective", targets=("act",)),
    "attn_proj": ActivationCheckpointing(mode="selective", targets=("attn_proj",)),
    "mlp": ActivationCheckpointing(mode="selective", targets=("mlp", "moe")),
    "all": ActivationCheckpointing(mode="selective", targets=("norm", "act", "attn_proj", "mlp", "moe")),
}


def kernel_attention(device="cpu"):
    """What GPUs run: one autograd function that saves q, k and v as they are."""
    ends = torch.tensor([0, *DOCS], device=device).cumsum(0).to(torch.int32)
    return lambda layer_idx, q, k, v: PackedAttention.apply(q, k, v, ends, max(DOCS))


def sliced_attention():
    """One call per document, on views of q, k and v: as cuDNN's kernels are used."""

    def attend(layer_idx, q, k, v):
        parts = zip(*(t.split(DOCS) for t in (q, k, v)), strict=True)
        ends = [torch.tensor([0, n], dtype=torch.int32) for n in DOCS]
        return torch.cat([PackedAttention.apply(*p, e, n) for p, e, n in zip(parts, ends, DOCS, strict=True)])

    return attend


ATTENTIONS = {
    "padded": lambda: packed_attention(DOCS, torch.device("cpu")),
    "kernel": kernel_attention,
    "slices": sliced_attention,
}


def make_model(kind, ac=None, **changes):
    model = random_model(CARDS[kind](**changes), std=0.1)
    if ac is not None:
        apply_checkpointing(model, ac)
    return model


def hidden_of(model, attend):
    ids = torch.randint(0, VOCAB, (N,), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in DOCS])
    device = next(model.parameters()).device
    return model(ids.to(device), positions.to(device), attend)


def gradients(model, attend, repeat=1):
    loss = hidden_of(model, attend).square().sum()
    for i in range(repeat):
        loss.backward(retain_graph=i + 1 < repeat)
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_same_bits(one, other):
    assert len(one) == len(other) > 1
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", CARDS)
def test_gradients_are_the_same_to_the_bit(kind, mode, attention):
    attend = ATTENTIONS[attention]()
    assert_same_bits(gradients(make_model(kind, MODES[mode]), attend), gradients(make_model(kind), attend))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", CARDS)
def test_a_retained_graph_can_be_walked_again(kind, mode):
    attend = kernel_attention()
    assert_same_bits(gradients(make_model(kind, MODES[mode]), attend, 2), gradients(make_model(kind), attend, 2))


class Saved:
    """Floats that autograd keeps between forward and backward, storages counted once, parameters not at all."""

    def __init__(self, model, attend):
        params = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.storages = {}
        with packing(self.pack):
            self.loss = hidden_of(model, attend).square().sum()
        self.floats = sum(t.untyped_storage().nbytes() // 4 for p, t in self.storages.items() if p not in params)

    def pack(self, tensor):
        self.storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor


# per token and layer: x at both residual joints, attention's output and log-sum-exp (4 heads), gate and up of 48
X, OUT, LSE, GATE_UP = 32, 32, 4, 2 * 48
KEPT = {"full": X, "default": 2 * X + OUT + LSE + GATE_UP, "all": 2 * X + OUT + LSE}


@pytest.mark.parametrize("mode", KEPT)
def test_what_is_kept_is_what_is_said(mode):
    assert kept_per_token(mode, kernel_attention()) == pytest.approx(KEPT[mode], abs=1)


def test_views_of_what_can_be_remade_are_dropped_too():
    per_document = KEPT["default"] + OUT  # the outputs of the slices, and all in one tensor
    assert kept_per_token("default", sliced_attention()) == pytest.approx(per_document, abs=1)


def kept_per_token(mode, attend):
    """And layer."""
    four, two = (Saved(make_model("dense", MODES[mode], num_hidden_layers=n), attend).floats for n in (4, 2))
    return (four - two) / (2 * N)


@pytest.mark.parametrize(("mode", "dropped"), [("norm", 2 * X), ("act", GATE_UP), ("attn_proj", X + 2 * 48 + 16)])
def test_each_target_drops_its_part(mode, dropped):
    """At least: norms on CPU save more than their inputs."""
    attend = kernel_attention()
    none, some = (Saved(make_model("dense", ac), attend).floats for ac in (None, MODES[mode]))
    assert (none - some) / (2 * N) >= dropped


INNER, CHANNELS = 8 * 8, 8 * 8 + 2 * 4 * 16  # of the state-space layers below


@pytest.mark.parametrize(
    ("targets", "dropped", "kept"),
    [
        # x, B and C before the convolution and after it, and the gate
        (("attn_proj",), INNER + 2 * CHANNELS, 900),
        # what comes out of the scan and of the norm, and all that both save; kept is what they read
        (("scan",), 2 * INNER + CHANNELS, 2 * X + INNER + CHANNELS + 60),
        (("attn_proj", "scan"), 3 * INNER + 2 * CHANNELS, 2 * X + 2),  # kept is what is as wide as the hidden state
    ],
)
def test_state_space_layers_drop_what_is_said(targets, dropped, kept):
    """And gradients stay the same to the bit."""
    card = family_card("nemotron_h without experts", hybrid_override_pattern="MM", num_hidden_layers=2)
    attend, models = attend_documents(card, DOCS, torch.device("cpu")), [random_model(card, std=0.1) for _ in range(2)]
    apply_checkpointing(models[1], ActivationCheckpointing(mode="selective", targets=targets))
    none, some = (Saved(model, attend).floats for model in models)
    assert (none - some) / (2 * N) >= dropped
    assert some / (2 * N) <= kept
    assert_same_bits(*(gradients(model, attend) for model in models))


def test_moe_target_drops_everything_routed():
    attend = kernel_attention()
    none, some = (Saved(make_model("moe", ac), attend).floats for ac in (None, MODES["mlp"]))
    assert (none - some) / (2 * N) > X + 2 * (X + 3 * 16), "normed input, and two experts' rows, gate, up and product"


def count_calls(module, method):
    calls = []
    function = getattr(module, method)

    def run(*args):
        calls.append(torch.is_grad_enabled())
        return function(*args)

    setattr(module, method, run)
    return calls


@pytest.mark.parametrize(("mode", "twice"), [("default", "project"), ("mlp", "mlp_block")])
def test_only_the_targets_run_twice_and_attention_never(mode, twice):
    model = random_model(dense_card())
    calls = {method: count_calls(model.layers[0], method) for method in ("project", "join", "mlp_block")}
    apply_checkpointing(model, MODES[mode])
    attended = []
    kernel = kernel_attention()

    def attend(layer_idx, q, k, v):
        attended.append(layer_idx)
        return kernel(layer_idx, q, k, v)

    gradients(model, attend)
    assert attended == [0, 1]
    assert {method: len(made) for method, made in calls.items()} == {
        method: 2 if method == twice else 1 for method in calls
    }


@pytest.mark.parametrize("mode", ["full", "all"])
def test_keys_are_chosen_once(mode, monkeypatch):
    """By layers that choose, not again for backward, and not by those that share a choice."""
    card = family_card("glm_moe_dsa shared choices")
    model, chosen = random_model(card, std=0.1), []
    plain = gradients(model, attend_documents(card, DOCS, torch.device("cpu")))
    apply_checkpointing(model, MODES[mode])
    choose = packed_sparse_attention.choose_keys
    monkeypatch.setattr(packed_sparse_attention, "choose_keys", lambda *args: chosen.append(1) or choose(*args))
    assert_same_bits(gradients(model, attend_documents(card, DOCS, torch.device("cpu"))), plain)
    assert len(chosen) == card.num_hidden_layers - len(card.shared_index_layers) == 2


def test_a_repetition_stops_at_the_last_tensor_that_is_missing():
    """The MLP's last product is needed by nobody in backward."""
    model = random_model(dense_card())
    products = count_calls(model.layers[0].mlp.down_proj, "forward")
    apply_checkpointing(model, MODES["full"])
    finished = count_calls(model.layers[0].mlp, "forward")
    gradients(model, kernel_attention())
    assert len(products) == 2
    assert len(finished) == 2
    done = []
    model.layers[0].mlp.register_forward_hook(lambda *_: done.append(1))
    gradients(model, kernel_attention())
    assert done == [1], "the repetition ends inside the MLP"


def test_nothing_is_recomputed_without_gradients():
    model = random_model(dense_card())
    calls = count_calls(model.layers[0], "project")
    apply_checkpointing(model, MODES["default"])
    with torch.no_grad():
        hidden = hidden_of(model, kernel_attention())
    assert calls == [False]
    assert torch.equal(hidden, hidden_of(random_model(dense_card()), kernel_attention()))


def test_a_function_that_does_not_repeat_itself_is_caught():
    model = random_model(dense_card())
    model.layers[0].project = lambda x, cos, sin, real=model.layers[0].project, calls=[]: (
        calls.append(1),
        real(x, cos, sin) if len(calls) == 1 else real(torch.cat([x, x]), torch.cat([cos, cos]), torch.cat([sin, sin])),
    )[1]
    apply_checkpointing(model, MODES["attn_proj"])
    with pytest.raises(AssertionError, match="did not repeat"):
        gradients(model, kernel_attention())


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", CARDS)
def test_with_fsdp(world, kind, mode):
    """Parameters are gathered again before backward asks for anything; experts are a group of their own."""
    results = []
    for ac in (None, MODES[mode]):
        model = make_model(kind, ac)
        for layer in model.layers:
            if kind == "moe":
                fully_shard(layer.mlp.experts, mesh=world)
            fully_shard(layer, mesh=world)
        fully_shard(model, mesh=world)
        results.append([t.full_tensor() for t in gradients(model, kernel_attention())[1:]])
    assert_same_bits(*results)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "default", "mlp"])
@pytest.mark.parametrize("kind", CARDS)
def test_with_compiled_parts(kind, mode):
    attend = kernel_attention()
    results = []
    for ac in (None, MODES[mode]):
        model = random_model(CARDS[kind](num_hidden_layers=1), std=0.1)
        apply_compile(model, True, ac)
        if ac is not None:
            apply_checkpointing(model, ac, compiled=True)
        results.append(gradients(model, attend))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_default_targets_leave_attention_and_mlp_alone():
    assert not {"mlp", "moe"} & set(DEFAULT_TARGETS)
