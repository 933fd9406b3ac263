"""Faults that users of other trainers reported of scheduling, each by the thread that reports it."""

from __future__ import annotations

import pytest

from schedule_world import Faults, World, replay
from springtide.schedule.events import (
    Admit,
    Admitted,
    Began,
    Measured,
    Paused,
    Placed,
    RankJoined,
    Ready,
    Resume,
    Resumed,
    Returned,
    StepEnded,
    StepStarted,
    TurnEnded,
    Updated,
)
from springtide.schedule.policy import Bounds, Cluster, Wait, choose_batch
from springtide.schedule.readiness import Readiness
from springtide.schedule.registry import POLICIES, layout, make_policy

NAMES = sorted(POLICIES)
BUDGETED = ("springtide", "tiderl")


@pytest.mark.parametrize("name", NAMES)
def test_groups_rejected_until_nothing_is_ready_close_no_gate(name: str) -> None:
    """AReaL#588: rejected samples made wait() infinite. SkyRL#1173: a buffer stood at 125 of 128 groups."""
    bounds = Bounds(groups=3, concurrency=6, bound=1, members=2)
    world = World(name, bounds, Cluster(4), seed=1, faults=Faults(reject=0.9))
    world.run(3)
    assert world.ends["rejected"] > 30


@pytest.mark.parametrize("name", NAMES)
def test_an_environment_that_never_returns_holds_up_its_group_only(name: str) -> None:
    """verl#7155: sample() waited for ever for one lost rollout of 512, without a word."""
    bounds = Bounds(groups=2, concurrency=6, bound=2, members=2)
    world = World(name, bounds, Cluster(4), seed=2, faults=Faults(hang=0.2))
    world.run(4)
    world.recount()


@pytest.mark.parametrize("name", NAMES)
def test_suites_that_are_rejected_at_different_rates_do_not_wait_for_each_other(name: str) -> None:
    """miles#2638: queues a policy deadlocked when acceptance rates diverged. prime-rl#2072: the mixture drifted."""
    bounds = Bounds(groups=4, concurrency=12, bound=2)
    world = World(
        name, bounds, Cluster(4), seed=3, faults=Faults(reject=0.4), turns=(1, 2), weights={"a": 3.0, "b": 1.0}
    )
    world.run(30, most_events=200_000)
    share = world.state.consumed["b"] / world.state.consumed.total()
    assert share == pytest.approx(0.25, abs=0.07)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_starts_from_nothing_and_refills_its_gate_after_every_step(name: str) -> None:
    """verl#3895: a hang at the start. prime-rl#1372: after the barrier only one group was refilled."""
    bounds = Bounds(groups=4, concurrency=100, bound=1)
    policy, state = make_policy(name, bounds, layout(name, Cluster(4))), Readiness({"a": 1.0})
    state.follow(policy)

    def drawn() -> int:
        before = visits[0]
        while isinstance((policy.decide(state) or [None])[0], Admit):
            state.apply(Admitted(0, visits[0], "a", state.step))
            visits[0] += 1
        return visits[0] - before

    visits = [0]
    state.apply(Began(0, 0, {"a": 1.0}, {}))  # no ranks: the runtime places
    first = drawn()
    assert first >= 4
    for visit in range(4):
        state.apply(Ready(1, visit))
    state.apply(StepStarted(1, (0, 1, 2, 3)))
    drawn()
    state.apply(Updated(2))
    assert policy.decide(state)  # publish
    state.apply(StepEnded(2, 1))
    drawn()
    assert len(state.playing) >= 4


def test_a_trainer_never_overtakes_what_plays_under_a_hard_bound() -> None:
    """prime-rl#491: the trainer overtook the orchestrator and trained on stale data. slime#1800: no versions at all."""
    state, bounds = Readiness({"a": 1.0}), Bounds(groups=1, concurrency=9, bound=1)
    for visit in range(3):
        state.apply(Admitted(0, visit, "a", 0))
    for step in (1, 2):
        state.apply(Ready(step, step))
        choice = choose_batch(state, bounds)
        if step == 2:
            assert isinstance(choice, Wait) and "visits 0" in choice.reason
            return
        state.apply(StepStarted(step, (step,)))
        state.apply(StepEnded(step, step))


@pytest.mark.parametrize("name", [n for n in NAMES if n != "kv_aimd"])
def test_under_wait_nothing_that_was_drawn_is_thrown_away(name: str) -> None:
    """slime#2238: the queue was drained and almost all surplus groups dropped. marin#8955: 1 of 5 was stale."""
    bounds = Bounds(groups=4, concurrency=40, bound=2, members=2)
    world = World(name, bounds, Cluster(5), seed=5)
    world.run(8)
    assert set(world.ends) == {"trained"}
    assert world.visit <= world.ends["trained"] + (bounds.bound + 1) * bounds.groups


def test_the_gate_holds_exactly_one_more_than_the_bound() -> None:
    """TRL PR#5656: the bound on what is in flight was off by one."""
    for bound in range(4):
        bounds = Bounds(groups=3, concurrency=100, bound=bound)
        policy, state = make_policy("fixed_split", bounds), Readiness({"a": 1.0})
        visit = 0
        while policy.decide(state):
            state.apply(Admitted(0, visit, "a", 0))
            visit += 1
        assert visit == (bound + 1) * 3


def test_after_a_resume_there_is_no_burst() -> None:
    """AReaL's recovery rule: submitted := version * batch + pending, else all of (bound + version + 1) * batch come."""
    bounds = Bounds(groups=3, concurrency=1000, bound=1)
    policy, state = make_policy("fixed_split", bounds), Readiness({"a": 1.0})
    state.apply(Began(0, 70, {"a": 1.0}, {"a": 210}))
    visit = 500
    for _ in range(4):
        state.apply(Admitted(0, visit, "a", 69))
        visit += 1
    drawn = 0
    while policy.decide(state):
        state.apply(Admitted(0, visit + drawn, "a", 70))
        drawn += 1
    assert drawn == 2


@pytest.mark.parametrize("name", ["program_aware", *BUDGETED])
def test_a_pause_reaches_what_acts_and_ends(name: str) -> None:
    """verl PR#4067: a pause missed samples in their tool call. prime-rl PR#2673: a pause had no time-out."""
    bounds = Bounds(groups=50, concurrency=99, bound=1)
    policy, state = make_policy(name, bounds, layout(name, Cluster(2))), Readiness({"a": 1.0})
    state.follow(policy)
    state.apply(RankJoined(0, "r0", "rollout", 1000))
    for visit in (1, 2):
        state.apply(Admitted(0, visit, "a", 0))
        state.apply(Placed(0, visit, 0, "r0", 400))
    state.apply(TurnEnded(1, 1, 0, 450))
    state.apply(Paused(1, 1, 0))  # it acts
    assert state.ranks["r0"].tokens == 400 and state.ranks["r0"].live == 1
    state.apply(Returned(2, 1, 0, 800))
    state.apply(Admitted(2, 3, "a", 0))
    assert Resume(1, 0, "r0") not in policy.decide(state)
    state.apply(Measured(2 + 1800, "sync", 1.0))
    assert Resume(1, 0, "r0") in policy.decide(state)


@pytest.mark.parametrize("name", BUDGETED)
def test_sticky_episodes_leave_a_rank_that_became_hot(name: str) -> None:
    """verl RFC#6383, PR#7435; torchtitan#3755: sticky sessions never rebalanced, one replica's KV was hot."""
    bounds = Bounds(groups=90, concurrency=200, bound=1)
    policy, state = make_policy(name, bounds, layout(name, Cluster(3))), Readiness({"a": 1.0})
    state.follow(policy)
    for rank in ("r0", "r1"):
        state.apply(RankJoined(0, rank, "rollout", 100_000))
    for visit in range(20):
        state.apply(Admitted(0, visit, "a", 0))
        state.apply(Placed(0, visit, 0, "r0", 500))
    state.apply(TurnEnded(1, 3, 0, 600))
    state.apply(Paused(1, 3, 0))
    state.apply(Returned(2, 3, 0, 700))
    assert policy.decide(state)[0] == Resume(3, 0, "r1")


def test_a_rank_that_joins_gets_its_part_of_what_plays() -> None:
    """The same, where the rank was lent: what plays elsewhere is paused at its tool, and goes on there."""
    bounds = Bounds(groups=90, concurrency=200, bound=1)
    policy, state = make_policy("springtide", bounds, layout("springtide", Cluster(3))), Readiness({"a": 1.0})
    state.follow(policy)
    state.apply(RankJoined(0, "r0", "rollout", 100_000))
    for visit in range(12):
        state.apply(Admitted(0, visit, "a", 0))
        state.apply(Placed(0, visit, 0, "r0", 500))
        if visit % 2:
            state.apply(TurnEnded(1, visit, 0, 600))
    state.apply(RankJoined(2, "r1", "rollout", 100_000))
    pauses = policy.decide(state)
    assert sorted(p.visit for p in pauses) == [1, 3, 5, 7, 9, 11]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", BUDGETED)
def test_what_plays_keeps_its_budget(name: str) -> None:
    """DESIGN 11: KV used never exceeds capacity. Beyond head-room is only what cannot be paused: one, or who leaves."""
    bounds = Bounds(groups=4, concurrency=30, bound=3, members=3)

    class Watched(World):
        def _check(self) -> None:
            super()._check()
            for pool in self.policy.placement.pools.pools.values():  # type: ignore[attr-defined]
                marked = sum(episode.phase == "decoding" for episode in pool.rank.parked.values())
                if pool.rank.live - marked > 1:
                    assert pool.used - pool.leaving <= pool.rank.budget
                    assert pool.room + pool.leaving >= 0
                    self.full = max(self.full, pool.used / pool.rank.budget)

        full = 0.0

    world = Watched(name, bounds, Cluster(5), seed=4, budget=3000, turns=(4, 9), tool_s=6.0)
    world.run(8)
    assert world.actions["Pause"] > 10 and world.full > 0.7
    replay(world)


@pytest.mark.parametrize("name", ["program_aware", *BUDGETED])
def test_nobody_starves_where_tokens_are_short(name: str) -> None:
    """Ageing: five steps, then it is one's turn; no group of a run that ends is left behind."""
    bounds = Bounds(groups=4, concurrency=30, bound=3, members=3)
    world = World(name, bounds, Cluster(4), seed=6, budget=2500, turns=(3, 8), tool_s=4.0)
    world.run(12, most_events=200_000)
    step = world.state.step_s.value
    assert step is not None
    assert world.longest_wait < 8 * step
    oldest = min((group.birth for group in world.state.playing.values()), default=world.state.step)
    assert world.state.step - oldest <= bounds.bound


def test_the_watchdog_names_the_predicate_and_its_holder() -> None:
    """verl#7155, prime-rl#1713: a hang without a log."""
    bounds = Bounds(groups=2, concurrency=9, bound=1)
    policy, state = make_policy("springtide", bounds, layout("springtide", Cluster(2))), Readiness({"a": 1.0})
    state.follow(policy)
    state.apply(RankJoined(0, "r0", "rollout", 1000))
    for visit in range(2):
        state.apply(Admitted(0, visit, "a", 0))
        state.apply(Placed(0, visit, 0, "r0", 450))
    state.apply(TurnEnded(1, 0, 0, 480))
    assert policy.decide(state) == []
    # Two that grow to 1,200 on average: a first turn of 480, and four times as much before an end was seen.
    assert policy.blocked(state) == "tokens: 2400 and 1 episodes of 1200 more in budgets of 1000"
    assert policy.batch(state) == Wait("groups", "0 of 2 groups ready, 2 in flight")


def test_late_and_doubled_answers_change_nothing() -> None:
    """Answers of an attempt that is over, of a rank that died, of a group that was dropped."""
    bounds = Bounds(groups=3, concurrency=9, bound=2, members=2)
    world = World(
        "springtide", bounds, Cluster(4), seed=8, faults=Faults(twice=0.5, fail=0.2, deaths_s=20.0, clock=True)
    )
    world.run(5)
    world.recount()
    replay(world)


def test_a_resumed_episode_of_a_rank_that_left_plays_on_another() -> None:
    """vLLM and verl#6583: a dead engine was reported as success and the trainer blocked for ever."""
    state = Readiness({"a": 1.0})
    for rank in ("r0", "r1"):
        state.apply(RankJoined(0, rank, "rollout", 1000))
    state.apply(Admitted(0, 1, "a", 0))
    state.apply(Placed(0, 1, 0, "r0", 100))
    state.apply(TurnEnded(1, 1, 0, 200))
    state.apply(Paused(1, 1, 0))
    assert state.invalid(Resume(1, 0, "r9")) == "there is no rank r9"
    state.apply(Resumed(2, 1, 0, "r1"))
    assert state.ranks["r1"].acting_tokens == 200 and not state.ranks["r0"].parked
