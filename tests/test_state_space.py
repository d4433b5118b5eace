"""State-space layers: the scan against the recurrence, documents of a row against each alone, states in the engine."""

import pytest
import torch
from families import family_card
from tiny import END, random_model

from prl.config.schema import InferenceConfig
from prl.inference.engine import TorchEngine
from prl.inference.sampling import SamplingParams
from prl.inference.sequences import Request
from prl.models.adapters.lora import cast_parameters
from prl.models.experts.routing import RoutingRecorder
from prl.models.layers.documents import attend_documents
from prl.models.state_space.convolution import Documents, convolve_documents
from prl.models.state_space.documents import mix_documents
from prl.models.state_space.mixer import Channels, Decay, draw_decay
from prl.models.state_space.scan import scan, step

CPU = torch.device("cpu")
ROWS, TOKENS, HEADS, SIZE, GROUPS, STATE = 2, 37, 4, 3, 2, 5


def numbers(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def scan_inputs(tokens=TOKENS):
    shared = (ROWS, tokens, GROUPS, STATE)
    inputs = [numbers(ROWS, tokens, HEADS, SIZE), numbers(ROWS, tokens, HEADS, seed=1).exp(),
              -numbers(HEADS, seed=2).exp(), numbers(*shared, seed=3), numbers(*shared, seed=4),
              numbers(HEADS, seed=5), numbers(ROWS, HEADS, SIZE, STATE, seed=6)]  # fmt: skip
    starts = torch.rand(ROWS, tokens, generator=torch.Generator().manual_seed(7)) < 0.1
    starts[1, 0] = True
    return [t.requires_grad_() for t in inputs], starts


def recurrence(x, dt, a, b, c, d, starts, state):
    """One token after the other, as the paper defines it."""
    ys = []
    for t in range(x.shape[1]):
        state = state.masked_fill(starts[:, t, None, None, None], 0)
        per_head = [m[:, t].repeat_interleave(HEADS // GROUPS, dim=1) for m in (b, c)]
        decay = (dt[:, t] * a).exp()[..., None, None]
        state = decay * state + (dt[:, t, :, None] * x[:, t])[..., None] * per_head[0][:, :, None]
        ys.append((state * per_head[1][:, :, None]).sum(-1) + d[:, None] * x[:, t])
    return torch.stack(ys, dim=1), state


@pytest.mark.parametrize(("chunk", "block"), [(4, 8), (8, 8), (4, 16), (1, 4), (64, 2048)])
def test_the_scan_is_the_recurrence(chunk, block):
    """Outputs, last states and all gradients, with documents that begin anywhere and a state that comes in."""
    inputs, starts = scan_inputs()
    results = []
    for y, state in (scan(*inputs[:6], starts, inputs[6], chunk, block), recurrence(*inputs[:6], starts, inputs[6])):
        loss = (y * numbers(*y.shape, seed=8)).sum() + (state * numbers(*state.shape, seed=9)).sum()
        results.append((y, state, *torch.autograd.grad(loss, inputs)))
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("seed", [1, 2])
def test_gradients_of_rates_keep_their_digits_where_states_fade_fast(seed):
    """In float32 against float64. As autograd takes it, a difference of two sums over pairs, it is 2e-5 apart."""
    inputs, _ = scan_inputs(tokens=256)
    x, dt, a, b, c, d, state = (t.detach() for t in inputs)
    dy, grads = numbers(ROWS, 256, HEADS, SIZE, seed=seed), []
    for dtype in (torch.float64, torch.float32):
        taken = [t.to(dtype).requires_grad_() for t in (x, dt * 10, a, b, c, d, state)]
        y, _ = scan(*taken[:6], state=taken[6])
        grads.append(torch.autograd.grad((y * dy.to(dtype)).sum(), taken[2])[0].double())
    assert float((grads[1] - grads[0]).abs().max() / grads[0].abs().max()) < 4e-6


def test_single_steps_are_the_recurrence():
    inputs, starts = scan_inputs()
    x, dt, a, b, c, d, state = (t.detach() for t in inputs)
    wanted, last = recurrence(x, dt, a, b, c, d, torch.zeros_like(starts), state)
    for t in range(TOKENS):
        y, state = step(x[:, t], dt[:, t], a, b[:, t], c[:, t], d, state)
        torch.testing.assert_close(y, wanted[:, t])
    torch.testing.assert_close(state, last)


def test_fast_decays_over_many_chunks_stay_exact_in_float32():
    """What backward and forward divide by is never a decay: states that fade to nothing give no infinities."""
    inputs, _ = scan_inputs(tokens=500)
    x, dt, a, b, c, d, state = (t.detach() for t in inputs)
    dt = dt * 30
    wanted, _ = scan(x, dt, a, b, c, d, state=state)
    ours, last = scan(*(t.float() for t in (x, dt, a, b, c, d)), state=state.float())
    torch.testing.assert_close(ours.double(), wanted, rtol=1e-4, atol=1e-3)
    assert last.isfinite().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("programs", [1, 10**6], ids=["heads of a group together", "one by one"])
@pytest.mark.parametrize(("tokens", "sizes"), [(64, (64, 128)), (300, (64, 128)), (300, (64, 64)), (300, (128, 128))])
def test_the_kernels_on_a_gpu_do_as_what_is_written_out(tokens, sizes, programs, monkeypatch):
    """In bfloat16 against float64, all gradients, with documents that begin anywhere and a state that comes in."""
    from prl.models.state_space import scan_kernels

    monkeypatch.setattr(scan_kernels, "PROGRAMS", programs)
    for name, size in {"HEADS": 8, "SIZE": sizes[0], "STATE": sizes[1]}.items():
        monkeypatch.setitem(globals(), name, size)
    inputs, starts = scan_inputs(tokens)
    grads = numbers(ROWS, tokens, 8, sizes[0], seed=8), numbers(ROWS, 8, *sizes, seed=9)
    narrow = torch.bfloat16, torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, torch.float32, torch.float32
    given = [t.detach().cuda().to(dtype).requires_grad_() for t, dtype in zip(inputs, narrow, strict=True)]
    exact = [t.detach().double().requires_grad_() for t in given]
    results = []
    for parts in (given, given, exact):
        y, state = scan(*parts[:6], starts.cuda(), parts[6])
        loss = (y.double() * grads[0].cuda()).sum() + (state.double() * grads[1].cuda()).sum()
        results.append((y, state, *torch.autograd.grad(loss, parts)))
    for ours, again, wanted in zip(*results, strict=True):
        assert torch.equal(ours, again)
        assert (ours.double() - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernels_of_the_convolution_do_as_what_is_written_out():
    """In bfloat16 against float64, with documents shorter than the taps, and x a slice of something wider."""
    documents = [1, 2, 3, 700, 5, 90]
    wide, weight, bias, dy = (
        numbers(sum(documents), 500),
        numbers(300, 4, seed=1),
        numbers(300, seed=2),
        numbers(sum(documents), 300, seed=3),
    )
    results = []
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float64):
        parts = [t.cuda().bfloat16().to(dtype).requires_grad_() for t in (wide, weight, bias)]
        y = convolve_documents(parts[0][:, 100:400], *parts[1:], Documents(documents, torch.device("cuda")))
        results.append((y, *torch.autograd.grad(y, parts, dy.cuda().bfloat16().to(dtype))))
    for ours, again, wanted in zip(*results, strict=True):
        assert torch.equal(ours, again)
        assert (ours.double() - wanted).norm() < 0.01 * wanted.norm()


def test_documents_of_a_row_know_nothing_of_each_other():
    lengths, channels = [70, 1, 2, 130], 8 * 4 + 2 * 2 * 8
    weights = Channels(numbers(channels, 4), numbers(channels, seed=1), -numbers(8, seed=2).exp(), numbers(8, seed=3),
                       head_dim=4, groups=2, state=8)  # fmt: skip
    xbc, dt = numbers(sum(lengths), channels, seed=4), numbers(sum(lengths), 8, seed=5).exp()
    packed = mix_documents(lengths, CPU)(0, xbc, dt, weights, convolve_documents)
    alone = [
        mix_documents([n], CPU)(0, part, steps, weights, convolve_documents)
        for n, part, steps in zip(lengths, xbc.split(lengths), dt.split(lengths), strict=True)
    ]
    torch.testing.assert_close(packed, torch.cat(alone))


@pytest.mark.parametrize(("groups", "repeats"), [(4, 1), (2, 1), (1, 2)])
def test_heads_and_their_groups_can_be_shared_out(groups, repeats):
    """Two ranks with half the heads each say what one says with all."""
    channels = 8 * 4 + 2 * groups * 8
    weights = Channels(numbers(channels, 4), numbers(channels, seed=1), -numbers(8, seed=2).exp(), numbers(8, seed=3),
                       head_dim=4, groups=groups, state=8)  # fmt: skip
    xbc, dt = numbers(50, channels, seed=4), numbers(50, 8, seed=5).exp()
    mix = mix_documents([20, 30], CPU)
    parts = weights.shares(xbc, 2, repeats)
    shares = [
        mix(0, parts[rank], dt[:, 4 * rank : 4 * rank + 4], weights.share(rank, 2, repeats), convolve_documents)
        for rank in range(2)
    ]
    torch.testing.assert_close(torch.cat(shares, dim=1), mix(0, xbc, dt, weights, convolve_documents))


def test_what_states_decay_by_begins_as_in_mamba_and_stays_in_float32():
    decay = Decay(1000)
    for name, param in decay.named_parameters():
        assert draw_decay(f"layers.0.mamba.decay.{name}", param, torch.Generator().manual_seed(0))
    steps, rates, _ = decay(torch.zeros(1, 1000, dtype=torch.bfloat16))
    assert 0.001 <= steps.min() < 0.0015
    assert 0.07 < steps.max() <= 0.1001
    assert -16.01 <= rates.min() < -15 < -1.5 < rates.max() <= -0.999
    assert steps.dtype == torch.float32
    model = random_model(family_card("nemotron_h"))
    cast_parameters(model, torch.bfloat16, requires_grad=True)
    kept = {name for name, param in model.named_parameters() if param.dtype == torch.float32}
    assert kept == {f"layers.{i}.mamba.decay.{name}" for i in (0, 4) for name in ("A_log", "D", "dt_bias")}
    assert not draw_decay("layers.0.mamba.in_proj.weight", torch.empty(1), torch.Generator())


# --- the built-in engine ----------------------------------------------------------------------------------------------

MODEL = random_model(family_card("nemotron_h"))


def new_engine(**changes):
    return TorchEngine(MODEL, InferenceConfig(max_num_seqs=3, max_model_len=128, **changes), (END,))


def ask(engine, prompt, tokens=6, seed=0, n=1):
    params = SamplingParams(n=n, temperature=1.0, max_tokens=tokens, seed=seed, ignore_eos=True)
    sequences = engine.prepare(Request(f"{len(prompt)}-{seed}", list(prompt), params))
    engine.submit(sequences)
    return sequences


def run(engine):
    while engine.busy:
        engine.step()


def assert_said_by_the_model(sequence):
    ids = torch.tensor(sequence.token_ids)
    with torch.no_grad():
        attend = attend_documents(MODEL.card, [len(ids)], CPU)
        logits = MODEL.logits(MODEL(ids, torch.arange(len(ids)), attend))
    said = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[sequence.num_prompt - 1 :, 0]
    torch.testing.assert_close(torch.tensor(sequence.logprobs), said, rtol=1e-5, atol=1e-5)


def test_a_conversation_goes_on_from_its_state_and_nothing_else_does():
    engine = new_engine()
    (first,) = ask(engine, range(30))
    run(engine)
    known = first.token_ids[:-1]  # the last was never forwarded
    (second,) = ask(engine, [*first.token_ids, 7, 8], seed=1)
    (other,) = ask(engine, [*known[:24], 9, 9], seed=2)  # shares three blocks, and leaves in the middle
    run(engine)
    assert second.cached == len(known)
    assert other.cached == 0
    for sequence in (first, second, other):
        assert_said_by_the_model(sequence)


def test_conversations_fork_from_one_state():
    """Two at once from one slot, which has to stay as it is until both have what they need of it."""
    engine = new_engine()
    (first,) = ask(engine, range(40))
    run(engine)
    turns = [ask(engine, [*first.token_ids, 5, token], seed=token, n=2) for token in (3, 4)]
    run(engine)
    forks = [sequence for turn in turns for sequence in turn]
    assert sum(sequence.cached > 0 for sequence in forks) >= 3
    for sequence in forks:
        assert_said_by_the_model(sequence)


def test_the_state_of_a_running_sequence_is_nobodys_prefix():
    engine = new_engine()
    (first,) = ask(engine, range(40), tokens=20)
    engine.step()
    engine.step()
    (second,) = ask(engine, [*range(40), 1, 2], seed=1)  # all of its prompt, behind which it is already
    (third,) = ask(engine, range(41), seed=2)
    run(engine)
    assert second.cached == third.cached == 0
    for sequence in (first, second, third):
        assert_said_by_the_model(sequence)


def test_states_are_computed_anew_after_sleep():
    engine = new_engine()
    (sequence,) = ask(engine, range(20), tokens=12)
    for _ in range(4):
        engine.step()
    engine.sleep(1)
    assert engine.cache.states.state.numel() == 0
    engine.wake_up()
    run(engine)
    assert len(sequence.completion_ids) == 12
    assert_said_by_the_model(sequence)


def test_a_slot_that_held_another_sequence_begins_from_nothing():
    engine = new_engine(prefix_caching=False)
    done = [ask(engine, range(k, k + 20), seed=k)[0] for k in range(7)]  # seven through three slots
    run(engine)
    for sequence in done:
        assert_said_by_the_model(sequence)


def test_the_routing_of_a_hybrid_is_recorded_and_replayed_layer_by_layer():
    engine = new_engine(return_routed_experts=True)
    (sequence,) = ask(engine, range(20))
    run(engine)
    routed, ids = torch.from_numpy(sequence.routed_experts()), torch.tensor(sequence.token_ids[:-1])
    assert routed.shape == (len(ids), len(MODEL.layers), 2)
    attend = attend_documents(MODEL.card, [len(ids)], CPU)
    recorder = RoutingRecorder()
    with torch.no_grad():
        hidden = MODEL(ids, torch.arange(len(ids)), attend, recorder=recorder)
        replayed = MODEL(ids, torch.arange(len(ids)), attend, recorder=RoutingRecorder(given=routed))
    assert recorder.experts.keys() == set(MODEL.card.sparse_layers)
    for layer, experts in recorder.experts.items():
        assert torch.equal(routed[:, layer].long().sort().values, experts.sort().values)
    torch.testing.assert_close(replayed, hidden)


def test_only_layers_with_attention_have_keys():
    cache = new_engine().cache
    assert len(cache.k) == len(MODEL.card.attention_layers) == 1
    assert len(cache.states.state) == len(MODEL.card.state_layers) == 2
