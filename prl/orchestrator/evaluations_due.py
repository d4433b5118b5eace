"""Which versions of the policy are evaluated, and which of these evaluations are still to come."""

from __future__ import annotations

from prl.config.schema import EvalConfig


class EvaluationsDue:
    """A version is
        none's     if `eval` does not ask for it, or a stop leaves it to the run that resumes;
        to come    from `published` on;
        evaluated  when its row is on disk (`done`), in this attempt or an earlier one. It is never evaluated again;
        lost       when all that was done about it is over (`over`) and a stop came in between.

    The last version may be evaluated when all else is over instead (`follows_at_end`).
    """

    def __init__(self, config: EvalConfig) -> None:
        self.config = config
        self.evaluated: set[int] = set()
        self.to_come: set[int] = set()
        self.first = 0  # version that the run began with
        self.stop_at: int | None = None  # first step that nobody will train

    def resume(self, evaluated: set[int], first: int = 0) -> None:
        """Behind an attempt that has evaluated these, of a run that began with the version `first`."""
        self.evaluated, self.first = evaluated, first

    def stop(self, at: int) -> None:
        """The first step that nobody will train is known."""
        self.stop_at = at

    def published(self, version: int) -> None:
        if self.follows(version):
            self.to_come.add(version)

    def done(self, version: int) -> None:
        self.evaluated.add(version)

    def over(self, version: int) -> None:
        """An update to `version` is over, with whatever came behind it."""
        if not self.follows(version):  # else another update may be evaluating it
            self.to_come.discard(version)

    def _is_regular(self, version: int) -> bool:
        return bool(self.config.interval) and version > 0 and version % self.config.interval == 0

    def follows(self, version: int) -> bool:
        """Whether an evaluation follows when the engines have got `version`."""
        if version in self.evaluated or not self.config.interval:
            return False
        if version == self.first and self.config.at_start:
            return True
        # a stop leaves it to the run that resumes, if that begins with this version
        return self._is_regular(version) and (self.stop_at is None or version < self.stop_at - 1)

    def follows_at_end(self, version: int) -> bool:
        """Whether the final policy is evaluated when all else is over; where it is due anyway, its update does it."""
        wanted = bool(self.config.interval) and self.config.at_end
        return wanted and not self._is_regular(version) and version not in self.evaluated

    def lost_by(self, step: int) -> bool:
        """Whether a run that resumes from `step` would miss an evaluation of an older version that is to come. Not if
        it is to stop, which waits for none. Called from other threads, too.
        """
        return self.stop_at is None and any(version < step for version in tuple(self.to_come))
