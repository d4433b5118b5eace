"""The `prl` console script: `prl rl ...` is `python -m prl.rl ...`, and the program that shell completion asks.

Completion: `eval "$(prl -sc install=bash)"` (or fish, zsh). The shell then calls `prl -sc query=bash` with the line
typed so far in COMP_LINE; the subcommand is cut out of it and Hydra answers for that subcommand.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import os
import shlex
import sys

from prl.config.console import leave_interrupted, shield_console

COMMANDS = {  # subcommand -> module whose main() it is
    "rl": "prl.rl",
    "sft": "prl.sft",
    "inference": "prl.inference.__main__",
    "eval": "prl.eval",
    "bench": "prl.bench.__main__",
    "plan": "prl.plan",
    "status": "prl.status",
    "cancel": "prl.cancel",
    "compare": "prl.compare.__main__",
    "watch": "prl.watch.__main__",
    "doctor": "prl.doctor.__main__",
}
USAGE = f"""usage: prl {{{",".join(COMMANDS)}}} [overrides]

`prl rl ...` is the same as `python -m prl.rl ...`.
Shell completion: eval "$(prl -sc install=bash)", or zsh or fish in the place of bash."""


def main() -> None:
    """Run a subcommand with the rest of the command line; leaves by SystemExit."""
    shield_console()
    program, *words = sys.argv
    if words and words[0] in ("-sc", "--shell-completion"):
        _complete(program, words)
    elif words and words[0] in COMMANDS:
        sys.argv = [program, *words[1:]]
        _run(words[0])
    elif words and words[0] in ("-h", "--help"):
        print(USAGE)
    else:
        print(USAGE, file=sys.stderr)
        sys.exit(2)


def _run(command: str) -> None:
    try:
        importlib.import_module(COMMANDS[command]).main()
    except KeyboardInterrupt:  # where the command has no word of its own, while it is imported above all
        leave_interrupted()


def _complete(program: str, words: list[str]) -> None:
    """Offer subcommands for the first word, and leave all else to Hydra."""
    line = os.environ.get("COMP_LINE", "")
    command, space, rest = line.partition(" ")[2].lstrip().partition(" ")
    asked = any(word.startswith("query") for word in words)
    if asked and (command not in COMMANDS or not space):
        print(" ".join(name for name in COMMANDS if name.startswith(command)))
        return
    # +sweep= is our second name of +sweep_file= (prl.config.hydra_setup), which is what Hydra knows how to complete
    os.environ["COMP_LINE"] = f"{program} {rest}".replace(" +sweep=", " +sweep_file=")
    sys.argv += config_dir_of(rest) if asked else []
    offered = io.StringIO()
    try:
        with contextlib.redirect_stdout(offered):
            _run(command if asked else "rl")
    finally:
        print(offered.getvalue().replace("+sweep_file=", "+sweep="), end="")


def config_dir_of(line: str) -> list[str]:
    """The option of a line that is being typed by which a directory of the user's own is searched, if it has one."""
    try:
        words = shlex.split(line.rpartition(" ")[0])  # the last word is not complete
    except ValueError:  # an open quotation
        return []
    for word, following in itertools.pairwise([*words, ""]):
        option, _, value = word.partition("=")
        if option in ("--config-dir", "-cd") and os.path.isdir(value or following):
            return ["--config-dir", value or following]
    return []


if __name__ == "__main__":
    main()
