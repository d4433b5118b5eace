"""`python -m prl.bench.packing [--help]`: how evenly a step's documents are packed for data ranks.

Of lognormal lengths, dealt by tokens and by work (their FLOPs, attention's square included): a step's time over that
with all ranks busy, where ranks wait for each other behind every row; means of several draws. Nothing is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from prl.bench.arguments import parser_of, user_errors_told
from prl.config import compose
from prl.config.arguments import a_count
from prl.metrics.mfu import document_flops
from prl.transport.packing import Work, deal_rows, laps_work, pack_laps, pack_rows

SHORTEST = 256  # tokens


class Draw(NamedTuple):
    """Data ranks, the two parameters of their documents' lengths, and how many documents."""

    ranks: int
    scale: float
    spread: float
    documents: int


DRAWS = [Draw(4, 9.0, 1.0, 64), Draw(16, 8.5, 1.5, 512), Draw(64, 8.5, 1.5, 2048)]


def unevenness(draw: Draw, seq_len: int, seed: int, work: Work) -> tuple[float, float]:
    """A step's time over that with all ranks busy: rows dealt by tokens, and documents packed by work."""
    drawn = np.random.default_rng(seed).lognormal(draw.scale, draw.spread, draw.documents)
    lengths = np.clip(drawn, min(SHORTEST, seq_len), seq_len).astype(int).tolist()
    costs = [work(length) for length in lengths]
    rows = pack_rows(lengths, seq_len)
    dealt = deal_rows([sum(lengths[i] for i in row) for row in rows], draw.ranks)
    by_tokens = [[rows[i] if i >= 0 else [] for i in lap] for lap in zip(*dealt, strict=True)]
    even = sum(costs) / draw.ranks
    return laps_work(by_tokens, costs) / even, laps_work(pack_laps(lengths, seq_len, draw.ranks, work), costs) / even


def measure(model: str, seq_len: int, seeds: int) -> Iterator[tuple[Draw, float, float]]:
    """Each draw, and the means of `unevenness`. Raises UserError for a model that there is not."""
    card = compose([f"model={model}"]).model.card
    work = document_flops(card)
    for draw in DRAWS:
        found = [unevenness(draw, seq_len, seed, work) for seed in range(seeds)]
        by_tokens, by_work = np.mean(found, axis=0)
        yield draw, float(by_tokens), float(by_work)


def main() -> None:
    parser = parser_of("packing", __doc__)
    parser.add_argument("--model", default="qwen3_30b_a3b", help="whose FLOPs are counted; default: qwen3_30b_a3b")
    parser.add_argument("--seq-len", type=a_count, default=131072, help="tokens of a row; default: 131072")
    parser.add_argument("--seeds", type=a_count, default=5, help="draws; default: 5")
    said = parser.parse_args()
    print("| data ranks | documents | lognormal | by tokens | by work |\n|---|---|---|---|---|")
    with user_errors_told():
        for draw, by_tokens, by_work in measure(said.model, said.seq_len, said.seeds):
            drawn = f"{draw.ranks} | {draw.documents} | {draw.scale}, {draw.spread}"
            print(f"| {drawn} | {by_tokens:.2f} | {by_work:.2f} |")


if __name__ == "__main__":
    main()
