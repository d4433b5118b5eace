# mypy: allow-untyped-defs, allow-untyped-calls
"""The scan on CUDA, in Triton: chunks side by side, states passed from chunk to chunk in between.

Forward: what each chunk leaves behind (`_outer`), the states that enter each (`_pass_on`), outputs (`_outputs`).
Backward: states again, what outputs want of the states that enter (`_outer`), the same passed back (`_pass_on`), and
the gradients of a chunk from both (`_gradients`). Nothing is kept for it but the inputs. Products are of 16-bit numbers
with float32 sums; decays, steps and the passing of states are float32. No atomic additions: the same inputs give the
same bits. Of heads that read one group of B and C, a program does several, so that C B^T is made once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZES = ((64, 64), (64, 128), (128, 128))  # of heads, and of states
CHUNK = 64  # tokens of a chunk
GRADIENTS = {"num_warps": 8, "num_stages": 1}
PASSED = 1024  # numbers of a state that one program passes on
PROGRAMS = 528  # at least so many (four for each of Hopper's multiprocessors), before a program does several heads


class Sizes(NamedTuple):
    rows: int
    tokens: int
    heads: int
    size: int  # P
    groups: int
    state: int  # S

    @property
    def chunks(self) -> int:
        return triton.cdiv(self.tokens, CHUNK)

    def heads_of_program(self) -> int:
        """Heads of one group that a program does."""
        together, rows = self.heads // self.groups, self.rows * self.chunks
        while together % 2 == 0 and rows * (self.heads // together) < PROGRAMS:
            together //= 2
        return together


def fits(x: Tensor, b: Tensor) -> bool:
    """What it was tried with. Heads of 16 were wrong and read foreign memory where a program does one (Triton 3.6)."""
    narrow = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
    return narrow and (x.shape[3], b.shape[3]) in SIZES


def forward(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor, document: Tensor
) -> tuple[Tensor, Tensor]:
    """As `scan.scan`; document [R, T] int32 counts documents, and the state that comes in belongs to number 0."""
    x, b, c = (_rows_of_numbers(t) for t in (x, b, c))
    sizes = Sizes(*x.shape, *b.shape[2:])
    entering, last = _entering(x, dt, a, b, state, document, sizes)
    y = x.new_empty(x.shape)
    together = sizes.heads_of_program()
    _outputs[(sizes.rows * sizes.chunks, sizes.heads // together)](
        x, dt, a, b, c, d, document, entering, y, *_strides(x, b, c), sizes.tokens, sizes.chunks, sizes.heads,
        sizes.groups, sizes.size, sizes.state, CHUNK, together, num_warps=4,
    )  # fmt: skip
    return y, last


def backward(
    dy: Tensor, dlast: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor,
    document: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of x, dt, a, b, c, d and state from those of `forward`'s two results."""
    x, b, c, dy = (_rows_of_numbers(t) for t in (x, b, c, dy))
    sizes = Sizes(*x.shape, *b.shape[2:])
    entering, _ = _entering(x, dt, a, b, state, document, sizes)
    wanted, whole = _outer_products(dy, dt, a, c, document, sizes, leaving=False)
    leaving, dstate = _passed(wanted, whole, _kept(document, sizes), dlast, sizes, backwards=True)
    together = sizes.heads_of_program()
    parts = sizes.heads // sizes.groups // together
    dx, ddt = x.new_empty(x.shape), torch.empty_like(dt, memory_format=torch.contiguous_format)
    dbs, dcs = (x.new_empty(parts, *b.shape, dtype=torch.float32) for _ in range(2))
    das, dds = (dt.new_empty(sizes.rows * sizes.chunks, sizes.heads) for _ in range(2))
    _gradients[(sizes.rows * sizes.chunks, sizes.heads // together)](
        dy, x, dt, a, b, c, d, document, entering, leaving, dx, ddt, dbs, dcs, das, dds, dy.stride(0), dy.stride(1),
        *_strides(x, b, c), sizes.rows, sizes.tokens, sizes.chunks, sizes.heads, sizes.groups, sizes.size, sizes.state,
        CHUNK, together, **GRADIENTS,
    )  # fmt: skip
    db, dc = (t.sum(0).to(b.dtype) if parts > 1 else t[0].to(b.dtype) for t in (dbs, dcs))
    return dx, ddt, das.sum(0), db, dc, dds.sum(0), dstate


def _rows_of_numbers(t: Tensor) -> Tensor:
    """With the last two dimensions side by side, as slices of one wide tensor have them."""
    return t if t.stride(3) == 1 and t.stride(2) == t.shape[3] else t.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for t in tensors for stride in (t.stride(0), t.stride(1))]


def _entering(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, state: Tensor, document: Tensor, sizes: Sizes
) -> tuple[Tensor, Tensor]:
    """The states before each chunk [R * K, H, P, S] in x's dtype, and the last [R, H, P, S] float32."""
    left, whole = _outer_products(x, dt, a, b, document, sizes, leaving=True)
    return _passed(left, whole, _kept(document, sizes), state, sizes, backwards=False)


def _kept(document: Tensor, sizes: Sizes) -> Tensor:
    """[R, K] int32: whether a chunk ends in the document in which the one before it did."""
    last = torch.arange(1, sizes.chunks + 1, device=document.device).mul_(CHUNK).clamp_(max=sizes.tokens) - 1
    ends = document.index_select(1, last)
    return (ends == torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], dim=1)).to(torch.int32)


def _outer_products(
    u: Tensor, dt: Tensor, a: Tensor, z: Tensor, document: Tensor, sizes: Sizes, leaving: bool
) -> tuple[Tensor, Tensor]:
    """[R * K, H, P, S] in u's dtype, and how far each head fades over each chunk [R * K, H] float32."""
    shape = (sizes.rows * sizes.chunks, sizes.heads)
    out, whole = u.new_empty(*shape, sizes.size, sizes.state), dt.new_empty(shape)
    _outer[shape](
        u, dt, a, z, document, out, whole, *_strides(u, z), sizes.tokens, sizes.chunks, sizes.heads, sizes.groups,
        sizes.size, sizes.state, CHUNK, leaving, num_warps=4,
    )  # fmt: skip
    return out, whole


def _passed(
    left: Tensor, whole: Tensor, kept: Tensor, state: Tensor, sizes: Sizes, backwards: bool
) -> tuple[Tensor, Tensor]:
    """What each chunk is met by, in left's dtype, and what remains at the other end, float32."""
    met, remains = torch.empty_like(left), whole.new_empty(sizes.rows, *left.shape[1:])
    numbers = sizes.size * sizes.state
    block = min(PASSED, numbers)
    _pass_on[(sizes.rows * sizes.heads, numbers // block)](
        left, whole, kept, state.contiguous(), met, remains, sizes.chunks, sizes.heads, numbers, block, backwards,
        num_warps=4,
    )  # fmt: skip
    return met, remains


@triton.jit
def _chunk(document, row, chunk, tokens, Q: tl.constexpr):
    """Of a chunk: its tokens, which of them there are, their documents, that before it and that of its last one."""
    ts = chunk * Q + tl.arange(0, Q)
    doc = tl.load(document + row * tokens + tl.minimum(ts, tokens - 1))
    before = tl.load(document + row * tokens + tl.maximum(chunk * Q - 1, 0)) * (chunk > 0)
    last = tl.load(document + row * tokens + tl.minimum(chunk * Q + Q, tokens) - 1)
    return ts, ts < tokens, doc, before, last


@triton.jit
def _fading(dt, a, row, ts, inside, tokens, heads, h):
    """Steps of the chunk's tokens, and the logarithm of how far a state fades since the chunk began."""
    steps = tl.load(dt + (row * tokens + ts).to(tl.int64) * heads + h, mask=inside, other=0.0)
    return steps, tl.cumsum(steps * tl.load(a + h), 0)


@triton.jit
def _outer(
    u, dt, a, z, document, out, whole, u_row, u_token, z_row, z_token, tokens, chunks, heads, groups,
    P: tl.constexpr, S: tl.constexpr, Q: tl.constexpr, LEAVING: tl.constexpr,
):  # fmt: skip
    """The sum over a chunk's tokens of weight * u z^T. LEAVING: u is x, z is B, weighted as they are left behind;
    else u is the gradient of y, z is C, weighted as they read the state that comes in.
    """
    at = tl.program_id(0).to(tl.int64)
    row, chunk, h = at // chunks, (at % chunks).to(tl.int32), tl.program_id(1)
    ts, inside, doc, before, last = _chunk(document, row, chunk, tokens, Q)
    steps, faded = _fading(dt, a, row, ts, inside, tokens, heads, h)
    end = tl.sum(tl.where(tl.arange(0, Q) == Q - 1, faded, 0.0), 0)
    if LEAVING:
        weight = tl.where(doc == last, tl.exp(end - faded) * steps, 0.0)
    else:
        weight = tl.where((doc == before) & inside, tl.exp(faded), 0.0)
    ps, ss = tl.arange(0, P), tl.arange(0, S)
    wide, g = ts[:, None].to(tl.int64), h // (heads // groups)
    us = tl.load(u + row * u_row + wide * u_token + h * P + ps[None, :], mask=inside[:, None], other=0.0)
    zs = tl.load(z + row * z_row + wide * z_token + g * S + ss[None, :], mask=inside[:, None], other=0.0)
    weighted = (us.to(tl.float32) * weight[:, None]).to(us.dtype)
    product = tl.dot(tl.trans(weighted), zs).to(us.dtype)
    tl.store(out + (at * heads + h) * (P * S) + ps[:, None] * S + ss[None, :], product)
    tl.store(whole + at * heads + h, end)


@triton.jit
def _pass_on(
    left, whole, kept, state, met, remains, chunks, heads, numbers, BLOCK: tl.constexpr, BACKWARDS: tl.constexpr
):  # fmt: skip
    """From chunk to chunk: what meets a chunk, fades over it and is added to what it leaves."""
    row, h = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    ns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    now = tl.load(state + (row * heads + h) * numbers + ns)
    for i in range(chunks):
        at = row * chunks + (chunks - 1 - i if BACKWARDS else i)
        spot = (at * heads + h) * numbers + ns
        tl.store(met + spot, now.to(met.dtype.element_ty))
        fades = tl.exp(tl.load(whole + at * heads + h)) * tl.load(kept + at)
        now = now * fades + tl.load(left + spot).to(tl.float32)
    tl.store(remains + (row * heads + h) * numbers + ns, now)


@triton.jit
def _outputs(
    x, dt, a, b, c, d, document, entering, y, x_row, x_token, b_row, b_token, c_row, c_token, tokens, chunks, heads,
    groups, P: tl.constexpr, S: tl.constexpr, Q: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    row, chunk, first = at // chunks, (at % chunks).to(tl.int32), tl.program_id(1) * TOGETHER
    g = first // (heads // groups)
    ts, inside, doc, before, _ = _chunk(document, row, chunk, tokens, Q)
    ps, ss, wide = tl.arange(0, P), tl.arange(0, S), ts[:, None].to(tl.int64)
    bs = tl.load(b + row * b_row + wide * b_token + g * S + ss[None, :], mask=inside[:, None], other=0.0)
    cs = tl.load(c + row * c_row + wide * c_token + g * S + ss[None, :], mask=inside[:, None], other=0.0)
    scores = tl.dot(cs, tl.trans(bs))  # [Q, Q]
    seen = (ts[:, None] >= ts[None, :]) & (doc[:, None] == doc[None, :])
    for i in range(TOGETHER):
        h = first + i
        steps, faded = _fading(dt, a, row, ts, inside, tokens, heads, h)
        xs = tl.load(x + row * x_row + wide * x_token + h * P + ps[None, :], mask=inside[:, None], other=0.0)
        fading = tl.where(seen, tl.exp(tl.where(seen, faded[:, None] - faded[None, :], 0.0)) * steps[None, :], 0.0)
        out = tl.dot((scores * fading).to(xs.dtype), xs)
        found = tl.load(entering + (at * heads + h) * (P * S) + ps[None, :] * S + ss[:, None])  # [S, P]
        reading = tl.where(doc == before, tl.exp(faded), 0.0)
        out += reading[:, None] * tl.dot(cs, found) + tl.load(d + h) * xs.to(tl.float32)
        spot = (row * tokens + wide) * (heads * P) + h * P + ps[None, :]
        tl.store(y + spot, out.to(xs.dtype), mask=inside[:, None])


@triton.jit
def _gradients(
    dy, x, dt, a, b, c, d, document, entering, leaving, dx, ddt, dbs, dcs, das, dds, dy_row, dy_token, x_row, x_token,
    b_row, b_token, c_row, c_token, rows, tokens, chunks, heads, groups, P: tl.constexpr, S: tl.constexpr,
    Q: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """leaving: the gradient of the state after each chunk. dbs and dcs [parts, R, T, G, S], das and dds [R * K, H]: to
    be added up.
    """
    at = tl.program_id(0).to(tl.int64)
    row, chunk, first = at // chunks, (at % chunks).to(tl.int32), tl.program_id(1) * TOGETHER
    g = first // (heads // groups)
    ts, inside, doc, before, last = _chunk(document, row, chunk, tokens, Q)
    ps, ss, wide = tl.arange(0, P), tl.arange(0, S), ts[:, None].to(tl.int64)
    bs = tl.load(b + row * b_row + wide * b_token + g * S + ss[None, :], mask=inside[:, None], other=0.0)
    cs = tl.load(c + row * c_row + wide * c_token + g * S + ss[None, :], mask=inside[:, None], other=0.0)
    scores = tl.dot(cs, tl.trans(bs))  # [Q, Q]
    seen = (ts[:, None] >= ts[None, :]) & (doc[:, None] == doc[None, :])
    db = tl.zeros([Q, S], tl.float32)
    dc = tl.zeros([Q, S], tl.float32)
    for i in range(TOGETHER):
        h = first + i
        steps, faded = _fading(dt, a, row, ts, inside, tokens, heads, h)
        end = tl.sum(tl.where(tl.arange(0, Q) == Q - 1, faded, 0.0), 0)
        reading = tl.where((doc == before) & inside, tl.exp(faded), 0.0)
        lasting = tl.where(doc == last, tl.exp(end - faded), 0.0)
        xs = tl.load(x + row * x_row + wide * x_token + h * P + ps[None, :], mask=inside[:, None], other=0.0)
        dys = tl.load(dy + row * dy_row + wide * dy_token + h * P + ps[None, :], mask=inside[:, None], other=0.0)
        state = (at * heads + h) * (P * S) + ps[:, None] * S + ss[None, :]

        # within the chunk: y_q = sum of fading_qs * scores_qs * dt_s * x_s
        fading = tl.where(seen, tl.exp(tl.where(seen, faded[:, None] - faded[None, :], 0.0)), 0.0)
        dtaken = tl.dot(tl.trans((fading * scores).to(xs.dtype)), dys)  # of dt * x, [Q, P]
        dscores = fading * tl.dot(dys, tl.trans(xs)) * steps[None, :]  # [Q, Q]
        dfading = dscores * scores  # of its logarithm
        dfaded = tl.sum(dfading, 1) - tl.sum(dfading, 0)
        narrow = dscores.to(xs.dtype)
        dc += tl.dot(narrow, bs)
        db += tl.dot(tl.trans(narrow), cs)

        # what was read of the state that came in
        states = tl.load(entering + state)
        read = tl.dot(dys, states) * reading[:, None]  # [Q, S]
        dc += read
        dfaded += tl.sum(read * cs.to(tl.float32), 1)

        # what was left in the state that goes out
        dstates = tl.load(leaving + state)
        dtaken += lasting[:, None] * tl.dot(bs, tl.trans(dstates))
        left = tl.dot(xs, dstates) * (lasting * steps)[:, None]  # [Q, S]
        db += left
        dleft = tl.sum(left * bs.to(tl.float32), 1)
        through = tl.sum(tl.sum(states.to(tl.float32) * dstates.to(tl.float32), 1), 0)
        through = tl.where(before == last, tl.exp(end) * through, 0.0)

        # a step fades what comes before it for what comes from it on
        dlog = tl.cumsum(dfaded, 0, reverse=True) + tl.cumsum(dleft, 0) - dleft + through
        xw, dyw = xs.to(tl.float32), dys.to(tl.float32)
        dsteps = dlog * tl.load(a + h) + tl.sum(xw * dtaken, 1)
        tl.store(ddt + (row * tokens + ts).to(tl.int64) * heads + h, dsteps, mask=inside)
        dxs = steps[:, None] * dtaken + tl.load(d + h) * dyw
        spot = (row * tokens + wide) * (heads * P) + h * P + ps[None, :]
        tl.store(dx + spot, dxs.to(xs.dtype), mask=inside[:, None])
        tl.store(das + at * heads + h, tl.sum(dlog * steps, 0))
        tl.store(dds + at * heads + h, tl.sum(tl.sum(xw * dyw, 1), 0))
    part = first // TOGETHER % (heads // groups // TOGETHER)
    spot = (((part * rows + row) * tokens + wide) * groups + g) * S + ss[None, :]
    tl.store(dbs + spot, db, mask=inside[:, None])
    tl.store(dcs + spot, dc, mask=inside[:, None])
