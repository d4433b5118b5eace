"""`python -m prl.bench.experts [MODEL ...]`: one layer's experts spread over the GPUs of this machine.

By all-to-all, the same in two pieces, and DeepEP where it is installed: milliseconds forward and backward, and whether
all ways give the same.

Random weights in the sizes of the cards of conf/model, made where they are used, and tokens that choose at random. A
card's experts may be more than these GPUs hold: with `--ep 8` there are as many on each as eight ranks would have. On
a CPU, in float32 over gloo, two processes show that it runs; a small card (`tiny_qwen3_moe`) and few `--tokens` do.

What gives no answer within `--limit` seconds ends it, and says where each process stood.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import itertools
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from prl.bench.arguments import parser_of, user_errors_told
from prl.config import compose
from prl.config.arguments import a_count, a_count_or_0, an_amount
from prl.config.families import FAMILIES
from prl.config.rules.parallelism import DEEPEP_CHOICES, DEEPEP_EXPERTS, DEEPEP_HIDDEN, DEEPEP_MULTIPLE
from prl.config.schema import ModelCard
from prl.models.experts.all_to_all import AllToAllDispatch
from prl.models.experts.deepep import DeepEPDispatch
from prl.models.experts.stacked import Dispatch, Experts

MODELS = ("qwen3_30b_a3b", "glm_4_5_air", "deepseek_v3_2", "glm_5_1", "nemotron_3_super")
WARMUP = 3


@dataclass(frozen=True)
class Sizes:
    """Of one layer, whose experts all ranks hold together."""

    experts: int
    choices: int
    hidden: int
    width: int
    gated: bool

    @staticmethod
    def of(card: ModelCard, ranks: int, ep: int) -> Sizes:
        """ep: 0 for all experts of the card."""
        experts = card.num_experts * ranks // ep if ep else card.num_experts
        gated = FAMILIES[card.family].gated
        return Sizes(experts, card.num_experts_per_tok, card.expert_width, card.moe_intermediate_size, gated)

    def suit_deepep(self, ranks: int) -> bool:
        """Between ranks of one node, as the rules of configurations have it."""
        few = self.experts <= DEEPEP_EXPERTS * ranks and self.choices <= DEEPEP_CHOICES
        return few and self.hidden <= DEEPEP_HIDDEN and self.hidden % DEEPEP_MULTIPLE == 0


@dataclass
class Measured:
    """One way of one layer: milliseconds [repeats], and how far output and gradients are from those of the first way,
    relative to each one's largest element; 0: the same bits.
    """

    way: str
    ms: list[float]
    far: float


def ways_of(group: dist.ProcessGroup, device: torch.device, num_sms: int, sizes: Sizes) -> dict[str, Dispatch]:
    """DeepEP is for GPUs, in bfloat16, within the bounds of its kernels."""
    ways: dict[str, Dispatch] = {"all-to-all": AllToAllDispatch(group), "2 pieces": AllToAllDispatch(group, 2)}
    if device.type == "cuda" and importlib.util.find_spec("deep_ep") is not None:
        if sizes.suit_deepep(group.size()):
            ways["DeepEP"] = DeepEPDispatch(group, num_sms, None)
        elif group.rank() == 0:
            print("# DeepEP: beyond what its kernels take (prl/config/rules/parallelism.py)", flush=True)
    return ways


def layer_of(sizes: Sizes, ranks: int, device: torch.device, seed: int) -> Experts:
    """This rank's experts; the layer knows of all."""
    with device:
        layer = Experts(sizes.experts // ranks, sizes.hidden, sizes.width, sizes.gated)
    layer.num_experts = sizes.experts
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for matrix in itertools.chain.from_iterable(layer.parameters()):
            matrix.normal_(0, sizes.hidden**-0.5, generator=generator)
    return layer.to(torch.bfloat16 if device.type == "cuda" else torch.float32)


def both_ways(layer: Experts, inputs: tuple[Tensor, Tensor, Tensor], grad: Tensor) -> list[Tensor]:
    """The output [N, H], and gradients of tokens, mixing weights and the experts held here."""
    x, weights = (tensor.clone().requires_grad_() for tensor in inputs[:2])
    layer.zero_grad(set_to_none=True)
    out = layer(x, weights, inputs[2])
    out.backward(grad)
    return [out.detach(), *(held.grad for held in (x, weights, *layer.parameters()) if held.grad is not None)]


def measure(sizes: Sizes, tokens: int, repeats: int, num_sms: int, device: torch.device) -> list[Measured]:
    """A collective over all ranks; every rank gets its own figures."""
    assert dist.group.WORLD is not None
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layer = layer_of(sizes, ranks, device, rank)
    generator = torch.Generator(device).manual_seed(rank)
    logits = torch.randn(tokens, sizes.experts, device=device, generator=generator)
    weights, chosen = logits.softmax(-1).topk(sizes.choices)
    dtype = layer.down_proj.dtype
    weights = weights.to(dtype)  # as a layer's router gives them
    x, grad = (torch.randn(tokens, sizes.hidden, device=device, generator=generator).to(dtype) for _ in range(2))
    first: list[Tensor] = []
    found = []
    for name, dispatch in ways_of(dist.group.WORLD, device, num_sms, sizes).items():
        layer.dispatch = dispatch
        ms, got = [], []
        for number in range(WARMUP + repeats):
            _wait(device)
            dist.barrier()
            began = time.perf_counter()
            got = both_ways(layer, (x, weights, chosen), grad)
            _wait(device)
            ms.append(1e3 * (time.perf_counter() - began))
            if number == 0 and rank == 0:
                print(f"# {name}: first pass after {ms[0] / 1e3:.1f} s", flush=True)
        first = first or got
        pairs = zip(got, first, strict=True)
        far = max(float((one - other).abs().max() / other.abs().max().clamp(min=1e-30)) for one, other in pairs)
        found.append(Measured(name, ms[WARMUP:], far))
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def serve_rank(rank: int, store: str, ranks: int, models: list[str], arguments: argparse.Namespace) -> None:
    """A process: one rank, the first of which prints the table's rows."""
    device = torch.device("cuda", rank) if arguments.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    for model in models:
        faulthandler.dump_traceback_later(arguments.limit, exit=True)
        sizes = Sizes.of(card_of(model), ranks, arguments.ep)
        if rank == 0:
            print(f"# {model}: {sizes}", flush=True)
        found = measure(sizes, arguments.tokens, arguments.repeats, arguments.num_sms, device)
        told = tell_all(found, device)
        if rank == 0:
            print("\n".join(rows_of(model, sizes, told)), flush=True)
        faulthandler.cancel_dump_traceback_later()
    dist.barrier()
    dist.destroy_process_group()


def tell_all(found: list[Measured], device: torch.device) -> list[list[Measured]]:
    """Of each rank, all ways: a collective."""
    own = torch.tensor([[*one.ms, one.far] for one in found], dtype=torch.float64, device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return [
        [Measured(one.way, row[:-1], row[-1]) for one, row in zip(found, rows.tolist(), strict=True)]
        for rows in gathered
    ]


def rows_of(model: str, sizes: Sizes, told: list[list[Measured]]) -> list[str]:
    """told: of each rank, all ways. A way's time is the median of the repeats, each that of its slowest rank."""
    rows = []
    for of_ranks in zip(*told, strict=True):
        ms = statistics.median(map(max, zip(*(one.ms for one in of_ranks), strict=True)))
        far = max(one.far for one in of_ranks)
        same = "the same bits" if far == 0 else f"{far:.0e}"
        shape = f"{sizes.experts}, {sizes.choices}, {sizes.hidden}, {sizes.width}"
        rows.append(f"| {model}: {shape} | {of_ranks[0].way} | {ms:.2f} | {same} |")
    return rows


def card_of(model: str) -> ModelCard:
    return compose([f"model={model}", "model.path=null", "model.tokenizer=byte"], "bench").model.card


def main() -> None:
    parser = parser_of("experts", __doc__)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL", help=f"default: {' '.join(MODELS)}")
    parser.add_argument(
        "--ranks", type=a_count, default=torch.cuda.device_count() if on_gpu else 2, help="default: all GPUs"
    )
    parser.add_argument(
        "--ep", type=a_count_or_0, default=0, help="as many experts a rank as with so many ranks (0: all there are)"
    )
    parser.add_argument("--tokens", type=a_count, default=8192 if on_gpu else 64, help="of each rank (default: 8192)")
    parser.add_argument("--repeats", type=a_count, default=5, help="after 3 that do not count (default: 5)")
    parser.add_argument("--num-sms", type=a_count, default=20, help="multiprocessors of DeepEP's kernels (default: 20)")
    parser.add_argument("--limit", type=an_amount, default=150, help="seconds for each model (default: 150)")
    arguments = parser.parse_args()
    arguments.device = "cuda" if on_gpu else "cpu"
    if on_gpu and arguments.ranks > torch.cuda.device_count():
        parser.error(f"--ranks {arguments.ranks} --ep {arguments.ep}: a rank has a GPU of its own, where there are any")
    with user_errors_told():
        found = {model: Sizes.of(card_of(model), arguments.ranks, arguments.ep) for model in arguments.models}
    for model, sizes in found.items():
        if not sizes.choices or sizes.experts < max(arguments.ranks, sizes.choices) or sizes.experts % arguments.ranks:
            parser.error(f"{model}: {sizes.experts} experts cannot be spread over {arguments.ranks} ranks")
    print("| experts, choices, hidden, width | way | ms | from the first |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        settings = (str(Path(directory) / "store"), arguments.ranks, list(arguments.models), arguments)
        try:
            mp.spawn(serve_rank, settings, nprocs=arguments.ranks)
        except mp.ProcessExitedException as error:
            print(f"{error}: no answer within {arguments.limit:g} s, or a crash; see above", file=sys.stderr)
            sys.exit(1)


if __name__ == "__main__":
    main()
