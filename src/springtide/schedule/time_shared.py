"""Trainer ranks that play while the trainer waits, all at once.

Owns: the roles of the colocated `synchronous` policy: every lendable rank plays until the step's groups are ready and
no evaluation runs, then all train (sleep and wake of verl's hybrid engine, slime's colocate; tiderl_async 3.1).
Called by: `registry.py`.
"""

from __future__ import annotations

from springtide.schedule.composed import Roles
from springtide.schedule.events import Action, Event, RankJoined, RankLeft, Role, RoleChanged
from springtide.schedule.parts import Episode
from springtide.schedule.policy import Bounds, Layout
from springtide.schedule.readiness import Readiness


class TimeShared(Roles):
    """Lend all while `lends`, else bring all home."""

    def __init__(self, bounds: Bounds, layout: Layout) -> None:
        super().__init__(bounds, layout)
        self._want: Role | None = None  # what lendable ranks were last told to do; None: it is to be told anew
        self._out = 0  # lendable ranks that play

    def observe(self, state: Readiness, event: Event, touched: list[Episode]) -> None:
        super().observe(state, event, touched)
        if isinstance(event, (RankJoined, RankLeft, RoleChanged)):
            self._want = None
            self._out = sum(r.origin == "trainer" and r.role == "rollout" for r in state.ranks.values())

    def lends(self, state: Readiness) -> bool:
        return self.ready(state) < self.fetch or state.evaluating or bool(state.evaluations)

    def ready(self, state: Readiness) -> int:
        """Groups that the next step could take."""
        newest = state.step - self.bounds.bound
        return sum(count for birth, count in state.ready_births.items() if birth >= newest)

    def decide(self, state: Readiness) -> list[Action]:
        if state.step_running:
            return super().decide(state)
        want: Role = "rollout" if self.lends(state) else "trainer"
        if want == self._want:
            return []
        self._want = want
        return [
            self.ask(state, rank, want)
            for rank in state.ranks.values()
            if rank.origin == "trainer" and rank.lendable and rank.role != want and rank.name not in self.asked
        ]

    def unready(self, state: Readiness) -> str | None:
        return f"{self._out} trainer ranks still play" if self._out else None
