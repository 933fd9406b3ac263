"""prime-rl's adaptive concurrency: one cap on episodes in flight, driven by the worst replica's KV.

Owns: the control law and constants of prime-rl's concurrency controller as tiderl_async 2.5 has them. Every poll looks
at the fullest rank:

- its KV above 0.9: the youngest groups are given up until 0.7 of the budget is left in use, and the cap follows;
- above 0.8: the cap becomes what brings use to 0.7;
- more than half as many episodes wait as run, for 6 polls: the cap is cut to 0.9;
- below 0.6 with the cap binding (90% of it in flight): it grows by 1.25, once a turnover (as many episodes have ended
  as the cap holds) and not within 6 polls of a cut.

The first cap is KV capacity over the longest context seen (over 8,192 tokens before any is). Engines here report no
pre-emption, so the cuts of 0.8 and 0.5 for those are left out. Ours: a poll is 5 s of the events' clock.
Called by: `registry.py`.
"""

from __future__ import annotations

from springtide.schedule.composed import Gates
from springtide.schedule.events import Abort, Action, Began, Event, Finished
from springtide.schedule.parts import RankState
from springtide.schedule.policy import Bounds
from springtide.schedule.readiness import Readiness

_POLL_S = 5.0
_GROW_BELOW, _SOFT, _TARGET, _HARD = 0.6, 0.8, 0.7, 0.9
_GROWTH, _BINDING, _COOL_DOWN = 1.25, 0.9, 6
_OVERLOAD, _OVERLOAD_CUT = 0.5, 0.9
_CONTEXT = 8192  # of an episode, before any has ended


class KvAimd(Gates):
    """cap: episodes in flight."""

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._begin()

    def _begin(self) -> None:
        self.cap: float | None = None
        self._polled = float("-inf")
        self._quiet = self._overloaded = self._ended = 0
        self._victims: list[int] = []  # groups that the last poll gave up

    def observe(self, state: Readiness, event: Event) -> None:
        if isinstance(event, Began):
            self._begin()
        self._ended += isinstance(event, Finished)
        if state.now - self._polled >= _POLL_S and state.roles["rollout"]:
            self._polled = state.now
            self._poll(state)

    def _poll(self, state: Readiness) -> None:
        ranks = list(state.rollout_ranks())
        worst = max(ranks, key=lambda rank: rank.tokens / max(1, rank.budget))
        use = worst.tokens / max(1, worst.budget)
        running = sum(rank.live for rank in ranks)
        self._quiet += 1
        self._overloaded = self._overloaded + 1 if len(state.waiting) > _OVERLOAD * running else 0
        if self.cap is None:
            longest = max((s.final.value or 0.0 for s in state.suites.values()), default=0.0) or _CONTEXT
            self.cap = max(float(self.bounds.members), sum(rank.budget for rank in ranks) / longest)
            self._quiet = self._ended = 0
        elif use > _SOFT:
            self._cut(state, _TARGET / use * running)
            if use > _HARD:
                self._victims = _youngest(state, worst, worst.tokens - _TARGET * worst.budget)
        elif self._overloaded >= _COOL_DOWN:
            self._cut(state, _OVERLOAD_CUT * self.cap)
        elif (
            use < _GROW_BELOW
            and state.alive >= _BINDING * self.cap
            and self._ended >= self.cap
            and self._quiet >= _COOL_DOWN
        ):
            self.cap *= _GROWTH
            self._ended = 0

    def _cut(self, state: Readiness, cap: float) -> None:
        self.cap = max(float(self.bounds.members), cap)
        self._quiet = self._overloaded = self._ended = 0

    def gives_up(self, state: Readiness) -> list[Action]:
        victims, self._victims = self._victims, []
        return [Abort(visit, "kv_trim") for visit in victims if visit in state.playing]

    def closed(self, state: Readiness, fetch: int) -> str | None:
        if self.cap is not None and state.alive and state.alive + self.bounds.members > self.cap:
            return f"concurrency control: {state.alive} episodes in flight, at most {self.cap:.0f}"
        return super().closed(state, fetch)


def _youngest(state: Readiness, rank: RankState, tokens: float) -> list[int]:
    """Groups with as many tokens on the rank, the youngest first; never the only one in flight."""
    chosen: list[int] = []
    for group in reversed(state.playing.values()):
        if tokens <= 0 or len(chosen) == len(state.playing) - 1:
            break
        if held := sum(e.context for e in group.episodes.values() if e.rank == rank.name and not e.parked):
            tokens -= held
            chosen.append(group.visit)
    return chosen
