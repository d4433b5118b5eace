"""What a rule is, and what rules share."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prl.config.errors import UserError
from prl.config.keys import as_override
from prl.config.schema import RunConfig
from prl.config.world import World, closest, divisors

Rule = Callable[[RunConfig, World], Iterator[UserError]]
Condition = Callable[[RunConfig, World], object]  # truth counts
Text = str | Callable[[RunConfig, World], str]


@dataclass(frozen=True)
class Refuse:
    """A rule of one condition and one message: the configuration is refused if the condition is true.

    A text is a template. {seq_len} is that key's value as an override says it, {seq_len=} writes the key before it, and
    {world.ranks} is what World says; `!s` and `:g` work as in f-strings. A function gives the text as it is.
    """

    condition: Condition
    what: Text
    where: Text
    fix: Text
    why: Text = ""

    def __call__(self, config: RunConfig, world: World) -> Iterator[UserError]:
        if self.condition(config, world):
            what, where, why, fix = (
                text(config, world) if callable(text) else TEMPLATES.vformat(text, (config, world), {})
                for text in (self.what, self.where, self.why, self.fix)
            )
            yield UserError(what, where=where, why=why, fix=fix)


@dataclass(frozen=True)
class Several:
    """A rule of several, asked where `given` is true: all of them, or up to the first that is broken."""

    rules: tuple[Rule, ...]
    given: Condition
    stops: bool

    def __call__(self, config: RunConfig, world: World) -> Iterator[UserError]:
        for rule in self.rules if self.given(config, world) else ():
            found = list(rule(config, world))
            yield from found
            if found and self.stops:
                return


def each_of(*rules: Rule, given: Condition = lambda c, w: True) -> Several:
    return Several(rules, given, stops=False)


def first_of(*rules: Rule, given: Condition = lambda c, w: True) -> Several:
    return Several(rules, given, stops=True)


class _Templates(string.Formatter):
    """Of `Refuse`; formatted with (config, world)."""

    def parse(self, text: Any) -> Iterable[tuple[str, str | None, str | None, str | None]]:
        for literal, key, spec, conversion in super().parse(text):
            named = key is not None and key.endswith("=")
            yield literal + (key or "" if named else ""), key and key.removesuffix("="), spec, conversion

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Any) -> Any:
        config, world = args
        return world if key == "world" else getattr(config, str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        return format(value, format_spec) if format_spec else as_override(value)


TEMPLATES = _Templates()


def next_divisor(wanted: int, number: int) -> int:
    """The divisor of `number` next to `wanted`."""
    return closest(wanted, divisors(number))
