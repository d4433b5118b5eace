"""What a launcher choice (conf/hydra/launcher) says: how points are queued, and what is asked of SLURM for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prl.config.errors import ConfigError, UserError
from prl.config.keys import as_override
from prl.config.schema import SlurmConfig


class LauncherSettings(BaseModel):
    """The node hydra.launcher. What it says of jobs can be overridden for a point by the keys of the node `slurm`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["auto", "local", "slurm"] = "auto"  # auto: slurm on machines of a cluster
    dry_run: bool = False  # write and print everything, start nothing
    retry_failed: bool = False  # points whose failure would come again (oom, config, env, diverged, code), too
    parallel_points: Annotated[int, Field(ge=1)] | Literal["auto"] = (
        "auto"  # local: at a time; auto: as many as the GPUs hold, without GPUs 1
    )
    array_parallelism: int | None = Field(default=None, ge=1)  # slurm: elements of an array at a time, None: all
    max_array_size: int | None = Field(default=None, ge=1)  # None: the cluster's
    timeout_min: Annotated[float, Field(gt=0)] | None = None  # local: a point that takes longer saves and ends
    asked: dict[str, int] = {}  # nodes, gpus_per_node: what a launcher of submitit's was told that each point takes
    slurm: SlurmConfig = SlurmConfig()


def read_settings(node: Mapping[str, Any]) -> LauncherSettings:
    """Of the node hydra.launcher, without its _target_. Raises ConfigError for values that are none."""
    plain = OmegaConf.to_container(OmegaConf.create(dict(node)), resolve=True)
    try:
        return LauncherSettings.model_validate(plain)
    except ValidationError as error:
        items = {item["loc"][: 1 + (item["loc"][0] == "slurm")]: dict(item) for item in error.errors()}
        raise ConfigError([_invalid(".".join(map(str, key)), item) for key, item in items.items()]) from error


def _invalid(name: str, item: dict[str, Any]) -> UserError:
    """Of a union of types, the last one's complaint."""
    key, field = f"hydra.launcher.{name}", LauncherSettings.model_fields.get(name)
    usual = "null" if field is None else as_override(field.default)
    return UserError(
        f"{key}={item['input']} is not valid.",
        where=key,
        why=str(item["msg"]).replace("Input should be ", "it must be "),
        fix=f"{key}={usual}",
    )
