"""The LM head in chunks: the same numbers and gradients as whole, and no more logits than wait for backward."""

import weakref

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from prl.trainer.head import head as head_module
from prl.trainer.head.head import logprob_head


def run(chunk, tokens=23, picked=17, vocab=29, temperature=0.7, entropy_coef=0.3, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 8, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, 8, generator=generator, dtype=dtype, requires_grad=True)
    rows = torch.randperm(tokens, generator=generator)[:picked]
    targets = torch.randint(0, vocab, (picked,), generator=generator)
    logp, entropy = logprob_head(rows, targets, temperature, chunk)(hidden, weight)
    ((logp.exp() * 2 + logp).sum() - entropy_coef * entropy.sum()).backward()
    return logp, entropy, hidden.grad, weight.grad


def assert_alike(one, other, tolerance=2e-5):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk", ["auto", 1, 5, 17, 100])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_chunks_equal_the_whole(chunk, temperature):
    assert_alike(run(chunk, temperature=temperature), run("disabled", temperature=temperature))


@given(
    tokens=st.integers(1, 40),
    share=st.floats(0, 1),
    vocab=st.integers(2, 70),
    chunk=st.integers(1, 50),
    entropy_coef=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 1000),
)
@example(tokens=32, share=1.0, vocab=42, chunk=1, entropy_coef=0.0, seed=638)
@example(tokens=22, share=1.0, vocab=2, chunk=1, entropy_coef=0.5, seed=23)
@settings(max_examples=60, deadline=None)
def test_any_sizes(tokens, share, vocab, chunk, entropy_coef, seed):
    """Entropies apart, and gradients that they are part of: one near zero is a difference of numbers as large as
    logits, off by their rounding (2.3e-5).
    """
    sizes = {"tokens": tokens, "picked": int(share * tokens), "vocab": vocab, "seed": seed}
    (logp, entropy, *grads), (whole_logp, whole_entropy, *whole_grads) = (
        run(size, entropy_coef=entropy_coef, **sizes) for size in (chunk, "disabled")
    )
    assert_alike([logp], [whole_logp])
    assert_alike(grads, whole_grads, tolerance=4e-5 if entropy_coef else 2e-5)
    assert_alike([entropy], [whole_entropy], tolerance=4e-5)


def test_gradients_by_finite_differences():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    weight = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    rows, targets = torch.tensor([3, 0, 4]), torch.tensor([6, 0, 2])

    def loss(h, w):
        logp, entropy = logprob_head(rows, targets, 0.8, 2)(h, w)
        return (logp * torch.tensor([1.0, -2.0, 0.5])).sum() + entropy.sum()

    hidden.requires_grad_(True)
    weight.requires_grad_(True)
    loss(hidden, weight).backward()
    step = 1e-2  # the statistics are float32
    for tensor in (hidden, weight):
        flat, grad = tensor.detach().view(-1), tensor.grad.view(-1)
        for i in range(0, flat.numel(), 3):
            old = flat[i].item()
            flat[i] = old + step
            up = loss(hidden, weight).item()
            flat[i] = old - step
            down = loss(hidden, weight).item()
            flat[i] = old
            assert (up - down) / (2 * step) == pytest.approx(grad[i].item(), abs=2e-3)


@pytest.mark.parametrize(("chunk", "most"), [("auto", 2), (4, 1)])
def test_no_more_logits_than_those_that_wait_are_there_at_once(monkeypatch, chunk, most):
    """With "auto" of two chunks, with a size of one: in forward one more while it is computed, in backward no more."""
    monkeypatch.setattr(head_module, "AUTO_CHUNK_TOKENS", 4)
    alive, seen = weakref.WeakSet(), []
    make = head_module._chunk_logits

    def counted(*args):
        made = make(*args)
        alive.add(made)
        seen.append(len(alive))
        return made

    monkeypatch.setattr(head_module, "_chunk_logits", counted)
    gradient = head_module._gradient
    in_place = lambda logits, *numbers: logits.copy_(gradient(logits, *numbers))  # noqa: E731, as kernels do
    monkeypatch.setattr(head_module, "_gradient", in_place)
    hidden, weight = torch.randn(14, 4, requires_grad=True), torch.randn(30, 4, requires_grad=True)
    logp, _ = logprob_head(torch.arange(14), torch.arange(14), 1.0, chunk)(hidden, weight)
    assert (len(seen), len(alive), max(seen)) == (4, most, most)
    logp.sum().backward()
    assert (len(seen), len(alive), max(seen)) == (8 - most, 0, most), "those that waited were not computed again"


@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_gradients_that_nobody_wants_are_not_computed(wanted):
    hidden, weight = torch.randn(9, 4), torch.randn(30, 4)
    {"hidden": hidden, "weight": weight}[wanted].requires_grad_(True)
    logp, _ = logprob_head(torch.arange(9), torch.arange(9), 1.0, 4)(hidden, weight)
    with Products() as products:
        logp.sum().backward()
    assert products.count == 2 * 3 - 1, "the logits of each chunk but the last, which waited, and one gradient"
    assert (hidden.grad is None) == (wanted == "weight")
    assert (weight.grad is None) == (wanted == "hidden")


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "mm" in func.__name__
        return func(*args, **(kwargs or {}))


class Largest(TorchDispatchMode):
    """Remembers the most elements that any tensor made inside had, weight-shaped ones aside."""

    def __init__(self, vocab):
        super().__init__()
        self.vocab, self.rows = vocab, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and tensor.shape[1] == self.vocab:
                self.rows = max(self.rows, tensor.shape[0])
        return out


@pytest.mark.parametrize(("chunk", "rows"), [(16, 16), ("disabled", 200)])
def test_logits_never_exceed_a_chunk(chunk, rows):
    with Largest(vocab=331) as seen:
        run(chunk, tokens=220, picked=200, vocab=331)
    assert seen.rows == rows


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton kernels need a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_equal_the_formulas(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 64, generator=generator)
    weight = torch.randn(10007, 64, generator=generator) / 8  # logits of about 1: bfloat16 rounds them to 0.4 %
    rows, targets = torch.arange(0, 300, 2), torch.randint(0, 10007, (150,), generator=generator)
    results = []
    for device, kind in (("cpu", torch.float32), ("cuda", dtype)):
        h, w = (t.to(dtype).to(device, kind).detach().clone().requires_grad_(True) for t in (hidden, weight))
        logp, entropy = logprob_head(rows.to(device), targets.to(device), 0.9, 64)(h, w)
        (logp.sum() + 0.1 * entropy.sum()).backward()
        results.append([t.detach().float().cpu() for t in (logp, entropy, h.grad, w.grad)])
    for cpu, gpu in zip(*results, strict=True):
        assert (cpu - gpu).norm() / cpu.norm() < (1e-2 if dtype == torch.bfloat16 else 1e-4)
