"""Attention blocks as parts: grouped queries, latents, and latents with an indexer's choice; under context parallelism,
too.
"""

from __future__ import annotations

from collections.abc import Iterator

from prl.config.families import FAMILIES
from prl.forecast.cost import NIC, NOTHING, NVLINK, Cost
from prl.forecast.parts import Part, heads_exchanged, join
from prl.forecast.setting import BF16, FLOAT32, Both, Setting, repeats


def attention_parts(s: Setting, chooses: bool = True) -> Iterator[Part]:
    """A norm, projections, the kernel, the way back, the residual. chooses: of sparse attention, whether the layer has
    an indexer of its own.
    """
    hidden = s.card.hidden_size
    yield Part("input", "input", NOTHING, NOTHING, kept=hidden * BF16)
    yield Part("norm", "attn_proj", *s.elementwise(2 * hidden), kept=hidden * BF16, weights=((hidden,),))
    if s.card.index_topk:
        yield from _sparse(s, chooses)
    elif s.card.kv_lora_rank:
        yield from _latent(s)
    else:
        yield from _grouped(s)


def _grouped(s: Setting) -> Iterator[Part]:
    card, n = s.card, s.tokens
    q, kv = card.num_attention_heads * card.head_dim, card.num_key_value_heads * card.head_dim
    family = FAMILIES.get(card.family)
    norm = family.qk_norm if card.use_qk_norm and family is not None else "none"
    adapted = join(*(adapter(s, name, card.hidden_size, size) for name, size in (("q", q), ("k", kv), ("v", kv))))
    project = join(s.matmul(n, card.hidden_size, q + 2 * kv), s.elementwise(2 * (q + kv)), adapted)
    kept = ((q + kv) * (1 if norm == "none" else 2) + kv) * BF16
    norms = {"none": (), "head": ((card.head_dim,),) * 2, "all": ((q,), (kv,))}[norm]
    biases = ((q,), (kv,), (kv,)) * card.attention_bias
    weights = ((q, card.hidden_size), (kv, card.hidden_size), (kv, card.hidden_size), *norms, *biases)
    yield Part("project", "attn_proj", *project, kept=kept, weights=weights)
    copies = repeats(s.mesh.cp, card.num_key_value_heads) if s.cp_style == "ulysses" else 1
    moved = context(s, 2 * q + 2 * kv * copies, 2 * kv)
    yield Part("attend", "attend", *join(dense_kernel(s), moved), kept=q * BF16 + card.num_attention_heads * FLOAT32)
    yield _output(s, q)


def _latent(s: Setting) -> Iterator[Part]:
    """Expanded, or left to ranks that gather latents and make keys and values of the whole row."""
    card, n = s.card, s.tokens
    heads, rank = card.num_attention_heads, card.kv_lora_rank
    q, keys = heads * card.head_dim, heads * (card.qk_nope_head_dim + card.v_head_dim)
    gathers = s.mesh.cp > 1 and s.cp_style == "gather"
    yield _compress(s)
    v = heads * card.v_head_dim
    out = v * BF16 + heads * FLOAT32
    if gathers:
        whole = s.matmul(n * s.mesh.cp, rank, keys)
        expand = (whole[0], whole[1] + whole[0])
        moved = context(s, 0, 0, rank + card.qk_rope_head_dim)
        yield Part("attend", "attend", *join(dense_kernel(s), expand, moved), kept=out, weights=((keys, rank),))
    else:
        expand = join(s.matmul(n, rank, keys), s.elementwise(2 * q))
        yield Part("expand", "attn_proj", *expand, kept=(q + keys) * BF16, weights=((keys, rank),))
        yield Part("attend", "attend", *join(dense_kernel(s), context(s, 2 * q + 2 * v, q + v)), kept=out)
    yield _output(s, v)


def _compress(s: Setting) -> Part:
    """Queries, and the latent of keys and values."""
    card, n = s.card, s.tokens
    q, low = card.num_attention_heads * card.head_dim, card.q_lora_rank
    latent = card.kv_lora_rank + card.qk_rope_head_dim
    queries = join(s.matmul(n, card.hidden_size, low), s.matmul(n, low, q)) if low else s.matmul(n, card.hidden_size, q)
    cost = join(queries, s.matmul(n, card.hidden_size, latent), s.elementwise(2 * (q + low + latent)))
    weights = ((low, card.hidden_size), (q, low), (low,)) if low else ((q, card.hidden_size),)
    kept = (q + 2 * low + 2 * latent) * BF16
    return Part(
        "compress", "attn_proj", *cost, kept=kept, weights=(*weights, (latent, card.hidden_size), (card.kv_lora_rank,))
    )


def _sparse(s: Setting, chooses: bool) -> Iterator[Part]:
    """Absorbed: queries are brought to the latents, which all heads see."""
    card, n = s.card, s.tokens
    heads, rank, rope = card.num_attention_heads, card.kv_lora_rank, card.qk_rope_head_dim
    yield _compress(s)
    absorb = join(s.matmul(n * heads, card.qk_nope_head_dim, rank), s.elementwise(3 * heads * (rank + rope)))
    weights = ((heads * (card.qk_nope_head_dim + card.v_head_dim), rank),)
    yield Part("absorb", "attn_proj", *absorb, kept=(heads + 1) * (rank + rope) * BF16, weights=weights)
    if chooses:
        yield _choice(s)
    flops = 2 * heads * (2 * rank + rope) * s.chosen_pairs
    kernel = (_kernel(s, "sparse_forward", flops), _kernel(s, "sparse_backward", 2.5 * flops))
    gathered = context(s, 0, 0, rank + rope + (card.index_head_dim if chooses else 0))
    yield Part("attend", "attend", *join(kernel, gathered), kept=heads * (rank * BF16 + FLOAT32))
    values = s.matmul(n * heads, rank, card.v_head_dim)
    yield Part("values", "values", *values, kept=heads * card.v_head_dim * BF16)
    yield _output(s, heads * card.v_head_dim)


def _choice(s: Setting) -> Part:
    """The indexer, frozen. Its choice is kept, whatever is repeated."""
    card, n = s.card, s.tokens
    heads, dim = card.index_n_heads, card.index_head_dim
    scores = _kernel(s, "indexer", 2 * heads * dim * s.pairs)
    project = s.matmul(n, card.q_lora_rank, heads * dim, fp8=False)[0]
    forward = scores + project + s.elementwise(4 * heads * dim)[0]
    weights = ((heads * dim, card.q_lora_rank), (dim + heads, card.hidden_size), (2 * dim,))
    return Part("choice", "choice", forward, NOTHING, kept=4 * card.index_topk, weights=weights, again=project)


def _output(s: Setting, width: int) -> Part:
    hidden = s.card.hidden_size
    cost = join(s.matmul(s.tokens, width, hidden), s.elementwise(3 * hidden), adapter(s, "o", width, hidden))
    return Part("output", "output", *cost, weights=((s.card.hidden_size, width),))


def adapter(s: Setting, name: str, inner: int, columns: int) -> Both:
    """LoRA: the input read once more, two thin products written, the second scaled and added to the output."""
    numbers = inner + 6 * columns
    return s.copies(numbers, 2 * numbers) if f"{name}_proj" in s.adapters else (NOTHING, NOTHING)


# --- kernels and context parallelism ----------------------------------------------------------------------------------


def dense_kernel(s: Setting) -> Both:
    """Backward makes the scores again: three products over the width of keys and two over that of values a pair."""
    card = s.card
    variant = s.hardware.attention_variant(s.kernel, card.head_dim)
    per_pair = 2 * card.num_attention_heads * s.pairs
    ahead, back = card.head_dim + card.value_dim, 3 * card.head_dim + 2 * card.value_dim
    return (
        _kernel(s, "attention_forward", per_pair * ahead, variant),
        _kernel(s, "attention_backward", per_pair * back, variant),
    )


def _kernel(s: Setting, name: str, flops: float, variant: str = "own") -> Cost:
    return Cost({name: s.hardware.seconds(name, flops, variant, s.length)})


def context(s: Setting, exchanged: float, passed: float, gathered: float = 0.0) -> Both:
    """What a token's numbers cost on their way between the ranks of a context group.

    exchanged: Ulysses, all that goes out and comes back. passed: the ring, keys and values; it hides behind the blocks
    of attention, so it has bytes and no seconds. gathered: latents.
    """
    cp, n = s.mesh.cp, s.tokens
    if cp == 1:
        return NOTHING, NOTHING
    if s.cp_style == "ulysses":
        return heads_exchanged(s, exchanged)
    if s.cp_style == "ring":
        nbytes = passed * BF16 * n * (cp - 1)
        link = NVLINK if cp <= s.node_ranks else NIC
        gradients = passed * FLOAT32 * n * cp
        return Cost({}, {("CP, ring", link): nbytes}), Cost({}, {("CP, ring", link): nbytes + gradients})
    cost = s.exchange("CP, gathered latents", gathered * BF16 * n * cp, cp)
    return cost, cost
