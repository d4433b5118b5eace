"""What a launcher choice (conf/hydra/launcher) says: how points are queued, and what is asked of SLURM for each."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from prl.config.schema import SlurmConfig


class LauncherSettings(BaseModel):
    """The node hydra.launcher. What it says of jobs can be overridden for a point by the keys of the node `slurm`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["auto", "local", "slurm"] = "auto"  # auto: slurm on machines of a cluster
    dry_run: bool = False  # write and print everything, start nothing
    retry_failed: bool = False  # points whose failure would come again (oom, config, env, code), too
    parallel_points: int | Literal["auto"] = "auto"  # local: at a time; auto: as many as the GPUs hold, without GPUs 1
    array_parallelism: int | None = Field(default=None, ge=1)  # slurm: elements of an array at a time, None: all
    max_array_size: int | None = Field(default=None, ge=1)  # None: the cluster's
    slurm: SlurmConfig = SlurmConfig()
