"""Files of the user's own directories, and of a site, before Hydra composes them: what in them would be lost, or would
end in a message that names no file.

Only those that a command line chooses are looked at, with those that their defaults lists name. YAML that cannot be
read is told elsewhere (`unreadable.py`).
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.plugins.config_source import ConfigSource
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from omegaconf.grammar_parser import parse as parse_value

from prl.config.errors import UserError
from prl.config.locate import SITE_GROUP, conf_dir, config_groups, file_of_choice, searched, sweep_files
from prl.config.overrides import JOBS, SWEEP_GROUP, all_keys, choices_of, nearest, parse, passed_over
from prl.config.own_keys import refused_keys_of_hydra, unknown_keys
from prl.config.search_path import directories
from prl.config.unreadable import UNREADABLE

BYTE_ORDER_MARK = "\ufeff"
GLOBAL = "# @package _global_"
HEADER_CHARACTERS = 512  # that Hydra looks at for a header
SAMPLE = "the lines `key: value`, for instance `seed: 1`"
GroupsOf = Callable[[str], Set[str]]  # those in the defaults of a job


@dataclass(frozen=True)
class Job:
    """What a command is for. Its groups are worked out if they are asked for."""

    name: str
    groups_of: GroupsOf

    @property
    def groups(self) -> Set[str]:
        return self.groups_of(self.name)


@dataclass(frozen=True)
class OwnFile:
    """One file, and how it was chosen: `package` is what the choice itself says (`+overlay@_global_=mine`)."""

    path: Path
    group: str
    package: str | None = None
    chosen_by_file: bool = False  # whether it stands in a defaults list, which says where its keys go

    def place(self, text: str) -> str:
        """Dotted, below which its keys go; "" for the top. Raises ValueError for a header that Hydra cannot read."""
        header = ConfigSource._get_header_dict(text[:HEADER_CHARACTERS])["package"]
        package = header if self.chosen_by_file and header else self.package or header or "_group_"
        return {"_global_": "", "_group_": self.group.replace("/", ".")}.get(package, package)

    def wrong(self, what: str, why: str, fix: str, line: int | None = None) -> UserError:
        where = str(self.path) if line is None else f"{self.path}, line {line}"
        return UserError(f"{self.path.name} {what}", where=where, why=why, fix=fix)


@dataclass(frozen=True)
class Entry:
    """One of a defaults list, as Hydra reads it: `override /algo: sync`, or the name of a file alone."""

    text: str
    written: str  # the group as it stands there, without a leading /
    group: str  # in full
    names: tuple[str, ...]
    flags: frozenset[str]  # of "override", "optional", "/", "@" (it says where its keys go), "file" (a name alone)

    @property
    def fixed(self) -> str:
        return f"- override /{self.written}: {_listed(self.names)}"


def wrong_files(lines: Iterable[str], config_name: str, groups_of: GroupsOf) -> list[UserError]:
    """Everything wrong with the files that overrides choose, and with the site's.

    Args:
        groups_of: name of a job -> the groups in its defaults.
    """
    found: dict[str, UserError] = {}
    lines = list(lines)
    for error in _of_primary(config_name):
        found.setdefault(error.render(), error)
    for file in _chosen(lines):
        for error in _of_file(file, Job(config_name, groups_of), ()):
            found.setdefault(error.render(), error)
    return [*_unread_site(), *found.values()]


def chosen_files(lines: Iterable[str], config_name: str) -> Iterator[OwnFile]:
    """Files of the user's own that a command line composes, with those that their defaults lists name: the job's own
    first.
    """
    seen: set[Path] = set()
    ahead = [*_primary(config_name), *_chosen(lines)]
    while ahead:
        file = ahead.pop(0)
        if file.path not in seen:
            seen.add(file.path)
            yield file
            ahead = [*_named_by(file), *ahead]


def _primary(config_name: str) -> Iterator[OwnFile]:
    """The file of the job itself, if it is one of the user's own."""
    found = [path for root in (conf_dir(), *directories()) if (path := root / f"{config_name}.yaml").is_file()]
    if found and _is_own(found[0]):
        yield OwnFile(found[0], "", "_global_")


def _of_primary(config_name: str) -> Iterator[UserError]:
    """Keys and references of a job of the user's own; what it chooses is Hydra's to refuse."""
    for file in _primary(config_name):
        try:
            text = file.path.read_text(encoding="utf-8")
            content = yaml.load(text, Loader=get_yaml_loader())
        except UNREADABLE:
            return
        if isinstance(content, dict):
            yield from _of_keys(file, text)
            yield from _of_values(file, content)


def _named_by(file: OwnFile) -> Iterator[OwnFile]:
    try:
        content = yaml.load(file.path.read_text(encoding="utf-8"), Loader=get_yaml_loader())
    except UNREADABLE:
        return
    entries = content.get("defaults") if isinstance(content, dict) else None
    for entry in entries if isinstance(entries, list) else []:
        read = _read(entry, file.group)
        for name in read.names if read is not None and read.text != "_self_" else ():
            for chosen in _own(read.group, name) if read else ():
                yield OwnFile(chosen.path, chosen.group, None, True)


def overridden(group: str, choice: str, choosing: tuple[Path, ...] = ()) -> set[str]:
    """The groups, those of Hydra aside, in which a file and those that it names choose; none of a file that cannot be
    read.
    """
    path = file_of_choice(group, choice)
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (*UNREADABLE, OmegaConfBaseException):
        return set()
    entries = content.get("defaults") if isinstance(content, dict) else None
    read = [_read(entry, group) for entry in entries or []] if path not in choosing else []
    found = {entry.group for entry in read if entry is not None and "override" in entry.flags}
    for entry in read:
        if entry is not None and "override" not in entry.flags and entry.text != "_self_":
            for name in entry.names:
                found |= overridden(entry.group, name, (*choosing, path))
    return {name for name in found if not name.startswith("hydra/")}


def _unread_site() -> Iterator[UserError]:
    """Of a site's file that Hydra passes over for its ending."""
    if file_of_choice(SITE_GROUP, "default").is_file():
        return
    if (passed := passed_over(SITE_GROUP, "default")) is not None:
        yield passed.error(str(passed.path))


def _chosen(lines: Iterable[str]) -> Iterator[OwnFile]:
    site = OwnFile(file_of_choice(SITE_GROUP, "default"), SITE_GROUP)
    if site.path.is_file():
        yield site
    for override in parse(lines):
        if override.get_key_element() in ("+sweep", f"+{SWEEP_GROUP}"):
            files = {name: path for name, path in sweep_files().items() if _is_own(path)}
            yield from (OwnFile(files[c], SWEEP_GROUP, "_global_") for c in choices_of(override) if c in files)
        elif not override.is_delete():
            for choice in choices_of(override):
                yield from _own(override.key_or_group, choice, override.package)


def _own(group: str, choice: str, package: str | None = None) -> Iterator[OwnFile]:
    """The file of that choice, if it is one of the user's own."""
    group = "memory_recipe" if group == "memory" else group
    path = file_of_choice(group, choice)
    if _is_own(path) and path.is_file():
        yield OwnFile(path, group, package)


def _is_own(path: Path) -> bool:
    return any(path.is_relative_to(root) for root in directories())


def _of_file(file: OwnFile, job: Job, choosing: tuple[Path, ...]) -> Iterator[UserError]:
    """choosing: the files that led here, each chosen by the one before it."""
    if file.path in choosing:
        circle = " -> ".join(path.name for path in (*choosing[choosing.index(file.path) :], file.path))
        why, fix = circle, "leave one of them out of a defaults list; `_self_` stands for the file's own keys"
        yield file.wrong("chooses itself.", why, fix)
        return
    try:
        text = file.path.read_text(encoding="utf-8")
        content = yaml.load(text, Loader=get_yaml_loader())  # which refuses a key given twice
    except UNREADABLE:
        return
    if not isinstance(content, dict) and content is not None:
        held = "a list" if isinstance(content, list) else f"nothing but {content!r}"
        yield file.wrong("is no configuration.", f"it holds {held}, and no keys with values", SAMPLE)
        return
    yield from _of_header(file, text, content is None)
    yield from _of_keys(file, text)
    content = content or {}
    yield from _of_values(file, content)
    entries = content.get("defaults", [])
    if not isinstance(entries, list):
        fix = "defaults:, and below it a line `  - override /GROUP: CHOICE` for each"
        yield file.wrong("has no list in `defaults`.", f"it has {entries!r} there", fix)
        return
    if entries.count("_self_") > 1:
        yield file.wrong("has `_self_` twice in its defaults list.", "it has one place in the order", "leave one out")
    for entry in entries:
        yield from _of_entry(file, entry, job, (*choosing, file.path))


# --- where its keys go ------------------------------------------------------------------------------------------------


def _of_header(file: OwnFile, text: str, is_empty: bool) -> Iterator[UserError]:
    try:
        header = ConfigSource._get_header_dict(text[:HEADER_CHARACTERS])
    except ValueError as error:
        yield file.wrong("has a header that Hydra cannot read.", str(error), f"write `{GLOBAL}` as its first line", 1)
        return
    package = file.package or header["package"] or file.group.replace("/", ".")
    if package in ("_global_", "_group_") or package.split(".")[0] in _top_level():
        return
    number, written = _header_in(text)
    fix = f"write `{GLOBAL}` as its first line"
    if is_empty:
        yield file.wrong("is empty.", "choosing it changes nothing", "write keys into it, or do not choose it")
        return
    if text.startswith(BYTE_ORDER_MARK):
        why = "it begins with a byte order mark, behind which Hydra sees no header"
        fix = f"save it as UTF-8 without that mark: sed -i '1s/^\\xEF\\xBB\\xBF//' {shlex.quote(str(file.path))}"
    elif header["package"] is not None:
        why = f"its header says so: `{written}`"
    elif written:
        why = f"line {number} says `{written}`, and Hydra reads a header only before all else and spelled as below"
    else:
        why = f"without a header they land at the name of their group: seed is {package}.seed"
    yield file.wrong(f"puts its keys under `{package}.`, where nothing reads them.", why, fix, number)


def _header_in(text: str) -> tuple[int | None, str]:
    """The first line that was meant as a header, and its number."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*#\s*@\w+", line):
            return number, line.strip()
    return None, ""


def _top_level() -> set[str]:
    from prl.config.schema import RunConfig  # pydantic: a command line without such files does without it

    return {"hydra", *RunConfig.model_fields}


# --- its keys and values ----------------------------------------------------------------------------------------------


def _of_keys(file: OwnFile, text: str) -> Iterator[UserError]:
    """Those that no schema has; not of a file whose keys go where another one says."""
    try:
        header = ConfigSource._get_header_dict(text[:HEADER_CHARACTERS])["package"]
    except ValueError:
        return  # told already
    package = file.package or header or "_group_"
    if file.chosen_by_file and header != "_global_":
        return
    place = {"_global_": "", "_group_": file.group.replace("/", ".")}.get(package, package)
    if place and place.split(".")[0] not in _top_level():
        return  # told already
    for key, why, fix, line in refused_keys_of_hydra(text, place):
        instead = "" if fix.startswith("leave it out") else f"; instead: {fix}"
        yield file.wrong(f"has the key {key}, which does nothing here.", why, f"leave it out there{instead}", line)
    for key, guess, line in unknown_keys(text, place):
        what = f"has the key {key!r}, which there is not." + (f" Did you mean {guess!r}?" if guess else "")
        fix = f"rename it there: {guess}" if guess else f"leave it out there; all keys: {all_keys('rl')}"
        yield file.wrong(what, "every key must exist in the schema, so that a typo cannot pass unseen", fix, line)


def _of_values(file: OwnFile, content: dict[Any, Any]) -> Iterator[UserError]:
    for key in content:
        if not isinstance(key, str):
            yield file.wrong(f"has the key {key!r}, which is no name.", "keys are names", SAMPLE)
    for key, value in _texts(content, ""):
        try:
            parse_value(value)
        except GrammarParseError as error:
            fix = f"{key}: VALUE, or `${{KEY}}` for the value of another key"
            yield file.wrong(f"has a value that cannot be read: {key}: {value}", str(error).splitlines()[0], fix)


def _texts(node: Any, key: str) -> Iterator[tuple[str, str]]:
    """Key and text of every value that refers to something."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _texts(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for value in node:
            yield from _texts(value, key)
    elif isinstance(node, str) and "${" in node:
        yield key, node


# --- what it chooses --------------------------------------------------------------------------------------------------


def _of_entry(file: OwnFile, entry: Any, job: Job, choosing: tuple[Path, ...]) -> Iterator[UserError]:
    read = _read(entry, file.group)
    if read is None:
        why = "an entry is the name of a file, or one group with its choice"
        yield file.wrong(f"has {entry!r} in its defaults list.", why, "- override /GROUP: CHOICE")
        return
    if read.text == "_self_" or any("${" in name or name == "???" for name in (read.group, *read.names)):
        return
    unknown = list(_of_group(file, read, job))
    yield from unknown
    if unknown or read.group.startswith("hydra/"):
        return
    for name in read.names:
        own = list(_own(read.group, name))
        if not own and "optional" not in read.flags and not _exists(read.group, name):
            yield _no_choice(file, read, name)
        for chosen in own:
            yield from _of_file(OwnFile(chosen.path, chosen.group, "_global_", True), job, choosing)


def _of_group(file: OwnFile, entry: Entry, job: Job) -> Iterator[UserError]:
    """What is wrong with the group of an entry, whatever its choice."""
    if "file" in entry.flags or not entry.names:
        return
    groups = config_groups()
    if "/" not in entry.flags:
        if entry.group not in groups and (entry.written in job.groups or entry.written.startswith("hydra/")):
            why = f"a group without / before it is sought inside of {file.group}/"
            yield file.wrong(f"means the group {entry.written} by `{entry.text}`.", why, entry.fixed)
    elif entry.group not in groups and not entry.group.startswith("hydra/"):
        guess = nearest(entry.group, groups)
        fix = f"- override /{guess}: {_listed(entry.names)}" if guess else f"one of {', '.join(groups)}"
        yield file.wrong(f"chooses in a group that there is not: `{entry.text}`.", f"searched: {searched()}", fix)
    elif {"override", "@"} & entry.flags == {"override"} and file.group == SITE_GROUP:
        yield from _of_another_job(file, entry, job)
    elif not entry.flags & {"override", "@"} and entry.group in job.groups:
        why = f"the job chooses {entry.group}, too, and one choice has to give way"
        yield file.wrong(f"chooses {entry.group} without `override`.", why, entry.fixed)


def _of_another_job(file: OwnFile, entry: Entry, job: Job) -> Iterator[UserError]:
    """Of a site's file; experiments and overlays for other jobs are told by Hydra's refusal of them."""
    having = [name for name in JOBS if entry.group in job.groups_of(name)]
    if job.name in having or not having:
        return
    what = f"chooses in the group {entry.group}, which {job.name} has not."
    why = f"a site's file is composed into every job, and that group is one of {', '.join(having)}"
    fix = f"leave `{entry.text}` out of it; {entry.group}={_listed(entry.names)} on the command line says it"
    yield file.wrong(what, why, f"{fix} to {', '.join(f'prl.{name}' for name in having)}")


def _no_choice(file: OwnFile, entry: Entry, name: str) -> UserError:
    choices = config_groups().get(entry.group, [])
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    fix = f"{' or '.join(close or choices[:3])} in its place" if choices else f"write {entry.group}/{name}.yaml"
    has = f"{entry.group} has: {', '.join(choices)}" if choices else f"searched: {searched()}"
    if (passed := passed_over(entry.group, name)) is not None:
        has, fix = f"{passed.path.name} is not read: {passed.why}", passed.fix
    return file.wrong(f"chooses {entry.group}/{name}, which there is not: `{entry.text}`.", has, fix)


def _exists(group: str, name: str) -> bool:
    return file_of_choice("memory_recipe" if group == "memory" else group, name.removesuffix(".yaml")).is_file()


def _read(entry: Any, group: str) -> Entry | None:
    """Of a file of that group; None for what is no entry."""
    if isinstance(entry, str):
        key, _, name = entry.partition("@")[0].rpartition("/")
        flags, names, text = ["file"], [name], entry
        key = f"/{key.strip('/')}" if entry.startswith("/") else key
    elif isinstance(entry, dict) and len(entry) == 1:
        ((key, value),) = entry.items()
        names = value if isinstance(value, list) else [] if value is None else [value]
        if not isinstance(key, str) or not key.strip() or not all(isinstance(name, str) for name in names):
            return None
        *flags, last = key.split()
        key, at, _ = last.partition("@")
        flags, text = [*flags, at], f"{' '.join([*flags, last])}: {_listed(names)}"
    else:
        return None
    written = key.strip("/")
    in_full = written if key.startswith("/") else f"{group}/{written}".rstrip("/")
    return Entry(text, written, in_full, tuple(names), frozenset([*flags, *("/" if key.startswith("/") else "")]))


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return (names or ["null"])[0] if len(names) < 2 else f"[{', '.join(names)}]"
