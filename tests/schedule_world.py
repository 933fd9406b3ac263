"""A small world for scheduling policies: it carries out their actions, and answers with what a cluster would say.

Turns, tools, training and changes of role take random times; episodes fail, tools hang, groups are rejected, ranks die
and come back, by a seed. It checks, after every event, what must hold whatever a policy decides.
"""

from __future__ import annotations

import heapq
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from springtide.schedule.events import (
    Abort,
    Action,
    Admit,
    Admitted,
    Began,
    ChoosePipeline,
    Dropped,
    Evaluation,
    Event,
    Fed,
    Finished,
    Measured,
    Pause,
    Paused,
    Placed,
    RankJoined,
    RankLeft,
    Ready,
    Resume,
    Resumed,
    Returned,
    RoleChanged,
    Route,
    SetFetch,
    StepEnded,
    StepStarted,
    SwitchRole,
    Sync,
    TurnEnded,
    Updated,
    event_from_json,
    event_to_json,
)
from springtide.schedule.parts import Episode
from springtide.schedule.policy import Batch, Bounds, Cluster, Layout
from springtide.schedule.readiness import InvalidEvent, Readiness
from springtide.schedule.registry import layout as layout_of
from springtide.schedule.registry import make_policy


@dataclass(frozen=True)
class Faults:
    """Shares of episodes that fail and of tools that hang, of groups that are rejected; seconds between two deaths of
    ranks (0: none); of events that come twice; clock: whether it jumps; nonsense: engines report impossible contexts;
    evaluations: seconds between two (0: none)."""

    fail: float = 0.0
    hang: float = 0.0
    reject: float = 0.0
    deaths_s: float = 0.0
    twice: float = 0.0
    clock: bool = False
    nonsense: bool = False
    evaluations_s: float = 0.0


_HANG_S = 120.0  # an environment's deadline
_SWITCH_S = 2.0
_SYNC_S = 0.5


class World:
    """One run of a policy."""

    def __init__(
        self,
        name: str,
        bounds: Bounds,
        cluster: Cluster,
        *,
        seed: int,
        faults: Faults = Faults(),
        budget: int = 6000,
        turns: tuple[int, int] = (1, 6),
        tool_s: float = 3.0,
        token_s: float = 2e-4,
        weights: dict[str, float] | None = None,
        follow: bool = True,
    ) -> None:
        self.name, self.bounds, self.cluster, self.faults = name, bounds, cluster, faults
        self.random = random.Random(seed)
        self.budget, self.turns, self.tool_s, self.token_s = budget, turns, tool_s, token_s
        self.layout: Layout = layout_of(name, cluster)
        self.policy = make_policy(name, bounds, self.layout)
        self.state = Readiness(weights or {"a": 2.0, "b": 1.0})
        if follow:
            self.state.follow(self.policy)
        self.now, self.shift = 0.0, 0.0
        self.log: list[str] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self.visit = 0
        self.attempt: dict[tuple[int, int], int] = {}
        self.left: dict[tuple[int, int], int] = {}  # turns that an episode still plays
        self._decodes: Counter[tuple[int, int]] = Counter()
        self.ends: Counter[str] = Counter()
        self.staleness: list[int] = []
        self.longest_wait = 0.0
        self.actions: Counter[str] = Counter()
        self.prefilled = 0
        self.over: list[str] = []
        self.fetch = bounds.groups
        self._apply(Began(self._t(), 0, dict(self.state.mixture), {}))
        ranks = [("rollout", i) for i in range(self.layout.rollout)]
        ranks += [("reference", i) for i in range(self.layout.reference)]
        ranks += [("trainer", i) for i in range(self.layout.trainer)]
        for role, i in ranks:
            lendable = role == "trainer" and i >= self.layout.trainer - self.layout.lendable
            self._apply(RankJoined(self._t(), f"{role}-{i}", role, budget, lendable))  # type: ignore[arg-type]
        if faults.deaths_s:
            self._after(faults.deaths_s, self._die)
        if faults.evaluations_s:
            self._after(faults.evaluations_s, self._evaluate)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _t(self) -> float:
        return self.now + self.shift

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (self.now + seconds, self._order, do))

    def run(self, steps: int, *, most_events: int = 60_000) -> None:
        """Until so many steps are trained. Fails where nothing happens any more although they are not."""
        self._settle()
        for _ in range(most_events):
            if self.state.step >= steps:
                return
            assert self._queue, f"deadlock at step {self.state.step}: {self._why()}"
            self.now, _, do = heapq.heappop(self._queue)
            do()
        raise AssertionError(f"no progress: {self.state.step} of {steps} steps in {self.now:.0f} s: {self._why()}")

    def _why(self) -> str:
        choice = self.policy.batch(self.state) if not self.state.step_running else "a step runs"
        held = f"waiting {len(self.state.waiting)} parked {len(self.state.parked)} roles {dict(self.state.roles)}"
        return f"{self.policy.blocked(self.state)}; {choice}; {held}"

    # --- events and actions -------------------------------------------------------------------------------------------

    def _apply(self, event: Event) -> None:
        if self.faults.clock and self.random.random() < 0.01:
            self.shift += self.random.choice([-3600.0, -5.0, 5.0, 3600.0])
        self.log.append(json.dumps(event_to_json(event)))
        self.state.apply(event)

    def happen(self, event: Event) -> None:
        """Apply an event, let the policy decide, and carry out what it decides."""
        self._apply(event)
        self._settle()
        if self.random.random() < self.faults.twice:
            before = self._summary()
            try:
                self.state.apply(event)
            except InvalidEvent:
                assert self._summary() == before
            else:
                self.log.append(json.dumps(event_to_json(event)))
                self._settle()

    def _settle(self) -> None:
        for _ in range(100_000):
            actions = self.policy.decide(self.state)
            if not actions:
                break
            for action in actions:
                why = self.state.invalid(action)
                assert why is None, f"{self.name} at {self.now:.1f}: {action}: {why}"
                self.log.append(json.dumps(event_to_json(action)))
                self.actions[type(action).__name__] += 1
                self._carry_out(action)
        else:
            raise AssertionError(f"{self.name} never stops deciding: {actions}")
        while self.state.still and (visit := self.policy.feed(self.state)) is not None:
            self._consume((visit,))
            self._apply(Fed(self._t(), visit))
            if not self.state.still:
                self._train()
        if not self.state.step_running and isinstance(choice := self.policy.batch(self.state), Batch):
            assert len(choice.visits) + choice.more >= min(self.fetch, self.bounds.groups)
            self._consume(choice.visits)
            self._apply(StepStarted(self._t(), choice.visits, choice.more))
            if not choice.more:
                self._train()
            self._settle()
        self._check()

    def _carry_out(self, action: Action) -> None:
        match action:
            case Admit(suite):
                visit, self.visit = self.visit, self.visit + 1
                self._apply(Admitted(self._t(), visit, suite, self.state.step, self.bounds.members))
                for member in range(self.bounds.members):
                    self._begin(visit, member)
            case Route(visit, member, rank):
                episode = self._episode(visit, member)
                self.longest_wait = max(self.longest_wait, self.state.now - episode.since)
                context = max(episode.context, 100)
                self.prefilled += context
                self._apply(Placed(self._t(), visit, member, rank, context))
                self._decode(visit, member)
            case Pause(visit, member):
                self._apply(Paused(self._t(), visit, member))
            case Resume(visit, member, rank):
                episode = self._episode(visit, member)
                returned = episode.phase == "returned"
                if returned:
                    self.longest_wait = max(self.longest_wait, self.state.now - episode.since)
                self.prefilled += episode.context
                self._apply(Resumed(self._t(), visit, member, rank))
                if returned:
                    self._decode(visit, member)
            case Abort(visit, cause):
                self.ends[cause] += 1
                self._apply(Dropped(self._t(), visit, cause))
            case SwitchRole(rank, role):
                self._after(_SWITCH_S, lambda: self._switched(rank, role))
            case SetFetch(groups):
                self.fetch = groups
            case Sync():
                self._after(_SYNC_S + _SWITCH_S, self._published)
            case ChoosePipeline():
                pass

    def _switched(self, rank: str, role: Any) -> None:
        if rank in self.state.ranks and self.state.ranks[rank].role != role:
            self.happen(RoleChanged(self._t(), rank, role))

    def _published(self) -> None:
        self.happen(Measured(self._t(), "sync", _SYNC_S))
        self.happen(StepEnded(self._t(), self.state.step + 1))

    # --- episodes -----------------------------------------------------------------------------------------------------

    def _episode(self, visit: int, member: int) -> Episode:
        episode = self.state.episode(visit, member)
        assert episode is not None
        return episode

    def _begin(self, visit: int, member: int) -> None:
        self.attempt[visit, member] = self.attempt.get((visit, member), 0) + 1
        self.left[visit, member] = self.random.randint(*self.turns)

    def _still(self, visit: int, member: int, attempt: int, phase: str) -> bool:
        episode = self.state.episode(visit, member)
        return episode is not None and self.attempt[visit, member] == attempt and episode.phase == phase

    def _decode(self, visit: int, member: int) -> None:
        episode = self._episode(visit, member)
        assert episode.rank is not None
        self._decodes[visit, member] += 1
        attempt, rank, tokens = self.attempt[visit, member], episode.rank, self.random.randint(20, 200)
        beside = len(self.state.ranks[rank].decoding)

        def ends() -> None:
            if not self._still(visit, member, attempt, "decoding") or self._episode(visit, member).rank != rank:
                return
            self._turn_ended(visit, member, tokens)

        self._after(tokens * 0.02 * (1 + 0.05 * beside), ends)

    def _turn_ended(self, visit: int, member: int, tokens: int) -> None:
        episode = self._episode(visit, member)
        attempt = self.attempt[visit, member]
        if self.faults.nonsense and self.random.random() < 0.05:
            for context in (-5, 1 << 60):
                before = self._summary()
                try:
                    self.state.apply(TurnEnded(self._t(), visit, member, context))
                except InvalidEvent:
                    assert self._summary() == before
                else:
                    raise AssertionError("a context that cannot be was taken")
            tokens = self.random.choice([0, tokens, 100 * tokens])  # and some that can, and are wrong
        self.left[visit, member] -= 1
        context = episode.context + tokens
        if self.random.random() < self.faults.fail:
            self._over(visit, member, played=False)
        elif self.left[visit, member] <= 0:
            self.happen(TurnEnded(self._t(), visit, member, context))
            if self._still(visit, member, attempt, "acting"):
                self._over(visit, member, played=True)
        else:
            self.happen(TurnEnded(self._t(), visit, member, context))
            hangs = self.random.random() < self.faults.hang

            def answers() -> None:
                if not self._still(visit, member, attempt, "acting"):
                    return
                if hangs:
                    self._over(visit, member, played=False)
                    return
                self._returned(visit, member)

            self._after(_HANG_S if hangs else self.random.expovariate(1 / self.tool_s), answers)

    def _returned(self, visit: int, member: int) -> None:
        episode = self._episode(visit, member)
        attempt, turn = self.attempt[visit, member], self._decodes[visit, member]
        self.happen(Returned(self._t(), visit, member, episode.context + self.random.randint(0, 300)))
        # Where it went on at once; paused ones and those whose rank died are resumed or routed.
        if self._still(visit, member, attempt, "decoding") and self._decodes[visit, member] == turn:
            self._decode(visit, member)

    def _over(self, visit: int, member: int, *, played: bool) -> None:
        if not played:
            self._begin(visit, member)
        group = self.state.group(visit)
        assert group is not None
        evaluation = group.evaluation
        self.happen(Finished(self._t(), visit, member, played))
        group = self.state.group(visit)
        if group is None or group.played < group.members:
            return
        if evaluation:
            self.ends["evaluated"] += 1
            self.happen(Dropped(self._t(), visit, "evaluated"))
            if not self.state.evaluations:
                self.happen(Evaluation(self._t(), False))
        elif self.random.random() < self.faults.reject:
            self.ends["rejected"] += 1
            self.happen(Dropped(self._t(), visit, "equal_rewards"))
        else:
            self.happen(Ready(self._t(), visit, 500 * group.members))

    # --- the trainer, faults, evaluations -----------------------------------------------------------------------------

    def _consume(self, visits: tuple[int, ...]) -> None:
        for visit in visits:
            group = self.state.buffer[visit]
            assert group.played == group.members, f"visit {visit} is trained before it is complete"
            self.staleness.append(self.state.staleness(group))
            self.ends["trained"] += 1

    def _train(self) -> None:
        ranks = max(1, self.state.roles["trainer"])
        tokens = 500 * self.bounds.members * len(self.state.training)
        self.happen(Measured(self._t(), "train_token", self.token_s))
        self._after(tokens * self.token_s / ranks, lambda: self.happen(Updated(self._t())))

    def _die(self) -> None:
        playing = [r for r in self.state.rollout_ranks() if r.origin == "rollout"]
        if len(playing) > 1:
            rank = self.random.choice(playing).name
            self.happen(RankLeft(self._t(), rank))
            self._after(
                self.random.uniform(1, 30), lambda: self.happen(RankJoined(self._t(), rank, "rollout", self.budget))
            )
        self._after(self.faults.deaths_s, self._die)

    def _evaluate(self) -> None:
        if not self.state.evaluating:
            self.happen(Evaluation(self._t(), True))
            for _ in range(2):
                visit, self.visit = self.visit, self.visit + 1
                for member in range(2):
                    self._begin(visit, member)
                self.happen(Admitted(self._t(), visit, "a", self.state.step, 2, True))
        self._after(self.faults.evaluations_s, self._evaluate)

    # --- what must hold -----------------------------------------------------------------------------------------------

    def _summary(self) -> Any:
        s = self.state
        held = [(r.name, r.role, r.decoding_tokens, r.acting_tokens, r.live) for r in s.ranks.values()]
        groups = sorted(s.playing), sorted(s.buffer), sorted(s.evaluations)
        return held, groups, list(s.waiting), list(s.parked), s.step, s.still, s.edge, s.alive, s.pending, s.now

    def _check(self) -> None:
        s = self.state
        assert all(lag <= self.bounds.bound for lag in self.staleness[-8:]), "staler than the bound"
        for rank in s.ranks.values():
            if rank.live:
                assert rank.role == "rollout", f"{rank.live} episodes on {rank.name}, a {rank.role}"
        if self.bounds.environments is not None and not s.evaluations:
            assert s.alive <= max(self.bounds.environments, self.bounds.members)

    def recount(self) -> None:
        """The counts that the state keeps equal those one would sum."""
        s = self.state
        episodes = [e for groups in (s.playing, s.evaluations) for g in groups.values() for e in g.episodes.values()]
        assert s.alive == len(episodes)
        assert set(s.waiting) == {e.key for e in episodes if e.phase == "waiting"}
        assert set(s.parked) == {e.key for e in episodes if e.parked}
        for rank in s.ranks.values():
            here = [e for e in episodes if e.rank == rank.name]
            assert set(rank.decoding) == {e.key for e in here if e.phase == "decoding"}
            assert set(rank.acting) == {e.key for e in here if e.phase == "acting" and not e.parked}
            assert set(rank.parked) == {e.key for e in here if e.parked}
            assert rank.decoding_tokens == sum(e.context for e in rank.decoding.values())
            assert rank.acting_tokens == sum(e.context for e in rank.acting.values())
        assert s.births == Counter(g.birth for g in s.playing.values())
        assert s.ready_births == Counter(g.birth for g in s.buffer.values())
        assert +s.playing_of == Counter(g.suite for g in s.playing.values())
        assert +s.roles == Counter(r.role for r in s.ranks.values())
        pending = len(s.playing) + len(s.buffer)
        evaluated = len(s.evaluations)
        assert self.visit == sum(self.ends.values()) + pending + evaluated, "a visit ends once"


def replay(world: World) -> None:
    """Feed the recorded lines to a fresh policy: every recorded action must be the next it takes, and no other."""
    policy = make_policy(world.name, world.bounds, world.layout)
    state = Readiness({"a": 1.0})
    state.follow(policy)
    due: list[dict[str, Any]] = []
    events = {c.__name__ for c in Event.__args__}
    for line in world.log:
        data = json.loads(line)
        if data["kind"] in events:
            state.apply(event_from_json(data))
        else:
            due = due or [event_to_json(action) for action in policy.decide(state)]
            assert due and due.pop(0) == data, f"{data} was decided, not {due}"
    assert not due
