"""What engines answer to a request for tokens, and what they must not."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np

from prl.orchestrator.rollout import Generation


class EngineError(RuntimeError):
    """An engine refused or failed; the message names the route, the status and the engine's own words."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.refused = 400 <= status < 500  # by an engine in good health


def parse_choice(choice: dict[str, Any], known: int) -> Generation:
    """A choice of /inference/v1/generate.

    known: version served when the request was sent, and so at most that of any token; for what the engine leaves
    unlabelled.
    """
    token_ids, logprobs = choice["token_ids"] or [], sampled_logprobs(choice)
    if len(logprobs) != len(token_ids):
        raise EngineError(f"an engine returned {len(token_ids)} tokens but {len(logprobs)} logprobs")
    versions = [known] * len(token_ids)
    for span in choice.get("weight_versions") or []:
        versions[span["start"] : span["end"]] = [int(span["version"])] * (span["end"] - span["start"])
    routed = choice.get("routed_experts")
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        versions=versions,
        finish_reason=choice["finish_reason"] or "stop",
        routed_experts=None if routed is None else np.load(io.BytesIO(base64.b64decode(routed)), allow_pickle=False),
    )


def sampled_logprobs(choice: dict[str, Any]) -> list[float]:
    """Of each token: a list of numbers from engines of a run, an object for each from a vLLM that is not ours."""
    if (flat := choice.get("token_logprobs")) is not None:
        return flat
    content = (choice.get("logprobs") or {}).get("content") or []
    return [entry["logprob"] for entry in content]


def check_routing(generation: Generation, num_prompt: int) -> None:
    """Raises EngineError unless every token but the last, which was never forwarded, has a row of experts.

    A row too few would replay each choice on the wrong token, and no routing at all would silently be no replay.
    """
    if not generation.token_ids:  # aborted before its first token
        return
    expected = num_prompt + len(generation.token_ids) - 1
    routed = generation.routed_experts
    found = "no" if routed is None else f"{len(routed)} rows of"
    if routed is None or len(routed) != expected:
        raise EngineError(f"an engine returned {found} routed experts for {expected} forwarded tokens")
    if routed.shape[-1] > 1 and not routed.any():  # vLLM 0.23 with MoE kernels that route by themselves
        raise EngineError("an engine returned expert 0 throughout: its kernels do not record the routing")
