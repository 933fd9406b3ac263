"""A policy of three parts: who goes where (placement), which rank does what (roles), and when a group is drawn (gates).

Owns: the order in which the parts are asked, and the gates: staleness, concurrency, environments, and
diversity of tasks. Invariants: the parts see every event through `observe` and keep nothing that
follows from anything else; at an edge a policy asks for `Sync` once, last.
Called by: `registry.py`, which puts the policies together.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Protocol

from springtide.schedule.events import Action, Admit, Began, Event, RankLeft, Role, RoleChanged, SwitchRole, Sync
from springtide.schedule.parts import Episode, RankState
from springtide.schedule.policy import Batch, Bounds, Layout, Wait, choose_batch, next_fed, stale
from springtide.schedule.readiness import Readiness

_DIVERSE = 2.0  # times its share of the groups in flight that a suite may have, so that one that hangs leaves room


class Placement(Protocol):
    """Where episodes play, and which are paused."""

    def observe(self, state: Readiness, event: Event, touched: list[Episode]) -> None: ...
    def follow(self, state: Readiness) -> None: ...
    def decide(self, state: Readiness, away: set[str]) -> list[Action]:
        """Pauses, resumptions, routes. away: ranks that are about to stop playing."""
        ...

    def full(self, state: Readiness) -> str | None:
        """Why no further group is taken, or None."""
        ...

    def probes(self, state: Readiness, suite: str) -> bool:
        """Whether the next group of the suite sends its first member ahead."""
        ...


class Roles:
    """Ranks keep the role they joined with. Base of those that change it.

    asked: switches that were asked for and not done, with the step in which."""

    def __init__(self, bounds: Bounds, layout: Layout) -> None:
        self.bounds, self.layout = bounds, layout
        self.pipeline = layout.pipeline
        self.fetch = bounds.groups
        self.streams = layout.pipeline == "streaming"
        self.asked: dict[str, tuple[Role, int]] = {}
        self._published = -1

    def observe(self, state: Readiness, event: Event, touched: list[Episode]) -> None:
        if self.asked and isinstance(event, (RoleChanged, RankLeft)):
            self.asked.pop(event.rank, None)
        elif isinstance(event, Began):
            self.asked.clear()
            self._published = -1

    def decide(self, state: Readiness) -> list[Action]:
        if not state.edge or self._published == state.step:
            return []
        self._published = state.step
        return [*self.at_edge(state), Sync()]

    def at_edge(self, state: Readiness) -> list[Action]:
        """What changes between an update and its publication."""
        return []

    def starts(self, state: Readiness) -> int:
        """Groups with which a step that streams begins: one for every rank that trains."""
        return max(1, state.roles["trainer"])

    def unready(self, state: Readiness) -> str | None:
        """Why no step may start although its groups are ready, or None."""
        return None

    def holds(self, state: Readiness) -> str | None:
        """Why no group is drawn although the gates are open, or None."""
        return None

    def away(self, state: Readiness) -> set[str]:
        """Ranks that play and were asked to do something else."""
        if not self.asked:
            return set()
        # What was not done by the end of the next step was refused.
        self.asked = {name: ask for name, ask in self.asked.items() if state.step <= ask[1] + 1}
        return {name for name, (role, _) in self.asked.items() if role != "rollout"}

    def ask(self, state: Readiness, rank: RankState, role: Role) -> SwitchRole:
        self.asked[rank.name] = (role, state.step)
        return SwitchRole(rank.name, role)


class Streaming(Roles):
    """A step takes groups as they become ready, from as many on as there are trainer ranks (StreamRL)."""

    def __init__(self, bounds: Bounds, layout: Layout) -> None:
        super().__init__(bounds, layout)
        self.streams = True


class ClusterPolicy:
    """The policy. gates: when a group is drawn; `Gates` if not given."""

    def __init__(self, bounds: Bounds, placement: Placement, roles: Roles, gates: Gates | None = None) -> None:
        self.bounds, self.placement, self.roles = bounds, placement, roles
        self.gates = gates or Gates(bounds)
        self._state: Readiness | None = None

    def observe(self, state: Readiness, event: Event, touched: list[Episode]) -> None:
        self._state = state
        self.placement.observe(state, event, touched)
        self.roles.observe(state, event, touched)
        self.gates.observe(state, event)

    def decide(self, state: Readiness) -> list[Action]:
        if self._state is not state:  # nobody told it to follow: it starts from what it sees
            self._state = state
            state.follow(self)
            self.placement.follow(state)
        actions = self.roles.decide(state) or stale(state, self.bounds) or self.gates.gives_up(state)
        if actions:
            return actions
        actions = self.placement.decide(state, self.roles.away(state))
        if actions or self.closed(state) is not None:
            return actions
        suite = self.gates.suite(state)
        # One at a time: each admission changes the mixture's counts, which the caller applies before asking again.
        return [] if suite is None else [Admit(suite, self.placement.probes(state, suite))]

    def closed(self, state: Readiness) -> str | None:
        """Why no group is drawn, or None."""
        if state.held:
            return "held: the run has not begun, evaluates before it draws, or ends"
        return self.gates.closed(state, self.roles.fetch) or self.roles.holds(state) or self.placement.full(state)

    def batch(self, state: Readiness) -> Batch | Wait:
        fetch = self.roles.fetch
        bounds = self.bounds if fetch == self.bounds.groups else replace(self.bounds, groups=fetch)
        choice = choose_batch(state, bounds, stream=self.roles.starts(state) if self.roles.streams else None)
        if isinstance(choice, Batch) and (reason := self.roles.unready(state)) is not None:
            return Wait("ranks", reason)
        return choice

    def feed(self, state: Readiness) -> int | None:
        return next_fed(state, self.bounds)

    def blocked(self, state: Readiness) -> str:
        reason = self.closed(state)
        if reason is None and self.gates.suite(state) is None:
            reason = f"diversity: each suite has {_DIVERSE:g} times its share of the groups in flight"
        return reason or "nothing"


class Gates:
    """AReaL's staleness gate, groups in flight, environments; no suite beyond twice its share of what is in flight."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds

    def observe(self, state: Readiness, event: Event) -> None:
        """Nothing is kept between events."""

    def closed(self, state: Readiness, fetch: int) -> str | None:
        b, most = self.bounds, (self.bounds.bound + 1) * fetch
        if state.pending >= most:
            return f"staleness gate: {state.pending} groups pending, at most {most} at bound {b.bound}"
        if len(state.playing) >= b.concurrency:
            return f"concurrency: {b.concurrency} groups in flight"
        return self.crowded(state)

    def crowded(self, state: Readiness) -> str | None:
        """Whether the environments are taken. A group larger than all of them is played alone."""
        b = self.bounds
        if b.environments is not None and state.alive and state.alive + b.members > b.environments:
            return f"environments: {state.alive} of {b.environments} open, a group needs {b.members}"
        return None

    def gives_up(self, state: Readiness) -> list[Action]:
        """Groups to be aborted."""
        return []

    def suite(self, state: Readiness) -> str | None:
        most = min(self.bounds.concurrency, (self.bounds.bound + 1) * self.bounds.groups)
        if len(state.mixture) == 1:
            return state.next_suite()
        free = [
            suite
            for suite, share in state.mixture.items()
            if state.playing_of[suite] < max(1, math.ceil(_DIVERSE * share * most))
        ]
        return state.next_suite(free) if free else None
