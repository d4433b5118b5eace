"""Keys of Hydra's own node that do nothing in prl, or would leave files that nobody reads: what to say instead.

prl runs no job of Hydra's: a run has its directory, its logs and its environment from the runtime, and a point of a
sweep starts from its plan.json. Every key of HydraConf is here, or in WORKING.
"""

from __future__ import annotations

WORKING = ("defaults", "searchpath", "sweep.dir", "sweeper", "launcher", "verbose", "help", "hydra_help")
GROUPS = ("job_logging", "hydra_logging")  # whose choices other than `none` write files
SWEEP_ONLY = ("hydra.sweep.dir", "hydra.sweeper.params")

_LOGS = (
    "the logs of a run belong to prl: RUN/logs has one for each role",
    "leave it out",
)
_RECORD = ("Hydra records there what it did, and overwrites what is said", "leave it out")
_ENVIRONMENT = (
    "it would hold for this process alone, and for no point of a sweep and no job of SLURM",
    "set it before the command, as NAME=VALUE python -m prl.rl; for engines inference.env.NAME=VALUE, "
    "for SLURM hydra.launcher.slurm.setup=['export NAME=VALUE']",
)
_NO_JOB = "prl runs no job of Hydra's, so that nothing reads it"
REFUSED = {  # below hydra -> why, fix
    "mode": ("whether a command is a sweep is said by its option", "-m"),
    "run": ("a run has one directory, with all that it writes", "output_dir=DIRECTORY"),
    "sweep.subdir": ("points have names of their own below the sweep's directory", "hydra.sweep.dir=DIRECTORY"),
    "output_subdir": ("a run keeps its configuration in its plan.json", "output_dir=DIRECTORY"),
    "job_logging": _LOGS,
    "hydra_logging": _LOGS,
    "callbacks": ("the points of a sweep start from their plan.json, without Hydra and its callbacks", "leave it out"),
    "overrides": _RECORD,
    "runtime": _RECORD,
    "job.name": ("a run is named by a key of its own", "name=NAME"),
    "job.chdir": ("paths of a run are relative to the directory of the command", "cd DIRECTORY before the command"),
    "job.config_name": ("the job is chosen by the command", "python -m prl.sft, or --config-name NAME"),
    "job.env_set": _ENVIRONMENT,
    "job.env_copy": _ENVIRONMENT,
    "job.override_dirname": (_NO_JOB, "leave it out; output_dir and hydra.sweep.dir name directories"),
    "job.id": (_NO_JOB, "leave it out; name=NAME names a run"),
    "job.num": (_NO_JOB, "leave it out"),
    "job.config": (_NO_JOB, "leave it out; output_dir and hydra.sweep.dir name directories"),
}


def refused_hydra_key(key: str) -> tuple[str, str] | None:
    """Why a key below `hydra.`, or a choice of a group `hydra/...`, is refused, and what to say instead; None of one
    that works, and of nodes, which are told elsewhere.
    """
    below = key.removeprefix("hydra.").removeprefix("hydra/")
    return next((told for name, told in REFUSED.items() if f"{below}.".startswith(f"{name}.")), None)
