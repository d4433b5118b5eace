"""Nothing that comes from a socket is unpickled: who unpickles at all is listed here, with what and why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# each builds objects from bytes, and with them whatever code the bytes ask for
UNPICKLES = re.compile(
    r"\b(pickle|dill|marshal|shelve|joblib)\b|\btorch\.load\(|allow_pickle=True|weights_only=False"
    r"|yaml\.(unsafe_)?load\(|(broadcast|gather|scatter|send|recv)_object(_list)?\("
    r"|\bmultiprocessing\b.*\b(Listener|Manager)\b|\bdcp\.(async_)?(save|load)\("
)
EXCEPTIONS = {
    # configurations that this process has pickled itself, in its own memory: a copy by pickle is cheaper than deepcopy
    "prl/config/composer.py",
    "prl/config/composing.py",
    # YAML by OmegaConf's loader, a SafeLoader that refuses a key given twice
    "prl/config/own_files.py",
    # torch's own checkpoints: their plans go as objects through the process group of one run's trainers, whose
    # rendezvous listens on loopback or the nodes' network only; `.metadata` is read from the run directory
    "prl/trainer/checkpoint.py",
    # the same plans, passed on as bytes, through the same process group and a pair of sockets that the trainer's own
    # child inherits; and the errors of both
    "prl/trainer/writer/process.py",
    "prl/trainer/writer/writing.py",
    "prl/trainer/writer/failures.py",
    # what torch's ways of saving take, between processes that the benchmark starts
    "prl/bench/checkpoint.py",
    # the same checkpoints, read by one process without a process group
    "prl/trainer/checkpoint_reader.py",
}


def found(text: str) -> list[str]:
    code = [line.partition("  # ")[0] for line in text.splitlines() if not line.lstrip().startswith("#")]
    return [line.strip() for line in code if UNPICKLES.search(line)]


@pytest.mark.parametrize(
    "line",
    [
        "handles = pickle.loads(data)",
        "state = torch.load(path)",
        "torch.load(file, weights_only=False)",
        "np.load(file, allow_pickle=True)",
        "dist.broadcast_object_list(where, src=0)",
        "dist.all_gather_object(parts, mine)",
        "yaml.load(text)",
    ],
)
def test_what_unpickles_would_be_found(line: str) -> None:
    assert found(line)


def test_only_what_is_listed_unpickles() -> None:
    files = [path for folder in ("prl", "launch") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 150
    unpickling = {str(path.relative_to(ROOT)): found(path.read_text()) for path in files}
    assert {name for name, lines in unpickling.items() if lines} == EXCEPTIONS, unpickling
