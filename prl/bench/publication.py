"""`python -m prl.bench.publication [--help]`: weights from many trainer ranks to many engine processes, on CPUs.

The layout is Qwen3-235B-A22B's, all names, layers and experts, with each dimension divided by `--shrink`. Trainer ranks
are processes with FSDP and expert parallelism (shards by the trainer's own code), engines are groups of processes with
tensor parallelism that copy what they need into place. Between them is what runs over NCCL on GPUs, here over gloo.

Measured: bytes that each rank sends, what anybody holds of weights on their way (all that malloc gave out, sampled),
seconds; each engine process looks at every byte that came. `--json` prints the figures as JSON.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import dataclass, fields
from types import SimpleNamespace

from prl.bench.arguments import parser_of, user_errors_told
from prl.bench.processes import Processes
from prl.config.arguments import a_count

EXPERTS = 128  # of a layer
EVEN = 1.1  # the most that a rank sends over the least
BUCKETS = 2.0  # the most that anybody holds


@dataclass(frozen=True)
class Load:
    """One run of the bench."""

    trainers: int = 64
    ep: int = 8
    engines: int = 4
    tp: int = 8
    shrink: int = 32
    layers: int = 94
    bucket_kib: int = 24576
    versions: int = 1
    kv_heads: int = 4

    @property
    def bucket_bytes(self) -> int:
        return self.bucket_kib << 10


SIZES = {
    "hidden_size": 4096, "moe_intermediate_size": 1536, "intermediate_size": 12288, "head_dim": 128,
    "vocab_size": 151936,
}  # fmt: skip


def measure(load: Load) -> dict[str, float]:
    """Start all processes, publish all versions, end them. Raises UserError when one has died."""
    import torch

    from prl.bench.publication_sides import WIRE, check_holdings, holdings_of, serve, tensor_parallel, train
    from prl.config import compose
    from prl.trainer.owned import OwnShards
    from prl.trainer.parallelize import build_meta

    torch.set_num_threads(1)
    card = {key: size // load.shrink for key, size in SIZES.items()} | {"num_hidden_layers": load.layers}
    config = compose(["model=qwen3_235b_a22b", *(f"model.card.{key}={size}" for key, size in card.items())])
    model = build_meta(config, None)
    table = OwnShards(model, WIRE, SimpleNamespace(is_main=True, rank=0, size=1)).table  # type: ignore[arg-type]
    holdings = holdings_of(table, load)
    wanted = [tensor_parallel(table, rank, load.tp, load.kv_heads) for rank in range(load.tp)]
    gc.collect()
    gc.freeze()  # so that its marks do not copy the pages that all share
    trainers, engines = range(load.trainers), range(load.trainers, load.trainers + load.engines * load.tp)
    with Processes("fork") as processes:
        for rank in trainers:
            processes.start(f"trainer {rank}", train, load, rank, table, holdings[rank])
        for number in range(len(engines)):
            processes.start(f"engine process {number}", serve, load, table, wanted[number % load.tp])
        checked = {0, min(load.trainers // 2 + 1, load.trainers - 1), load.trainers - 1}
        for rank in checked:
            processes.start(f"check of trainer {rank}", check_holdings, load, rank, model, config, holdings[rank])
        processes.tell(trainers, processes.hear(0))
        for _ in range(load.versions):
            for rank in trainers:
                processes.hear(rank)  # it has all numbers
            processes.tell(trainers, None)
            processes.tell(engines, processes.hear(0))
            of_engines = [processes.hear(index) for index in engines]
        of_trainers = [processes.hear(rank) for rank in trainers]
        checks = range(engines.stop, engines.stop + len(checked))
        assert all(processes.hear(index) for index in checks), "these are not the shards that a trainer has"
    return {"version, MB": int(table.nbytes(table.whole()).sum()) / 1e6} | summary(load, of_trainers, of_engines)


def cannot_be_laid_out(load: Load) -> str:
    """Why `holdings_of` knows no such layout; empty where it does."""
    if load.ep < 2 or EXPERTS % load.ep or load.trainers % load.ep:
        return f"--ep {load.ep}: 2 or more, of which {EXPERTS} experts and {load.trainers} trainers are a multiple"
    if odd := {size for size in SIZES.values() if size % load.shrink}:
        return f"--shrink {load.shrink} does not divide {min(odd)}, one of the model's dimensions"
    along = load.trainers // load.ep
    for rows in (2 * SIZES["moe_intermediate_size"] // load.shrink, SIZES["hidden_size"] // load.shrink):
        if rows % along:
            return f"--trainers {load.trainers} --ep {load.ep}: {rows} rows of an expert are not cut into {along}"
    return ""


def summary(load: Load, of_trainers: list[dict[str, float]], of_engines: list[dict[str, float]]) -> dict[str, float]:
    def of(sides: list[dict[str, float]], figure: str) -> list[float]:
        return [side[figure] for side in sides]

    sent, got = of(of_trainers, "sent"), of(of_engines, "got")
    return {
        "a rank sends at least, MB": min(sent) / 1e6,
        "a rank sends at most, MB": max(sent) / 1e6,
        "an engine process gets, MB": max(got) / 1e6,
        "a rank holds at most, buckets": max(of(of_trainers, "held")) / load.bucket_bytes,
        "an engine process holds at most, buckets": max(of(of_engines, "held")) / load.bucket_bytes,
        "rounds": of_trainers[0]["rounds"],
        "laps": of_trainers[0]["laps"],
        "CPU seconds of the plan, each process": max(of(of_trainers, "plan")),
        "seconds until the first round": max(of(of_trainers, "meeting")),
        "seconds from there to the end": max(of(of_trainers, "seconds")),
    }


def check(figures: dict[str, float]) -> None:
    """Raises AssertionError where ranks send unevenly, or somebody holds more than two buckets."""
    least, most = figures["a rank sends at least, MB"], figures["a rank sends at most, MB"]
    assert most <= EVEN * least, f"ranks send {least:.2f} to {most:.2f} MB"
    for who in ("a rank", "an engine process"):
        held = figures[f"{who} holds at most, buckets"]
        assert held <= BUCKETS, f"{who} holds {held:.2f} buckets"


def main() -> None:
    parser = parser_of("publication", __doc__)
    for field in fields(Load):
        name, value = f"--{field.name.replace('_', '-')}", field.default
        parser.add_argument(name, type=a_count, default=value, help=f"default: {value}")
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    said = vars(parser.parse_args())
    as_json, load = said.pop("json"), Load(**said)
    if why := cannot_be_laid_out(load):
        parser.error(why)
    with user_errors_told():  # of the model in that size, of a process that dies
        figures = measure(load)
    print(
        json.dumps(figures) if as_json else "\n".join(f"{name:<42}{value:>12,.2f}" for name, value in figures.items())
    )
    try:
        check(figures)
    except AssertionError as error:
        sys.exit(f"a bound is broken: {error} (at most {EVEN:g} times the least, and {BUCKETS:g} buckets)")


if __name__ == "__main__":
    main()
