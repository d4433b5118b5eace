"""The one boundary: a composed DictConfig becomes a frozen RunConfig, or every reason why it cannot."""

from __future__ import annotations

import contextlib
import difflib
import re
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from prl.config.auto_card import complete_card
from prl.config.branching import take_start
from prl.config.chosen import said_by_user
from prl.config.errors import UTF8, ConfigError, UserError, is_unread
from prl.config.evaluated import take_model
from prl.config.keys import as_override, field_of, is_group, schema_keys
from prl.config.locate import config_groups
from prl.config.overrides import all_keys, unknown_key
from prl.config.rules import violations
from prl.config.rules.memory import attention_linears
from prl.config.schema import ATTENTION, Group, RunConfig, WarmStartConfig
from prl.config.schema_fields import WORDS_OF_PATTERN


def resolve(cfg: DictConfig, **run_fields: Any) -> RunConfig:
    """Validate types, then all cross-group rules.

    Args:
        cfg: the composed config without Hydra's own node.
        run_fields: `choices`, `sweep`, `swept`, `output_dir`, as known to the entry point.

    Raises:
        ConfigError: with every violation found, each with the override that fixes it.
    """
    try:
        plain = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        with contextlib.suppress(OmegaConfBaseException):  # what cannot be resolved cannot be looked through either
            _refuse_missing(cfg)
        raise ConfigError([unresolved(error)]) from error
    assert isinstance(plain, dict)
    if "'???'" in repr(plain):  # a tenth of the time of missing_keys
        _refuse_missing(cfg)
    return resolve_plain(plain, **run_fields)


def resolve_plain(plain: dict[Any, Any], **run_fields: Any) -> RunConfig:
    """As `resolve`, of dicts in which no key refers to another and none is left to the user. `plain` is changed."""
    _refuse_recorded(plain)
    plain.update(run_fields)
    if isinstance(plain.get("model"), dict):
        complete_card(plain["model"])
    try:
        config = RunConfig.model_validate(plain)
    except ValidationError as error:
        raise ConfigError(_explain_all(error, str(plain.get("job")))) from error
    if config.job == "eval" and config.eval.run is not None:
        config = take_model(config)
    config = settle_adapters(settle_warm_start(config))
    if config.job in ("rl", "sft") and config.ckpt.from_run is not None:
        config = take_start(config)
    found = violations(config)
    if found:
        raise ConfigError(found)
    return config


def settle_warm_start(config: RunConfig) -> RunConfig:
    """warm_start=auto: a checkpoint that others have trained begins as it is, unless keys of a warm start are said."""
    if config.warm_start is None or config.model.path is None or config.choices.get("warm_start") != "auto":
        return config
    keys = [key for key in schema_keys(WarmStartConfig, "warm_start.") if not is_group(key)]
    if any(said_by_user(config, key) for key in keys):
        return config
    return config.model_copy(update={"warm_start": None})


def settle_adapters(config: RunConfig) -> RunConfig:
    """The target "attention" in the words of the model's family, where prl knows it; else `apply_lora` does it."""
    memory = config.memory_recipe
    if not config.model.card.is_native or not memory.lora.rank or ATTENTION not in memory.lora.targets:
        return config
    said = memory.lora.targets
    names = dict.fromkeys(
        name for one in said for name in (attention_linears(config.model.card) if one == ATTENTION else (one,))
    )
    lora = memory.lora.model_copy(update={"targets": tuple(names)})
    return config.model_copy(update={"memory_recipe": memory.model_copy(update={"lora": lora})})


def unresolved(error: OmegaConfBaseException) -> UserError:
    """What is said of a key whose `${...}` leads nowhere."""
    key = str(error.full_key or "").partition("[")[0]  # overrides cannot name elements of a list
    default = default_of(key)
    return UserError(
        f"Cannot resolve {key!r}.",
        where=key,
        why=str(error).splitlines()[0].removeprefix("KeyError raised while resolving interpolation: "),
        fix=f"{key}={'VALUE' if default is None else default}, or set what it refers to",
    )


def _refuse_recorded(plain: dict[Any, Any]) -> None:
    """Keys in which a run writes down how it was composed: what a user says there would be lost."""
    said_by = {"choices": "GROUP=CHOICE", "swept": "-m KEY=VALUE,VALUE"}
    found = [
        UserError(
            f"{key} is not for you to set.",
            where=f"{key}={plain[key]}",
            why="it records what was chosen or swept on the command line",
            fix=f"leave it out; {instead} is how to say it",
        )
        for key, instead in said_by.items()
        if plain.get(key)
    ]
    if found:
        raise ConfigError(found)


UNION_MEMBERS = (
    "int",
    "constrained-int",
    "float",
    "constrained-float",
    "str",
    "constrained-str",
)  # names that pydantic appends


def _refuse_missing(cfg: DictConfig) -> None:
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise ConfigError([_missing(key) for key in missing])


def _missing(key: str) -> UserError:
    return UserError(
        f"{key} has no value.",
        where=key,
        why="the chosen config leaves it to you",
        fix=f"{key.partition('[')[0]}=VALUE on the command line",
    )


def _explain_all(error: ValidationError, job: str) -> list[UserError]:
    """One UserError per key: a union reports each of its types, and the user wants to read one sentence."""
    known = set(schema_keys())
    by_key: dict[str, list[dict[str, Any]]] = {}
    for item in error.errors():
        by_key.setdefault(_key_of(item["loc"], known), []).append(dict(item))
    return [
        unknown_key(key, known, job) if items[0]["type"] == "extra_forbidden" else _explain(key, items, job)
        for key, items in by_key.items()
        if key.removeprefix("sft.") == key or key.removeprefix("sft.") not in by_key  # conf/sft.yaml copies optim
    ]


def _key_of(location: tuple[int | str, ...], known: set[str]) -> str:
    """The dotted key of a pydantic location, without the type names that a union appends to it."""
    parts = [str(part) for part in location if "[" not in str(part)]
    key = ".".join(parts)
    parent = ".".join(parts[:-1])
    is_leaf = parent in known and not any(other.startswith(parent + ".") for other in known)
    added = parts[-1] in UNION_MEMBERS or parts[-1].isdigit()  # of a union, or an element of a list
    return parent if key not in known and is_leaf and added else key


KINDS_OF_NODE = ("model_type", "model_attributes_type", "dict_type")  # what pydantic says of a value in their place
ADDRESSES = ("inference.urls", "algo.teacher.urls")
WORDS_OF_KIND = {
    "tuple_type": "it must be a list, [a,b]",
    **dict.fromkeys(KINDS_OF_NODE, "it holds keys, and is no value itself"),
}


def _explain(key: str, items: list[dict[str, Any]], job: str) -> UserError:
    in_words = [WORDS_OF_PATTERN[i["ctx"]["pattern"]] for i in items if i["type"] == "string_pattern_mismatch"]
    if key in ADDRESSES and in_words and (wrong := _wrong_in_url(str(items[0]["input"]))):
        in_words = [f"{wrong}: {in_words[0]}"]
    messages = in_words[:1] or [
        WORDS_OF_KIND[item["type"]] if item["type"] in WORDS_OF_KIND else _in_words(str(item["msg"])) for item in items
    ]
    messages = list(dict.fromkeys(messages))
    expected = " or ".join([messages[0], *(message.removeprefix("it must be ") for message in messages[1:])])
    missing = all(item["type"] == "missing" and isinstance(item["input"], dict) for item in items)
    if not missing and items[0]["type"] == "missing":  # of a list that is too short, whose elements are no keys
        whole = as_override(items[0]["input"])
        expected = f"it has {len(items[0]['input'])} of {len(items[0]['input']) + len(items)} elements"
        return UserError(f"{key}={whole} is not valid.", where=key, why=expected, fix=_suggest(key, items, job))
    if any(isinstance(item["input"], str) and is_unread(item["input"]) for item in items):
        return UserError(
            f"{key}={items[0]['input']} is not valid.", where=key, why="this locale does not know its letters", fix=UTF8
        )
    given = "null" if items[0]["input"] is None else items[0]["input"]
    what = f"{key} is missing." if missing else f"{key}={given} is not valid."
    return UserError(what, where=key, why="it is required" if missing else expected, fix=_suggest(key, items, job))


def _in_words(message: str) -> str:
    """Pydantic's, without what it says of itself."""
    told = message.replace("Input should be ", "it must be ").removeprefix("Value error, ")
    told = told.replace("String should have at least 1 character", "it must not be empty")
    return told.partition(", unable to")[0]


def default_of(key: str) -> str | None:
    """The schema's default of a dotted key as an override's value; None where there is none or it is a group."""
    try:
        field = field_of(key)
    except KeyError:
        return None
    plain = not field.is_required() and not isinstance(field.default, (Group, dict))
    return as_override(field.default) if plain else None


def _group_of(key: str) -> str | None:
    """The group whose choices fill a node."""
    groups = config_groups()
    return next((name for name in (key, key.removeprefix("sft.")) if name in groups), None)


def _is_port(number: str) -> bool:
    return 0 < int(number) < 2**16


def _wrong_in_url(text: str) -> str:
    """What is wrong with the address of an engine, before how one is written."""
    if "@" in text:
        return "it names somebody"
    server = re.match(r"(?:\w+://)?(?:[^/:\[]+|\[[^]]*\])(?::([^/]*))?", text)
    if server is None:
        return "it names no host"
    if server[1] is None:
        return "it names no port"
    if not server[1].isdecimal() or not _is_port(server[1]):
        return f"{server[1]!r} is no port"
    return "" if text.startswith(("http://", "https://")) else "it does not begin with http://"


def _suggest(key: str, items: list[dict[str, Any]], job: str) -> str:
    default = default_of(key)
    for item in items:
        context = item.get("ctx", {})
        if item["type"] == "literal_error":
            options = [option.strip("'") for option in str(context["expected"]).replace(" or ", ", ").split(", ")]
            close = difflib.get_close_matches(str(item["input"]), options, n=1, cutoff=0.4)
            if not close and len(items) > 1 and default is not None:  # a word, or something else: nobody meant the word
                return f"{key}={default}"
            is_list = default is not None and default.startswith("[")
            return f"{key}=[{(close or options)[0]}]" if is_list else f"{key}={(close or options)[0]}"
        one = len(items) == 1 and isinstance(item["input"], str | int | float)
        if item["type"] == "tuple_type" and one:  # where a list is meant
            return f"{key}=[{as_override(item['input'])}]"
        if item["type"] in KINDS_OF_NODE and (group := _group_of(key)) is not None:
            choices = config_groups()[group]
            return f"{group}={(difflib.get_close_matches(str(item['input']), choices, n=1) or choices)[0]}"
        if item["type"] in KINDS_OF_NODE:
            below = [name for name in schema_keys() if name.startswith(f"{key}.") and not is_group(name)]
            return f"{below[0] if below else f'{key}.NAME'}=VALUE"
        if key in ADDRESSES:
            server = re.search(r"([\w.-]+):(\d+)(?![\w.])", str(item["input"]))
            if server and _is_port(server[2]):
                return f"{key}=[http://{server[0]}] as the address of a server, or {key}=[]"
            return f"{key}=[http://{server[1] if server else '127.0.0.1'}:8000] for instance, or {key}=[]"
    if items[0]["type"] == "missing" and key in (groups := config_groups()):
        return f"{key}={groups[key][0]}, without ~{key}"
    if default is not None:
        return f"{key}={default}"
    for item in items:
        context = item.get("ctx", {})
        for bound in ("ge", "le"):
            if bound in context:
                return f"{key}={context[bound]}"
        if "gt" in context or item["type"] in ("int_parsing", "int_from_float"):
            return f"{key}=1"
    return f"give {key} a value of that kind; {all_keys(job)} shows what it is by default"
