"""What a scheduling policy is, and the rules that all of them obey.

Owns: the protocol, the bounds, how a cluster is first divided into roles, and the choice of a batch. Pure functions of
`Readiness`. Invariants: no group that is trained is older than the staleness bound; under `overage = wait` the trainer
waits for a group that would become too old, under `drop` a group that became too old, in flight or ready, is given up
and counted.
Called by: the driver and the simulator.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal, Protocol

from springtide.schedule.events import Abort, Action, Pipeline
from springtide.schedule.parts import GroupState
from springtide.schedule.readiness import Follower, Readiness


@dataclass(frozen=True, slots=True)
class Bounds:
    """What every policy obeys: groups a step, groups in flight at once, steps of staleness; episodes of a group;
    environments that can be open at once (None: as many as there are episodes). fewest: groups of the smallest step
    that a policy may ask for when generation falls behind (None: as the policy would)."""

    groups: int
    concurrency: int
    bound: int
    overage: Literal["wait", "drop"] = "wait"
    members: int = 1
    environments: int | None = None
    fewest: int | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks of each role at the start. lendable: of the trainer's, those that may play while it waits for data;
    sharded: all of them at once or none."""

    rollout: int
    reference: int
    trainer: int
    lendable: int = 0
    pipeline: Pipeline = "none"
    sharded: bool = False


@dataclass(frozen=True, slots=True)
class Cluster:
    """What there is to divide. trainers: the fewest ranks that hold the trainer's state. reference: there is none, it
    fits beside the trainer (an adapter's always does), or it is swapped in or lives on ranks of its own. sharded: the
    trainer's ranks hold parts of the weights, so that they are lent all at once or not at all. share: of the ranks,
    those that play; None: as the policy would. training: the share of all rank-seconds that training is predicted to
    take (a roofline's, or measured before), for policies that start from a prediction."""

    ranks: int
    reference: Literal["none", "resident", "swapped"] = "none"
    trainers: int = 1
    sharded: bool = False
    share: float | None = None
    training: float | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Train these visits now; the step takes `more` groups as they become ready (a pipeline that streams)."""

    visits: tuple[int, ...]
    more: int = 0


@dataclass(frozen=True, slots=True)
class Wait:
    """Not yet, and why: one predicate with its numbers."""

    cause: Literal["groups", "stale_group", "ranks"]
    reason: str


class Policy(Follower, Protocol):
    """Decides by what is ready. A policy may keep state of its own, as long as it follows from the events alone."""

    def decide(self, state: Readiness) -> list[Action]:
        """All actions that are due now. Called after every event, and again after its actions were carried out, until
        it returns none; the next call sees the events that they caused."""
        ...

    def batch(self, state: Readiness) -> Batch | Wait:
        """The groups of the next step. Asked while no step is under way."""
        ...

    def feed(self, state: Readiness) -> int | None:
        """The visit that the step under way takes next, or None. Asked after every event while `state.still` > 0."""
        ...

    def blocked(self, state: Readiness) -> str:
        """Why nothing is admitted now, as one predicate with its numbers (for progress, waits and the watchdog)."""
        ...


def stale(state: Readiness, bounds: Bounds) -> list[Action]:
    """Give up, under `overage = drop`, what is past the bound, in flight or ready."""
    oldest = state.step - bounds.bound
    if bounds.overage != "drop" or not any(birth < oldest for birth in (*state.births, *state.ready_births)):
        return []
    pending = (*state.playing.values(), *state.buffer.values())
    return [Abort(g.visit, "stale") for g in pending if state.staleness(g) > bounds.bound]


def choose_batch(state: Readiness, bounds: Bounds, *, stream: int | None = None) -> Batch | Wait:
    """The groups of the next step: every one that would be too old a step later, then the oldest ready ones.

    A batch has at least `bounds.groups` groups, and more only when more are at the bound. What is past it already
    (under `drop`, a group that became ready while a step ran) is left for the policy to drop, whichever is asked first.
    stream: begin with as many ready groups, if every group at the bound that still plays has a place among those that
    the step takes later (see `next_fed`).
    """
    newest = state.step - bounds.bound  # birth of a group that is at the bound
    late = sum(count for birth, count in state.births.items() if birth <= newest)
    usable = sum(count for birth, count in state.ready_births.items() if birth >= newest)
    begins = stream is not None and 0 < min(stream, bounds.groups) <= usable < bounds.groups
    if begins and (bounds.bound == 0 or usable + late <= bounds.groups):
        visits_now = tuple(sorted(g.visit for g in state.buffer.values() if g.birth >= newest))
        return Batch(visits_now, bounds.groups - len(visits_now))
    if late and bounds.overage == "wait" and bounds.bound > 0:
        held = (str(g.visit) for g in state.playing.values() if g.birth <= newest)
        visits = ", ".join(itertools.islice(held, 4))  # the oldest are drawn first, so this looks at few
        return Wait("stale_group", f"{late} groups at staleness bound {bounds.bound} still play (visits {visits})")
    if usable < bounds.groups:
        return Wait("groups", f"{usable} of {bounds.groups} groups ready, {len(state.playing)} in flight")
    ready = [g for g in state.ready() if state.staleness(g) <= bounds.bound]
    must = {g.visit for g in ready if state.staleness(g) == bounds.bound} if bounds.bound > 0 else set()
    chosen: list[GroupState] = [g for g in ready if g.visit in must]
    for group in ready:
        if len(chosen) >= bounds.groups:
            break
        if group.visit not in must:
            chosen.append(group)
    return Batch(tuple(sorted(g.visit for g in chosen)))


def next_fed(state: Readiness, bounds: Bounds) -> int | None:
    """The group that a step under way takes next, or None: of those ready the oldest, as long as every group at the
    bound that still plays keeps a place; a step later it would be too old."""
    if state.still == 0 or not state.buffer:
        return None
    newest = state.step - bounds.bound
    usable = [g for g in state.buffer.values() if g.birth >= newest]  # the others are to be dropped
    if not usable:
        return None
    group = min(usable, key=lambda g: g.birth)
    late = sum(count for birth, count in state.births.items() if birth <= newest) if bounds.bound > 0 else 0
    return group.visit if group.birth == newest or state.still > late else None
