"""What layers are costed under: card, mesh, recipe and the tokens of one rank's micro-batch; and the costs of the kinds
of work that they are made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd

from prl.config.families import FAMILIES
from prl.config.rules.memory import attention_linears
from prl.config.schema import ATTENTION, ModelCard, RunConfig
from prl.config.world import Mesh, context_style, experts_go_without_fsdp, goes_without_fsdp, world_of
from prl.forecast.cost import NIC, NVLINK, Cost
from prl.forecast.hardware import Hardware

BF16, FLOAT32 = 2, 4  # bytes
CUDNN_TOKENS = 2048  # of a document, from which cuDNN attends (prl/models/layers/packed_attention.py)


@dataclass(frozen=True)
class Setting:
    """One micro-batch of documents of `lengths` tokens, which a context group shares."""

    hardware: Hardware
    config: RunConfig
    lengths: tuple[int, ...]
    # as runs were when one rank had FSDP, too, every layer was a unit of it, and no logits waited for backward
    before: bool = False

    @cached_property
    def card(self) -> ModelCard:
        return self.config.model.card

    @cached_property
    def mesh(self) -> Mesh:
        return world_of(self.config).mesh

    @cached_property
    def node_ranks(self) -> int:
        """Neighbouring ranks that NVLink joins: a node of the deployment, or of the hardware if that is smaller."""
        return min(self.hardware.gpus_per_node, world_of(self.config).node_ranks)

    @cached_property
    def cp_style(self) -> str:
        return context_style(self.config)

    @property
    def tokens(self) -> float:
        """Of one rank."""
        return sum(self.lengths) / self.mesh.cp

    @property
    def pairs(self) -> float:
        """Of a token and one that it sees, a rank's share."""
        return sum(d * (d + 1) / 2 for d in self.lengths) / self.mesh.cp

    @property
    def chosen_pairs(self) -> float:
        """The same of sparse attention."""
        most = self.card.index_topk
        few = [min(d, most) for d in self.lengths]
        return sum(n * (n + 1) / 2 + (d - n) * most for d, n in zip(self.lengths, few, strict=True)) / self.mesh.cp

    @property
    def length(self) -> int:
        """By which rates of attention are looked up: that of the document with the most pairs."""
        return max(self.lengths)

    @property
    def compiled(self) -> bool:
        return self.config.memory_recipe.compile

    @cached_property
    def alone(self) -> bool:
        """Whether weights are cast where they lie, and FSDP has no part in it."""
        return not self.before and goes_without_fsdp(self.config, self.mesh.dp_replicate, self.mesh.fsdp_island)

    @property
    def experts_alone(self) -> bool:
        """Whether experts are cast where they lie, on the one rank that has them."""
        return not self.before and experts_go_without_fsdp(self.config, self.mesh.size, self.mesh.ep)

    @property
    def casts(self) -> bool:
        """Whether one rank's weights are cast where they are read."""
        return self.alone and self.wide

    @property
    def wide(self) -> bool:
        """Whether it is float32 that lies on the device, and another dtype that is read."""
        held = not self.frozen and self.config.memory_recipe.optim_cpu_offload != "full"
        return held and self.config.model.dtype != "float32"

    @property
    def frozen(self) -> bool:
        """Whether the weights themselves are not trained (LoRA)."""
        return self.config.memory_recipe.lora.rank > 0

    @property
    def fp8(self) -> bool:
        return self.config.model.fp8 != "none"

    def casts_activations(self, inner: int) -> bool:
        """Whether MLPs of so many units never write their activation (`models/fp8/activations.py`)."""
        return self.fp8 and self.gated and inner % 128 == 0

    @property
    def even_experts(self) -> bool:
        """Whether no expert rank waits for a fuller one: a choice of the benchmark."""
        bench = getattr(self.config, "bench", None)
        return bench is not None and bench.experts == "even"

    @property
    def gated(self) -> bool:
        family = FAMILIES.get(self.card.family)
        return family is None or family.gated

    @property
    def kernel(self) -> str:
        """Of dense attention. Merging partial sums over keys (ring, gathered latents) wants one that tells them."""
        asked = self.config.model.attn
        if asked in ("flash_attention_3", "flash_attention_4"):
            measured = (self.card.head_dim, self.card.value_dim) in ((128, 128), (192, 128))
            return f"fa{asked[-1]}" if measured else "flash"
        merges = self.mesh.cp > 1 and self.cp_style != "ulysses"
        return "cudnn" if asked == "auto" and not merges and self.length >= CUDNN_TOKENS else "flash"

    @property
    def adapters(self) -> tuple[str, ...]:
        """Linears that have them (LoRA)."""
        said = self.config.memory_recipe.lora.targets if self.frozen else ()
        return (*said, *(attention_linears(self.card) if ATTENTION in said else ()))

    # --- kinds of work, forward and backward --------------------------------------------------------------------------

    def matmul(self, rows: float, inner: float, columns: float, kind: str = "gemm", fp8: bool = True) -> Both:
        """[rows, inner] times a weight [inner, columns]: a product forward, two backward; of a frozen weight one."""
        flops = 2 * rows * inner * columns
        name = f"{kind}_fp8" if self.fp8 and fp8 else kind
        back = flops * (1 if self.frozen else 2)
        seconds, slower = self.hardware.seconds, 1 / self.hardware.constants.products
        return (
            Cost({f"{name}_forward": slower * seconds(f"{name}_forward", flops)}),
            Cost({f"{name}_backward": slower * seconds(f"{name}_backward", back)}),
        )

    def elementwise(self, numbers: float) -> Both:
        """Kernels that read and write so many bfloat16 numbers a token; backward twice as many."""
        passes = 1.0 if self.compiled else self.hardware.constants.eager_passes
        return self.copies(numbers * passes, 2 * numbers * passes)

    def copies(self, forward: float, backward: float) -> Both:
        """The same, as many as are said."""
        return self.memory(forward * BF16 * self.tokens), self.memory(backward * BF16 * self.tokens)

    def memory(self, nbytes: float) -> Cost:
        return Cost({"memory": self.hardware.seconds("memory", nbytes)})

    def exchange(self, what: str, nbytes: float, ranks: int) -> Cost:
        """An all-to-all, in which a GPU sends so many bytes, its own part included, to `ranks` neighbouring ones."""
        near = min(ranks, self.node_ranks)
        inside, outside = nbytes * (near - 1) / ranks, nbytes * (ranks - near) / ranks
        return self.over_links(what, inside, outside)

    def over_links(self, what: str, inside: float, outside: float, at_once: bool = True) -> Cost:
        """So many bytes that a GPU sends within its node and out of it: both at once, or one after the other."""
        times = {"nvlink_all_to_all": inside, "nic": outside}
        seconds = {name: self.hardware.seconds(name, size) for name, size in times.items()}
        if at_once:
            slower = max(seconds, key=seconds.__getitem__)
            seconds = {slower: seconds[slower]}
        traffic = {(what, link): size for link, size in ((NVLINK, inside), (NIC, outside)) if size}
        return Cost(seconds, traffic)


Both = tuple[Cost, Cost]  # forward, backward


def repeats(cp: int, heads: int) -> int:
    """How often Ulysses repeats key heads, so that each rank has whole ones."""
    return cp // gcd(cp, heads)
