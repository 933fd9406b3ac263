"""The two plain policies: play beside training within fixed bounds, or play and train in turns.

Owns: when the next group is drawn. Both leave it to the runtime where an episode plays, and pause nothing.
Called by: the driver and the simulator.
"""

from __future__ import annotations

from typing import Literal

from springtide.schedule.events import Action, Admit
from springtide.schedule.policy import Batch, Bounds, Policy, Wait, choose_batch, next_fed, stale
from springtide.schedule.readiness import Readiness


class FixedSplit:
    """Asynchronous rollout beside training: draw whenever the staleness gate and the concurrency allow.

    The gate is AReaL's, floor((submitted - 1) / groups) <= step + bound, with submitted = step * groups + pending, so
    that dropped groups give their place back (AReaL#588). It means pending < (bound + 1) * groups.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds

    def room(self, state: Readiness) -> int:
        b = self.bounds
        return min(b.concurrency - len(state.playing), (b.bound + 1) * b.groups - state.pending)

    def decide(self, state: Readiness) -> list[Action]:
        actions = stale(state, self.bounds)
        # One at a time: each admission changes the mixture's counts, which the caller applies before asking again.
        if self.room(state) > 0:
            actions.append(Admit(state.next_suite()))
        return actions

    def batch(self, state: Readiness) -> Batch | Wait:
        return choose_batch(state, self.bounds)

    def feed(self, state: Readiness) -> int | None:
        return next_fed(state, self.bounds)

    def blocked(self, state: Readiness) -> str:
        b, pending = self.bounds, state.pending
        if pending >= (b.bound + 1) * b.groups:
            return f"staleness gate: {pending} groups pending, at most {(b.bound + 1) * b.groups} at bound {b.bound}"
        if len(state.playing) >= b.concurrency:
            return f"concurrency: {b.concurrency} groups in flight"
        return "nothing"


class Synchronous:
    """Draw exactly one step's groups, then wait until they are trained and published. On-policy and reproducible.

    Groups dropped for equal rewards are refilled in whole waves, after every group of the wave has ended, so that what
    is played together never depends on timing.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._wave = 0  # admissions still due in the wave that is being drawn

    def decide(self, state: Readiness) -> list[Action]:
        if self._wave == 0 and not state.step_running and not state.playing:
            self._wave = self.bounds.groups - len(state.buffer)
        if self._wave <= 0:
            self._wave = 0
            return []
        self._wave -= 1
        return [Admit(state.next_suite())]

    def batch(self, state: Readiness) -> Batch | Wait:
        return choose_batch(state, self.bounds)

    def feed(self, state: Readiness) -> int | None:
        return next_fed(state, self.bounds)

    def blocked(self, state: Readiness) -> str:
        if state.step_running:
            return "synchronous: the trainer works on the last batch"
        return f"synchronous: {len(state.playing)} groups of this wave in flight"


def make_policy(name: Literal["synchronous", "fixed_split"], bounds: Bounds) -> Policy:
    """The policy of that name; see DESIGN's list for those to come."""
    return Synchronous(bounds) if name == "synchronous" else FixedSplit(bounds)
