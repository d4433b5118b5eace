"""Decoding of rows at addresses that stay, idle ones among them: on CPUs with attention written out, on GPUs as CUDA
graphs.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys

import pytest
import torch
import torch.nn.functional as F
from test_inference_engine import OTHER, add, finish, full_logprobs, make_engine, one_thread, prompt  # noqa: F401
from tiny import END, dense_card, moe_card, random_model

from prl.config.schema import InferenceConfig
from prl.inference import graphs
from prl.inference.engine import TorchEngine
from prl.inference.graphs import PASSES_BEFORE, DecodeGraphs, size_of
from prl.inference.sampling import SamplingParams
from prl.models.experts.routing import RoutingRecorder

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
LENGTH = 64  # of the context


def written_out(cache, slots, positions, places):
    def attend(layer, q, k, v):
        cache.write(layer, slots, places, k, v)
        out = torch.empty_like(q)
        for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
            keys, values = (x[slot, :, : position + 1] for x in cache.of(layer))
            out[row] = F.scaled_dot_product_attention(q[row, :, None], keys, values, enable_gqa=True)[:, 0]
        return out

    return attend


@pytest.fixture(params=["cpu", GPU])
def engine_of(request, monkeypatch):
    """An engine of a model, which decodes a fixed number of rows at once."""
    if request.param == "cpu":
        monkeypatch.setattr(graphs, "decode_attention", written_out)
        monkeypatch.setattr(DecodeGraphs, "suit", staticmethod(lambda cache: True))

    def build(model, **changes) -> TorchEngine:
        model = copy.deepcopy(model).to(request.param).requires_grad_(False).eval()
        fixed = {"max_num_seqs": 6, "max_model_len": LENGTH, **changes}
        return TorchEngine(model, InferenceConfig(**fixed), (END,))

    build.device = request.param
    return build


def agrees(model, sequence) -> None:
    recorder = RoutingRecorder() if sequence.routed else None
    told = full_logprobs(model, sequence.token_ids, recorder)[sequence.num_prompt - 1 :]
    tolerance = 2e-4 if torch.cuda.is_available() else 2e-5
    torch.testing.assert_close(torch.tensor(sequence.logprobs), told, rtol=0, atol=tolerance)
    if recorder is not None:
        assert torch.equal(torch.from_numpy(sequence.routed_experts()), recorder.stacked(model.card)[:-1])


@pytest.mark.parametrize("card", [moe_card(), dense_card()], ids=["moe", "dense"])
def test_sequences_that_come_and_go_are_those_of_a_full_forward_pass(card, engine_of):
    """Rows that are idle are decoded beside them."""
    model, draw = random_model(card), random.Random(0)
    engine = engine_of(model, return_routed_experts=bool(card.num_experts))
    sequences = []
    for i in range(24):
        length, tokens = draw.randint(1, 20), draw.choice([1, 2, 9, 30, 60])
        asked = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=i)
        sequences += add(engine, prompt(length, seed=i), asked)
        for _ in range(draw.randint(0, 4)):
            engine.step()
    finish(engine)
    assert len({len(s.token_ids) for s in sequences}) > 5
    assert any(len(s.token_ids) == LENGTH for s in sequences), "one that fills its slot"
    for sequence in sequences:
        agrees(model, sequence)


def test_what_an_idle_slot_remembers_stays(engine_of):
    """A prefix up to the end of the context, found again after others were decoded beside it."""
    model = random_model(dense_card())
    engine = engine_of(model)
    (first,) = add(engine, prompt(40), SamplingParams(max_tokens=60, ignore_eos=True, seed=1))
    finish(engine)
    assert len(first.token_ids) == LENGTH
    beside = [add(engine, prompt(9, seed=n), SamplingParams(max_tokens=30, ignore_eos=True, seed=n))[0] for n in (2, 3)]
    finish(engine)
    again = first.token_ids[: LENGTH - 1]
    (last,) = add(engine, again, SamplingParams(max_tokens=1, ignore_eos=True, seed=4, prompt_logprobs=None))
    finish(engine)
    assert last.cached == 56, "of the slot that the first one left"
    for sequence in (first, *beside, last):
        agrees(model, sequence)


def test_sleep_and_new_weights_are_noticed(engine_of):
    model = random_model(moe_card())
    engine = engine_of(model)
    asked = SamplingParams(max_tokens=12, ignore_eos=True, seed=5)
    before = add(engine, prompt(7), asked)[0]
    finish(engine)
    engine.sleep(1)
    engine.wake_up()
    again = add(engine, prompt(7), asked)[0]
    finish(engine)
    assert (again.token_ids, again.logprobs) == (before.token_ids, before.logprobs)
    engine.load(((name, x.to(engine.device)) for name, x in OTHER), "1")
    other = add(engine, prompt(7), asked)[0]
    finish(engine)
    agrees(random_model(moe_card(), seed=1), other)


def test_a_pass_is_the_same_bits_whether_it_is_captured_or_not(engine_of):
    engine = engine_of(random_model(dense_card()))
    asked = SamplingParams(max_tokens=40, ignore_eos=True, seed=6)
    found = []
    for _ in range(3):
        engine.reset_prefix_cache()
        found.append([add(engine, prompt(n, seed=n), asked)[0] for n in (3, 11, 5)])
        finish(engine)
    assert all([s.logprobs for s in one] == [s.logprobs for s in found[0]] for one in found)
    captured = engine.graphs.captured
    assert set(captured) == ({3} if engine_of.device == "cuda" else set())
    assert engine.graphs.passes[3] > PASSES_BEFORE


def test_experts_in_float32_are_launched_kernel_by_kernel(engine_of, caplog):
    """They ask the host for their sizes: nothing is tried that would fail."""
    model = random_model(moe_card())
    engine = engine_of(model)
    sequences = [add(engine, prompt(n, seed=n))[0] for n in (3, 11)]
    finish(engine)
    for sequence in sequences:
        agrees(model, sequence)
    assert not engine.graphs.captured
    assert not engine.graphs.can_capture
    assert not caplog.records


def test_what_cannot_be_captured_is_tried_once_for_all(engine_of, caplog, monkeypatch):
    """Also after sleep; and what comes then runs on the stream that ran before."""
    tries, streams = [], []

    @contextlib.contextmanager
    def capture(graph, **options):
        tries.append(options)
        yield
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", capture)
    if engine_of.device == "cpu":
        monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the stream before")
        monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    model = random_model(dense_card())
    engine = engine_of(model)
    for _ in range(2):
        sequence = add(engine, prompt(5))[0]
        engine.step()
        engine.step()
        if engine_of.device == "cpu" and not tries:
            engine.graphs.can_capture = True
        finish(engine)
        agrees(model, sequence)
        engine.sleep(1)
        engine.wake_up()
    assert len(tries) == 1
    assert sum("cannot be captured" in record.message for record in caplog.records) == 1
    assert streams == (["the stream before"] if engine_of.device == "cpu" else [])


def test_kernels_that_do_not_run_are_passed_over(engine_of, monkeypatch, caplog):
    """They are tried when an engine begins."""
    from prl.inference import forward

    model = random_model(dense_card())
    engine = engine_of(model)
    engine.cache.by_kernels = True
    monkeypatch.setitem(sys.modules, "prl.inference.decode_kernels", None)
    monkeypatch.delattr("prl.inference.decode_kernels", raising=False)  # what imported it before left it there
    assert not forward.kernels_run(engine.cache, model.card.num_attention_heads)
    assert "do not run here" in caplog.text


def test_experts_in_bfloat16_are_captured(engine_of):
    """Their sizes stay on the device. Replayed passes are the bits of those that are launched kernel by kernel."""
    if engine_of.device == "cpu":
        pytest.skip("nothing is captured on a CPU")
    model, asked = random_model(moe_card()).bfloat16(), SamplingParams(max_tokens=30, ignore_eos=True, seed=7)
    found = []
    for captures in (True, False):
        engine = engine_of(model, return_routed_experts=True)
        engine.graphs = DecodeGraphs(engine.model, engine.cache, records=True)
        engine.graphs.can_capture = captures
        sequences = [add(engine, prompt(n, seed=n), asked)[0] for n in (3, 11, 5)]
        finish(engine)
        assert set(engine.graphs.captured) == ({3} if captures else set())
        found.append([(s.token_ids, s.logprobs, s.routed_experts().tolist()) for s in sequences])
    assert found[0] == found[1]


def test_sizes_of_graphs():
    assert [size_of(n, 100) for n in (1, 2, 3, 4, 5, 6, 7, 9, 13, 33, 49, 65, 97)] == [
        1, 2, 3, 4, 6, 6, 8, 12, 16, 48, 64, 96, 100,
    ]  # fmt: skip
    assert all(n <= size_of(n, 500) <= max(1.5 * n, n + 1) for n in range(1, 501))


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "dim", "rows"), [((8, 2), 64, 3), ((16, 8), 128, 40), ((6, 2), 80, 1), ((4, 4), 256, 2)]
)
def test_kernels_are_attention_to_the_cache(device, dtype, heads, dim, rows):
    from prl.inference import decode_kernels

    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int):
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    keys, values = random(rows + 2, heads[1], 3000, dim), random(rows + 2, heads[1], 3000, dim)
    slots = torch.randperm(rows + 2, generator=generator, device=device)[:rows]
    positions = torch.randint(0, 3000, (rows,), generator=generator, device=device)
    q, k, v = random(rows, heads[0], dim), random(rows, heads[1], dim), random(rows, heads[1], dim)
    wanted_keys = keys.clone()
    wanted_keys[slots, :, positions] = k
    decode_kernels.write(k, v, keys, values, slots, positions)
    assert torch.equal(keys, wanted_keys)
    found = decode_kernels.attend(q, keys, values, slots, positions)
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        seen = (x[slot, :, : position + 1].double() for x in (keys, values))
        wanted = F.scaled_dot_product_attention(q[row, :, None].double(), *seen, enable_gqa=True)[:, 0]
        tolerance = 2e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(found[row].double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("turning", [64, 128])
def test_the_kernel_turns_heads_as_the_layers_do(device, turning):
    from prl.models.layers import rope_kernels
    from prl.models.layers.rope import rotate

    x = torch.randn(7, 5, 128, device=device)
    angles = torch.randn(7, 1, turning // 2, device=device).repeat(1, 1, 2)
    torch.testing.assert_close(
        rope_kernels.rotate(x, angles.cos(), angles.sin()), rotate(x, angles.cos(), angles.sin())
    )
