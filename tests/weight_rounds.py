"""Weights from ranks to engine processes by a schedule, with nothing sent."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from prl.transport.boxes import Boxes, Table
from prl.transport.receiving_nccl import Incoming
from prl.transport.rounds import Schedule
from prl.transport.staging import Outgoing, Staging, fill


def shards(table: Table, ranks: int, by_columns: bool) -> list[Boxes]:
    """As FSDP cuts: the same number of rows for each rank, none for the last ones where they do not suffice."""
    whole, held = table.whole(), [[] for _ in range(ranks)]
    dim = (3, 4) if by_columns else (1, 2)
    for box in whole.tolist():
        step = -(-box[dim[1]] // ranks)
        for rank in range(ranks):
            begin, end = min(rank * step, box[dim[1]]), min((rank + 1) * step, box[dim[1]])
            part = list(box)
            part[dim[0]], part[dim[1]] = begin, end - begin
            if part[2] * part[4]:
                held[rank].append(part)
        if not box[2] * box[4]:
            held[0].append(list(box))
    return [np.array(boxes, dtype=np.int64).reshape(-1, 5) for boxes in held]


def data_of(boxes: Boxes, named: list[tuple[str, Tensor]], table: Table) -> list[Tensor]:
    found = []
    for number, row, rows, column, columns in boxes.tolist():
        matrix = named[number][1].reshape(int(table.rows[number]), int(table.columns[number]))
        found.append(matrix[row : row + rows, column : column + columns].clone())
    return found


def send(
    schedule: Schedule, holdings: list[Boxes], named: list[tuple[str, Tensor]], wanted: list[Boxes | None], verify: bool
) -> tuple[list[Incoming], list[list[Tensor]]]:
    """What each engine process gets in each round, [n] uint8."""
    table, engines = schedule.table, range(len(wanted))
    messages = [[schedule.message(rank, engine, wanted[engine]) for engine in engines] for rank in range(len(holdings))]
    incoming = [Incoming(schedule, [of_rank[engine] for of_rank in messages], verify) for engine in engines]
    got: list[list[list[Tensor]]] = [[[] for _ in range(schedule.rounds)] for _ in engines]
    for rank, held in enumerate(holdings):
        staging, outgoing = Staging(schedule, rank), Outgoing(schedule, rank, messages[rank], verify)
        laps = list(staging.casts(data_of(held, named, table))) if len(held) else [[]] * schedule.laps
        assert len(laps) == schedule.laps
        for lap, runs in enumerate(laps):
            bucket = torch.full((staging.bytes,), 7, dtype=torch.uint8)
            fill(bucket, runs)
            for number in range(lap * schedule.rounds_per_lap, (lap + 1) * schedule.rounds_per_lap):
                given = torch.full((outgoing.bytes,), 9, dtype=torch.uint8)
                packed = outgoing.pack(number, bucket, given).split(outgoing.sizes[number])
                for engine, message in enumerate(packed):
                    got[engine][number].append(message)
    return incoming, [[torch.cat(messages) for messages in of_engine] for of_engine in got]
