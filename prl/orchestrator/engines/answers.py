"""What engines answer to a request for tokens, and what they must not."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import math
import mmap
from typing import Any

import aiohttp
import numpy as np

from prl.config.errors import UserError
from prl.orchestrator.engines.generation import Generation
from prl.runtime.process.failures import HUNG_UP, NO_ANSWER_IN_TIME, NOBODY_LISTENS, UNREACHABLE
from prl.transport.answers import ROUTING_START
from prl.transport.kept import KeptTokens, decode_array, kept_of_candidates

KEPT_MASS_TOLERANCE = 1e-3
DYING = ("EngineDeadError", "EngineCore encountered an issue")  # an engine's last words, ours and vLLM's


class EngineError(RuntimeError):
    """An engine refused or failed; the message names the engine, the route, the status and the engine's own words.

    `why` is the same without its address, for a sentence that names it.
    """

    def __init__(self, message: str, status: int = 0, lost: bool = False, said: str = "", why: str = "") -> None:
        super().__init__(message)
        self.why, self.status = why or message, status
        # by an engine in good health, and asked again it would say the same
        self.refused = 400 <= status < 500 or (status == 500 and is_engines_own(said))
        self.lost = lost  # the connection, or the answer: nobody knows whether the engine did what it was asked for

    @classmethod
    def of_silence(cls, url: str, route: str, error: Exception) -> EngineError:
        """For a request that aiohttp says has no answer."""
        why = _in_words(error)
        return cls(f"{url}: {why} (asked for {route})", lost=True, why=why)

    @classmethod
    def of_status(cls, url: str, route: str, status: int, said: str) -> EngineError:
        """For an answer of another status than 200."""
        why = f"it answered {route} by {status}: {_message_in(said)}".rstrip(": ")
        return cls(f"{url}: {why}", status, said=said, why=why)


class EngineLost(EngineError):
    """The engine was started again before it had answered."""


class NoWeights(RuntimeError):
    """All engines wait for weights, and there will be none."""


def _in_words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return NO_ANSWER_IN_TIME
    if isinstance(error, aiohttp.ClientConnectorError):
        reason = error.os_error
        refused = reason.errno == errno.ECONNREFUSED
        return NOBODY_LISTENS if refused else f"{UNREACHABLE} ({reason.strerror or reason})"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError):
        return HUNG_UP
    if isinstance(error, aiohttp.ClientPayloadError):
        return "its answer broke off"
    return f"its answer cannot be read ({type(error).__name__}: {error})"


def _message_in(said: str) -> str:
    """Of an error as servers with OpenAI's routes write it; anything else as it is."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        said = str(json.loads(said)["error"]["message"])
    return said[:500]


def is_engines_own(said: str) -> bool:
    """Whether a 500 is the word of an engine that lives: one that dies, or a router that lost one, may say 500, too."""
    try:
        error = json.loads(said)["error"]
        return error["code"] == 500 and not any(word in f"{error['type']} {error['message']}" for word in DYING)
    except (ValueError, LookupError, TypeError):
        return False


MOST_BYTES = 4 << 30
LARGE = 1 << 20  # bytes


async def read_whole(response: aiohttp.ClientResponse) -> bytes | memoryview:
    """A large body: into its place while it comes, where its length is told, and joined in the end where not."""
    size = response.content_length
    if size is None or size > MOST_BYTES:  # of which nobody knows whether they will come
        return await response.read()
    whole = _fresh(size) if size < LARGE else await asyncio.to_thread(_fresh, size)
    filled = 0
    async for chunk in response.content.iter_any():
        whole[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
    return whole[:filled]


def _fresh(size: int) -> memoryview:
    """For a thread: memory whose pages the system has given. It does so when a page is first written to, which takes
    longer than to write it: 4 of 6 ms for 24 MB, and on a virtual machine as much as 6 ms for a single huge page.
    """
    memory = np.empty(size, np.uint8)
    memory[:: mmap.PAGESIZE] = 0
    return memory.data


def parse_choice(choice: dict[str, Any], known: int) -> Generation:
    """A choice of /inference/v1/generate.

    known: version served when the request was sent, and so at most that of any token; for what the engine leaves
    unlabelled.
    """
    token_ids, sampled = as_list(choice["token_ids"]), sampled_logprobs(choice)
    check_logprobs(sampled)
    logprobs = np.asarray(sampled, np.float32)
    if len(logprobs) != len(token_ids):
        raise EngineError(f"an engine returned {len(token_ids)} tokens but {len(logprobs)} logprobs")
    versions = np.full(len(token_ids), known, np.int32)
    for span in choice.get("weight_versions") or []:
        versions[span["start"] : span["end"]] = int(span["version"])
    routed = choice.get("routed_experts")
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        versions=versions,
        finish_reason=choice["finish_reason"] or "stop",
        routed_experts=None if routed is None else routed if isinstance(routed, np.ndarray) else decode_array(routed),
        routing_start=choice.get(ROUTING_START, 0),
        kept=kept_tokens(choice),
    )


def cached_tokens(reply: dict[str, Any]) -> int | None:
    """Tokens of the prompt that an engine found in its prefix cache; None when it does not say."""
    details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
    return details.get("cached_tokens")


def kept_tokens(choice: dict[str, Any]) -> KeptTokens | None:
    """What each token was drawn from, however the engine says it; None when it does not, or of a choice without tokens.

    Engines of a run answer who asks; a vLLM that is not ours has it in its objects of several logprobs, or, with its
    `--return-sampling-mask`, as lists. Raises EngineError where some of what could be drawn is missing.
    """
    mass = choice.get("kept_mass", 1.0)
    content = (choice.get("logprobs") or {}).get("content") or []
    if (encoded := choice.get("kept_tokens")) is not None:
        try:
            kept = KeptTokens.from_json(encoded)
        except ValueError as error:
            raise EngineError(f"an engine returned {error}") from error
    elif (lists := choice.get("sampling_mask")) is not None:
        kept = KeptTokens.of_sets([np.array(ids, np.int64) for ids in lists])
    elif content and all(entry.get("top_logprobs") for entry in content):
        # the sampled one first; that it may come again is taken into account
        candidates = [[entry, *entry["top_logprobs"]] for entry in content]
        flat = [one for several in candidates for one in several]
        lengths = np.array([len(several) for several in candidates])
        ids = np.array([one["token_id"] for one in flat], np.int64)
        kept, mass = kept_of_candidates(lengths, ids, np.array([one["logprob"] for one in flat], np.float64))
    else:
        return None
    if abs(mass - 1) > KEPT_MASS_TOLERANCE:
        raise EngineError(
            f"what an engine says a token was drawn from adds up to {mass:.4f}: more tokens than it lists could be "
            "drawn, or its logprobs are those before truncation (vLLM: --logprobs-mode=processed_logprobs)"
        )
    return kept


def check_kept(generation: Generation) -> None:
    """Raises UserError where the engine does not say what tokens were drawn from, EngineError where it is nonsense."""
    ids, kept = generation.token_ids, generation.kept
    if not ids:  # aborted before its first token
        return
    if kept is None:
        raise UserError(
            "The engine does not say which tokens it could have drawn.",
            where="inference.sampling.top_p, top_k, min_p, and a server of somebody else's (inference.router.type=url)",
            why="its log-probabilities are of what truncation left, and training must renormalise over the same tokens",
            fix="inference.sampling.top_p=1 inference.sampling.top_k=0 inference.sampling.min_p=0 (evaluations have "
            "eval.top_p, eval.top_k and eval.min_p), or a server that passes sampling_params on to vLLM whole",
        )
    if len(kept) != len(ids):
        raise EngineError(f"an engine returned {len(ids)} tokens but {len(kept)} sets of what they were drawn from")
    of_token = np.repeat(np.arange(len(ids)), kept.counts)
    holds_it = np.bincount(of_token[kept.ids == np.array(ids)[of_token]], minlength=len(ids)) > 0
    if not (holds_it | (kept.counts == 0)).all():
        raise EngineError("an engine returned a token that is not among those which it says it was drawn from")


def as_list(numbers: list[Any] | np.ndarray | None) -> list[Any]:
    return numbers.tolist() if isinstance(numbers, np.ndarray) else numbers or []


def sampled_logprobs(choice: dict[str, Any]) -> list[float] | np.ndarray:
    """Of each token: a list of numbers from engines of a run, an object for each from a vLLM that is not ours."""
    if (flat := choice.get("token_logprobs")) is not None:
        return flat
    content = (choice.get("logprobs") or {}).get("content") or []
    return [entry["logprob"] for entry in content]


def check_logprobs(logprobs: list[Any] | np.ndarray) -> None:
    """Raises EngineError unless all are finite: a token that was sampled had a probability above zero."""
    if isinstance(logprobs, np.ndarray) and np.isfinite(logprobs).all():
        return
    for index, logprob in enumerate(logprobs):
        if not isinstance(logprob, int | float) or not math.isfinite(logprob):
            raise EngineError(f"an engine returned {logprob!r} as the logprob of token {index} of its reply")


def check_routing(generation: Generation, num_prompt: int) -> None:
    """Raises EngineError unless every token but the last, which was never forwarded, has a row of experts.

    A row too few would replay each choice on the wrong token, and no routing at all would silently be no replay.
    """
    if not generation.token_ids:  # aborted before its first token
        return
    expected = num_prompt + len(generation.token_ids) - 1 - generation.routing_start
    routed = generation.routed_experts
    found = "no" if routed is None else f"{len(routed)} rows of"
    if routed is None or len(routed) != expected:
        raise EngineError(f"an engine returned {found} routed experts for {expected} forwarded tokens")
    some = routed[:: max(len(routed) // 64, 1)]
    if len(routed) and routed.shape[-1] > 1 and not some.any():  # vLLM 0.23 with MoE kernels that route by themselves
        raise EngineError("an engine returned expert 0 throughout: its kernels do not record the routing")
