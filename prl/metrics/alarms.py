"""Alarms: what is wrong with a run that goes on, told from its metrics by name, with what to look at.

Each looks at the last `logging.alarms.window` optimizer steps, so that a single odd step is none, and is over when they
are good again. What is normal for entropy and lengths is what the first `window` steps had.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from prl.config.schema import RunConfig
from prl.config.world import takes_turns
from prl.metrics.reader import Row

Kind = Literal[
    "entropy_collapse",
    "mismatch",
    "truncated",
    "no_signal",
    "dropped_stale",
    "failing_environment",
    "length_runaway",
    "not_finite",
    "trainer_idle",
    "engines_idle",
    "frozen_weights",
]
REMEDIES: dict[Kind, str] = {
    "entropy_collapse": "raise algo.entropy_coef or lower optim.lr; the policy tries nothing new any more",
    "mismatch": "the engines do not sample from the policy that is trained: look at weight updates, chat template,"
    " precision (model.fp8) and, for mixtures of experts, router replay",
    "truncated": "raise inference.sampling.max_tokens or seq_len, or look whether completions end (chat template,"
    " end-of-turn token)",
    "no_signal": "all rollouts of a group have the same reward: other tasks, a finer reward, a larger algo.group_size",
    "dropped_stale": "rollouts take longer than algo.max_off_policy_steps allow: raise it, or lower algo.batch_size",
    "failing_environment": "look at failures.jsonl of the run, last_rollout_error in the metrics and logs/env.*.log",
    "length_runaway": "look whether the reward pays for length; algo.overlong_buffer, or a limit in the environment",
    "not_finite": "lower optim.lr, set optim.max_grad_norm, look at the rollouts of skipped_groups in the metrics",
    "trainer_idle": "more or faster engines: fewer trainer GPUs, longer concurrency, a slow environment",
    "engines_idle": "more trainer GPUs or fewer engines, or a larger algo.max_off_policy_steps",
    "frozen_weights": "optim.lr is too small for the precision of the weights, or nothing is trained",
}


@dataclass(frozen=True)
class Alarm:
    """One that is on.

    Attributes:
        since: optimizer step at which it came on.
        message: what was seen, with the limit and its key, and what to do.
    """

    kind: Kind
    since: int
    message: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Series:
    """A metric's first and last `window` values, one a step."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.first: list[float] = []
        self.last: deque[float] = deque(maxlen=window)

    def add(self, value: float) -> None:
        if len(self.first) < self.window:
            self.first.append(value)
        self.last.append(value)

    @property
    def is_full(self) -> bool:
        return len(self.last) == self.window

    @property
    def has_reference(self) -> bool:
        """Whether the last values are others than the first ones."""
        return self.is_full and len(self.first) == self.window and list(self.last) != self.first


class Alarms:
    """Of one run. Feed it the rows of the trainer and the orchestrator in their order; `active` says what is on."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.limits = config, config.logging.alarms
        self.active: dict[Kind, Alarm] = {}
        self.series: dict[str, Series] = {}
        self.waiting: dict[str, tuple[float, int]] = {}  # as `_failed_shares`, of rollouts that a step waits for
        self.step = 0  # of the newest row that was looked at: roles are not at the same one

    def observe(self, role: str, row: Row) -> list[str]:
        """Take one row in.

        Args:
            role: "trainer" or "orchestrator".

        Returns: a line for each alarm that came on or is over.
        """
        step = row.get("step")
        if not isinstance(step, int) or not self._take(role, row):
            return []
        self.step = step
        found = self._find()
        told = [f"alarm {kind} since step {self.step}: {found[kind]}" for kind in found if kind not in self.active]
        told += [f"alarm {kind} is over at step {self.step}" for kind in self.active if kind not in found]
        since = {kind: alarm.since for kind, alarm in self.active.items()}
        self.active = {kind: Alarm(kind, since.get(kind, self.step), text) for kind, text in found.items()}
        return told

    def numbers(self) -> dict[str, int]:
        """For a metrics row: every alarm as 0 or 1, and how many are on."""
        return {"active": len(self.active), **{kind: int(kind in self.active) for kind in REMEDIES}}

    # --- what is seen ---------------------------------------------------------------------------------------------

    def _take(self, role: str, row: Row) -> bool:
        """Whether it is the row of a step."""
        if role == "trainer" and "step_skipped" in row:
            seen = {key: row.get(key) for key in TRAINER_KEYS}
        elif role == "orchestrator" and "reward" in row:
            seen = {key: row.get(key) for key in ORCHESTRATOR_KEYS}
            seen |= {f"failed/{env}": share for env, (share, _) in _failed_shares(row, "").items()}
            self.waiting = {}
        elif role == "orchestrator" and any(key.startswith(WAITING) for key in row):
            self.waiting, seen = _failed_shares(row, WAITING), {}
        elif role == "orchestrator" and _is_number(row.get("overlap")) and _is_number(row.get("trainer_busy_s")):
            busy_s = row["trainer_busy_s"]
            seen = {"trainer_busy_s": busy_s, "engines_wait_s": (1 - row["overlap"]) * busy_s}
        else:
            return False
        for key, value in seen.items():
            if _is_number(value):
                self.series.setdefault(key, Series(self.limits.window)).add(float(value))  # type: ignore[arg-type]
        return True

    def median_of(self, key: str) -> float | None:
        """Of the last steps; None before there are enough of them."""
        series = self.series.get(key)
        return median(series.last) if series is not None and series.is_full else None

    def ratio_of(self, key: str) -> float | None:
        """Of the last steps' median to the first steps'."""
        series = self.series.get(key)
        if series is None or not series.has_reference or (reference := median(series.first)) <= 0:
            return None
        return median(series.last) / reference

    # --- what is wrong --------------------------------------------------------------------------------------------

    def _find(self) -> dict[Kind, str]:
        """Alarms that are on by now, with what was seen."""
        told: dict[Kind, str] = {}
        for look in LOOKS:
            limit = getattr(self.limits, look.limit)
            if limit is None or (look.not_in_turns and self.takes_turns):
                continue
            for name in self._series_of(look.series):
                value = look.value(self, name)
                is_wrong = value is not None and (value < limit if look.below else value > limit)
                if is_wrong:
                    env = name.removeprefix(look.series)
                    seen = f"{look.what}{' of ' + env if env else ''} is {value:.3g}"
                    text = f"{seen} (logging.alarms.{look.limit}={limit:g}): {REMEDIES[look.kind]}"
                    told.setdefault(look.kind, text)
        if (failing := self._failing_while_waited_for()) is not None:
            told.setdefault("failing_environment", failing)
        changed = self.series.get("weights_changed")
        if self.limits.weights_unchanged and changed is not None and changed.is_full and max(changed.last) == 0:
            told["frozen_weights"] = (
                f"no weight has changed for {self.limits.window} steps: {REMEDIES['frozen_weights']}"
            )
        return told

    def _failing_while_waited_for(self) -> str | None:
        limit = self.limits.failed_rollouts
        for env, (share, ended) in self.waiting.items():
            if limit is not None and share > limit and ended >= LEAST_ENDED:
                whose = "" if env == "all" else f" of {env}"
                seen = f"of {ended} rollouts{whose} that the next step waits for {share * 100:.0f} % failed"
                return f"{seen} (logging.alarms.failed_rollouts={limit:g}): {REMEDIES['failing_environment']}"
        return None

    def _series_of(self, name: str) -> list[str]:
        """One, or one for each environment."""
        return [key for key in self.series if key.startswith(name)] if name.endswith("/") else [name]

    @property
    def takes_turns(self) -> bool:
        """Whether waiting is by design: roles share devices, or training is synchronous."""
        return takes_turns(self.config) or self.config.algo.max_off_policy_steps == 0

    def dropped_of(self, key: str) -> float | None:
        """Share of the last steps' groups; a step's own number says little."""
        series = self.series.get(key)
        if series is None or not series.is_full:
            return None
        trained = len(series.last) * self.config.algo.batch_size / self.config.algo.group_size
        return sum(series.last) / (sum(series.last) + trained)

    def share_of(self, key: str) -> float | None:
        """Of the last steps' time: who waits does so in some of them and not in others."""
        series, whole = self.series.get(key), self.series.get(TIMES[key])
        if series is None or whole is None or not series.is_full or sum(whole.last) <= 0:
            return None
        return sum(series.last) / sum(whole.last)

    def sum_of(self, key: str) -> float | None:
        """Over the last steps; the first one counts at once."""
        series = self.series.get(key)
        return None if series is None else sum(series.last)


TIMES = {"wait_for_batch_s": "step_s", "engines_wait_s": "trainer_busy_s"}  # waiting -> what it is a part of


@dataclass(frozen=True)
class Look:
    """One thing that is looked at.

    Attributes:
        limit: its key in `logging.alarms`.
        series: the metric; with a slash at its end one for each environment.
        value: a method of Alarms that makes one number of it.
        below: whether less than the limit is wrong, not more.
        not_in_turns: whether it says nothing where roles wait for each other by design.
    """

    kind: Kind
    limit: str
    series: str
    what: str
    value: Callable[[Alarms, str], float | None] = Alarms.median_of
    below: bool = False
    not_in_turns: bool = False


LOOKS = [
    Look("entropy_collapse", "entropy_ratio", "entropy", "entropy over the first steps'", Alarms.ratio_of, below=True),
    Look("mismatch", "mismatch_kl_mean", "mismatch_kl_mean", "mean mismatch KL"),
    Look("mismatch", "mismatch_kl_p999", "mismatch_kl_p999", "the 99.9 % quantile of the mismatch KL"),
    Look("truncated", "truncated", "truncated", "the share of truncated rollouts"),
    Look("no_signal", "no_signal", "no_signal_groups", "the share of groups without signal"),
    Look("dropped_stale", "dropped_stale", "dropped_stale", "the share of groups that were too old", Alarms.dropped_of),
    Look("failing_environment", "failed_rollouts", "failed/", "the share of failed rollouts"),
    Look("length_runaway", "length_ratio", "completion_tokens", "length over the first steps'", Alarms.ratio_of),
    Look("not_finite", "steps_skipped", "step_skipped", "the number of steps that were not finite", Alarms.sum_of),
    Look("trainer_idle", "trainer_idle", "wait_for_batch_s", "the trainer's share of waiting",
         Alarms.share_of, not_in_turns=True),
    Look("engines_idle", "engines_idle", "engines_wait_s", "the engines' share of waiting",
         Alarms.share_of, not_in_turns=True),
]  # fmt: skip
TRAINER_KEYS = (
    *("entropy", "mismatch_kl_mean", "mismatch_kl_p999", "step_skipped", "weights_changed"),
    *("wait_for_batch_s", "step_s"),
)
WAITING = "waiting/"  # before "outcome/*": of rollouts that a step waits for
LEAST_ENDED = 20  # of them, before a share says something
ORCHESTRATOR_KEYS = ("truncated", "no_signal_groups", "dropped_stale", "completion_tokens")


def _failed_shares(row: Mapping[str, Any], before: str) -> dict[str, tuple[float, int]]:
    """Environment ("all" where there is one) -> share of its rollouts that ended otherwise than by the policy, and how
    many ended. `before`: what the keys begin with.
    """
    counts: dict[str, dict[str, float]] = {}
    for key, value in row.items():
        if key.startswith(f"{before}outcome/") and _is_number(value):
            *env, outcome = key.removeprefix(f"{before}outcome/").split("/")
            counts.setdefault("/".join(env) or "all", {})[outcome] = value
    return {
        env: (1 - outcomes.get("policy", 0) / total, int(total))
        for env, outcomes in counts.items()
        if (total := sum(outcomes.values()))
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
