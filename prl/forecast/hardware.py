"""A hardware card: the rates by which work becomes seconds, each with where it was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from importlib import resources
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from prl.config.errors import UserError
from prl.config.overrides import nearest

FOLDER = resources.files("prl.forecast") / "hardware"
DEFAULT = "h200_ib400"


class Rate(BaseModel):
    """`value`, or `by` variant and length of documents (tokens), between which it is interpolated."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float | None = None
    by: Mapping[str, Mapping[int, float]] = {}
    unit: str
    kind: Literal["measured", "arithmetic", "assumed", "fitted"]
    source: str = Field(alias="from")

    def at(self, variant: str, length: int) -> float:
        """Beyond the lengths that were measured, that of the nearest."""
        if self.value is not None:
            return self.value
        points = sorted(self.by[variant].items())
        lengths = [length for length, _ in points]
        place = min(max(length, lengths[0]), lengths[-1])
        after = next(i for i, known in enumerate(lengths) if known >= place)
        if lengths[after] == place:
            return points[after][1]
        (low, below), (high, above) = points[after - 1], points[after]
        return below + (above - below) * math.log(place / low) / math.log(high / low)


class Constants(BaseModel):
    """What `prl.forecast.validation --fit` finds on the rows that are marked for it, and the error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    products: float  # rate of matrix products within a step over that alone
    eager_passes: float  # bytes of elementwise kernels over those counted, where layers' parts are not compiled
    contention: float  # seconds that a hidden collective costs the work that hides it, over its bytes at nvlink_ring
    expert_wait: float  # seconds of exchanges between expert ranks over those of their bytes: the fullest rank's
    reserve_gib: float  # of a rank's peak, beside what is counted
    # |ln(forecast / measured)| of a step's seconds, by which the interval is made: of `validation --draws=10` the worst
    error: float


class Hardware(BaseModel):
    """`seconds` of work at the rates of one card. `scale` multiplies rates, for the sensitivity to each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    about: str
    gpus_per_node: int
    memory_gib: float
    peak_flops: float
    rates: Mapping[str, Rate]
    constants: Constants
    scale: Mapping[str, float] = {}

    def rate(self, name: str, variant: str = "own", length: int = 0) -> float:
        return self.rates[name].at(variant, length) * self.scale.get(name, 1.0)

    def seconds(self, name: str, amount: float, variant: str = "own", length: int = 0) -> float:
        return amount / self.rate(name, variant, length) if amount else 0.0

    def scaled(self, name: str, factor: float) -> Hardware:
        return self.model_copy(update={"scale": {**self.scale, name: factor}})

    @cached_property
    def head_dims(self) -> dict[str, list[int]]:
        """Kernels of dense attention -> the widths of heads that were measured, ascending."""
        found: dict[str, list[int]] = {}
        for variant in self.rates["attention_forward"].by:
            kernel, dim = variant.split("/")
            found.setdefault(kernel, []).append(int(dim))
        return {kernel: sorted(dims) for kernel, dims in found.items()}

    def attention_variant(self, kernel: str, head_dim: int) -> str:
        """The measured width next above a head's, else the widest."""
        dims = self.head_dims[kernel]
        return f"{kernel}/{next((dim for dim in dims if dim >= head_dim), dims[-1])}"


def load_hardware(name: str = DEFAULT) -> Hardware:
    """Raises UserError for a card that is not there."""
    known = sorted(path.name.removesuffix(".yaml") for path in FOLDER.iterdir() if path.name.endswith(".yaml"))
    if name not in known:
        raise UserError(
            f"There is no hardware card {name}.",
            where=f"--hardware={name}",
            why="rates are read from prl/forecast/hardware",
            fix=f"--hardware={nearest(name, known) or ', '.join(known)}",
        )
    return Hardware.model_validate(yaml.safe_load((FOLDER / f"{name}.yaml").read_text()))
