"""Pipelines, elastic ranks and forecasts by cases that were computed by hand, with the published constants."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.schedule.composed import ClusterPolicy
from springtide.schedule.ers import Elastic, Signals
from springtide.schedule.events import (
    Admitted,
    ChoosePipeline,
    Evaluation,
    Event,
    Measured,
    Placed,
    RankJoined,
    Ready,
    Role,
    RoleChanged,
    StepEnded,
    StepStarted,
    SwitchRole,
    Sync,
    TurnEnded,
    Updated,
)
from springtide.schedule.forecast import Split, groups_per_s, step_s
from springtide.schedule.lending import Lending
from springtide.schedule.placement import LeastLoaded
from springtide.schedule.policy import Bounds, Layout
from springtide.schedule.ra2p import Piece, arrivals, choose, hidden_s, predict_s
from springtide.schedule.readiness import Readiness


def play(state: Readiness, *events: Event) -> None:
    for event in events:
        state.apply(event)


# --- RA2P -------------------------------------------------------------------------------------------------------------

PIECE = Piece(reference_s=1.0, train_s=3.0, swap_s=2.0)


def test_each_pipeline_takes_the_time_computed_by_hand() -> None:
    at = [0.0] * 4
    assert predict_s("none", at, PIECE, 2) == 6.0  # two pieces each
    assert predict_s("resident", at, PIECE, 2) == 8.0
    assert predict_s("aggregate", at, PIECE, 2) == 12.0  # in, 2 x 1, out, 2 x 3: one round
    # One reference: known at 1, 2, 3, 4. Trainer 1: forward to 1, backward to 3; forward to 4, backward to 6.
    # Trainer 2: forward to 1, waits for 2, backward to 4; forward to 5, backward to 7.
    assert predict_s("streaming", at, PIECE, 2, 1) == 7.0
    assert predict_s("streaming", at, PIECE, 2, 0) == math.inf
    assert hidden_s(at, PIECE, 2) == 6.0
    assert arrivals(2, 4, 5.0) == [0.0, 0.0, 5.0, 10.0]
    # The last comes at 10; in two rounds the first two are done by 8, the others end at 10 + 4 + 4.
    assert predict_s("aggregate", arrivals(2, 4, 5.0), PIECE, 2) == 18.0
    assert predict_s("streaming", arrivals(2, 4, 5.0), PIECE, 2, 1) == 13.0


@given(
    gaps=st.lists(st.floats(0, 10), min_size=1, max_size=20),
    reference=st.floats(0, 5),
    train=st.floats(0.1, 5),
    swap=st.floats(0, 5),
    trainers=st.integers(1, 6),
    references=st.integers(1, 3),
)
def test_no_pipeline_beats_a_hidden_reference(
    gaps: list[float], reference: float, train: float, swap: float, trainers: int, references: int
) -> None:
    at = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    piece = Piece(reference, train, swap)
    for pipeline in ("resident", "streaming", "aggregate"):
        assert predict_s(pipeline, at, piece, trainers, references) >= hidden_s(at, piece, trainers) - 1e-9


def test_a_pipeline_is_left_for_one_faster_by_five_percent_after_two_steps() -> None:
    assert choose("aggregate", {"aggregate": 100.0, "streaming": 96.0}, 9) == "aggregate"
    assert choose("aggregate", {"aggregate": 100.0, "streaming": 94.0}, 9) == "streaming"
    assert choose("aggregate", {"aggregate": 100.0, "streaming": 94.0}, 1) == "aggregate"
    assert choose("streaming", {"aggregate": 100.0, "streaming": math.inf}, 0) == "aggregate"


# --- ERS --------------------------------------------------------------------------------------------------------------


def elastic(kind: type[Elastic], layout: Layout, bounds: Bounds, **costs: float) -> tuple[Elastic, Readiness]:
    """One step of `bounds.groups` was made in 100 s by the rollout ranks, all of it busy; edge after the next."""
    roles, state = kind(bounds, layout), Readiness({"a": 1.0})
    for i in range(layout.rollout):
        play(state, RankJoined(0, f"r{i}", "rollout", 10_000))
    for i in range(layout.reference):
        play(state, RankJoined(0, f"f{i}", "reference", 10_000))
    for i in range(layout.trainer):
        play(state, RankJoined(0, f"t{i}", "trainer", 10_000, i < layout.lendable))
    for name, value in costs.items():
        play(state, Measured(0, name, value))  # type: ignore[arg-type]
    for rank in range(layout.rollout):
        play(state, Admitted(0, 1000 + rank, "a", 0), Placed(0, 1000 + rank, 0, f"r{rank}", 10))
    for visit in range(bounds.groups):
        play(state, Admitted(0, visit, "a", 0))
    for visit in range(bounds.groups):
        play(state, Ready(100.0, visit, 1000))
    play(state, StepStarted(100, tuple(range(bounds.groups))), Updated(100))
    play(state, StepEnded(100, 1))
    for visit in range(bounds.groups):
        play(state, Admitted(100, 100 + visit, "a", 1), Ready(100, 100 + visit, 1000))
    play(state, StepStarted(100, tuple(100 + v for v in range(bounds.groups))), Updated(100))
    return roles, state


BOUNDS = Bounds(groups=4, concurrency=9, bound=1)


def test_a_trainer_rank_is_lent_where_generation_is_the_slower_and_the_saving_pays() -> None:
    """2 rollout ranks make 4 groups in 100 s: 50 rank-seconds each. Training takes 4 x 1000 x 1 ms / 4 = 1 s. Three
    ranks would take 66.7 s: 33.3 s saved over 3 steps, for a switch of 10 s."""
    roles, state = elastic(Elastic, Layout(2, 0, 4, 4), BOUNDS, train_token=1e-3, switch=10.0)
    assert roles.decide(state) == [SwitchRole("t0", "rollout"), Sync()]
    assert roles.decide(state) == []  # once an edge
    dear, state = elastic(Elastic, Layout(2, 0, 4, 4), BOUNDS, train_token=1e-3, switch=101.0)
    assert dear.decide(state) == [Sync()]
    whole, state = elastic(Elastic, Layout(2, 0, 4, 4, "none", sharded=True), BOUNDS, train_token=1e-3, switch=10.0)
    assert whole.decide(state) == [Sync()]  # a sharded trainer lends all its ranks or none
    kept, state = elastic(Elastic, Layout(2, 0, 4, 0), BOUNDS, train_token=1e-3, switch=10.0)
    assert kept.decide(state) == [Sync()]


def test_nothing_is_switched_while_an_evaluation_is_pinned() -> None:
    roles, state = elastic(Elastic, Layout(2, 0, 4, 4), BOUNDS, train_token=1e-3, switch=10.0)
    play(state, Evaluation(100, True))
    assert roles.decide(state) == [Sync()]


def test_a_reference_rank_is_moved_jointly_with_the_pipeline() -> None:
    """Its leaving ends streaming: the trainer aggregates."""
    at = Layout(2, 1, 4, 0, "streaming")
    roles, state = elastic(Elastic, at, BOUNDS, train_token=1e-3, reference_token=3e-4, switch=10.0, swap=0.1)
    assert roles.decide(state) == [ChoosePipeline("aggregate"), SwitchRole("f0", "rollout"), Sync()]


def test_what_a_leaving_rank_holds_counts_as_work_to_be_done_again() -> None:
    """Training is the slower: a lent rank goes home, unless what it holds costs more to prefill again than is saved."""
    for rate, goes in ((1e6, True), (10.0, False)):
        costs = {"train_token": 0.2, "switch": 1.0, "prefill_rate": rate}
        roles, state = elastic(Elastic, Layout(3, 0, 2, 2), BOUNDS, **costs)
        play(state, TurnEnded(100, 1000, 0, 9000), TurnEnded(100, 1001, 0, 9500), TurnEnded(100, 1002, 0, 9500))
        state.ranks["r0"].origin = "trainer"
        assert (SwitchRole("r0", "trainer") in roles.decide(state)) is goes


def test_the_fetch_falls_towards_its_least_after_a_rank_was_taken_and_rises_again() -> None:
    bounds = Bounds(groups=4, concurrency=9, bound=1, fewest=2)
    roles, state = elastic(Elastic, Layout(3, 0, 2, 2), bounds, train_token=0.2, switch=1.0)
    state.ranks["r0"].origin = "trainer"
    actions = roles.decide(state)
    assert SwitchRole("r0", "trainer") in actions and roles.fetch == 4  # as much as ever was made
    state.made = 1
    assert roles.next_fetch(state, (state.ranks["r0"], "trainer")) == 2
    roles.fetch = 2
    for visit in range(200, 204):
        play(state, Admitted(100, visit, "a", 1), Ready(100, visit, 1000))
    assert roles.next_fetch(state, None) == 4


def test_tiderl_moves_a_rank_by_its_signals() -> None:
    """A trainer that waits, too little at the start: a reference rank plays. Ranks that wait, a long queue: back."""
    costs = {"train_token": 1e-3, "reference_token": 3e-4, "swap": 1.0}
    starved, state = elastic(Signals, Layout(2, 1, 4, 0, "streaming"), BOUNDS, **costs)
    state.train_wait_s.value, state.rollout_wait_s.value, state.step_s.value = 30.0, 0.0, 100.0
    state.ready_at_start = 1
    move = starved.move(state)
    assert move is not None and (move[0].name, move[1]) == ("f0", "rollout")
    flooded, state = elastic(Signals, Layout(3, 0, 4, 0, "aggregate"), BOUNDS, **costs)
    state.train_wait_s.value, state.rollout_wait_s.value, state.step_s.value = 0.0, 30.0, 100.0
    state.ready_at_start = 4
    play(state, Admitted(100, 500, "a", 1), Ready(100, 500, 1000), Measured(160, "sync", 1.0))  # 60 s > 0.5 x 100 s
    move = flooded.move(state)
    assert move is not None and move[1] == "reference"
    literal, state = elastic(Signals, Layout(3, 0, 4, 4), BOUNDS, **costs)
    state.train_wait_s.value, state.step_s.value = 90.0, 100.0
    assert literal.move(state) is None  # without a reference the paper moves nothing


def test_generation_is_forecast_by_the_measured_turns() -> None:
    """Turns of 100 tokens at 10 ms + 1 ms x batch, no tool: 40 episodes on 2 ranks decode 20 each, 30 ms a token."""
    state = Readiness({"a": 1.0})
    for rank in ("r0", "r1"):
        play(state, RankJoined(0, rank, "rollout", 10**6))
    for batch in (10, 20, 30, 40) * 20:
        state.decode.add(batch, 0.010 + 0.001 * batch)
    stats = state.suites["a"]
    for smoothed, value in ((stats.turns, 5.0), (stats.sampled, 100.0), (stats.tool_s, 0.0), (state.flying, 40.0)):
        smoothed.add(value)
    bounds = Bounds(groups=4, concurrency=9, bound=1, members=2)
    assert groups_per_s(state, bounds, 2) == pytest.approx(40 / (3.0 * 5 * 2))
    assert groups_per_s(state, bounds, 4) == pytest.approx(40 / (2.0 * 5 * 2))
    play(state, Measured(0, "train_token", 1e-3))
    state.group_tokens.add(1000.0)
    # 4 groups at 1.33 a second take 3 s; training 4 x 1 s on one rank takes 4 s.
    assert step_s(state, bounds, 4, "none", Split(2, 0, 1)) == pytest.approx(4.0)


# --- lending ----------------------------------------------------------------------------------------------------------


def lending() -> tuple[Lending, Readiness]:
    bounds = Bounds(groups=4, concurrency=99, bound=2)
    roles, state = Lending(bounds, Layout(1, 0, 2, 2, "none", sharded=True)), Readiness({"a": 1.0})
    state.follow(ClusterPolicy(bounds, LeastLoaded(), roles))
    play(state, RankJoined(0, "r0", "rollout", 1000))
    for name in ("t0", "t1"):
        play(state, RankJoined(0, name, "trainer", 1000, True))
    return roles, state


OUT = [SwitchRole("t0", "rollout"), SwitchRole("t1", "rollout")]
HOME = [SwitchRole("t0", "trainer"), SwitchRole("t1", "trainer")]


def changed(state: Readiness, t: float, role: Role) -> None:
    play(state, RoleChanged(t, "t0", role), RoleChanged(t, "t1", role))


def step(state: Readiness, t: float) -> None:
    """The first four groups that are ready, in 10 s."""
    play(state, StepStarted(t, tuple(list(state.buffer)[:4])), Updated(t + 10), StepEnded(t + 10, state.step + 1))


def test_all_trainer_ranks_play_at_the_start_and_come_home_for_the_first_step() -> None:
    roles, state = lending()
    assert roles.decide(state) == OUT
    changed(state, 2, "rollout")
    assert roles.decide(state) == []
    for visit in range(4):
        play(state, Admitted(3, visit, "a", 0), Ready(10 + visit, visit))
    assert roles.unready(state) == "2 trainer ranks still play"
    assert roles.decide(state) == HOME
    changed(state, 15, "trainer")
    assert roles.unready(state) is None


@pytest.mark.parametrize(("switch", "lends"), [(2.0, True), (20.0, False)])
def test_ranks_are_lent_where_what_is_missing_comes_sooner_by_more_than_the_changes_take(
    switch: float, lends: bool
) -> None:
    """One rank makes a group in 10 s, so 4 missing take 40 s. With two more and changes of 2 s: 4 s, and 3.6 groups at
    three times the rate, 12 s. With changes of 20 s nothing would be left."""
    roles, state = lending()
    play(state, Measured(0, "switch", switch))
    for visit in range(8):
        play(state, Admitted(0, visit, "a", 0))
    for visit in range(4):
        play(state, Ready(30, visit))
    roles.decide(state)
    step(state, 30)
    state.group_rank_s.value = 10.0
    for visit in range(4, 8):
        play(state, Ready(40, visit))
    roles.decide(state)
    step(state, 40)  # nothing is ready for the next
    assert (roles.decide(state) == OUT) is lends


def test_an_evaluation_between_steps_begins_with_all_ranks() -> None:
    roles, state = lending()
    play(state, Measured(0, "switch", 1000.0))
    for visit in range(4):
        play(state, Admitted(0, visit, "a", 0), Ready(1, visit))
    roles.decide(state)
    step(state, 1)
    assert roles.decide(state) == []
    play(state, Evaluation(12, True))
    assert roles.decide(state) == OUT
