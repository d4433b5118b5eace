"""From where an engine may take weights: by the transport that its run is configured for, and from its own trainer.

What /update_weights is told is checked here, field by field, before anything is opened, dialled or mapped.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prl.config.loopback import LOOPBACK_HOSTS
from prl.runtime.process.child import ChildContext
from prl.runtime.process.ports import RENDEZVOUS

VARIABLE = "PRL_WEIGHT_SOURCE"  # for processes that an engine starts by itself
MOST = (1 << 53) - 1  # of any integer: what every reader of JSON agrees on
PORTS = (1 << 16) - 1
MOST_TEXT = 256  # characters of a name


class Update(BaseModel):
    """What every transport says of a version."""

    model_config = ConfigDict(extra="forbid", strict=True)

    version: int = Field(ge=0, le=MOST)


class Near(BaseModel):
    """Where on an engine's host a version was prefetched to (`prefetch.py`)."""

    model_config = ConfigDict(extra="forbid", strict=True)

    host: str = Field(max_length=MOST_TEXT)
    path: str = Field(pattern=r"^(/proc/\d{1,10}/fd/\d{1,10})?$")
    token: str = Field(pattern=r"^[0-9a-f]{32}$")


class HeldUpdate(Update):
    """Of a version that the trainer holds until all have it."""

    near: Near | None = None


class FileUpdate(HeldUpdate):
    type: Literal["filesystem"]
    path: str


class SharedMemoryUpdate(HeldUpdate):
    type: Literal["shared_memory"]
    path: str  # of the ranks' segments, without their numbers
    ranks: int = Field(gt=0, le=PORTS)


class NetworkUpdate(Update):
    """`host`, `port`: of the trainer."""

    host: str
    port: int = Field(gt=0, le=PORTS)
    timeout_s: float = Field(gt=0, allow_inf_nan=False)


class TcpUpdate(NetworkUpdate, HeldUpdate):
    type: Literal["tcp"]
    key: str = Field(pattern=r"^[0-9a-f]{64}$")


class NcclUpdate(NetworkUpdate):
    type: Literal["nccl"]
    publication: int = Field(gt=0, le=MOST)
    bucket_bytes: int = Field(gt=0, le=1 << 40)
    checksums: bool
    absent: int = Field(default=0, ge=0, le=MOST)


class IpcUpdate(NetworkUpdate):
    type: Literal["ipc"]


UPDATES = (FileUpdate, SharedMemoryUpdate, TcpUpdate, NcclUpdate, IpcUpdate)
MODELS = {get_args(model.model_fields["type"].annotation)[0]: model for model in UPDATES}


@dataclass(frozen=True)
class WeightSource:
    """One run's. A server without a trainer takes files from its own run directory, and anything else from this host.

    `directory` holds versions as directories; `shared_memory` is what names of segments begin with, a path; `hosts` are
    names of where the trainer is.
    """

    transport: str
    directory: str
    shared_memory: str
    hosts: tuple[str, ...]
    timeout_s: float
    leased: str = ""  # a file, in which a server without a trainer keeps what the run says that holds its lease

    @classmethod
    def of(cls, ctx: ChildContext) -> WeightSource:
        transport, meeting = ctx.plan.config.weight_transport, ctx.endpoints.get(RENDEZVOUS)
        hosts = LOOPBACK_HOSTS if meeting is None else (meeting.rsplit(":", 1)[0],)
        leased = ""
        if ctx.plan.config.job == "inference":
            engine = ctx.role.engine
            name = ctx.role.name if engine is None or engine.serves else engine.head  # who only computes looks there
            leased = str(ctx.run_dir / f"lease-{name.replace('/', '-')}.json")
        return cls(transport.type, str(ctx.run_dir / "weights"), ctx.shared_memory, hosts, transport.timeout_s, leased)

    def current(self) -> WeightSource:
        """The source that holds now: of the run that has a lease on this server, else its own."""
        try:
            return WeightSource.from_fields(json.loads(Path(self.leased).read_text())) if self.leased else self
        except FileNotFoundError:
            return self

    def check(self, update_info: dict[str, Any]) -> dict[str, Any]:
        """The same, with defaults, if all of it is as it should be. Raises ValueError that says what is not."""
        if self.leased:
            return self.current().check_update(update_info)
        return self.check_update(update_info)

    def check_update(self, update_info: dict[str, Any]) -> dict[str, Any]:
        """`check`, whoever else may have a lease."""
        if update_info.get("type") != self.transport or self.transport not in MODELS:
            given = str(update_info.get("type"))[:50]
            raise ValueError(f"weights come by weight_transport={self.transport} here, not by {given!r}")
        try:
            update = MODELS[self.transport].model_validate(update_info)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"update_info is not understood: {where}: {first['msg']}") from error
        if isinstance(update, FileUpdate):
            self.check_path(update.path, f"step_{update.version}")
        elif isinstance(update, SharedMemoryUpdate):
            if update.path != f"{self.shared_memory}-{update.version}":
                raise ValueError("update_info names a segment that is not of this run")
            _check_segments(update)
        elif isinstance(update, NetworkUpdate) and (update.host not in self.hosts or update.timeout_s > self.timeout_s):
            raise ValueError(f"update_info must name the trainer's host, {self.hosts[0]}, and no longer time-out")
        return update.model_dump(exclude_none=True)

    def check_path(self, path: str, name: str) -> None:
        """Of a version in files, or of adapters. Raises ValueError unless it is the one of that name in `directory`."""
        if name in ("", ".", "..") or Path(path) != Path(self.directory) / name:
            raise ValueError(f"weights come from {self.directory}, and a version's name is {name}")

    def to_environment(self) -> dict[str, str]:
        """What `from_environment` reads in a process that this one starts."""
        return {VARIABLE: json.dumps(asdict(self))}

    @staticmethod
    def from_environment() -> WeightSource:
        if VARIABLE not in os.environ:
            raise RuntimeError(
                f"{VARIABLE} is not set: this vLLM was not started by prl.inference, nor with PRL_CONTROL_KEY in its "
                "environment (prl/inference/README.md, Engines that run already)"
            )
        return WeightSource.from_fields(json.loads(os.environ[VARIABLE]))

    @staticmethod
    def from_fields(fields: dict[str, Any]) -> WeightSource:
        """Of what `asdict` has made."""
        return WeightSource(**fields | {"hosts": tuple(fields["hosts"])})


def _check_segments(update: SharedMemoryUpdate) -> None:
    for rank in range(update.ranks):
        if not Path(f"{update.path}-{rank}").exists():
            raise ValueError(f"the segment {rank} of {update.ranks} that update_info names is not there")
