"""Each rule of the policies by a case that was computed by hand, with the published constants."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.schedule.composed import ClusterPolicy, Roles
from springtide.schedule.ctb import Rules, TaskBatching
from springtide.schedule.events import (
    Abort,
    Action,
    Admit,
    Admitted,
    Dropped,
    Evaluation,
    Event,
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
    StepEnded,
    StepStarted,
    SwitchRole,
    TurnEnded,
    Updated,
)
from springtide.schedule.footprint import Decay, Footprint
from springtide.schedule.hybrid_ranks import HybridRanks
from springtide.schedule.kv_aimd import KvAimd
from springtide.schedule.placement import LeastLoaded
from springtide.schedule.policy import Batch, Bounds, Cluster, Layout, Wait, choose_batch, next_fed
from springtide.schedule.program_aware import ProgramAware
from springtide.schedule.readiness import Readiness
from springtide.schedule.registry import layout, make_policy
from springtide.schedule.slack import Slack


def task_batching(bounds: Bounds, rules: Rules, *ranks: tuple[str, int]) -> tuple[ClusterPolicy, Readiness]:
    policy = ClusterPolicy(bounds, TaskBatching(bounds, rules), Roles(bounds, Layout(len(ranks), 0, 1)))
    state = Readiness({"a": 1.0})
    state.follow(policy)
    for name, budget in ranks:
        state.apply(RankJoined(0.0, name, "rollout", budget))
    return policy, state


def play(state: Readiness, *events: Event) -> None:
    for event in events:
        state.apply(event)


PLAIN = Rules(decay=Decay("constant"), probe="unknown", head_room=0.1)
WIDE = Bounds(groups=50, concurrency=100, bound=1, members=2)


def known(state: Readiness, first: int, visit: int = 999) -> None:
    """Let the suite's first turn be known."""
    play(
        state, Admitted(0, visit, "a", 0), Placed(0, visit, 0, next(iter(state.ranks)), 10),
        TurnEnded(0, visit, 0, first), Dropped(0, visit, "x"),
    )  # fmt: skip


# --- footprints -------------------------------------------------------------------------------------------------------


def test_what_acts_weighs_less_the_longer_it_acts() -> None:
    """ThunderAgent: f(t) = 2^(-t/T); linear 1 - t/T; constant."""
    assert Decay("exponential", 5.0).share(10.0) == 0.25
    assert Decay("linear", 5.0).share(2.0) == pytest.approx(0.6)
    assert Decay("linear", 5.0).share(6.0) == 0.0
    assert Decay("constant").share(1e6) == 1.0


@given(
    kind=st.sampled_from(["constant", "exponential", "linear"]),
    seconds=st.floats(0.5, 50),
    steps=st.lists(st.tuples(st.floats(0, 20), st.integers(0, 5000), st.booleans()), max_size=40),
)
def test_the_kept_sum_of_footprints_is_the_sum(kind: Any, seconds: float, steps: list[tuple[float, int, bool]]) -> None:
    decay, now, parts = Decay(kind, seconds), 0.0, []
    footprint = Footprint(decay)
    for passed, tokens, take in steps:
        now += passed
        if take and parts:
            footprint.take(parts.pop(tokens % len(parts)), now)
        else:
            parts.append(footprint.add(tokens, now, now))
        exact = sum(part.tokens * decay.share(now - part.since) for part in parts)
        assert footprint.value(now) == pytest.approx(exact, abs=1e-3)


# --- CTB --------------------------------------------------------------------------------------------------------------


def test_a_probe_goes_ahead_where_nothing_is_known_and_its_group_follows_its_first_turn() -> None:
    policy, state = task_batching(WIDE, PLAIN, ("r0", 10_000))
    assert policy.decide(state) == [Admit("a", probe=True)]
    play(state, Admitted(0, 1, "a", 0, 2))
    assert policy.decide(state) == [Route(1, 0, "r0")]
    play(state, Placed(0, 1, 0, "r0", 100))
    assert all(isinstance(action, Admit) for action in policy.decide(state))  # its mate waits for it
    play(state, TurnEnded(2, 1, 0, 300))
    assert policy.decide(state) == [Route(1, 1, "r0")]
    play(state, Placed(2, 1, 1, "r0", 100))
    assert policy.decide(state) == [Admit("a", probe=False)]


def test_a_group_follows_when_its_probe_fails() -> None:
    policy, state = task_batching(WIDE, PLAIN, ("r0", 10_000))
    play(state, Admitted(0, 1, "a", 0, 3), Placed(0, 1, 0, "r0", 100), Finished(1, 1, 0, False))
    assert policy.decide(state)[0] in [Route(1, m, "r0") for m in range(3)]
    for _ in range(3):
        action = policy.decide(state)[0]
        assert isinstance(action, Route)
        play(state, Placed(1, action.visit, action.member, action.rank, 100))
    assert not state.waiting


def test_admission_leaves_room_for_the_first_turns_of_a_group() -> None:
    """sum(used) + n * first turn <= 0.85 * budget: 1000 tokens hold 400 + 2 x 200, not 500 + 2 x 290."""
    policy, state = task_batching(WIDE, PLAIN, ("r0", 1000))
    known(state, 200)
    play(state, Admitted(0, 1, "a", 0), Placed(0, 1, 0, "r0", 400))
    assert policy.decide(state) == [Admit("a")]
    play(state, TurnEnded(1, 1, 0, 500))  # the estimate follows: 200 + 0.3 x (500 - 200)
    assert policy.decide(state) == []
    assert "tokens: 500 and 2 episodes of 290 more in budgets of 1000" in policy.blocked(state)


def test_over_budget_the_one_that_acts_is_paused_and_the_least_done_first() -> None:
    """Budget 1000 less 10%: 950 is 50 too many. Acting before decoding; share of the group done before context."""
    policy, state = task_batching(WIDE, PLAIN, ("r0", 1000))
    for visit in (1, 2, 3):
        play(state, Admitted(0, visit, "a", 0, 2))
        for member in (0, 1):
            play(state, Placed(0, visit, member, "r0", 50))
    play(state, Finished(1, 2, 1, True), Finished(1, 1, 1, True), Finished(1, 3, 1, True))
    play(state, Admitted(1, 4, "a", 0, 2), Placed(1, 4, 0, "r0", 500))
    assert not any(isinstance(action, Pause) for action in policy.decide(state))
    play(state, TurnEnded(2, 1, 0, 300), TurnEnded(2, 4, 0, 550))  # 1: half done; 4: nothing done, and larger
    assert policy.decide(state) == [Pause(4, 0)]
    play(state, Paused(2, 4, 0))
    assert not any(isinstance(action, Pause) for action in policy.decide(state))


def test_where_nobody_acts_those_that_decode_are_asked_to_leave_at_their_turns_end() -> None:
    policy, state = task_batching(WIDE, PLAIN, ("r0", 1000))
    play(state, Admitted(0, 1, "a", 0, 2), Admitted(0, 2, "a", 0, 2))
    play(state, Placed(0, 1, 0, "r0", 600), Placed(0, 1, 1, "r0", 200), Placed(0, 2, 0, "r0", 300))
    assert policy.decide(state) == [Pause(1, 1)]  # alike in all but context: the shortest
    play(state, Paused(0, 1, 1))
    assert not any(isinstance(action, Pause) for action in policy.decide(state))  # it is on its way out
    assert state.ranks["r0"].live == 3


def test_an_evaluation_is_paused_last_and_placed_first() -> None:
    policy, state = task_batching(WIDE, PLAIN, ("r0", 1000))
    known(state, 100)
    play(state, Evaluation(0, True), Admitted(0, 1, "a", 0, 1, True), Placed(0, 1, 0, "r0", 500))
    play(state, Admitted(0, 2, "a", 0), Placed(0, 2, 0, "r0", 300), TurnEnded(1, 1, 0, 650))
    assert policy.decide(state) == [Pause(2, 0)]  # though it decodes, and the evaluation's acts
    play(state, Paused(1, 2, 0), Admitted(1, 3, "a", 0), Admitted(1, 4, "a", 0, 1, True), Dropped(1, 1, "done"))
    assert policy.decide(state) == [Route(4, 0, "r0")]


def test_a_paused_one_comes_back_before_a_new_one_and_to_its_rank() -> None:
    policy, state = task_batching(WIDE, PLAIN, ("r0", 1000), ("r1", 1000))
    known(state, 100)
    play(state, Admitted(0, 1, "a", 0), Admitted(0, 2, "a", 0), Placed(0, 1, 0, "r0", 300), Placed(0, 2, 0, "r0", 300))
    play(state, TurnEnded(1, 1, 0, 350), Paused(1, 1, 0), Returned(2, 1, 0, 400), Admitted(2, 3, "a", 0))
    assert policy.decide(state) == [Resume(1, 0, "r1")] or policy.decide(state) == [Resume(1, 0, "r0")]


def test_affinity_holds_until_the_rank_is_fuller_by_more_than_the_margin() -> None:
    """verl PR#7435: two episodes more are borne, three are not."""
    for more, goes in ((2, "r0"), (3, "r1")):
        policy, state = task_batching(WIDE, PLAIN, ("r0", 10_000), ("r1", 10_000))
        known(state, 100)
        play(state, Admitted(0, 9, "a", 0), Placed(0, 9, 0, "r1", 100))
        for visit in range(1 + more):
            play(state, Admitted(0, visit, "a", 0), Placed(0, visit, 0, "r0", 100))
        play(state, Admitted(0, 20, "a", 0), Placed(0, 20, 0, "r0", 100), TurnEnded(1, 20, 0, 200), Paused(1, 20, 0))
        play(state, Returned(2, 20, 0, 300))
        assert state.ranks["r0"].live - state.ranks["r1"].live == more
        assert policy.decide(state) == [Resume(20, 0, goes)]


def test_a_rank_without_an_episode_takes_any_and_the_only_one_is_never_paused() -> None:
    policy, state = task_batching(WIDE, PLAIN, ("r0", 1000))
    known(state, 100)
    play(state, Admitted(0, 1, "a", 0), Placed(0, 1, 0, "r0", 100), TurnEnded(1, 1, 0, 5000))
    assert not any(isinstance(action, Pause) for action in policy.decide(state))
    play(state, Paused(1, 1, 0), Returned(2, 1, 0, 5100))
    assert policy.decide(state) == [Resume(1, 0, "r0")]


def test_who_waited_for_five_steps_goes_next_and_after_half_an_hour_in_any_case() -> None:
    policy, state = task_batching(WIDE, PLAIN, ("r0", 1000))
    known(state, 100)
    play(state, Admitted(0, 7, "a", 0), Ready(0, 7), StepStarted(0, (7,)), Updated(5), StepEnded(10, 1))  # T_step = 10
    play(state, Admitted(10, 1, "a", 1), Placed(10, 1, 0, "r0", 500), TurnEnded(11, 1, 0, 600), Paused(11, 1, 0))
    play(state, Admitted(11, 2, "a", 1), Placed(11, 2, 0, "r0", 700), Returned(12, 1, 0, 650))
    play(state, Admitted(13, 3, "a", 1))
    assert policy.decide(state) == []  # neither fits beside 700 of 900, the paused one first
    play(state, TurnEnded(20, 2, 0, 300))  # a window slid: 300 of 900
    assert policy.decide(state) == []
    play(state, Returned(61, 2, 0, 300))
    play(state, Admitted(63, 4, "a", 1))
    assert policy.decide(state) == []  # it is its turn, and nobody smaller takes the room
    play(state, Measured(12 + 1800, "sync", 1.0))
    assert policy.decide(state) == [Resume(1, 0, "r0")]


@pytest.mark.parametrize(("oldest", "first"), [(True, 1), (False, 2)])
def test_the_oldest_weights_go_first_where_the_rules_say_so(oldest: bool, first: int) -> None:
    """Else the group that is nearest to its end does."""
    rules = Rules(decay=Decay("constant"), oldest=oldest)
    policy, state = task_batching(WIDE, rules, ("r0", 1000), ("r1", 10))
    play(state, Admitted(0, 1, "a", 0), Placed(0, 1, 0, "r1", 100), StepStarted(0, ()), StepEnded(0, 1))
    play(state, Admitted(0, 2, "a", 1, 2), Placed(0, 2, 0, "r1", 100), Placed(0, 2, 1, "r1", 100))
    play(state, Finished(1, 2, 1, True), TurnEnded(1, 1, 0, 200), TurnEnded(1, 2, 0, 150))
    play(state, Paused(1, 1, 0), Paused(1, 2, 0), Returned(2, 1, 0, 300), Returned(2, 2, 0, 250))
    action = policy.decide(state)[0]
    assert isinstance(action, Resume) and action.visit == first


def test_head_room_is_for_as_many_turns_as_the_rules_say() -> None:
    """10 episodes that grow by 20 a turn keep 200 or 100 tokens free, and never less than a twentieth."""
    for ahead, room in ((1.0, 9_000 - 200), (0.5, 9_000 - 100), (0.1, 9_000 - 50)):
        rules = Rules(decay=Decay("constant"), turns_ahead=ahead, head_room=50 / 10_000)
        policy, state = task_batching(WIDE, rules, ("r0", 10_000))
        for visit in range(10):
            play(state, Admitted(0, visit, "a", 0), Placed(0, visit, 0, "r0", 60), TurnEnded(0, visit, 0, 80))
            play(state, Returned(0, visit, 0, 90), TurnEnded(0, visit, 0, 100))
        assert isinstance(policy.placement, TaskBatching)
        assert policy.placement.pools.pools["r0"].room == pytest.approx(room)


def test_while_no_first_turn_is_known_few_groups_are_drawn() -> None:
    policy, state = task_batching(WIDE, PLAIN, ("r0", 10_000))
    visit = 0
    while actions := policy.decide(state):
        for action in actions:
            if isinstance(action, Admit):
                play(state, Admitted(0, visit, "a", 0, 2))
                visit += 1
            elif isinstance(action, Route):
                play(state, Placed(0, action.visit, action.member, action.rank, 10))
    assert visit == 4
    assert policy.blocked(state) == "probes: 4 groups wait for the first turn of any"


def test_episodes_of_a_dead_rank_go_to_another_paused_ones_too() -> None:
    """A rank dies while paused episodes live on it."""
    policy, state = task_batching(WIDE, PLAIN, ("r0", 1000), ("r1", 1000))
    known(state, 100)
    play(state, Admitted(0, 1, "a", 0, 2), Placed(0, 1, 0, "r0", 100), Placed(0, 1, 1, "r0", 100))
    play(state, TurnEnded(1, 1, 0, 200), Paused(1, 1, 0), Returned(2, 1, 0, 250), RankLeft(3, "r0"))
    seen: set[Action] = set()
    while state.waiting or state.parked:
        (action,) = policy.decide(state)
        seen.add(action)
        if isinstance(action, Route):
            play(state, Placed(3, action.visit, action.member, action.rank, 100))
        elif isinstance(action, Resume):
            play(state, Resumed(3, action.visit, action.member, action.rank))
    assert seen == {Resume(1, 0, "r1"), Route(1, 1, "r1")}


# --- gates ------------------------------------------------------------------------------------------------------------


def test_environments_bound_what_is_drawn() -> None:
    bounds = Bounds(groups=9, concurrency=9, bound=1, members=4, environments=6)
    policy, state = make_policy("fixed_split", bounds), Readiness({"a": 1.0})
    assert policy.decide(state) == [Admit("a")]
    play(state, Admitted(0, 1, "a", 0, 4))
    assert policy.decide(state) == []
    assert policy.blocked(state) == "environments: 4 of 6 open, a group needs 4"
    play(state, Finished(1, 1, 0, True), Finished(1, 1, 1, True))
    assert policy.decide(state) == [Admit("a")]


def test_a_suite_that_hangs_leaves_room_for_the_others() -> None:
    """Diversity: at most twice its share of what may be in flight."""
    bounds = Bounds(groups=4, concurrency=8, bound=1)
    policy, state = make_policy("fixed_split", bounds), Readiness({"hangs": 1.0, "a": 3.0})
    visit = steps = 0
    for _ in range(400):
        for action in policy.decide(state):
            assert isinstance(action, Admit)
            play(state, Admitted(0, visit, action.suite, state.step))
            visit += 1
        for group in [g for g in state.in_flight() if g.suite == "a"]:
            play(state, Ready(0, group.visit))
        if state.buffer:
            steps += 1
            play(state, StepStarted(0, tuple(state.buffer)), Updated(0), StepEnded(0, steps))
    assert state.playing_of["hangs"] == 4  # 2 x 1/4 x 8
    assert state.consumed["a"] > 300


def test_a_synchronous_wave_is_refilled_whole_and_its_ranks_change_together() -> None:
    bounds = Bounds(groups=2, concurrency=9, bound=0)
    policy, state = make_policy("synchronous", bounds, layout("synchronous", Cluster(2))), Readiness({"a": 1.0})
    state.follow(policy)
    play(state, RankJoined(0, "t0", "trainer", 1000, True), RankJoined(0, "t1", "trainer", 1000, True))
    assert policy.decide(state) == [SwitchRole("t0", "rollout"), SwitchRole("t1", "rollout")]
    play(state, RoleChanged(1, "t0", "rollout"), RoleChanged(1, "t1", "rollout"))
    for visit in (0, 1):
        assert policy.decide(state) == [Admit("a")]
        play(state, Admitted(1, visit, "a", 0))
        assert policy.decide(state) == [Route(visit, 0, f"t{visit}")]
        play(state, Placed(1, visit, 0, f"t{visit}", 10))
    assert policy.decide(state) == []
    play(state, Ready(2, 0))
    assert policy.decide(state) == []
    play(state, Dropped(3, 1, "equal_rewards"))
    assert policy.decide(state) == [Admit("a")]  # one is missing, and nobody plays
    play(state, Admitted(3, 2, "a", 0), Placed(3, 2, 0, "t0", 10), Ready(4, 2))
    assert policy.batch(state) == Wait("ranks", "2 trainer ranks still play")
    assert policy.decide(state) == [SwitchRole("t0", "trainer"), SwitchRole("t1", "trainer")]
    play(state, RoleChanged(5, "t0", "trainer"), RoleChanged(5, "t1", "trainer"))
    assert policy.batch(state) == Batch((0, 2))


def test_fewer_groups_are_pending_where_the_trainer_waits_for_stragglers_and_more_where_for_data() -> None:
    """By a quarter of a step's groups: 12 at bound 2, 11 after 5 s for a straggler, 12 again after 5 s for data."""
    bounds = Bounds(groups=4, concurrency=99, bound=2)
    gates, state = Slack(bounds), Readiness({"a": 1.0})
    state.follow(ClusterPolicy(bounds, LeastLoaded(), Roles(bounds, Layout(1, 0, 1)), gates))

    def step(t: float, visits: range) -> None:
        for visit in visits:
            play(state, Admitted(t, visit, "a", state.step), Ready(t, visit))
        play(state, StepStarted(t, tuple(visits)), Updated(t + 10), StepEnded(t + 10, state.step + 1))

    play(state, Admitted(0, 99, "a", 0))
    step(0, range(4))
    step(10, range(10, 14))
    assert gates.limit == 12
    for visit in range(20, 24):
        play(state, Admitted(20, visit, "a", 2), Ready(20, visit))
    play(state, Ready(25, 99), StepStarted(25, (20, 21, 22, 23)), Updated(35))
    assert gates.limit == 11
    play(state, StepEnded(35, 3))
    for visit in range(30, 34):
        play(state, Admitted(35, visit, "a", 3))
    for visit in range(30, 34):
        play(state, Ready(40, visit))
    play(state, StepStarted(40, (30, 31, 32, 33)))
    assert gates.limit == 12
    assert gates.closed(state, 4) is None
    for visit in range(50, 57):
        play(state, Admitted(40, visit, "a", 3))
    assert state.pending == 12
    assert gates.closed(state, 4) == "staleness gate: 12 groups pending, at most 12, so that none comes too late"


def test_one_step_off_draws_the_next_step_and_no_more() -> None:
    bounds = Bounds(groups=2, concurrency=9, bound=1)
    policy, state = make_policy("one_step_off", bounds), Readiness({"a": 1.0})
    for visit in (0, 1):
        assert policy.decide(state) == [Admit("a")]
        play(state, Admitted(0, visit, "a", 0))
    assert policy.decide(state) == []
    assert policy.blocked(state) == "one step off: 2 groups of the next step's 2 are drawn"
    play(state, Ready(1, 0), Ready(1, 1), StepStarted(1, (0, 1)))
    assert policy.decide(state) == [Admit("a")]


# --- batches that stream ----------------------------------------------------------------------------------------------


def test_a_step_streams_from_as_many_groups_on_and_keeps_a_place_for_those_at_the_bound() -> None:
    bounds, state = Bounds(groups=3, concurrency=9, bound=1), Readiness({"a": 1.0})
    play(state, Admitted(0, 1, "a", 0), Admitted(0, 2, "a", 0), StepStarted(0, ()), StepEnded(0, 1))
    play(state, Admitted(1, 3, "a", 1), Admitted(1, 4, "a", 1), Ready(2, 3))
    assert choose_batch(state, bounds, stream=1) == Batch((3,), more=2)
    play(state, StepStarted(2, (3,), 2), Ready(3, 4))
    assert next_fed(state, bounds) is None  # both places are of 1 and 2, which are at the bound
    play(state, Ready(3, 2))
    assert next_fed(state, bounds) == 2
    fewer = Bounds(groups=2, concurrency=9, bound=1)
    other = Readiness({"a": 1.0})
    play(other, Admitted(0, 1, "a", 0), Admitted(0, 2, "a", 0), StepStarted(0, ()), StepEnded(0, 1))
    play(other, Admitted(1, 3, "a", 1), Ready(2, 3))
    assert isinstance(choose_batch(other, fewer, stream=1), Wait)  # one place is left, two are at the bound


# --- baselines' constants ---------------------------------------------------------------------------------------------


def test_hybrid_ranks_follow_verls_ratio() -> None:
    """ratio 0.3; waited for: + clip(missing / required, 0.02, 0.1); not: - 0.02, and not below 0."""
    bounds = Bounds(groups=10, concurrency=99, bound=1)
    roles, state = HybridRanks(bounds, Layout(1, 0, 2, 2)), Readiness({"a": 1.0})
    state.follow(ClusterPolicy(bounds, LeastLoaded(), roles))
    assert roles.lends(state) and roles.gap(state) == 3
    for visit in range(10):
        play(state, Admitted(0, visit, "a", 0))
    for visit in range(3):
        play(state, Ready(1, visit))
    assert not roles.lends(state)  # 3 of 3 are there
    roles._short = (1.0, 7)
    for visit in range(3, 10):
        play(state, Ready(15, visit))
    play(state, StepStarted(15, tuple(range(10))))
    assert roles.ratio == pytest.approx(0.4)
    assert roles.per_sample_s == pytest.approx(2.0)  # 14 s for 7
    play(state, Updated(16), StepEnded(16, 1))
    # gap = 4 groups x 2 s = 8 s < 10 s: not worth a switch.
    assert not roles.lends(state)
    roles._short = None
    for _ in range(30):
        roles._learn(state)
    assert roles.ratio == 0.0


def test_kv_aimd_grows_and_cuts_by_prime_rls_set_points() -> None:
    bounds = Bounds(groups=50, concurrency=99, bound=1, members=1)
    gates, state = KvAimd(bounds), Readiness({"a": 1.0})
    state.follow(ClusterPolicy(bounds, LeastLoaded(), Roles(bounds, Layout(1, 0, 1)), gates))
    play(state, RankJoined(0, "r0", "rollout", 81_920))
    assert gates.cap == 10.0  # capacity over 8,192
    for visit in range(10):
        play(state, Admitted(1, visit, "a", 0), Placed(1, visit, 0, "r0", 4_000))
    for t in range(7):
        for visit in range(100 + 2 * t, 102 + 2 * t):
            play(state, Admitted(2, visit, "a", 0), Placed(2, visit, 0, "r0", 1), Finished(2, visit, 0, True))
            play(state, Dropped(2, visit, "x"))
        play(state, Measured(6.0 + 5 * t, "sync", 1.0))
    assert gates.cap == 12.5  # 49% used, 10 of 10 in flight, 14 ended, 6 polls since
    for visit in range(10):
        play(state, TurnEnded(40, visit, 0, 7_000))
    play(state, Measured(50, "sync", 1.0))
    assert gates.cap == pytest.approx(0.7 / (70_000 / 81_920) * 10)  # 85%: the cap that brings 70%
    assert gates.gives_up(state) == []
    for visit in range(10):
        play(state, Returned(51, visit, 0, 7_600))
    play(state, Measured(60, "sync", 1.0))
    # 93%: 76,000 - 57,344 tokens to give up, the youngest first.
    assert gates.gives_up(state) == [Abort(9, "kv_trim"), Abort(8, "kv_trim"), Abort(7, "kv_trim")]


def test_program_aware_pauses_the_smallest_that_acts_every_five_seconds() -> None:
    bounds = Bounds(groups=50, concurrency=99, bound=1, members=1)
    policy = ClusterPolicy(bounds, ProgramAware(), Roles(bounds, Layout(1, 0, 1)))
    state = Readiness({"a": 1.0})
    state.follow(policy)
    play(state, RankJoined(0, "r0", "rollout", 2_000))
    for visit, context in ((1, 600), (2, 400), (3, 500)):
        play(state, Admitted(1, visit, "a", 0), Placed(1, visit, 0, "r0", context))
    for visit, context in ((1, 700), (2, 500), (3, 650)):
        play(state, TurnEnded(2, visit, 0, context))
    assert not any(isinstance(action, Pause) for action in policy.decide(state))  # the tick has not come
    play(state, Measured(5.0, "sync", 1.0))
    # 1,850 tokens and 100 for each of three exceed 2,000: the smallest goes.
    assert policy.decide(state)[0] == Pause(2, 0)
    play(state, Paused(5, 2, 0), Returned(6, 2, 0, 550))
    assert not any(isinstance(action, Resume) for action in policy.decide(state))
    play(state, Returned(14, 1, 0, 700), Measured(15, "sync", 1.0))
    # At 15 s: 700 decode, 650 acted for 13 s and count 107: 2,000 - 807 - 200 holds 550 + 100.
    assert Resume(2, 0, "r0") in policy.decide(state)
