"""A staleness gate that leaves stragglers time.

Owns: how many groups may be pending, at most what the staleness bound allows. At that limit every group is trained at
the bound, so one straggler holds up a trainer that has all it needs. After each step the limit falls by a quarter of a
step's groups where the trainer waited longer for groups at the bound than for data, and rises by as much where it was
the other way round; where it waited for neither for 2% of the step, it stays. Fewer pending groups are also fresher.
Called by: `registry.py`, for `springtide`.
"""

from __future__ import annotations

import math

from springtide.schedule.composed import Gates
from springtide.schedule.events import Began, Event, StepStarted
from springtide.schedule.policy import Bounds
from springtide.schedule.readiness import Readiness

_MATTERS = 0.02  # of a step
_LEAST = 1.25  # steps' groups: one that is trained, and some of the next


class Slack(Gates):
    """limit: groups pending."""

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._begin()

    def _begin(self) -> None:
        self.limit = (self.bounds.bound + 1) * self.bounds.groups
        self._late_s = self._short_s = self._seen = 0.0
        self._waits: str | None = None  # for what, since `_seen`

    def observe(self, state: Readiness, event: Event) -> None:
        if isinstance(event, Began):
            self._begin()
            self._seen = state.now
        if self._waits == "late":
            self._late_s += state.now - self._seen
        elif self._waits == "short":
            self._short_s += state.now - self._seen
        self._seen = state.now
        self._waits = None if state.step_running else self._cause(state)
        if isinstance(event, StepStarted):
            self._adapt(state)

    def _cause(self, state: Readiness) -> str | None:
        newest = state.step - self.bounds.bound
        if sum(count for birth, count in state.ready_births.items() if birth >= newest) < self.bounds.groups:
            return "short"
        return "late" if any(birth <= newest for birth in state.births) else None

    def _adapt(self, state: Readiness) -> None:
        bounds, step = self.bounds, state.step_s.value
        late, short = self._late_s, self._short_s
        self._late_s = self._short_s = 0.0
        if step is None or max(late, short) < _MATTERS * step:
            return
        change = math.ceil(bounds.groups / 4)
        least = min(math.ceil(_LEAST * bounds.groups), (bounds.bound + 1) * bounds.groups)
        most = (bounds.bound + 1) * bounds.groups
        self.limit = max(least, self.limit - change) if late > short else min(most, self.limit + change)

    def closed(self, state: Readiness, fetch: int) -> str | None:
        if state.pending >= self.limit:
            return f"staleness gate: {state.pending} groups pending, at most {self.limit}, so that none comes too late"
        return super().closed(state, fetch)
