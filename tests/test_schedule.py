"""Scheduling decisions: pure, replayable, and never past their bounds."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.schedule.events import (
    Abort,
    Admit,
    Admitted,
    Dropped,
    Event,
    Ready,
    StepEnded,
    StepStarted,
    event_from_json,
    event_to_json,
)
from springtide.schedule.policy import Batch, Bounds, Policy, Wait, choose_batch
from springtide.schedule.readiness import InvalidEvent, Readiness
from springtide.schedule.registry import make_policy
from springtide.schedule.sampling import UniformSampler
from springtide.trace import TaskRef

WEIGHTS = {"db": 2.0, "kg": 1.0, "household": 1.0}


class Play:
    """A run without a world: groups end at random, the trainer takes what `choose_batch` gives it."""

    def __init__(self, policy: Policy, bounds: Bounds, seed: int, *, drop: float, slow: dict[str, float]) -> None:
        self.policy, self.bounds, self.random = policy, bounds, random.Random(seed)
        self.drop, self.slow = drop, slow
        self.state = Readiness(WEIGHTS)
        self.visit, self.t = 0, 0.0
        self.log: list[Event | Admit | Abort] = []
        self.staleness: list[int] = []
        self.most_pending = self.most_in_flight = 0

    def apply(self, event: Event) -> None:
        self.log.append(event)
        self.state.apply(event)

    def decide(self) -> None:
        while actions := self.policy.decide(self.state):
            for action in actions:
                self.log.append(action)
                if isinstance(action, Abort):
                    self.apply(Dropped(self.t, action.visit, action.cause))
                else:
                    self.apply(Admitted(self.t, self.visit, action.suite, self.state.step))
                    self.visit += 1
            self.most_pending = max(self.most_pending, self.state.pending)
            self.most_in_flight = max(self.most_in_flight, len(self.state.in_flight()))

    def turn(self) -> None:
        self.t += 1.0
        self.decide()
        for group in self.state.in_flight():
            if self.random.random() < 0.3 / self.slow.get(group.suite, 1.0):
                dropped = self.random.random() < self.drop
                self.apply(Dropped(self.t, group.visit, "equal_rewards") if dropped else Ready(self.t, group.visit))
                self.decide()
        if self.state.step_running:
            if self.random.random() < 0.5:
                self.apply(StepEnded(self.t, self.state.step + 1))
        elif isinstance(choice := choose_batch(self.state, self.bounds), Batch):
            self.staleness += [self.state.staleness(self.state.buffer[v]) for v in choice.visits]
            assert len(choice.visits) >= self.bounds.groups
            self.apply(StepStarted(self.t, choice.visits))
        self.decide()


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["synchronous", "fixed_split"]),
    groups=st.integers(1, 6),
    concurrency=st.integers(1, 20),
    bound=st.integers(0, 3),
    overage=st.sampled_from(["wait", "drop"]),
    drop=st.sampled_from([0.0, 0.3, 0.8]),
    seed=st.integers(0, 10**6),
)
def test_no_bound_is_ever_passed_and_every_run_goes_on(
    name: str, groups: int, concurrency: int, bound: int, overage: str, drop: float, seed: int
) -> None:
    """AReaL#588: rejected groups must not close the gate for good; no trained group exceeds the staleness bound."""
    bounds = Bounds(groups, concurrency, bound, overage)
    play = Play(make_policy(name, bounds), bounds, seed, drop=drop, slow={"household": 8.0})
    turns = 0
    while turns < 300 or play.state.step < 2:
        play.turn()
        turns += 1
        assert turns < 20_000, play.policy.blocked(play.state)
    assert max(play.staleness, default=0) <= bound
    if name == "fixed_split":
        assert play.most_in_flight <= concurrency
        assert play.most_pending <= (bound + 1) * groups
    else:
        assert max(play.staleness, default=0) == 0
        assert play.most_pending <= groups


@given(seed=st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_a_recorded_run_replays_to_the_same_actions(seed: int) -> None:
    bounds = Bounds(4, 10, 1)
    play = Play(make_policy("fixed_split", bounds), bounds, seed, drop=0.3, slow={"kg": 3.0})
    for _ in range(120):
        play.turn()
    lines = [json.dumps(event_to_json(item)) for item in play.log]
    policy, state, due = make_policy("fixed_split", bounds), Readiness(WEIGHTS), []
    for line in lines:
        data = json.loads(line)
        if data["kind"] in ("Admit", "Abort"):
            if not due:
                due = [event_to_json(action) for action in policy.decide(state)]
            assert due.pop(0) == data
        else:
            state.apply(event_from_json(data))
    assert state.step == play.state.step


def test_the_consumed_mixture_follows_the_weights_even_when_a_suite_is_slow_and_drops() -> None:
    """prime-rl#2072: the realised mixture drifts from the configured one because environments differ in speed."""
    bounds = Bounds(6, 24, 2)
    play = Play(make_policy("fixed_split", bounds), bounds, 1, drop=0.4, slow={"household": 6.0})
    for _ in range(1500):
        play.turn()
    total = sum(play.state.consumed.values())
    assert total > 300
    for suite, share in play.state.mixture.items():
        assert abs(play.state.consumed[suite] / total - share) < 0.03, play.state.consumed


def test_a_group_at_the_bound_is_waited_for_and_named() -> None:
    state = Readiness({"db": 1.0})
    bounds = Bounds(groups=1, concurrency=4, bound=1)
    state.apply(Admitted(0, 1, "db", 0))
    state.apply(Admitted(0, 2, "db", 0))
    state.apply(Ready(1, 2))
    state.apply(StepStarted(2, (2,)))
    state.apply(StepEnded(3, 1))
    state.apply(Admitted(3, 3, "db", 1))
    state.apply(Ready(4, 3))
    choice = choose_batch(state, bounds)
    assert isinstance(choice, Wait)
    assert choice.cause == "stale_group"
    assert "visits 1" in choice.reason
    state.apply(Ready(5, 1))
    assert choose_batch(state, bounds) == Batch((1,))


def test_under_drop_a_group_that_became_ready_too_late_is_never_trained() -> None:
    """The trainer may choose before the policy has dropped it: both are asked after every event, in any order."""
    state, bounds = Readiness({"db": 1.0}), Bounds(groups=1, concurrency=4, bound=1, overage="drop")
    for visit in range(3):
        state.apply(Admitted(0, visit, "db", 0))
    for step, visit in enumerate((1, 2)):
        state.apply(Ready(1, visit))
        state.apply(StepStarted(2, (visit,)))
        if step == 1:
            state.apply(Ready(2, 0))  # at the bound while this step runs, past it when it ends
        state.apply(StepEnded(3, step + 1))
    assert state.staleness(state.buffer[0]) == 2
    assert isinstance(choose_batch(state, bounds), Wait)
    state.apply(Admitted(3, 3, "db", 2))
    state.apply(Ready(4, 3))
    assert choose_batch(state, bounds) == Batch((3,))
    assert make_policy("fixed_split", bounds).decide(state)[0] == Abort(0, "stale")


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([Admitted(0, 1, "db", 0), Admitted(0, 1, "db", 0)], "admitted twice"),
        ([Ready(0, 1)], "visit 1 is not pending"),
        ([Admitted(0, 1, "db", 0), Ready(0, 1), Ready(0, 1)], "ready twice"),
        ([Admitted(0, 1, "db", 0), StepStarted(0, (1,))], "not ready"),
        ([StepEnded(0, 2), StepEnded(0, 1)], "fell from 2 to 1"),
        ([Admitted(0, 1, "web", 0)], "not in the mixture"),
    ],
)
def test_events_that_contradict_the_state_are_refused(events: list[Event], says: str) -> None:
    state = Readiness({"db": 1.0})
    with pytest.raises(InvalidEvent, match=says):
        for event in events:
            state.apply(event)


def test_what_blocks_admission_is_said_with_its_numbers() -> None:
    bounds = Bounds(groups=2, concurrency=3, bound=1)
    policy, state = make_policy("fixed_split", bounds), Readiness({"db": 1.0})
    assert policy.blocked(state) == "nothing"
    for visit in range(3):
        state.apply(Admitted(0, visit, "db", 0))
    assert policy.blocked(state) == "concurrency: 3 groups in flight"
    state.apply(Ready(1, 0))
    state.apply(Admitted(1, 3, "db", 0))
    assert policy.blocked(state) == "staleness gate: 4 groups pending, at most 4 at bound 1"


def _tasks(n: int) -> list[TaskRef]:
    return [TaskRef(f"t{i}", "s", "1", "train", "quick", i, i) for i in range(n)]


def test_drawing_visits_every_task_once_an_epoch_and_continues_anywhere() -> None:
    """NeMo-RL#3599: 30% of the prompts were skipped over restarts."""
    sampler = UniformSampler("s", _tasks(17), seed=3)
    drawn = [sampler.task(k).id for k in range(51)]
    assert Counter(drawn) == {f"t{i}": 3 for i in range(17)}
    assert drawn[:17] != drawn[17:34]
    resumed = UniformSampler("s", _tasks(17), seed=3)
    assert [resumed.task(k).id for k in range(20, 51)] == drawn[20:]


def test_what_a_rollback_made_ready_is_not_trained_in_one_giant_step() -> None:
    """After a resume at step 1, groups born up to step 20 are ready again: each is due when its own age says so."""
    bounds = Bounds(groups=4, concurrency=8, bound=2)
    state = Readiness({"db": 1.0}, step=1)
    for visit in range(76):
        state.apply(Admitted(0, visit, "db", 1 + visit // 4))
        state.apply(Ready(1, visit))
    while state.ready():
        choice = choose_batch(state, bounds)
        assert isinstance(choice, Batch)
        assert len(choice.visits) == 4
        assert all(state.staleness(state.buffer[v]) <= bounds.bound for v in choice.visits)
        state.apply(StepStarted(2, choice.visits))
        state.apply(StepEnded(3, state.step + 1))
