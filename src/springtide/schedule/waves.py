"""Gates of the policies that draw a step's groups together: whole waves, or one step ahead.

Owns: `Waves` (synchronous: one step's groups, then none until they are trained and published) and `OneAhead`
(verl's one-step-off: the next step's groups play while this one's are trained, never more).
Called by: `registry.py`.
"""

from __future__ import annotations

from springtide.schedule.composed import Gates
from springtide.schedule.events import Admitted, Began, Event
from springtide.schedule.policy import Bounds
from springtide.schedule.readiness import Readiness


class Waves(Gates):
    """Groups dropped for equal rewards are refilled in whole waves, after every group of the wave has ended, so that
    what is played together never depends on timing."""

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._due = 0  # admissions of the wave that is being drawn

    def observe(self, state: Readiness, event: Event) -> None:
        if isinstance(event, Began):
            self._due = 0
        elif isinstance(event, Admitted) and not event.evaluation:
            first = len(state.playing) == 1
            self._due = (self.bounds.groups - len(state.buffer) if first else self._due) - 1

    def closed(self, state: Readiness, fetch: int) -> str | None:
        if state.step_running:
            return "synchronous: the trainer works on the last batch"
        due = self._due if state.playing else self.bounds.groups - len(state.buffer)
        if due <= 0:
            return f"synchronous: {len(state.playing)} groups of this wave in flight"
        return self.crowded(state)

    def suite(self, state: Readiness) -> str | None:
        return state.next_suite()  # a wave is drawn whole, and has no room to leave


class OneAhead(Gates):
    """One step's groups in flight or ready, beside those that are trained; that bounds staleness to one step."""

    def closed(self, state: Readiness, fetch: int) -> str | None:
        drawn = len(state.playing) + len(state.buffer)
        if drawn >= fetch:
            return f"one step off: {drawn} groups of the next step's {fetch} are drawn"
        return super().closed(state, fetch)
