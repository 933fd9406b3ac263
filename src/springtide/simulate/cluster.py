"""A cluster that plays and trains in simulated time, under any scheduling policy.

Owns: the event loop. It carries out every action of a policy and answers with the events a live run would record; what
decides are the very objects of `schedule/`. Nothing here knows a policy's name. Invariants: the same seed gives the
same events, to the byte; time passes only between events, which are turns' ends, tools' answers, and steps of the
trainer, never a token; every token that is sampled ends trained, discarded with a cause, or in flight; the seconds of a
rank add up to the time that passed.
Called by: `simulate.run`.
"""

from __future__ import annotations

import heapq
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
    Role,
    RoleChanged,
    Route,
    SetFetch,
    StepEnded,
    StepStarted,
    SwitchRole,
    Sync,
    TurnEnded,
    Updated,
)
from springtide.schedule.policy import Batch, Bounds, Layout, Policy
from springtide.schedule.readiness import Readiness
from springtide.schedule.roofline import Roofline, causal_pairs
from springtide.simulate.engine import Engine, Turn
from springtide.simulate.trainer import Step, train_s
from springtide.simulate.workload import Plan, Source

_MOST_DECISIONS = 1_000_000  # between two moments, then a policy never stops deciding
_NO_SIGNAL_STEPS = 20  # steps' worth of groups in a row with equal rewards, as in a live run
_RESTART_S = 30.0  # of a rank that died: a cold start of an engine takes 30 to 100 s (tiderl_async 3.2)


class Stuck(Exception):
    """Nothing will ever happen again, or the policy never stops deciding. One line: what blocks."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds. Weights cross PCIe at 50 GB/s and the network at 8.25 GB/s (tiderl_async 3.2)."""

    sync_s: float
    load_s: float
    switch_s: float
    swap_s: float

    @classmethod
    def of(cls, roofline: Roofline, trained_bytes: float) -> Costs:
        """trained_bytes: of weights and moments that a trainer rank moves out to play."""
        weights = 2.0 * roofline.shape.parameters
        load_s = weights / roofline.devices / 50e9
        return cls(0.5 + weights / 8.25e9, load_s, 1.0 + load_s + trained_bytes / 50e9, load_s)


@dataclass(frozen=True, slots=True)
class World:
    """What is simulated. suites: name -> (share, its episodes, which members succeed); budget: KV tokens of a rank;
    trains: rooflines of one trainer rank; evaluate_every, evaluate: steps between evaluations, and groups of one;
    deaths_s: mean seconds between two deaths of rollout ranks (0: none); equal: whether groups of equal rewards are
    dropped and refilled."""

    suites: dict[str, tuple[float, Source, Callable[[int, int], list[bool]]]]
    roofline: Roofline
    trains: Roofline
    budget: int
    costs: Costs
    evaluate_every: int = 0
    evaluate: int = 0
    deaths_s: float = 0.0
    equal: bool = False
    reference: bool = True


class _Attempt:
    """A running attempt of a member."""

    __slots__ = ("moved", "plan", "rank", "retry", "sampled", "turn")

    def __init__(self, plan: Plan, retry: int) -> None:
        self.plan, self.retry = plan, retry
        self.turn = -1  # before its environment is open
        self.rank: str | None = None
        self.sampled = 0
        self.moved = False


class Rank:
    """A rank's engine, and its seconds by what it did. doing: now; since: from when."""

    __slots__ = ("doing", "engine", "name", "seconds", "since")

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.engine = name, engine
        self.seconds: dict[str, float] = {}
        self.doing, self.since = "", 0.0

    def does(self, what: str, now: float) -> None:
        self.seconds[self.doing] = self.seconds.get(self.doing, 0.0) + now - self.since
        self.doing, self.since = what, now


class Cluster:
    """One run. `record` gets every event and action, if given."""

    def __init__(
        self,
        world: World,
        policy: Policy,
        bounds: Bounds,
        layout: Layout,
        *,
        seed: int = 0,
        record: Callable[[Event | Action], None] | None = None,
    ) -> None:
        self.world, self.policy, self.bounds, self.layout = world, policy, bounds, layout
        self._record = record
        self.now = 0.0
        self.events = 0
        self.state = Readiness({name: suite[0] for name, suite in world.suites.items()})
        follow = getattr(policy, "observe", None)
        if follow is not None:
            self.state.follow(policy)  # type: ignore[arg-type]
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._visit = 0
        self._suite: dict[int, str] = {}
        self._attempts: dict[tuple[int, int], _Attempt] = {}
        self._members: dict[int, list[Plan]] = {}  # of groups in flight: those that are done
        self._groups: dict[int, tuple[int, float, float, int]] = {}  # ready: tokens, reference, train, sampled
        self._evaluations: set[int] = set()
        self.ranks: dict[str, Rank] = {}
        self._step: Step | None = None
        self._pieces = 1
        self._pipeline = layout.pipeline
        self._random = random.Random(seed * 7919 + 3)
        self.trained: Counter[str] = Counter()  # groups, tokens, sampled
        self.discarded: Counter[str] = Counter()
        self.sampled = 0
        self.staleness: list[int] = []
        self.steps: list[tuple[float, float, int]] = []  # when each ended, seconds it trained, sampled tokens
        self.began: list[float] = []
        self.switches = self._without_signal = 0
        self._happen(Began(0.0, 0, dict(self.state.mixture), {}))
        for role, count in (("rollout", layout.rollout), ("reference", layout.reference), ("trainer", layout.trainer)):
            for i in range(count):
                lendable = role == "trainer" and i >= layout.trainer - layout.lendable
                self._join(f"{role}-{i}", role, lendable)  # type: ignore[arg-type]
        if world.deaths_s:
            self._after(self._random.expovariate(1 / world.deaths_s), self._die)

    # --- time ---------------------------------------------------------------------------------------------------------

    def run(self, steps: int, *, most_s: float = 1e9) -> None:
        """Until so many steps are published, or `most_s` have passed. Raises: Stuck."""
        self._settle()
        queue, state = self._queue, self.state
        while state.step < steps and self.now < most_s:
            if not queue:
                choice = "a step is under way" if state.step_running else self.policy.batch(state)
                raise Stuck(
                    f"nothing will happen at step {state.step}: {choice}; admission: {self.policy.blocked(state)}"
                )
            self.now, _, do, given = heapq.heappop(queue)
            do(*given)
        for rank in self.ranks.values():
            rank.does(rank.doing, self.now)

    @property
    def held(self) -> int:
        """Sampled tokens that are neither trained nor given up: of what is in flight, and of ready groups."""
        alive = sum(attempt.sampled for attempt in self._attempts.values())
        played = sum(sum(plan.sampled) for plans in self._members.values() for plan in plans)
        return alive + played + sum(group[3] for group in self._groups.values())

    def _after(self, seconds: float, do: Callable[..., None], *given: Any) -> None:
        self._order += 1
        heapq.heappush(self._queue, (self.now + seconds, self._order, do, given))

    def _happen(self, event: Event) -> None:
        self.events += 1
        if self._record is not None:
            self._record(event)
        self.state.apply(event)

    def _settle(self) -> None:
        """Let the policy decide until it is content."""
        state, policy = self.state, self.policy
        for _ in range(_MOST_DECISIONS):
            actions = policy.decide(state)
            if not actions:
                break
            for action in actions:
                if (why := state.invalid(action)) is not None:
                    raise Stuck(f"{action} is invalid: {why}")
                if self._record is not None:
                    self._record(action)
                self._carry_out(action)
        else:
            raise Stuck(f"the policy never stops deciding: {actions[0]}")
        while state.still and (visit := policy.feed(state)) is not None:
            self._happen(Fed(self.now, visit))
            self._feed(visit)
        if not state.step_running and state.roles["trainer"] and isinstance(choice := policy.batch(state), Batch):
            self._start(choice)
            self._settle()

    # --- actions ------------------------------------------------------------------------------------------------------

    def _carry_out(self, action: Action) -> None:
        match action:
            case Route(visit, member, name):
                self._place(visit, member, name)
            case Admit(suite):
                self._draw(suite, evaluation=False)
            case Pause(visit, member):
                self._happen(Paused(self.now, visit, member))
            case Resume(visit, member, name):
                self._resume(visit, member, name)
            case Abort(visit, cause):
                self._drop(visit, cause)
            case SwitchRole(name, role):
                self._switch(name, role)
            case ChoosePipeline(pipeline):
                self._pipeline = pipeline
            case Sync():
                self._after(self.world.costs.sync_s, self._published)
            case SetFetch():
                pass  # the policy's own batches have that size

    def _draw(self, suite: str, *, evaluation: bool) -> None:
        visit, self._visit = self._visit, self._visit + 1
        members = 1 if evaluation else self.bounds.members
        self._suite[visit] = suite
        self._members[visit] = []
        source = self.world.suites[suite][1]
        for member in range(members):
            self._attempts[visit, member] = _Attempt(source(visit, member, 0), 0)
        if evaluation:
            self._evaluations.add(visit)
        self._happen(Admitted(self.now, visit, suite, self.state.step, members, evaluation))

    def _place(self, visit: int, member: int, name: str) -> None:
        attempt = self._attempts[visit, member]
        attempt.moved = attempt.rank is not None and attempt.rank != name
        attempt.rank = name
        if attempt.turn < 0:
            self._happen(Placed(self.now, visit, member, name, 0))
            self._happen(TurnEnded(self.now, visit, member, 0))  # nothing is sampled: its environment opens
            self._after(attempt.plan.reset_s, self._answered, visit, member, attempt)
            return
        self._happen(Placed(self.now, visit, member, name, attempt.plan.before[attempt.turn]))
        self._decode(visit, member, attempt)

    def _resume(self, visit: int, member: int, name: str) -> None:
        attempt, episode = self._attempts[visit, member], self.state.episode(visit, member)
        assert episode is not None
        decodes = episode.phase == "returned"
        if episode.phase != "decoding" and attempt.rank != name:
            self._release(attempt, (visit, member))
            attempt.moved, attempt.rank = attempt.rank is not None, name
        self._happen(Resumed(self.now, visit, member, name))
        if decodes:
            self._decode(visit, member, attempt)

    def _switch(self, name: str, role: Role) -> None:
        rank = self.ranks[name]
        self.switches += 1
        self._empty(rank)
        rank.does("switch", self.now)
        self._after(self.world.costs.switch_s, self._switched, name, role)

    # --- episodes -----------------------------------------------------------------------------------------------------

    def _decode(self, visit: int, member: int, attempt: _Attempt) -> None:
        plan, turn, rank = attempt.plan, attempt.turn, self.ranks[attempt.rank or ""]
        if rank.doing == "switch":
            return  # it waits for another as soon as that is done
        work = Turn((visit, member), plan.before[turn], plan.sampled[turn], plan.keep[turn], plan.prompt, attempt.moved)
        attempt.moved = False
        rank.engine.start(work, self.now)
        self._watch(rank)

    def _watch(self, rank: Rank) -> None:
        engine = rank.engine
        doing = "decode" if engine.running else "wait"
        if rank.doing != doing and rank.doing in ("decode", "wait"):
            rank.does(doing, self.now)
        end = engine.next_end()
        if end is not None:
            self._order += 1
            heapq.heappush(self._queue, (max(end, self.now), self._order, self._turn_ended, (rank, engine.stamp)))

    def _turn_ended(self, rank: Rank, stamp: int) -> None:
        if stamp != rank.engine.stamp:
            return  # the rank's rate changed since: another end was announced
        visit, member = rank.engine.ended(self.now).key
        attempt = self._attempts[visit, member]
        plan, turn = attempt.plan, attempt.turn
        attempt.sampled += plan.sampled[turn]
        self.sampled += plan.sampled[turn]
        self._happen(TurnEnded(self.now, visit, member, plan.before[turn] + plan.sampled[turn]))
        wait_s = plan.tool_s[turn] if turn < len(plan.tool_s) else 0.0
        self._after(wait_s, self._answered, visit, member, attempt)
        self._watch(rank)
        self._settle()

    def _answered(self, visit: int, member: int, attempt: _Attempt) -> None:
        if self._attempts.get((visit, member)) is not attempt:
            return  # given up meanwhile
        plan = attempt.plan
        if plan.fails_after is not None and attempt.turn >= plan.fails_after:
            self._failed(visit, member, attempt)
        elif attempt.turn + 1 == len(plan.before):
            self._finish(visit, member, attempt)
        else:
            attempt.turn += 1
            self._happen(Returned(self.now, visit, member, plan.before[attempt.turn]))
            episode = self.state.episode(visit, member)
            assert episode is not None
            if episode.phase == "decoding":
                self._decode(visit, member, attempt)
        self._settle()

    def _failed(self, visit: int, member: int, attempt: _Attempt) -> None:
        self.discarded["environment_error"] += attempt.sampled
        self._release(attempt, (visit, member))
        retry = attempt.retry + 1
        source = self.world.suites[self._suite[visit]][1]
        self._attempts[visit, member] = _Attempt(source(visit, member, retry), retry)
        self._happen(Finished(self.now, visit, member, False))

    def _finish(self, visit: int, member: int, attempt: _Attempt) -> None:
        del self._attempts[visit, member]
        self._release(attempt, (visit, member))
        self._members[visit].append(attempt.plan)
        self._happen(Finished(self.now, visit, member, True))
        group = self.state.group(visit)
        assert group is not None
        if group.played == group.members:
            self._group_done(visit)

    def _release(self, attempt: _Attempt, key: tuple[int, int]) -> None:
        if attempt.rank is not None and (rank := self.ranks.get(attempt.rank)) is not None:
            rank.engine.forget(key)

    def _group_done(self, visit: int) -> None:
        plans = self._members.pop(visit)
        for rank in self.ranks.values():
            rank.engine.done(visit)
        sampled = sum(sum(plan.sampled) for plan in plans)
        if visit in self._evaluations:
            self._evaluations.remove(visit)
            self.discarded["evaluation"] += sampled  # of no use to training
            self._happen(Dropped(self.now, visit, "evaluated"))
            if not self._evaluations:
                self._happen(Evaluation(self.now, False))
            return
        won = self.world.suites[self._suite[visit]][2](visit, len(plans))
        if self.world.equal and (all(won) or not any(won)):
            self.discarded["equal_rewards"] += sampled
            self._happen(Dropped(self.now, visit, "equal_rewards"))
            self._without_signal += 1
            if self._without_signal >= _NO_SIGNAL_STEPS * self.bounds.groups:
                raise Stuck(f"all members of the last {self._without_signal} groups earned the same: nothing to train")
            return
        self._without_signal = 0
        tokens = plans[0].prompt + sum(plan.tokens - plan.prompt for plan in plans)  # the prompt is computed once
        pairs = sum(causal_pairs(plan.tokens) for plan in plans)
        reference = self.world.trains.logprobs_s(tokens, pairs) if self.world.reference else 0.0
        self._groups[visit] = tokens, reference, train_s(self.world.trains, tokens, pairs), sampled
        self._happen(Ready(self.now, visit, tokens))

    def _drop(self, visit: int, cause: str) -> None:
        for member in range(self.bounds.members):
            attempt = self._attempts.pop((visit, member), None)
            if attempt is None:
                continue
            self.discarded[cause] += attempt.sampled
            if attempt.rank is not None and (rank := self.ranks.get(attempt.rank)) is not None:
                rank.engine.abort((visit, member), self.now)
                self._watch(rank)
        self.discarded[cause] += sum(sum(plan.sampled) for plan in self._members.pop(visit, []))
        if visit in self._groups:
            self.discarded[cause] += self._groups.pop(visit)[3]
        for rank in self.ranks.values():
            rank.engine.done(visit)
        self._happen(Dropped(self.now, visit, cause))

    # --- training -----------------------------------------------------------------------------------------------------

    def _start(self, batch: Batch) -> None:
        trainers = [rank for name, rank in self.ranks.items() if self._role(name) == "trainer"]
        references = sum(1 for rank in self.state.ranks.values() if rank.role == "reference")
        self.staleness += [self.state.staleness(self.state.buffer[visit]) for visit in batch.visits]
        self.began.append(self.now)
        self._happen(StepStarted(self.now, batch.visits, batch.more))
        self._pieces = max(1, -(-2 * len(trainers) // max(1, len(batch.visits) + batch.more)))
        for rank in trainers:
            rank.does("train", self.now)
        for name, rank in self.ranks.items():
            if self._role(name) == "reference":
                rank.does("reference", self.now)
        pipeline = self._pipeline
        if pipeline == "streaming" and not references:
            pipeline = "aggregate"  # those it had are gone
        self._step = Step(pipeline, [self.now] * len(trainers), [self.now] * references, self.world.costs.swap_s)
        for visit in batch.visits:
            self._work(visit)
        self._complete()

    def _feed(self, visit: int) -> None:
        self.staleness.append(self.state.step - self.state.training_births[-1])
        self._work(visit)
        self._complete()

    def _work(self, visit: int) -> None:
        tokens, reference_s, train_s, sampled = self._groups.pop(visit)
        assert self._step is not None
        self._step.feed(self.now, reference_s, train_s, self._pieces)
        self.trained.update(groups=1, tokens=tokens, sampled=sampled)

    def _complete(self) -> None:
        if self.state.still == 0 and self._step is not None:
            self._after(self._step.end(self.now, self._pieces) - self.now, self._updated)

    def _updated(self) -> None:
        step, self._step = self._step, None
        assert step is not None
        tokens = max(1.0, sum(self.state.group_tokens.value or 1.0 for _ in step.groups))
        trained = sum(train for _, train in step.groups)
        if trained:
            self._happen(Measured(self.now, "train_token", trained / tokens))
        if reference := sum(reference for reference, _ in step.groups):
            self._happen(Measured(self.now, "reference_token", reference / tokens))
        if step.pipeline == "aggregate":
            self._happen(Measured(self.now, "swap", self.world.costs.swap_s))
        for name, rank in self.ranks.items():
            if self._role(name) in ("trainer", "reference") and rank.doing != "switch":
                rank.does("idle", self.now)
        self._happen(Updated(self.now))
        self._settle()

    def _published(self) -> None:
        step = self.state.step + 1
        for name, rank in self.ranks.items():
            if self._role(name) == "rollout":
                rank.engine.publish(step, self.world.costs.load_s, self.now)
                self._watch(rank)
        self._happen(Measured(self.now, "sync", self.world.costs.sync_s))
        self.steps.append((self.now, self.now - self.began[-1], self.trained["sampled"]))
        self._happen(StepEnded(self.now, step))
        every = self.world.evaluate_every
        if every and step % every == 0 and not self._evaluations:
            self._happen(Evaluation(self.now, True))
            names = list(self.world.suites)
            for i in range(self.world.evaluate):
                self._draw(names[i % len(names)], evaluation=True)
        self._settle()

    # --- ranks --------------------------------------------------------------------------------------------------------

    def _role(self, name: str) -> Role | None:
        """None of a rank that is dead."""
        rank = self.state.ranks.get(name)
        return rank.role if rank is not None else None

    def _join(self, name: str, role: Role, lendable: bool = False) -> None:
        rank = self.ranks.setdefault(name, Rank(name, Engine(self.world.roofline, self.world.budget)))
        rank.does("wait" if role == "rollout" else "idle", self.now)
        rank.engine.publish(self.state.step, 0.0, self.now)
        self._happen(RankJoined(self.now, name, role, self.world.budget, lendable))

    def _switched(self, name: str, role: Role) -> None:
        rank = self.ranks[name]
        rank.does("wait" if role == "rollout" else "idle", self.now)
        rank.engine.publish(self.state.step, 0.0, self.now)
        self._happen(Measured(self.now, "switch", self.world.costs.switch_s))
        self._happen(RoleChanged(self.now, name, role))
        self._settle()

    def _die(self) -> None:
        """A rollout rank dies, and comes back after a cold start."""
        playing = [name for name, rank in self.state.ranks.items() if rank.role == rank.origin == "rollout"]
        if len(playing) > 1:
            name = self._random.choice(playing)
            self._empty(self.ranks[name])
            self.ranks[name].does("dead", self.now)
            self._happen(RankLeft(self.now, name))
            self._after(_RESTART_S, self._rejoin, name)
            self._settle()
        self._after(self._random.expovariate(1 / self.world.deaths_s), self._die)

    def _rejoin(self, name: str) -> None:
        self._join(name, "rollout")
        self._settle()

    def _empty(self, rank: Rank) -> None:
        """What it holds is gone: turns begin again elsewhere."""
        rank.engine.clear(self.now)
        for attempt in self._attempts.values():
            if attempt.rank == rank.name:
                attempt.moved = True
