"""A layer as parts, in the order in which they run: what each costs forward and backward, what it keeps for backward,
and by which activation-checkpointing target it is forgotten. Counted from prl/models/layers and prl/trainer/memory.

Elementwise work is counted in numbers that are read or written: a norm reads and writes a row (2), a residual reads two
and writes one (3), SwiGLU reads two and writes one (3).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import comb, prod

from prl.config.schema import ModelCard
from prl.forecast.cost import NOTHING, Cost
from prl.forecast.setting import BF16, FLOAT32, Both, Setting

SORTED = 13.5  # times as long as now took finding out who goes where, when rows were sorted for it


@dataclass(frozen=True)
class Part:
    """kept: bytes a token. weights: shapes of parameters, those of stacked experts have three dimensions. again: what a
    repetition runs of it, if not all.
    """

    name: str
    block: str
    forward: Cost
    backward: Cost
    kept: float = 0.0
    weights: tuple[tuple[int, ...], ...] = ()
    again: Cost | None = None

    @property
    def repeated(self) -> Cost:
        return self.forward if self.again is None else self.again


def join(*pairs: Both) -> Both:
    forward, backward = NOTHING, NOTHING
    for ahead, back in pairs:
        forward, backward = forward + ahead, backward + back
    return forward, backward


# --- MLPs -------------------------------------------------------------------------------------------------------------


def mlp_parts(s: Setting) -> Iterator[Part]:
    """A norm, a dense MLP, the residual."""
    hidden, inner, n = s.card.hidden_size, s.card.intermediate_size, s.tokens
    wide = 2 if s.gated else 1
    yield Part("input", "input", NOTHING, NOTHING, kept=hidden * BF16)
    yield Part("norm", "mlp", *s.elementwise(2 * hidden), kept=hidden * BF16, weights=((hidden,),))
    yield Part(
        "up", "mlp", *s.matmul(n, hidden, wide * inner), kept=wide * inner * BF16, weights=((inner, hidden),) * wide
    )
    kept = 0 if s.casts_activations(inner) else inner * (1 if s.compiled or not s.gated else 2) * BF16
    yield Part("act", "mlp" if s.compiled else "mlp act", *s.elementwise((wide + 1) * inner), kept=kept)
    down = join(s.matmul(n, inner, hidden), s.elementwise(3 * hidden))
    yield Part("down", "mlp", *down, weights=((hidden, inner),), again=NOTHING)


def expert_parts(s: Setting) -> Iterator[Part]:
    """A norm, the router, experts, those that every token sees, the residual."""
    card, n = s.card, s.tokens
    hidden, width, top = card.hidden_size, card.expert_width, card.num_experts_per_tok
    inner, wide = card.moe_intermediate_size, 2 if s.gated else 1
    latent, shared = card.moe_latent_size, card.shared_intermediate_size
    # whether a repetition goes on behind the experts: shared ones are run ahead of them
    rows, runs_on = n * top, bool(latent or (shared and s.before))
    yield Part("input", "input", NOTHING, NOTHING, kept=hidden * BF16)
    yield Part("norm", "moe", *s.elementwise(2 * hidden), kept=hidden * BF16, weights=((hidden,),))
    route = join(s.matmul(n, hidden, card.num_experts, fp8=False), s.elementwise(4 * card.num_experts))
    kept = card.num_experts * FLOAT32 + top * 3 * 8  # scores; order, positions, places of int64
    yield Part("route", "moe", *route, kept=kept, weights=((card.num_experts, hidden),))
    if latent:
        yield Part("fc1", "moe", *s.matmul(n, hidden, latent), kept=latent * BF16, weights=((latent, hidden),))
    spread = join(s.copies((1 + top) * width, (1 + top) * width), dispatched(s, width), routed(s))
    yield Part("spread", "moe", *spread, kept=top * width * BF16)
    up = s.matmul(rows, width, wide * inner, "grouped")
    yield Part("up", "moe", *up, kept=top * wide * inner * BF16, weights=((card.num_experts, wide * inner, width),))
    kept = 0 if s.casts_activations(inner) else top * inner * (1 if s.compiled or not s.gated else 3) * BF16
    yield Part("act", "moe act", *s.elementwise(top * (wide + 1) * inner), kept=kept)
    down = join(s.matmul(rows, inner, width, "grouped"), s.copies((1 + top) * width, (1 + top) * width))
    down = join(down, dispatched(s, width), s.elementwise(3 * hidden))
    again = None if runs_on else NOTHING
    yield Part("down", "moe", *down, weights=((card.num_experts, width, inner),), again=again)
    if latent:
        fc2 = s.matmul(n, latent, hidden)
        yield Part("fc2", "moe", *fc2, kept=latent * BF16, weights=((hidden, latent),), again=NOTHING)
    if shared:
        up = s.matmul(n, hidden, wide * shared)
        activated = 0 if s.casts_activations(shared) else 1 if s.compiled else 2
        of_shared = (wide + activated) * shared * BF16
        yield Part(
            "shared up",
            "moe",
            *join(up, s.elementwise((wide + 1) * shared)),
            kept=of_shared,
            weights=((shared, hidden),) * wide,
        )
        down = s.matmul(n, shared, hidden)
        yield Part("shared down", "moe", *down, weights=((hidden, shared),), again=NOTHING)


def dispatched(s: Setting, width: int) -> Both:
    """Rows to the ranks of their experts, or back."""
    if s.mesh.ep == 1:
        return NOTHING, NOTHING
    cost = moved_rows(s, s.tokens * width * BF16)
    wait = 1.0 if s.even_experts else s.hardware.constants.expert_wait
    waited = Cost({name: t * wait for name, t in cost.seconds.items()}, cost.traffic)
    return waited, waited


def moved_rows(s: Setting, nbytes: float) -> Cost:
    """Tokens of so many bytes: each once to every rank that holds any of its experts. Beyond a node, `hierarchical` and
    DeepEP send it once to every node that does, and from there to these ranks; the latter both at once.
    """
    what, ep, near = "EP dispatch and combine", s.mesh.ep, min(s.mesh.ep, s.node_ranks)
    to_ranks = nbytes * parts_of_a_token(s.card, ep)
    if near == ep or s.config.parallelism.ep_comm_backend == "torch":
        return s.exchange(what, to_ranks, ep)
    nodes = -(-ep // near)
    to_nodes = nbytes * parts_of_a_token(s.card, nodes)
    at_once = s.config.parallelism.ep_comm_backend == "deepep"
    return s.over_links(what, to_ranks * (near - 1) / near, to_nodes * (nodes - 1) / nodes, at_once)


def routed(s: Setting) -> Both:
    """Under expert parallelism, finding out who goes where, beside what moving rows within a rank takes."""
    if s.mesh.ep == 1:
        return NOTHING, NOTHING
    pairs = s.tokens * s.card.num_experts_per_tok * (SORTED if s.before else 1)
    cost = Cost({"ep_routing": s.hardware.seconds("ep_routing", pairs)})
    return cost, cost


def parts_of_a_token(card: ModelCard, parts: int) -> float:
    """In how many of so many equal parts of all experts (ranks, nodes) those of a token lie, if any choice is as likely
    as another; of routers that choose groups first, within these. Approximate where neither number divides the other.
    """
    groups, chosen = card.n_group, card.topk_group
    if parts >= groups:  # each of a group's parts holds as much of it
        reached, experts = parts * chosen / groups, card.num_experts * chosen / groups
        return reached * (1 - missed(experts, experts / reached, card.num_experts_per_tok))
    each, size = groups // parts, card.num_experts / groups  # groups of a part, experts of a group
    found = 0.0
    for mine in range(1, min(each, chosen) + 1):
        ways = comb(each, mine) * comb(groups - each, chosen - mine) / comb(groups, chosen)
        found += ways * (1 - missed(chosen * size, mine * size, card.num_experts_per_tok))
    return parts * found


def missed(experts: float, held: float, drawn: int) -> float:
    """How likely it is that of so many experts drawn none is among those held."""
    return prod(max(0.0, experts - held - i) / (experts - i) for i in range(drawn))


# --- state space ------------------------------------------------------------------------------------------------------


def state_parts(s: Setting) -> Iterator[Part]:
    """A norm, Mamba-2, the residual. The convolution is an elementwise kernel here."""
    card, n = s.card, s.tokens
    hidden, inner = card.hidden_size, card.mamba_num_heads * card.mamba_head_dim
    channels = inner + 2 * card.mamba_n_groups * card.ssm_state_size
    made = inner + channels + card.mamba_num_heads
    yield Part("input", "input", NOTHING, NOTHING, kept=hidden * BF16)
    yield Part("norm", "attn_proj", *s.elementwise(2 * hidden), kept=hidden * BF16, weights=((hidden,),))
    project = s.matmul(n, hidden, made, fp8=False)
    yield Part("project", "attn_proj", *project, kept=made * BF16, weights=((made, hidden),))
    conv = s.copies(2 * channels, 4 * channels)
    weights: tuple[tuple[int, ...], ...] = ((channels, 1, card.conv_kernel), (channels,))
    yield Part("convolve", "attn_proj", *conv, kept=channels * BF16, weights=weights)
    numbers = n * inner * card.ssm_state_size
    scan = tuple(Cost({f"scan_{way}": s.hardware.seconds(f"scan_{way}", numbers)}) for way in ("forward", "backward"))
    yield Part("scan", "scan", *join((scan[0], scan[1]), heads_exchanged(s, channels + inner)), kept=inner * BF16)
    weights = ((inner,), *((card.mamba_num_heads,) for _ in range(3)))
    yield Part("gate", "scan", *s.elementwise(3 * inner), kept=inner * BF16, weights=weights)
    out = join(s.matmul(n, inner, hidden), s.elementwise(3 * hidden))
    yield Part("out", "out", *out, weights=((hidden, inner),))


def heads_exchanged(s: Setting, numbers: float) -> Both:
    """Ulysses: so many numbers of a token change ranks, and their gradients go back."""
    if s.mesh.cp == 1:
        return NOTHING, NOTHING
    cost = s.exchange("CP, heads for tokens", numbers * BF16 * s.tokens, s.mesh.cp)
    return cost, cost
