"""Types of single fields, and the base of all groups of the schema."""

from __future__ import annotations

import os
from typing import Annotated, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from prl.config.place_names import check_length

MOST = 2**31 - 1  # of anything that is counted: what 32 bits of a kernel, a header or a tensor's size hold
MAX_TEMPERATURE = 1000.0  # beyond, all tokens are equally probable, and engines refuse it
FLOAT32 = 3.4e38  # numbers beyond are infinite once a tensor holds them


def _counted(value: object) -> object:
    """pydantic takes true for 1."""
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers")
    return value


def _found_from_anywhere(name: str) -> str:
    """A directory by its whole path, so that who goes on with a run elsewhere finds it, too; other names as they are,
    but for ~/, the home of whoever composes it.
    """
    path = os.path.expanduser(name)
    return os.path.abspath(path) if os.path.isdir(path) else path


Positive = Annotated[int, BeforeValidator(_counted), Field(gt=0, le=MOST)]
Lengths = Annotated[tuple[Positive, ...], Field(min_length=1)]
Layers = Annotated[int, BeforeValidator(_counted), Field(gt=0, le=1 << 12)]  # plans go through them one by one
NonNegative = Annotated[int, BeforeValidator(_counted), Field(ge=0, le=MOST)]
Samples = Annotated[int, BeforeValidator(_counted), Field(gt=0, le=1 << 16)]  # of one task, all begun at once
PositiveFloat = Annotated[float, Field(gt=0, le=FLOAT32)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=FLOAT32)]
Number = Annotated[float, Field(ge=-FLOAT32, le=FLOAT32)]
RotaryPart = Annotated[float, Field(ge=0, le=1)]
LayerPattern = Annotated[str, Field(pattern=r"^[ME*-]*$")]
Fraction = Annotated[float, Field(ge=0, le=1)]
Part = Annotated[float, Field(gt=0, lt=1)]  # neither nothing nor all
Temperature = Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)]
TopP = Annotated[float, Field(ge=1e-6, le=1)]  # smaller ones vanish beside 1 in float32
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a running mean
Seconds = Annotated[float, Field(gt=0, le=1e8)]  # three years; threads and sockets refuse to wait for ever
Silence = Annotated[float, Field(ge=1, le=1e8)]  # seconds; signs of life come twice in one
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what NumPy takes, and with it vLLM
Port = Annotated[int, Field(ge=0, le=65535)]
Threads = Annotated[int, Field(ge=0, le=1024)]  # of one process
PerNode = Annotated[int, Field(gt=0, le=1024)]  # devices
Nodes = Annotated[int, Field(gt=0, le=65536)]
Devices = Annotated[int, Field(gt=0, le=65536)]
NoneOrDevices = Annotated[int, Field(ge=0, le=65536)]
Text = Annotated[str, Field(min_length=1)]
Place = Annotated[str, Field(min_length=1), AfterValidator(check_length)]  # a file or directory
DirectoryOrName = Annotated[str, AfterValidator(check_length), AfterValidator(_found_from_anywhere)]
# http:// or https://, a host, a port; no path, and nobody's name and password
PORT = r"(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
EngineUrl = Annotated[str, Field(pattern=rf"^https?://([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.%]+\]):{PORT}$")]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
HostName = Annotated[str, Field(pattern=r"^([A-Za-z0-9_.-]{1,253}|[0-9A-Fa-f:.%]{2,64})$")]
SlurmTime = Annotated[str, Field(pattern=r"^(\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE)$")]
SlurmMemory = Annotated[str, Field(pattern=r"^\d+[KMGTkmgt]?[Bb]?$")]
IN_WORDS = {  # what a text of that type must be, for people
    EngineUrl: "an address is http://HOST:PORT, without a path; a port is at most 65535",
    VariableName: "it is the name of an environment variable: letters, digits and _, no digit first",
    HostName: "it is the name of a host, or its address",
    SlurmTime: "it is as sbatch reads it: minutes, H:MM:SS or D-HH:MM:SS; 0: no limit",
    SlurmMemory: "it is as sbatch reads it: MiB, or a number with K, M, G or T; 0: all of a node",
    LayerPattern: "it has a letter for each layer: M state space, * attention, E experts, - MLP",
}
WORDS_OF_PATTERN = {get_args(kind)[1].metadata[0].pattern: words for kind, words in IN_WORDS.items()}


class Group(BaseModel):
    """Base of all groups: frozen; unknown keys are errors, and so are numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)
