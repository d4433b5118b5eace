"""Names that become names of files: of a run's or sweep's directory, of an environment's logs."""

from __future__ import annotations

from collections.abc import Iterator

from prl.config.errors import UserError
from prl.config.place_names import as_file_name, is_file_name
from prl.config.schema import RunConfig
from prl.config.world import World


def names_stay_in_their_directory(config: RunConfig, world: World) -> Iterator[UserError]:
    of_directories = {"name": config.name, "sweep": config.sweep}
    for key, name in of_directories.items():
        if name is not None and not is_file_name(name):
            other = "output_dir=DIRECTORY" if key == "name" else "hydra.sweep.dir=DIRECTORY"
            yield UserError(
                f"{name[:200]!r} cannot be the name of a directory.",
                where=f"{key}={name[:200]}",
                why=f"runs and sweeps are made under outputs/ by their names; {other} puts one elsewhere",
                fix=f"{key}={as_file_name(name)}",
            )
    for name in config.env.mix:
        if not is_file_name(name):
            yield UserError(
                f"{name[:200]!r} cannot be the name of an environment.",
                where=f"env.mix.{name[:200]}",
                why="logs and metrics of its process are called after it",
                fix=f"call it {as_file_name(name)}",
            )
