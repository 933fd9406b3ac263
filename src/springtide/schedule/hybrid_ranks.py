"""verl's dynamic schedule: trainer ranks host engines that are woken when samples run short.

Owns: the rules and constants of verl's `fully_async_policy/dynamic_schedule/default_policy.py` as tiderl_async 2.2 has
them, in groups. Standalone ranks always play; all lendable ranks play with them between two steps, if

    gap = int(ratio * required) - surplus > 0    and    gap * per_sample_s > switch_cost_s,

until the surplus (groups ready beyond those consumed) fills the gap. What a step still had to wait for afterwards moves
`ratio` up by that share, within 0.02 and 0.1, a step without waiting moves it down by 0.02. Ours: the ratio never falls
below 0, where the code lets it, so a long calm does not put off what follows.
Called by: `registry.py`.
"""

from __future__ import annotations

from springtide.schedule.events import Began, Event, RoleChanged, StepEnded, StepStarted
from springtide.schedule.parts import Episode
from springtide.schedule.policy import Bounds, Layout
from springtide.schedule.readiness import Readiness
from springtide.schedule.time_shared import TimeShared

_RATIO, _UP, _DOWN = 0.3, (0.02, 0.1), 0.02
_PER_SAMPLE_S = 1000.0  # before any was waited for: deliberately pessimistic
_SWITCH_S = 10.0  # there and back, before any was measured


class HybridRanks(TimeShared):
    """ratio: of a step's groups that hybrid ranks help to make before it; per_sample_s: measured wait for a group."""

    def __init__(self, bounds: Bounds, layout: Layout) -> None:
        super().__init__(bounds, layout)
        self._begin()

    def _begin(self) -> None:
        self.ratio, self.per_sample_s = _RATIO, _PER_SAMPLE_S
        self._active = True  # a run begins with nothing
        self._short: tuple[float, int] | None = None  # since when only standalone ranks play, and for how many groups

    def observe(self, state: Readiness, event: Event, touched: list[Episode]) -> None:
        super().observe(state, event, touched)
        if isinstance(event, Began):
            self._begin()
        elif isinstance(event, StepEnded):
            gap = self.gap(state)
            cost = 2 * state.costs["switch"].value if "switch" in state.costs else _SWITCH_S  # type: ignore[operator]
            self._active = gap > 0 and gap * self.per_sample_s > cost
            self._short = None if self._active else (state.now, self._missing(state))
        elif isinstance(event, RoleChanged) and not self._out and not state.step_running:
            self._short = (state.now, self._missing(state))
        elif isinstance(event, StepStarted):
            self._learn(state)
        if self._active and not state.step_running and self.gap(state) <= 0:
            self._active = False

    def gap(self, state: Readiness) -> int:
        return int(self.ratio * self.fetch) - self.ready(state)

    def lends(self, state: Readiness) -> bool:
        return self._active

    def _missing(self, state: Readiness) -> int:
        return max(0, self.fetch - self.ready(state))

    def _learn(self, state: Readiness) -> None:
        since, missing = self._short or (state.now, 0)
        self._short = None
        if missing and state.now > since:
            self.per_sample_s = (state.now - since) / missing
            self.ratio = min(1.0, self.ratio + min(max(missing / self.fetch, _UP[0]), _UP[1]))
        else:
            self.ratio = max(0.0, self.ratio - _DOWN)
