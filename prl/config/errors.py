"""Errors meant for the person at the keyboard: what is wrong, where, why, and what to do about it."""

from __future__ import annotations

import re

from prl.config.console import one_line

PLACEHOLDER = re.compile(r"=(.*(\b[A-Z]{4,}\b|DIRECTORY|HOST:PORT)|N$|\.\.\.$|/path/)")


UTF8 = "PYTHONUTF8=1 before the command, or a locale that knows them: export LC_ALL=C.UTF-8"


def is_unread(text: str) -> bool:
    """Whether bytes of it were no letters in this process's locale (PEP 383): those beyond ASCII with LC_ALL=C."""
    return any("\udc80" <= letter <= "\udcff" for letter in text)


def is_override(word: str) -> bool:
    """Whether a word of a remedy can be pasted as it is: key=value, and no NAME or /path/ to put something in for."""
    return re.match(r"[+~]{0,2}[\w./@]+=\S", word) is not None and PLACEHOLDER.search(word) is None


class UserError(Exception):
    """A mistake or a condition that the user can mend. Entry points print it without a traceback and exit with code 2.

    Args:
        what: one sentence saying what is wrong.
        where: the config key, file or host concerned.
        why: the rule or limit behind it.
        fix: what to do, preferably an override or a command to paste.
    """

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "") -> None:
        self.what, self.where, self.why, self.fix = what, where, why, fix
        super().__init__(self.render())

    @property
    def remedies(self) -> list[tuple[str, ...]]:
        """The alternatives of `fix` that are nothing but overrides to paste, each with all that belong to it."""
        alternatives = [part.split() for part in re.split(r"[;,] (?:or )?| or ", self.fix)]
        return [tuple(words) for words in alternatives if words and all(map(is_override, words))]

    def render(self) -> str:
        lines = [one_line(self.what)]
        for label, text in (("where", self.where), ("why", self.why), ("do", self.fix)):
            if text:
                lines.append(f"  {label + ':':<7}{one_line(text)}")
        return "\n".join(lines)


class ConfigError(UserError):
    """A configuration that cannot run. `violations` holds every broken rule, not just the first."""

    scene = "in this configuration"

    def __init__(self, violations: list[UserError]) -> None:
        self.violations = violations
        for part in ("what", "where", "why", "fix"):  # for those who tell a UserError by its parts
            setattr(self, part, "; ".join(filter(None, (getattr(error, part) for error in violations))))
        Exception.__init__(self, self.render())

    def render(self) -> str:
        count = len(self.violations)
        head = f"{count} problem{'s' if count > 1 else ''} {self.scene}:"
        return "\n".join([head, *(f"\n{i}. {v.render()}" for i, v in enumerate(self.violations, 1))])


class PassingError(UserError):
    """A condition of the machine that may pass (a full disk): the same command may find it gone, unchanged."""


class ReadOnlyError(PassingError):
    """A file system became read-only under a run: the machine's fault, and no mistake of who started it."""


class AwayError(PassingError):
    """What others run is away for now; the same command may find it back."""


class UnfitMachineError(ConfigError):
    """A configuration that may run elsewhere. `violations` holds all that this machine lacks for it."""

    scene = "of this machine with this configuration"


class PointFailedError(UserError):
    """A point of a sweep ended without a result, which a sweeper asked for. Entry points exit with code 1."""
