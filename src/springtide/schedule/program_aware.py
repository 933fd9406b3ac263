"""ThunderAgent's placement of programs (an episode is a program): pause what is cheap to compute again, pack the rest.

Owns: the rules of ThunderAgent (2602.13692 and its scheduler's documentation; tiderl_async 2.6). Every 5 s each rank is
looked at: over capacity, it pauses episodes that act, the smallest first (recomputing costs c^2), then marks those that
decode. What was paused comes back when its tool has answered: those with a turn behind them before the new ones, the
largest first, each to the rank with the most room; for that, acting episodes count 2^(-t/5 s). Each episode keeps 100
tokens free for its turn. After 30 minutes a paused one goes on in any case.
Called by: `registry.py`.
"""

from __future__ import annotations

from typing import Any

from springtide.schedule.events import Action, Began, Event, Pause
from springtide.schedule.footprint import Decay
from springtide.schedule.parts import Episode
from springtide.schedule.pools import Order, Pool, Pools, go
from springtide.schedule.readiness import Readiness

_TICK_S = 5.0
_BUFFER = 100  # tokens
_LONGEST_PAUSE_S = 1800.0


class ProgramAware:
    """The placement (`composed.Placement`). What a tick decides is kept until it is asked for; an entry whose episode
    was touched meanwhile is void."""

    def __init__(self) -> None:
        order = Order(_largest, _smallest, lambda state, episode: False, lambda state, episode: 0.0)
        self._pools = Pools(order, decay=Decay("exponential", _TICK_S), head_room=0.0)
        self._begin()

    def _begin(self) -> None:
        self._ticked = float("-inf")
        self._plan: list[tuple[int, Episode, Action]] = []

    def observe(self, state: Readiness, event: Event, touched: list[Episode]) -> None:
        if isinstance(event, Began):
            self._begin()
        self._pools.observe(state, event, touched)
        if state.now - self._ticked >= _TICK_S:
            self._ticked = state.now
            self._plan = [(e.mark.stamp, e, action) for e, action in (*self._resumes(state), *self._pauses(state))]

    def follow(self, state: Readiness) -> None:
        self._pools.follow(state)

    def decide(self, state: Readiness, away: set[str]) -> list[Action]:
        pools = self._pools
        pools.away = away
        best = pools.roomiest() if pools.queue else None
        if best is not None:
            oldest = next(iter(pools.queue.values()))
            if state.now - oldest.since >= _LONGEST_PAUSE_S:
                return [go(oldest, best)]
        if self._plan:
            plan, self._plan = self._plan, []
            actions = [a for stamp, e, a in plan if e.mark.stamp == stamp and getattr(a, "rank", None) not in away]
            if actions:
                return actions
        if best is None:
            return []
        new = pools.homeless.top() or pools.parked.top()
        # A new program starts at once where there is room; any does on a rank that has none.
        if new is not None and (best.rank.live == 0 or (new.turns == 0 and self._room(state, best) >= new.context)):
            return [go(new, best)]
        return []

    def _room(self, state: Readiness, pool: Pool, *, decayed: bool = True) -> float:
        rank = pool.rank
        used = rank.decoding_tokens + (pool.footprint.value(state.now) if decayed else rank.acting_tokens)
        return rank.budget - used + pool.leaving - _BUFFER * rank.live

    def _resumes(self, state: Readiness) -> list[tuple[Episode, Action]]:
        """Best fit, the largest first."""
        rooms = {name: self._room(state, pool) for name, pool in self._pools.pools.items()}
        chosen: list[tuple[Episode, Action]] = []
        for episode in sorted(self._pools.queue.values(), key=_largest) if rooms else ():
            name = max(rooms, key=rooms.__getitem__)
            if rooms[name] < episode.context + _BUFFER:
                continue
            rooms[name] -= episode.context + _BUFFER
            chosen.append((episode, go(episode, self._pools.pools[name])))
        return chosen

    def _pauses(self, state: Readiness) -> list[tuple[Episode, Action]]:
        chosen: list[tuple[Episode, Action]] = []
        for pool in self._pools.pools.values():
            short, left = -self._room(state, pool, decayed=False), pool.rank.live
            for heap in (pool.acting, pool.decoding):
                while short > 0 and left > 1 and (episode := heap.top()) is not None:
                    heap.pop()
                    short -= episode.context + _BUFFER
                    left -= 1
                    chosen.append((episode, Pause(episode.visit, episode.member)))
        return chosen

    def full(self, state: Readiness) -> str | None:
        """It takes what comes; what finds no room waits in its queue, and nothing is drawn meanwhile."""
        waiting = len(self._pools.queue)
        return f"tokens: {waiting} episodes wait for a place" if waiting and self._pools.pools else None

    def probes(self, state: Readiness, suite: str) -> bool:
        return False


def _largest(episode: Episode) -> Any:
    return (not episode.group.evaluation, episode.turns == 0, -episode.context)


def _smallest(episode: Episode) -> Any:
    return (episode.group.evaluation, episode.context)
