"""Continuous Task Batching: whole episodes are admitted, paused and resumed against each rank's token budget.

Owns: TideRL's placement (2608.10402; tiderl_async 1.3, with the choices of 1.8.2 where the paper gives none).

- A rank's pool is a budget of tokens: its KV less head-room for one more turn of every episode on it (`pools.py`).
- A group sends a *probe*, its first member, ahead where nothing is known of its suite's first turn; every turn replaces
  the estimate by the count. Admission needs room for the group's first turns within `admit_share` of all budgets.
- When growth passes a budget, episodes are paused: those that act before those that decode (which leave at the end of
  their turn), evaluation last, then by the priority (share of the group that is done, context), the least first.
- What waits for a place goes by the same priority, before any group is drawn: an evaluation's episodes, those paused,
  then the new. A paused one goes to the rank where it was, unless that is fuller by `margin` episodes and cannot take
  it. Who waited for `age_steps` steps goes next, and no other takes the room it needs; who waited for `longest_pause_s`
  goes on wherever there is most room.

Invariants: nobody is paused on a rank where nobody else plays, and a rank without an episode takes any, so something
always plays; only a rank's own events change what is decided for it.
Called by: `registry.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from springtide.schedule.events import Action, Admitted, Began, Event, Pause, RankJoined, RoleChanged
from springtide.schedule.footprint import Decay
from springtide.schedule.parts import Episode
from springtide.schedule.policy import Bounds
from springtide.schedule.pools import Heap, Order, Pool, Pools, fits, go
from springtide.schedule.readiness import Readiness

_UNKNOWN = 4  # groups a rank that are drawn before a first turn has told how large they are
_SHARED = 2048  # tokens of a first turn from which a group stays together: computing seven more takes half a second
_THUNDER = Decay("exponential", 5.0)  # ThunderAgent's: a half every 5 s


@dataclass(frozen=True, slots=True)
class Rules:
    """What the paper leaves open, with the values that its rules are tried at."""

    decay: Decay = _THUNDER
    head_room: float = 0.05
    turns_ahead: float = 1.0  # of each episode, for which head-room is kept
    admit_share: float = 0.85
    probe: Literal["always", "unknown"] = "always"
    estimate: Literal["first_turn", "mean"] = "first_turn"  # what a new episode is taken to need
    age_steps: float = 5.0
    longest_pause_s: float = 1800.0  # ThunderAgent's: half an hour
    margin: int = 2  # verl PR#7435
    times: float = 1.0  # as full as the emptiest that home must be besides (SGLang's second threshold)
    oldest: bool = False  # the group drawn with the oldest weights goes before the one that is nearest to its end
    rebalance: bool = False  # when a rank begins to play, others' episodes are paused so that they go on there


class TaskBatching:
    """The placement (`composed.Placement`)."""

    def __init__(self, bounds: Bounds, rules: Rules) -> None:
        self.bounds, self.rules = bounds, rules
        self.pools = Pools(
            Order(self._back, self._out, self._held, self._needs),
            decay=rules.decay,
            head_room=rules.head_room,
            ahead=rules.turns_ahead,
        )
        self._plan: list[tuple[int, Episode]] = []  # to be paused, unless touched meanwhile
        self._probing: dict[int, str] = {}  # visit -> suite, of groups whose other members are held

    # --- following ----------------------------------------------------------------------------------------------------

    def observe(self, state: Readiness, event: Event, touched: list[Episode]) -> None:
        if isinstance(event, Began):
            self._probing.clear()
            self._plan = []
        elif isinstance(event, Admitted) and event.members > 1 and self.probes(state, event.suite):
            self._probing[event.visit] = event.suite
        if self._probing:
            self._release(state, touched)
        self.pools.observe(state, event, touched)
        if self.rules.rebalance and isinstance(event, (RankJoined, RoleChanged)) and event.role == "rollout":
            self._plan = [(e.mark.stamp, e) for pool in self.pools.pools.values() for e in self._excess(pool)]

    def follow(self, state: Readiness) -> None:
        self.pools.follow(state)

    def probes(self, state: Readiness, suite: str) -> bool:
        stats = state.suites.get(suite)
        return stats is not None and (self.rules.probe == "always" or stats.first.value is None)

    def _held(self, state: Readiness, episode: Episode) -> bool:
        return episode.visit in self._probing and episode.member != min(episode.group.episodes)

    def _release(self, state: Readiness, touched: list[Episode]) -> None:
        """The others of a group follow when its probe has ended a turn, or is over; where only the unknown is probed,
        when any of its suite has."""
        known = touched[0].group.suite if touched and touched[0].turns and self.rules.probe == "unknown" else None
        done = {e.visit for e in touched if e.visit in self._probing and (e.turns or e.phase == "done")}
        if known is not None:
            done |= {visit for visit, suite in self._probing.items() if suite == known}
        for visit in done:
            del self._probing[visit]
            group = state.group(visit)
            for episode in group.episodes.values() if group is not None else ():
                if episode.phase == "waiting":
                    self.pools.recount(state, episode)

    def _back(self, episode: Episode) -> Any:
        """evaluation > share of the group done > was active > longer context (tiderl_async 1.3.3)."""
        group = episode.group
        age = group.birth if self.rules.oldest else 0
        return (not group.evaluation, age, -_done(episode), episode.turns == 0, -episode.context)

    def _out(self, episode: Episode) -> Any:
        group = episode.group
        age = -group.birth if self.rules.oldest else 0
        return (group.evaluation, age, _done(episode), episode.context)

    # --- deciding -----------------------------------------------------------------------------------------------------

    def decide(self, state: Readiness, away: set[str]) -> list[Action]:
        pools = self.pools
        pools.away = away
        pauses: list[Action] = []
        if self._plan:
            plan, self._plan = self._plan, []
            pauses += [Pause(*e.key) for stamp, e in plan if e.mark.stamp == stamp and e.rank not in away]
            if pauses:
                return pauses
        for name in (touched := sorted(pools.dirty)):
            pool = pools.dirty[name]
            if pool.room < 0 and pool.rank.live > 1 and name not in away:
                pauses += self._relieve(state, pool)
        if pauses:
            return pauses
        if pools.queue:
            return self._place(state, touched)
        pools.dirty.clear()
        return []

    def _excess(self, pool: Pool) -> list[Episode]:
        """Of a rank, as many as it has above the mean: those that act first, the cheapest to compute again."""
        rank = pool.rank
        mean = sum(p.rank.live for p in self.pools.pools.values()) / len(self.pools.pools)
        leaving = sum(episode.phase == "decoding" for episode in rank.parked.values())
        more = int(rank.live - leaving - mean)
        if more <= self.rules.margin:
            return []
        acting = sorted(rank.acting.values(), key=_cheapest)
        decoding = sorted((e for e in rank.decoding.values() if not e.parked), key=_cheapest)
        return (acting + decoding)[:more]

    def _relieve(self, state: Readiness, pool: Pool) -> list[Action]:
        """Pauses that bring a pool back under its budget, as far as there is anybody to pause."""
        short, left, chosen = -pool.room - pool.leaving, pool.rank.live, list[Action]()
        while short > 0 and left > 1:
            heap = _first(pool.acting, pool.decoding)
            if heap is None or (episode := heap.top()) is None:
                break
            heap.pop()
            part = episode.mark.part
            weighs = part.tokens * self.pools.decay.share(state.now - part.since) if part else episode.context
            short -= weighs + pool.growth
            left -= 1
            chosen.append(Pause(episode.visit, episode.member))
        return chosen

    def _place(self, state: Readiness, touched: list[str]) -> list[Action]:
        """The next that goes on, or nobody."""
        pools, rules = self.pools, self.rules
        best = pools.roomiest()
        if best is None:
            return []
        oldest = next(iter(pools.queue.values()))
        waited = state.now - oldest.since
        reserved: Pool | None = None
        if waited >= min(rules.longest_pause_s, rules.age_steps * (state.step_s.value or float("inf"))):
            reserved = pools.home(oldest) or best
            for pool in (reserved, best):
                if fits(pool, self._needs(state, oldest)):
                    return [go(oldest, pool)]
            if waited >= rules.longest_pause_s:
                return [go(oldest, best)]
        new = pools.homeless.top()
        if new is not None and new.group.evaluation and fits(best, self._needs(state, new)):
            return [go(new, best)]
        for name in touched:
            pool = pools.dirty[name]
            if pool is reserved or name in pools.away:
                continue  # to be looked at again when that has passed
            if (top := pool.home.top()) is not None and fits(pool, top.context):
                moves = best is not reserved and self._fuller(pool, best) and fits(best, top.context)
                return [go(top, best if moves else pool)]
            del pools.dirty[name]  # nothing fits until an event touches it
        if (top := pools.parked.top()) is not None and best is not reserved:
            home = pools.home(top)
            if (home is None or self._fuller(home, best)) and fits(best, top.context):
                return [go(top, best)]
        if new is not None:
            pool = self._beside(state, new, best)
            first = pool.home.top() is None or new.turns > 0  # what was paused comes back before what is new
            if first and pool is not reserved and fits(pool, self._needs(state, new)):
                return [go(new, pool)]
        return []

    def _fuller(self, pool: Pool, than: Pool) -> bool:
        """Whether affinity is broken: by more episodes than `margin` and `times` as many, or where nobody plays."""
        more, fewer = pool.rank.live, than.rank.live
        if fewer == 0:
            return more > 0
        return more - fewer > self.rules.margin and more > self.rules.times * fewer

    def _beside(self, state: Readiness, episode: Episode, best: Pool) -> Pool:
        """Where a new episode goes: to those of its group, with whom it shares a prompt worth sharing, unless that rank
        is fuller by more than a group; else to the best."""
        if self._first_turn(state, episode.group.suite) < _SHARED:
            return best
        for mate in episode.group.episodes.values():
            pool = self.pools.home(mate) if mate is not episode else None
            if pool is not None:
                near = pool.rank.live - best.rank.live <= self.bounds.members
                return pool if near and fits(pool, self._needs(state, episode)) else best
        return best

    def _needs(self, state: Readiness, episode: Episode) -> float:
        return episode.context or self._first_turn(state, episode.group.suite)

    def _first_turn(self, state: Readiness, suite: str) -> float:
        stats = state.suites.get(suite)
        return (stats.first.value or 0.0) if stats is not None else 0.0

    def full(self, state: Readiness) -> str | None:
        pools = self.pools
        if not pools.pools:
            return None  # without ranks in the state, the runtime places
        if pools.queue:
            return f"tokens: {len(pools.queue)} episodes wait for a place, and go before new ones"
        members = self.bounds.members
        used = pools.used
        if self.rules.probe == "unknown" and len(self._probing) >= _UNKNOWN * len(pools.pools):
            return f"probes: {len(self._probing)} groups wait for the first turn of any"
        if self.rules.estimate == "mean":
            each = max((_mean_context(state, suite) for suite in state.suites), default=0.0)
            if pools.tokens > 0:  # what acts counts for as little as it does now
                each *= min(1.0, pools.used / pools.tokens)
            # The young will grow to the mean.
            used = max(used, (state.alive - len(state.waiting) - len(state.parked)) * each)
        else:
            each = max((self._first_turn(state, suite) for suite in state.suites), default=0.0)
        most = self.rules.admit_share * pools.budget
        if state.alive and used + members * each > most:
            return f"tokens: {used:.0f} and {members} episodes of {each:.0f} more in budgets of {pools.budget}"
        return None


def _mean_context(state: Readiness, suite: str) -> float:
    """Of an episode over its life: it grows from its first turn to its end, to four times as much before any has."""
    stats = state.suites[suite]
    first, final = stats.first.value or 0.0, stats.final.value
    return (first + (4 * first if final is None else final)) / 2


def _done(episode: Episode) -> float:
    """Share of its group that is done, in hundredths: closer ones are alike."""
    return round(episode.group.played / episode.group.members, 2)


def _cheapest(episode: Episode) -> Any:
    return (episode.group.evaluation, episode.context, episode.key)


def _first(acting: Heap, decoding: Heap) -> Heap | None:
    """Acting before decoding; but no evaluation's before every training's."""
    one, other = acting.top(), decoding.top()
    if one is None:
        return decoding if other is not None else None
    return decoding if one.group.evaluation and other is not None and not other.group.evaluation else acting
