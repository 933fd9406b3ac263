"""When to draw the next group, and which ready groups make a step.

Owns: the admission policies and the choice of a batch. Pure functions of `Readiness`. Invariants: no group that is
trained is older than the staleness bound; under `overage = wait` the trainer waits for a group that would become
too old, under `drop` a group that became too old, in flight or ready, is given up and counted.
Called by: the driver and the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from springtide.schedule.readiness import Abort, Action, Admit, GroupState, Readiness


@dataclass(frozen=True, slots=True)
class Bounds:
    """What every policy obeys: groups a step, groups in flight at once, steps of staleness."""

    groups: int
    concurrency: int
    bound: int
    overage: Literal["wait", "drop"] = "wait"


class Policy(Protocol):
    """Decides which groups to draw. Called after every event; returns all actions that are due now."""

    def decide(self, state: Readiness) -> list[Action]: ...

    def blocked(self, state: Readiness) -> str:
        """Why nothing is admitted now, as one predicate with its numbers (for progress, waits and the watchdog)."""
        ...


class FixedSplit:
    """Asynchronous rollout beside training: draw whenever the staleness gate and the concurrency allow.

    The gate is AReaL's, floor((submitted - 1) / groups) <= step + bound, with submitted = step * groups + pending, so
    that dropped groups give their place back (AReaL#588). It means pending < (bound + 1) * groups.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds

    def room(self, state: Readiness) -> int:
        b = self.bounds
        pending = len(state.groups) + len(state.training)
        return min(b.concurrency - len(state.in_flight()), (b.bound + 1) * b.groups - pending)

    def decide(self, state: Readiness) -> list[Action]:
        actions: list[Action] = []
        if self.bounds.overage == "drop":
            late = (g for g in state.groups.values() if state.staleness(g) > self.bounds.bound)
            actions += [Abort(g.visit, "stale") for g in late]
        # One at a time: each admission changes the mixture's counts, which the caller applies before asking again.
        if self.room(state) > 0:
            actions.append(Admit(state.next_suite()))
        return actions

    def blocked(self, state: Readiness) -> str:
        b, pending = self.bounds, len(state.groups) + len(state.training)
        if pending >= (b.bound + 1) * b.groups:
            return f"staleness gate: {pending} groups pending, at most {(b.bound + 1) * b.groups} at bound {b.bound}"
        if len(state.in_flight()) >= b.concurrency:
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
        if self._wave == 0 and not state.step_running and not state.in_flight():
            self._wave = self.bounds.groups - len(state.ready())
        if self._wave <= 0:
            self._wave = 0
            return []
        self._wave -= 1
        return [Admit(state.next_suite())]

    def blocked(self, state: Readiness) -> str:
        if state.step_running:
            return "synchronous: the trainer works on the last batch"
        return f"synchronous: {len(state.in_flight())} groups of this wave in flight"


@dataclass(frozen=True, slots=True)
class Batch:
    """Train these visits now."""

    visits: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Not yet, and why: one predicate with its numbers."""

    cause: Literal["groups", "stale_group"]
    reason: str


def choose_batch(state: Readiness, bounds: Bounds) -> Batch | Wait:
    """The groups of the next step: every one that would be too old a step later, then the oldest ready ones.

    A batch has at least `bounds.groups` groups, and more only when more are at the bound. What is past it already
    (under `drop`, a group that became ready while a step ran) is left for the policy to drop, whichever is asked first.
    """
    late = [g for g in state.in_flight() if state.staleness(g) >= bounds.bound]
    if late and bounds.overage == "wait" and bounds.bound > 0:
        visits = ", ".join(str(g.visit) for g in late[:4])
        return Wait("stale_group", f"{len(late)} groups at staleness bound {bounds.bound} still play (visits {visits})")
    ready = [g for g in state.ready() if state.staleness(g) <= bounds.bound]
    must = {g.visit for g in ready if state.staleness(g) == bounds.bound} if bounds.bound > 0 else set()
    if len(ready) < bounds.groups:
        return Wait("groups", f"{len(ready)} of {bounds.groups} groups ready, {len(state.in_flight())} in flight")
    chosen: list[GroupState] = [g for g in ready if g.visit in must]
    for group in ready:
        if len(chosen) >= bounds.groups:
            break
        if group.visit not in must:
            chosen.append(group)
    return Batch(tuple(sorted(g.visit for g in chosen)))


def make_policy(name: Literal["synchronous", "fixed_split"], bounds: Bounds) -> Policy:
    """The policy of that name; see DESIGN's list for those to come."""
    return Synchronous(bounds) if name == "synchronous" else FixedSplit(bounds)
