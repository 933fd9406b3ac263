"""Ranks that play as pools of tokens, and every episode where it stands in them.

Owns: the indexes that policies look things up in: of each rank what it holds, what it can still take and who would go
first; of all, who waits for a place and where the most room is. It follows the state event by event (`observe`), so
what it says depends on the events alone, not on when it was asked. Invariants: an event costs O(log n); what a rank
holds is reckoned anew when an event touches it, and on all ranks once a second of the events' clock.
Called by: `ctb.py`, `placement.py`, `program_aware.py`.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from springtide.schedule.events import Action, Began, Event, RankJoined, RankLeft, Resume, RoleChanged, Route, TurnEnded
from springtide.schedule.footprint import Decay, Footprint, Part
from springtide.schedule.parts import Episode, Key, RankState
from springtide.schedule.readiness import Readiness

_AMPLE = 0.25  # of a budget: with so much left, tokens bind nobody, and an even load is the fastest
_MANY = 1e9  # more episodes than any rank has
_SWEEP_S = 1.0  # what acts decays although nothing happens to its rank


_OF_RANKS = frozenset({Began, RankJoined, RankLeft, RoleChanged})


class Mark:
    """What the index counted of an episode. stamp: entries of heaps with another are not true any more."""

    __slots__ = ("leaving", "part", "pool", "queued", "stamp")

    def __init__(self) -> None:
        self.pool: Pool | None = None
        self.part: Part | None = None
        self.leaving = 0
        self.queued = False
        self.stamp = 0


class Heap:
    """Episodes by a key, the least first; an episode that was touched since it came in is not in it. Most leave before
    anybody asks, so what comes in is put in order when somebody does."""

    __slots__ = ("_entries", "_key", "_new")

    def __init__(self, key: Callable[[Episode], Any]) -> None:
        self._key = key
        self._entries: list[tuple[Any, int, Episode]] = []
        self._new: list[tuple[int, Episode]] = []

    def push(self, stamp: int, episode: Episode, alive: int) -> None:
        self._new.append((stamp, episode))
        if len(self._new) + len(self._entries) > 2 * alive + 64:
            self._new = [new for new in self._new if new[1].mark.stamp == new[0]]
            self._entries = [entry for entry in self._entries if entry[2].mark.stamp == entry[1]]
            heapq.heapify(self._entries)

    def top(self) -> Episode | None:
        entries = self._entries
        for stamp, episode in self._new:
            if episode.mark.stamp == stamp:
                heapq.heappush(entries, (self._key(episode), stamp, episode))
        self._new.clear()
        while entries and entries[0][2].mark.stamp != entries[0][1]:
            heapq.heappop(entries)
        return entries[0][2] if entries else None

    def pop(self) -> None:
        heapq.heappop(self._entries)


@dataclass(frozen=True, slots=True)
class Order:
    """back: an episode's place among those that wait, the least goes on first; out: among those that play, the least is
    paused first; held: whether a waiting one is to wait although there is room (its group's probe plays)."""

    back: Callable[[Episode], Any]
    out: Callable[[Episode], Any]
    held: Callable[[Readiness, Episode], bool]
    needs: Callable[[Readiness, Episode], float]  # tokens, of one whose environment opens


class Pool:
    """A rank that plays. used: tokens it holds, what acts decayed; leaving: of those that decode and are asked to stay
    out at their turn's end; growth: of one more turn; room: what fits beside, after the head-room for one of each."""

    __slots__ = (
        "acting", "decoding", "footprint", "growth", "home", "leaving", "name", "rank", "room", "stamp", "tokens",
        "used",
    )  # fmt: skip

    def __init__(self, rank: RankState, decay: Decay, order: Order) -> None:
        self.rank, self.name = rank, rank.name
        self.footprint = Footprint(decay)
        # Those that may be paused, and those that were and wait to come back.
        self.acting, self.decoding, self.home = Heap(order.out), Heap(order.out), Heap(order.back)
        self.used = self.room = self.growth = 0.0
        self.leaving = self.stamp = self.tokens = 0


class Pools:
    """All pools. decay: of what acts; head_room: least share of a budget that is kept free for the turns to come;
    ahead: turns of each episode for which room is kept."""

    def __init__(self, order: Order, *, decay: Decay, head_room: float, ahead: float = 1.0) -> None:
        self._order, self.decay, self._head_room, self._ahead = order, decay, head_room, ahead
        self.reset()

    def reset(self) -> None:
        self.pools: dict[str, Pool] = {}
        self.dirty: dict[str, Pool] = {}  # touched since the policy found nothing to do there
        self.queue: OrderedDict[Key, Episode] = OrderedDict()  # who waits for a place, the longest first
        # Of those: the ones without a rank; the ones that were paused.
        self.homeless, self.parked = Heap(self._order.back), Heap(self._order.back)
        self.away: set[str] = set()  # ranks that were asked to change role: nobody is sent there
        self.used, self.tokens, self.budget = 0.0, 0, 0  # of all pools; tokens: nothing decayed
        self._rooms: list[tuple[float, str, int]] = []
        self._moved: dict[str, Pool] = {}  # reckoned anew since somebody asked for a room
        self._stamp = 0
        self._growth = 0.0
        self._swept = float("-inf")

    # --- following ----------------------------------------------------------------------------------------------------

    def observe(self, state: Readiness, event: Event, touched: Iterable[Episode]) -> None:
        now = state.now
        if type(event) is TurnEnded:
            self._growth = growth(state)
        elif type(event) in _OF_RANKS:
            self._ranks(state, event)
        for episode in touched:
            self._count(state, episode, now)
        if self.decay.kind != "constant" and now - self._swept >= _SWEEP_S:
            self._swept = now
            for pool in self.pools.values():
                self._refresh(state, pool)

    def _ranks(self, state: Readiness, event: Event) -> None:
        if isinstance(event, Began):
            self.reset()
        elif isinstance(event, (RankJoined, RoleChanged, RankLeft)):
            self.away.discard(event.rank)
            self._drop(event.rank)
            if not isinstance(event, RankLeft) and event.role == "rollout":
                pool = self.pools[event.rank] = Pool(state.ranks[event.rank], self.decay, self._order)
                self.budget += pool.rank.budget
                self._refresh(state, pool)

    def follow(self, state: Readiness) -> None:
        """Take in a state that nobody followed so far, whole."""
        self.reset()
        self._growth = growth(state)
        for rank in state.ranks.values():
            self.observe(state, RankJoined(state.now, rank.name, rank.role, rank.budget), ())
        for groups in (state.playing, state.evaluations):
            for group in groups.values():
                for episode in group.episodes.values():
                    self._count(state, episode, state.now)

    def recount(self, state: Readiness, episode: Episode) -> None:
        """What the policy says of it changed (it is held no longer)."""
        self._count(state, episode, state.now)

    def _count(self, state: Readiness, episode: Episode, now: float) -> None:
        mark: Mark | None = episode.mark
        if mark is None:
            mark = episode.mark = Mark()
        self._stamp += 1
        mark.stamp = self._stamp
        pool, phase = mark.pool, episode.phase
        here = self.pools.get(episode.rank) if episode.rank is not None else None
        if pool is not None:
            if mark.leaving:
                pool.leaving -= mark.leaving
                mark.leaving = 0
            if mark.part is not None and not (
                pool is here and phase == "acting" and not episode.parked and mark.part.since == episode.since
            ):
                pool.footprint.take(mark.part, now)
                mark.part = None
            if pool is not here and self.pools.get(pool.name) is pool:
                self._refresh(state, pool)
        mark.pool = here
        if phase == "decoding" and here is not None:
            if episode.parked:
                mark.leaving = episode.context
                here.leaving += mark.leaving
            else:
                here.decoding.push(mark.stamp, episode, here.rank.live)
        elif phase == "acting" and here is not None and not episode.parked:
            if mark.part is None:
                tokens = episode.context or int(self._order.needs(state, episode))
                mark.part = here.footprint.add(tokens, episode.since, now)
            here.acting.push(mark.stamp, episode, here.rank.live)
        if mark.queued or phase == "returned" or phase == "waiting":
            self._line_up(state, episode, mark, here)
        if here is not None:
            self._refresh(state, here)

    def _line_up(self, state: Readiness, episode: Episode, mark: Mark, here: Pool | None) -> None:
        waits = episode.phase == "returned" or (episode.phase == "waiting" and not self._order.held(state, episode))
        if not waits:
            if mark.queued:
                del self.queue[episode.key]
                mark.queued = False
            return
        if not mark.queued:
            self.queue[episode.key] = episode
            mark.queued = True
        alive = len(self.queue)
        if here is None or episode.phase == "waiting":
            self.homeless.push(mark.stamp, episode, alive)
        else:
            here.home.push(mark.stamp, episode, alive)
            self.parked.push(mark.stamp, episode, alive)

    def _drop(self, name: str) -> None:
        pool = self.pools.pop(name, None)
        self.dirty.pop(name, None)
        if pool is not None:
            self.used -= pool.used
            self.tokens -= pool.tokens
            self.budget -= pool.rank.budget

    def _refresh(self, state: Readiness, pool: Pool) -> None:
        """Reckon anew what it holds and what fits: its budget less `used`, less one more turn of each episode (at
        least `head_room` of the budget; tiderl_async 1.8.2)."""
        rank = pool.rank
        used, tokens, budget = rank.decoding_tokens + pool.footprint.value(state.now), rank.tokens, rank.budget
        self.used += used - pool.used
        self.tokens += tokens - pool.tokens
        pool.used, pool.tokens, pool.growth = used, tokens, self._growth
        spare = self._ahead * self._growth * rank.live
        pool.room = budget - used - (spare if spare > self._head_room * budget else self._head_room * budget)
        self._stamp += 1
        pool.stamp = self._stamp
        self.dirty[pool.name] = self._moved[pool.name] = pool

    # --- asking -------------------------------------------------------------------------------------------------------

    def roomiest(self) -> Pool | None:
        """The pool to which the next goes, of those that stay: with the fewest episodes, as long as there is room
        enough; then with the most room."""
        kept: list[tuple[float, str, int]] = []
        for name, pool in self._moved.items():
            if self.pools.get(name) is pool:
                heapq.heappush(self._rooms, (_order(pool), name, pool.stamp))
        self._moved.clear()
        if len(self._rooms) > 4 * len(self.pools) + 64:
            self._rooms = [(_order(p), p.name, p.stamp) for p in self.pools.values()]
            heapq.heapify(self._rooms)
        rooms, found = self._rooms, None
        while rooms:
            first = self.pools.get(rooms[0][1])
            if first is None or first.stamp != rooms[0][2]:
                heapq.heappop(rooms)
            elif first.name in self.away:
                kept.append(heapq.heappop(rooms))
            else:
                found = first
                break
        for entry in kept:
            heapq.heappush(rooms, entry)
        return found

    def home(self, episode: Episode) -> Pool | None:
        """Where it was, if that rank still plays and stays."""
        pool = self.pools.get(episode.rank) if episode.rank is not None else None
        return None if pool is None or pool.name in self.away else pool


def _order(pool: Pool) -> float:
    ample = pool.room > _AMPLE * pool.rank.budget
    return float(pool.rank.live) if ample else _MANY - pool.room


def growth(state: Readiness) -> float:
    """Tokens that one more turn adds: of the suite where it adds the most. 0 before any is known."""
    return max((stats.growth.value or 0.0 for stats in state.suites.values()), default=0.0)


def fits(pool: Pool, tokens: float) -> bool:
    """Whether an episode of as many tokens may go on there. An empty rank takes any: else what is larger than a budget
    would wait for ever."""
    return pool.rank.live == 0 or tokens + pool.growth <= pool.room


def go(episode: Episode, pool: Pool) -> Action:
    """Place or resume it there."""
    kind = Route if episode.phase == "waiting" else Resume
    return kind(episode.visit, episode.member, pool.name)
