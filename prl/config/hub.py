"""Checkpoints and data sets of the Hugging Face hub: what is a name of it and what a path, what its cache (HF_HOME)
has, and how the rest is fetched into it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prl.config.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

Kind = Literal["model", "dataset"]
PATHS = ("/", "./", "../", "~")  # what names of the hub do not begin with
OUTPUTS = "outputs"  # where runs lie, exports among them


def is_path(name: str) -> bool:
    """Whether it can be a path only, and no name of the hub, which are NAME or OWNER/NAME."""
    return name.startswith((*PATHS, f"{OUTPUTS}/")) or name.count("/") > 1


def is_hub_data(source: str) -> bool:
    """Whether `sft.data.source` names a data set of the hub, and no environment or file."""
    return not source.startswith("env:") and not source.endswith(".jsonl") and not is_path(source)


def hub_cache() -> Path:
    """Where huggingface_hub keeps what it has fetched, by the environment as it is now."""
    return Path(os.environ.get("HF_HUB_CACHE") or f"{_home()}/hub").expanduser()


def _home() -> str:
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return os.environ.get("HF_HOME") or f"{caches}/huggingface"


def cached_snapshots(name: str, kind: Kind) -> list[Path]:
    """Those of a repository in the hub's cache, which may lack files."""
    return sorted((hub_cache() / f"{kind}s--{name.replace('/', '--')}" / "snapshots").glob("*"))


def cached_snapshot(name: str, kind: Kind) -> Path | None:
    """That of its main branch as it was when it was last asked for, which is what is used without network."""
    repository = hub_cache() / f"{kind}s--{name.replace('/', '--')}"
    try:
        snapshot = repository / "snapshots" / (repository / "refs/main").read_text().strip()
    except (OSError, ValueError):
        return None
    return snapshot if snapshot.is_dir() else None


def is_cached(name: str, kind: Kind) -> bool:
    """Whether any of it lies in a cache of this machine."""
    if cached_snapshots(name, kind):
        return True
    if kind == "model":
        return False
    # `datasets` keeps tables of its own: OWNER___name_in_snake_case
    tables = Path(os.environ.get("HF_DATASETS_CACHE") or f"{_home()}/datasets").expanduser()
    owner, _, rest = name.rpartition("/")
    return any(folder.is_dir() for folder in tables.glob(f"{owner}___*" if owner else f"{rest}*"))


def fetch_checkpoint(repo_id: str) -> Path:
    """The snapshot of a model, fetched unless the cache has it. Raises UserError when it is not to be had."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                repo_id,
                allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"],
                ignore_patterns=["consolidated*", "original/*"],  # the same weights once more, for other programs
            )
        )
    except Exception as error:  # the hub client raises a dozen unrelated types for "not there" and "no network"
        why, fix = why_not(error, repo_id, "model")
        folder = Path(repo_id).parent
        if is_path(repo_id) or (folder != Path() and folder.is_dir()):
            also = "" if is_path(repo_id) else f"; nor could it be had as a name of the Hugging Face hub: {why}"
            path = Path(repo_id).expanduser().absolute()
            raise UserError(
                f"there is no directory {path}",
                where=f"model.path={repo_id}",
                why=f"it is to hold the weights of the model{also}",
                fix=f"model.path=/path/to/checkpoint, or for what began with one that has moved: "
                f"ln -s /where/it/is {path}",
            ) from error
        raise UserError(
            f"model {repo_id!r} is neither a directory nor could it be fetched from the Hugging Face hub",
            where=f"model.path={repo_id}",
            why=why,
            fix=f"{fix}; or model.path=/path/to/checkpoint",
        ) from error


def fetch_config_json(repo_id: str) -> Path:
    """The config.json of a model alone, fetched unless the cache has it. Raises UserError as `fetch_checkpoint`."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repo_id, "config.json"))
    except Exception as error:  # see fetch_checkpoint
        why, fix = why_not(error, repo_id, "model")
        raise UserError(
            f"model {repo_id!r} is neither a directory nor could its config.json be fetched from the Hugging Face hub",
            where=f"model.path={repo_id}",
            why=why,
            fix=f"{fix}; or model.path=/path/to/checkpoint",
        ) from error


def load_rows(name: str, split: str, args: dict[str, Any]) -> Dataset:
    """One split of a data set by `datasets.load_dataset`, which without network knows only what it has itself read
    before: here what `hf download` has brought is found, too. Raises whatever `datasets` raises.

    args: of `load_dataset`, beside the name and the split.
    """
    import datasets

    try:
        return datasets.load_dataset(name, split=split, **args)
    except Exception:  # see fetch_checkpoint
        snapshot = _cached_data_set(name, args.get("revision"))
        if snapshot is None:
            raise
    own = {key: value for key, value in args.items() if key not in ("path", "revision")}
    return datasets.load_dataset(str(snapshot), split=split, **own)


def _cached_data_set(name: str, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, repo_type="dataset", revision=revision, local_files_only=True))
    except Exception:  # not in the cache, or not the name of a repository
        return None


def why_not(error: Exception, name: str, kind: Kind) -> tuple[str, str]:
    """Of what could not be had from the hub: why, and what to do about it."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    lines = str(error).strip().splitlines()
    why = f"{type(error).__name__}: {lines[0] if lines else ''}"
    site = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name}"
    if isinstance(error, HFValidationError) or is_path(name):
        if Path(name).expanduser().is_file():
            return "it is a file, where the directory of a checkpoint belongs", f"model.path={Path(name).parent}"
        return f"there is no directory {name}, and the hub has no such names", "correct the path"
    if isinstance(error, GatedRepoError) or "gated" in why:
        return why, f"accept its terms at {site}, then `hf auth login`, or HF_TOKEN=... in the environment"
    if isinstance(error, RepositoryNotFoundError) or "doesn't exist on the Hub" in why:
        return why, f"correct the name; for a private one `hf auth login`, or HF_TOKEN=... in the environment ({site})"
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        place = "HF_DATASETS_CACHE" if kind == "dataset" else "HF_HOME"
        return why, f"{place}=/a/directory/that/can/be/written in the environment"
    if isinstance(error, ValueError | TypeError):
        return why, "correct the split or the arguments"
    if constants.HF_HUB_OFFLINE and isinstance(error, ConnectionError | LocalEntryNotFoundError):
        why = f"HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} does not have it"
    fetch = fetch_command(name, kind)
    return why, f"`{fetch}` where there is network (a gated one wants `hf auth login` before), with the same HF_HOME"


def fetch_command(name: str, kind: Kind) -> str:
    return f"hf download {'--repo-type=dataset ' if kind == 'dataset' else ''}{name}"


def repair(file: Path) -> str:
    """What brings back a checkpoint's file that is missing or damaged."""
    folder = file.parent.parent.parent.name  # models--OWNER--NAME/snapshots/COMMIT/file
    if file.parent.parent.name != "snapshots" or not folder.startswith("models--"):
        return "fetch the file again"
    command = fetch_command(folder.removeprefix("models--").replace("--", "/", 1), "model")
    return f"fetch the file again: `{command} {file.name}{' --force-download' if file.exists() else ''}`"
