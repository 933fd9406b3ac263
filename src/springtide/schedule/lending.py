"""ERS, and trainer ranks that play while the trainer waits for data.

Owns: the roles of `springtide`. Beside one rank a step (`ers.Elastic`), the lendable trainer ranks that are at home go
out together when a step has ended, if what is missing from the next is made sooner so, both changes of role included;
and come home early enough to train at once when it is complete. A run and an evaluation start with all of them out.
This is what a static split cannot do: where the bottleneck moves within a step, the ranks follow it.
Called by: `registry.py`.
"""

from __future__ import annotations

from springtide.schedule.ers import Elastic, Move
from springtide.schedule.events import (
    Action,
    Began,
    Evaluation,
    Event,
    RankJoined,
    RankLeft,
    Ready,
    Role,
    RoleChanged,
    StepEnded,
)
from springtide.schedule.forecast import groups_per_s
from springtide.schedule.parts import Episode
from springtide.schedule.readiness import Readiness

_SAVES = 0.1  # of the wait, at least
_SWITCH_S = 5.0  # one change of role: half of verl's guess for both
_NEWS = frozenset({Began, Evaluation, RankJoined, RankLeft, Ready, RoleChanged, StepEnded})


class Lending(Elastic):
    """kept: trainer ranks that play for longer (ERS); the others go out and home together."""

    def _begin(self) -> None:
        super()._begin()
        self.kept: set[str] = set()
        self._lends = True  # a run begins with nothing
        self._want: Role | None = None
        self._out = 0  # ranks that are to come home before a step

    def observe(self, state: Readiness, event: Event, touched: list[Episode]) -> None:
        super().observe(state, event, touched)
        if type(event) not in _NEWS:
            return
        if isinstance(event, (RankJoined, RankLeft, RoleChanged)):
            self._want = None
            self.kept &= state.ranks.keys()
            self._out = sum(rank.role == "rollout" for rank in state.ranks.values() if self._shared(rank.name, state))
        elif isinstance(event, StepEnded):
            self._want = None
            self._lends = self._pays(state)
        elif isinstance(event, Began) or (isinstance(event, Evaluation) and event.running):
            self._lends = True
        if self._lends and not state.step_running and self._nearly(state):
            self._lends = False

    def _shared(self, name: str, state: Readiness) -> bool:
        rank = state.ranks[name]
        return rank.origin == "trainer" and rank.lendable and name not in self.kept

    def _missing(self, state: Readiness) -> int:
        newest = state.step - self.bounds.bound
        return self.fetch - sum(count for birth, count in state.ready_births.items() if birth >= newest)

    def _pays(self, state: Readiness) -> bool:
        """Whether what is missing is made sooner with them, by a tenth at least."""
        missing, playing = self._missing(state), state.roles["rollout"]
        guests = sum(self._shared(name, state) and rank.role == "trainer" for name, rank in state.ranks.items())
        if missing <= 0 or not guests:
            return False
        if not playing:
            return True
        alone, together = (groups_per_s(state, self.bounds, n) for n in (playing, playing + guests))
        if not alone or not together:
            return False
        switch_s = state.cost("switch", _SWITCH_S)
        rest = missing - 2 * switch_s * alone
        return rest > 0 and 2 * switch_s + rest / together < (1 - _SAVES) * missing / alone

    def _nearly(self, state: Readiness) -> bool:
        """Whether what is missing comes while they change back."""
        missing = self._missing(state)
        if missing <= 0:
            return True
        home = state.roles["rollout"] - self._out
        alone = groups_per_s(state, self.bounds, home) if state.step and home > 0 else None
        return alone is not None and missing <= alone * state.cost("switch", _SWITCH_S)

    def decide(self, state: Readiness) -> list[Action]:
        actions = super().decide(state)
        if actions or state.step_running:
            return actions
        want: Role = "rollout" if self._lends else "trainer"
        if want == self._want:
            return []
        self._want = want
        ranks = [rank for name, rank in state.ranks.items() if self._shared(name, state)]
        return [self.ask(state, rank, want) for rank in ranks if rank.role != want and rank.name not in self.asked]

    def move(self, state: Readiness) -> Move | None:
        move = super().move(state)
        if move is not None and move[0].origin == "trainer":
            (self.kept.add if move[1] == "rollout" else self.kept.discard)(move[0].name)
        return move

    def unready(self, state: Readiness) -> str | None:
        return f"{self._out} trainer ranks still play" if self._out else None
