"""Engines that somebody else has started (inference.urls): what they say of themselves, and whether it fits a run."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from prl.config.errors import AwayError, UserError
from prl.config.keys import as_override
from prl.config.point import UNTRAINED
from prl.config.rules.external import asked_servers
from prl.config.schema import InferenceConfig, RunConfig
from prl.runtime.directory.files import parse_object
from prl.runtime.process.keys import users_key

LEASE = "/lease"
RUN_HEADER = "X-Prl-Run"  # of every request of a run to engines that are not its own
LEASE_S = 30.0  # of a server's lease without renewal
RENEW_S = 2.0  # between two renewals
ANSWER_S = 5.0  # for an answer that takes no work
LOOK_S = 0.1  # between two looks whether somebody stops who waits for one
MOST = 1 << 20  # bytes of it
START = "python -m prl.inference, with inference=vllm for vLLM and our plugin"
MIDDLEWARE = "--middleware prl.inference.vllm.stock.Leased"  # of a plain `vllm serve`


def model_facts(config: RunConfig) -> dict[str, Any]:
    """What an engine says of itself, and what a run wants of one."""
    inference, model = config.inference, config.model
    return {
        "engine": inference.engine,
        "model": model.name,
        "card": model.card.model_dump(mode="json", exclude=UNTRAINED),
        "dtype": model.dtype if inference.dtype == "auto" else inference.dtype,
        "max_model_len": inference.max_model_len,
        "return_routed_experts": inference.return_routed_experts,
    }


def check_keys(config: RunConfig) -> None:
    """Raises UserError for a variable that is to hold a key, and does not here."""
    inference, teacher = config.inference, config.algo.teacher
    for key, name, what in (
        ("inference.api_key_var", inference.api_key_var, "API key of the engines"),
        ("inference.control_key_var", inference.control_key_var, "control key of the engines"),
        ("algo.teacher.api_key_var", teacher.api_key_var if config.job == "rl" else None, "API key of the teacher"),
    ):
        if name is not None:
            users_key(key, name, what)


def keys_of(inference: InferenceConfig) -> tuple[str, str]:
    """Keys for sampling and for control. Raises UserError for variables that are unset."""
    assert inference.control_key_var is not None, "a rule asks for it"
    control = users_key(
        "inference.control_key_var", inference.control_key_var, "control key of the engines (RUN/control_key)"
    )
    if inference.api_key_var is None:
        return control, control
    return users_key("inference.api_key_var", inference.api_key_var, "API key of the engines (RUN/api_key)"), control


# --- answers ----------------------------------------------------------------------------------------------------------


def read_answer(url: str, status: int, text: str, inference: InferenceConfig) -> dict[str, Any]:
    """The answer to /lease. Raises UserError for who is no engine that takes weights from a run."""
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if status == 401:
        raise UserError(
            f"{url} does not take the control key.",
            where=f"inference.control_key_var={inference.control_key_var}",
            why="the variable holds another one, the server makes its own each time it is started, or it is a router, "
            "which has none: weights do not get through it",
            fix=f"start the server with inference.control_key_var={inference.control_key_var} and the same value; or "
            f"export {inference.control_key_var}=$(cat RUN/control_key), of a server that was started without and "
            "keeps its own there; of a router the addresses of the engines behind it",
        )
    if status not in (200, 409) or not isinstance(answer, dict) or "lease" not in answer:
        raise _no_engine_of_ours(url, status, inference)
    return answer


def _no_engine_of_ours(url: str, status: int, inference: InferenceConfig) -> UserError:
    """As far as what it answers to others tells what it is."""
    key = os.environ.get(inference.api_key_var or inference.control_key_var or "", "")
    code, text = _get(f"{url}/workers", key)
    if code == 200 and "workers" in (parse_object(text) or {}):
        return UserError(
            f"{url} is a router: weights do not get through it.",
            where="inference.urls",
            why="each engine must be told of each version itself",
            fix="the addresses of the engines behind it, each started without a router (inference.router.type=none)",
        )
    models, text = _get(f"{url}/v1/models", key)
    command = command_of(url, inference)
    command += "" if inference.engine == "vllm" else "; or with vLLM and our plugin, by inference=vllm in both commands"
    if models == 401 or (models == 200 and "data" in (parse_object(text) or {})):
        return UserError(
            f"{url} serves models, but cannot be given weights: it is good for evaluation, and as a teacher, only.",
            where="inference.urls",
            why=f"it does not know {LEASE} ({status}): a vLLM without our middleware, or another server with OpenAI's "
            "routes; training samples from the weights of each step",
            fix=f"start it with our plugin and the run's own model=: {command}; or vllm serve with {MIDDLEWARE} "
            "(prl/inference/README.md)",
        )
    return UserError(
        f"{url} is no inference engine.",
        where="inference.urls",
        why=f"it answers {LEASE} by {status}{' and something else than an engine' * (status == 200)}, and "
        + (f"has no /v1/models ({models or 'no answer'})" if models != 200 else "names no models at /v1/models"),
        fix=f"the address of an engine: {START}",
    )


def _get(url: str, key: str) -> tuple[int, str]:
    """Status and text; 0 for no answer."""
    try:
        return _fetch(url, key, lambda: False)
    except (OSError, ValueError, HTTPException):
        return 0, ""


def _fetch(url: str, key: str, stopped: Callable[[], bool]) -> tuple[int, str]:
    """Status and text. Raises TimeoutError where not all has come within ANSWER_S, however steadily it comes, or before
    somebody stops this; URLError, OSError, ValueError and HTTPException for who is not there, or speaks otherwise.
    """
    outcome: list[tuple[int, str] | Exception] = []

    def ask() -> None:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
        try:
            with _opener().open(request, timeout=ANSWER_S) as response:
                outcome.append((response.status, response.read(MOST).decode(errors="replace")))
        except urllib.error.HTTPError as error:
            with error, contextlib.suppress(OSError, HTTPException):
                outcome.append((error.code, error.read(MOST).decode(errors="replace")))
        except Exception as error:  # for who waits
            outcome.append(error)

    thread = threading.Thread(target=ask, daemon=True)  # which nothing could end that waits in it for bytes
    thread.start()
    deadline = time.monotonic() + ANSWER_S
    while thread.is_alive() and time.monotonic() < deadline and not stopped():
        thread.join(LOOK_S)
    if not outcome:
        raise TimeoutError
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _opener() -> urllib.request.OpenerDirector:
    """Without proxies and detours, which a control key is not for."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoDetours())


class _NoDetours(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
        return None


def check_facts(url: str, answer: dict[str, Any], config: RunConfig) -> None:
    """Raises UserError where an engine holds another model than the run trains, or less of it than the run needs."""
    wanted = model_facts(config)
    card = answer.get("card") or {}
    others = [
        f"{key} {card.get(key)!r}, not {value!r}" for key, value in wanted["card"].items() if card.get(key) != value
    ]
    if others:
        raise UserError(
            f"{url} holds another model: {answer.get('model')}.",
            where=f"inference.urls, model={config.model.name}",
            why=f"its card has {'; '.join(others[:4])}{' and more' if len(others) > 4 else ''}",
            fix="the same model= (and model.card keys) for both commands",
        )
    length = answer.get("max_model_len", 0)
    if length < wanted["max_model_len"]:
        raise UserError(
            f"{url} takes {length} tokens (prompt and completion), the run wants {wanted['max_model_len']}.",
            where=f"inference.max_model_len={wanted['max_model_len']}",
            why="an engine's context is set when it is started",
            fix=f"inference.max_model_len={length}, or start it with inference.max_model_len={wanted['max_model_len']}",
        )
    for key, where, remedy in (
        ("engine", "inference.engine", f"inference={answer.get('engine')}"),
        ("dtype", "inference.dtype", f"inference.dtype={answer.get('dtype')}"),
        ("return_routed_experts", "inference.return_routed_experts",
         f"inference.return_routed_experts={as_override(answer.get('return_routed_experts'))}"),
    ):  # fmt: skip
        if answer.get(key) != wanted[key]:
            raise UserError(
                f"{url} was started with {where}={as_override(answer.get(key))}.",
                where=f"{where}={as_override(wanted[key])}",
                why="the run would ask it for what it does not do, or train on what it does not say",
                fix=f"{remedy}, or start it otherwise",
            )


def held_by_other(url: str, lease: dict[str, Any]) -> UserError:
    return UserError(
        f"{url} is held by another run: {lease.get('run')} on {lease.get('host')}.",
        where="inference.urls",
        why="two runs would overwrite each other's weights",
        fix=f"other engines, or wait: a run gives its engines up when it ends, at the latest {LEASE_S:.0f} s after its "
        "last sign of life",
    )


def same_engine(url: str, other: str) -> UserError:
    return UserError(
        f"{other} and {url} are the same engine.",
        where="inference.urls",
        why="a run would pause it, and bring it each version, twice",
        fix="one address for each engine",
    )


def none_answers(inference: InferenceConfig, after_s: float | None = None, is_silent: bool = False) -> AwayError:
    """All are away: from the start (None), or for so long. `is_silent`: some take connections."""
    urls = ", ".join(inference.urls)
    return AwayError(
        f"No engine answers: {urls}." if after_s is None else f"No engine has answered for {after_s:.0f} s: {urls}.",
        where="inference.urls" if after_s is None else f"inference.urls, deployment.start_timeout_s={after_s:g}",
        why="who listens there takes connections, and gives no whole answer"
        if is_silent
        else "nobody listens there, or nobody who answers from this machine",
        fix=f"start them ({command_of(inference.urls[0], inference)}{', and so on' * (len(inference.urls) > 1)}, "
        "with the run's own model=); then this command again"
        + (", which resumes (a run by itself with its output_dir)" if after_s is not None else ""),
    )


def command_of(url: str, inference: InferenceConfig, config: RunConfig | None = None) -> str:
    """What starts an engine that is found at `url`, takes the run's control key, and is what the run wants of one, with
    its model if the whole configuration is given.
    """
    parts = urlsplit(url)
    host = "" if parts.hostname in ("127.0.0.1", "localhost", "::1") else " inference.host=0.0.0.0"
    key = "" if inference.control_key_var is None else f" inference.control_key_var={inference.control_key_var}"
    like = ["inference=vllm"] * (inference.engine == "vllm")
    if config is not None:
        model = config.model
        like += [f"model={config.choices.get('model', model.name)}"]
        like += [f"model.path={model.path}"] * (model.path is not None) + [f"model.dtype={model.dtype}"]
        like += [f"inference.dtype={inference.dtype}"] * (inference.dtype != "auto")
        like += [f"inference.max_model_len={inference.max_model_len}"]
        like += ["inference.return_routed_experts=true"] * inference.return_routed_experts
    return shlex.join(["python", "-m", "prl.inference", *like]) + f"{host} inference.port={parts.port}{key}"


# --- before anything starts -------------------------------------------------------------------------------------------


def await_listeners(config: RunConfig, note: Callable[[str], None], stopped: Callable[[], bool]) -> None:
    """Until somebody listens at each address (of a run's engines: at one, for it takes others in later), as long as
    engines of its own would have: who starts both at once, or a vLLM that binds its port when its model is loaded, is
    waited for. Who is still not there is told by who asks it next.
    """
    wanted = asked_servers(config)
    deadline, told = time.monotonic() + config.deployment.start_timeout_s, set[str]()
    while not stopped():
        wanted = [urls for urls in wanted if not any(map(_listens, urls))]
        if not wanted or time.monotonic() >= deadline:
            return
        for url in (url for urls in wanted for url in urls):
            if url not in told:
                told.add(url)
                note(
                    f"{url}: nobody listens there yet; waiting, {config.deployment.start_timeout_s:.0f} s at most "
                    "(deployment.start_timeout_s)"
                )
        time.sleep(LOOK_S)


def _listens(url: str) -> bool:
    """Or will never: a name that is none, for which nobody waits."""
    parts = urlsplit(url)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=ANSWER_S):
            return True
    except socket.gaierror:
        return True
    except OSError:
        return False


def check_engines(config: RunConfig, run_id: str, note: Callable[[str], None], stopped: Callable[[], bool]) -> None:
    """Ask each engine what it is. Raises UserError unless one at least is there, and all that are can serve this run.

    One that takes connections without an answer is loading, and waited for; one that another run holds until that
    renews its lease, or does not.
    """
    inference = config.inference
    _, control = keys_of(inference)
    deadline, told = time.monotonic() + config.deployment.start_timeout_s, set[str]()
    waiting, found, renewals = list(inference.urls), 0, dict[str, int]()
    away: list[str] = []
    servers: dict[str, str] = {}
    is_silent = False

    def tell(text: str) -> None:
        if text not in told:
            told.add(text)
            note(text)

    while waiting and not stopped():
        for url in list(waiting):
            state = _ask(url, control, inference, stopped)
            if stopped():
                return
            if isinstance(state, dict):
                check_facts(url, state, config)
                if (other := servers.setdefault(state.get("server", url), url)) != url:
                    raise same_engine(url, other)
                lease = state.get("lease")
                if lease is not None and lease["run"] != run_id:
                    if renewals.setdefault(url, lease["renewals"]) != lease["renewals"]:
                        raise held_by_other(url, lease)
                    tell(f"{url}: held by run {lease['run']}; waiting whether that is alive")
                    continue
                found += 1
            elif state == "loading" and time.monotonic() < deadline:
                tell(f"{url}: takes connections, but does not answer yet")
                continue
            else:
                away.append(url)
                is_silent |= state == "loading"
            waiting.remove(url)
        if waiting:
            time.sleep(1.0)
    if not found and not stopped():
        raise none_answers(inference, config.deployment.start_timeout_s if is_silent else None, is_silent)
    for url in away if found else ():
        tell(f"{url}: no answer; the run takes it in when it comes")


def _ask(url: str, control: str, inference: InferenceConfig, stopped: Callable[[], bool]) -> dict[str, Any] | str:
    """What it says, or "loading" or "away". Raises UserError."""
    try:
        code, text = _fetch(f"{url}{LEASE}", control, stopped)
    except TimeoutError:
        return "loading"
    except HTTPException as error:
        raise UserError(
            f"{url} is no inference engine.",
            where="inference.urls",
            why=f"what listens there does not speak HTTP ({type(error).__name__}: {str(error)[:80]!r})",
            fix=f"the address of an engine: {START}",
        ) from error
    except urllib.error.URLError as error:
        return "loading" if isinstance(error.reason, TimeoutError) else "away"
    except (OSError, ValueError):
        return "away"
    return "loading" if code == 503 else read_answer(url, code, text, inference)
