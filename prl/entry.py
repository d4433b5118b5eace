"""What every `python -m prl.NAME` shares: Hydra in front, our errors instead of its traces, and exit codes.

0: done. 2: a mistake of the user, told without a traceback; nothing was started and no directory made. 130: interrupted
before anything ran. Else what the job returned. A multirun is validated as a whole first; then its points run, and if
any fails the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback

import hydra
from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from launch.hydra_plugin import Task, of_a_plugin, of_a_sweeper, refuse_launcher, register_plugins
from launch.session import Job, Session, point_key
from prl.config.composing import (
    VERSION_BASE,
    explain,
    know_command,
    problems,
    refuse_contradictions,
)
from prl.config.console import leave_interrupted, leave_told, one_line, shield_console
from prl.config.errors import ConfigError, PointFailedError, UserError
from prl.config.hydra_keys import SWEEP_ONLY
from prl.config.hydra_setup import SWEEP_OPTION, name_sweep, register
from prl.config.locate import conf_dir
from prl.config.overrides import parse, swept_keys
from prl.config.place_names import lost_directory
from prl.config.search_path import use_directories
from prl.config.sweep import (
    corners,
    expand,
    launcher_of,
    makes_a_grid,
    refuse_equal_points,
    resolve_points,
    sweep_lines,
)
from prl.config.traced import left_to_user
from prl.config.unreadable import UNREADABLE, unreadable
from prl.runtime.nodes.torchrun import refuse_torchrun


def run_app(job: Job, config_name: str, *, starts_nothing: bool = False) -> None:
    """Compose, validate, run; leaves by SystemExit.

    Args:
        job: takes a RunConfig, returns an exit code. Called for a run here and now: what a launcher starts (points of a
            multirun, jobs of SLURM) starts from its plan.json.
        config_name: the primary config in conf/.
        starts_nothing: the job only looks at its config, so a multirun needs no directory either.
    """
    shield_console()
    args = parse_command_line()
    name = args.config_name or config_name
    show_trace = os.environ.get("HYDRA_FULL_ERROR") == "1"
    try:
        if not starts_nothing:
            refuse_torchrun(f"prl.{config_name}")
        if args.config_path is not None:
            raise _no_other_conf(args.config_path)
        refuse_options(args)
        know_command(starts_nothing, sys.argv[1 + len(args.overrides) :])
        if why := lost_directory():  # Hydra asks for its name, and makes what it is told to make from there
            raise UserError(
                f"{why[0].upper()}{why[1:]}.", why="paths are relative to it", fix="cd to another directory"
            )
        use_directories(args.config_dir, parse(args.overrides))
        session = Session(job, name, starts_nothing)
        code = _run(session, args.overrides, args.multirun, args.shell_completion, bool(args.cfg or args.info))
        if starts_nothing:
            leave_told(code)
        sys.exit(code)
    except UserError as error:
        shown = error
    except (HydraException, OmegaConfBaseException) as error:
        if show_trace:
            traceback.print_exc()
        shown = explain(error, args.overrides, name)
    except UNREADABLE as error:
        if (of_a_file := unreadable(error)) is None:
            raise
        if show_trace:
            traceback.print_exc()
        shown = of_a_file
    except (ImportError, RuntimeError) as error:
        if (told := of_a_plugin(error)) is None:
            raise
        if show_trace:
            traceback.print_exc()
        shown = told
    except KeyboardInterrupt:  # while nothing runs that would have to be stopped
        leave_interrupted()
    print(with_all_others(shown, args.overrides, name, args.multirun).render(), file=sys.stderr)
    sys.exit(2)


def with_all_others(error: UserError, overrides: list[str], config_name: str, multirun: bool) -> UserError:
    """Of a command line of which more may be wrong than was met first."""
    if not isinstance(error, ConfigError) and error.where not in overrides:
        return error
    from prl.all_wrong import all_wrong  # pydantic and the planner: --cfg and completion do without them

    register()  # a line that cannot be read is refused before
    register_plugins()
    return all_wrong(error, overrides, config_name, multirun)


def parse_command_line() -> argparse.Namespace:
    """What Hydra's parser makes of it, with options among the overrides, too; Hydra, which reads it again, wants them
    in one piece, so sys.argv has them behind the overrides from here on.
    """
    args = get_args_parser().parse_intermixed_args()
    options = sys.argv[1:]
    for override in args.overrides:
        options.remove(override)
    sys.argv = [sys.argv[0], *args.overrides, *options]
    return args


def refuse_options(args: argparse.Namespace) -> None:
    """Raise UserError for options of Hydra that are not for prl, or not beside each other."""
    if args.experimental_rerun is not None:
        raise UserError(
            "--experimental-rerun is not supported.",
            where=f"--experimental-rerun {args.experimental_rerun}",
            why="it reads what Hydra itself has frozen, and prl freezes runs in their plan.json",
            fix="the command of that run with output_dir=RUN goes on with it, and with another output_dir runs it anew",
        )
    asked = [option for option, is_given in _actions(args).items() if is_given]
    if len(asked) > 1:
        raise UserError(
            f"{' and '.join(asked)} cannot be given together.",
            where=" ".join(asked),
            why="each says what the command does",
            fix="give one of them",
        )
    if args.resolve and args.cfg is None and not args.help:
        raise UserError(
            "--resolve is for --cfg.", where="--resolve", why="it says how --cfg shows a configuration", fix="--cfg job"
        )
    swept = [] if args.cfg is None and args.info is None else swept_keys(args.overrides)
    if swept:
        raise UserError(
            f"{asked[0]} shows one configuration, and this is a sweep.",
            where=" ".join(line for line in args.overrides if swept_keys([line])),
            why="each key has one value in it",
            fix=f"one value for {', '.join(swept)}",
        )


def _actions(args: argparse.Namespace) -> dict[str, bool]:
    """What Hydra does one of."""
    return {
        "--run": args.run,
        "--cfg": args.cfg is not None,
        "-m": args.multirun,
        "--shell-completion": args.shell_completion,
        "--info": args.info is not None,
    }


def _no_other_conf(path: str) -> UserError:
    return UserError(
        "prl's own configurations cannot be replaced.",
        where=f"--config-path={path}",
        why="they lie in its conf/; directories of your own are searched after it",
        fix=f"--config-dir {path}",
    )


def _of_no_sweep(key: str) -> UserError:
    fix = "output_dir=DIRECTORY for a run, or -m for a sweep" if key == "hydra.sweep.dir" else "-m for a sweep"
    return UserError(f"{key} is for sweeps.", where=key, why="without -m this command is one run", fix=fix)


def _run(session: Session, overrides: list[str], multirun: bool, completing: bool, shows: bool = False) -> int:
    register()
    register_plugins()
    if not completing:
        refuse_contradictions(overrides, session.config_name)
    only_of_sweeps = [o for o in parse(overrides) if o.key_or_group in SWEEP_ONLY]
    if not multirun and not completing and not shows and only_of_sweeps:
        raise ConfigError([_of_no_sweep(override.key_or_group) for override in only_of_sweeps])
    if not multirun and not completing and any(line.startswith(SWEEP_OPTION) for line in overrides):
        raise UserError(
            "A sweep needs -m.", where="+sweep", why="without it one point would run, and no axis", fix="-m +sweep=NAME"
        )
    if not multirun and not completing and (left := left_to_user(overrides, session.config_name)):
        raise ConfigError(left)
    if multirun:
        found = problems(overrides, session.config_name)
        if found:
            raise ConfigError(found)
        lines = sweep_lines(overrides, session.config_name)
        session.swept = set(swept_keys(lines))
        is_grid = makes_a_grid(lines, session.config_name)
        points = expand(lines) if is_grid else corners(lines)
        configs = resolve_points(points, session.config_name, session.swept)
        if is_grid:
            refuse_equal_points(points, configs)
        if session.starts_nothing:
            refuse_launcher(launcher_of(lines, session.config_name), configs)
            return max(session.job(config) for config in configs)
        session.points = dict(zip(map(point_key, points), configs, strict=True))
        name_sweep(session.config_name, lines)
    try:
        _run_hydra(session)
    except PointFailedError as error:  # more than the sweeper puts up with
        print(error.render(), file=sys.stderr)
        session.exit_code = 1
    except Exception as error:
        told = None if isinstance(error, UserError) or not multirun else of_a_sweeper(error)
        if told is None:
            raise
        raise told from error
    if session.error is not None:
        raise session.error
    for output_dir, code in session.failed.items():
        print(one_line(f"point failed with exit code {code}: {output_dir}"), file=sys.stderr)
    return 1 if session.failed else session.exit_code


def _run_hydra(session: Session) -> None:
    """Hydra reports an exception itself and exits with 1, unless this variable lets it pass."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        front = hydra.main(config_path=str(conf_dir()), config_name=session.config_name, version_base=VERSION_BASE)
        front(Task(session).run)()
    finally:
        os.environ.pop("HYDRA_FULL_ERROR")
        if before is not None:
            os.environ["HYDRA_FULL_ERROR"] = before
