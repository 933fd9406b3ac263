"""Advantages against hand-computed cases, and the ways public trainers got them wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.algorithms.advantages import GroupRewards, Member, RunningMoments, advantages, consumed
from springtide.algorithms.advantages.group_relative import group_relative
from springtide.algorithms.advantages.leave_one_out import leave_one_out
from springtide.algorithms.advantages.task_norm import WINDOW, Moments
from springtide.config import Algorithm


def group(rewards, visit=0, suite="s", tokens=None, status="completed", task_id="t", success=None):
    tokens = tokens or [1] * len(rewards)
    members = tuple(Member(i, status, r, success, n) for i, (r, n) in enumerate(zip(rewards, tokens, strict=True)))
    return GroupRewards(task_id, visit, suite, members)


def plain(**options) -> Algorithm:
    return Algorithm(**{"task_norm": "none", **options})


def values(result) -> list[float]:
    return list(result.values.values())


def test_group_relative_by_hand():
    # rewards 1, 0, 0, 1: mean 1/2, sample deviation sqrt(4 * 1/4 / 3) = 0.57735
    assert group_relative(np.array([1.0, 0, 0, 1]), False) == pytest.approx([0.5, -0.5, -0.5, 0.5])
    assert group_relative(np.array([1.0, 0, 0, 1]), True) == pytest.approx([0.8660, -0.8660, -0.8660, 0.8660], abs=1e-4)


def test_a_penalty_is_taken_off_the_reward_before_the_baseline():
    members = (
        Member(0, "completed", 1.0, True, 5, penalty=0.5),
        Member(1, "completed", 1.0, True, 5),
        Member(2, "turn_limit", None, None, 5, penalty=0.1),
    )
    (result,) = advantages([GroupRewards("t", 0, "s", members)], plain(divide_by_std=False, incomplete_reward=0.0))
    mean = (0.5 + 1.0 - 0.1) / 3
    assert values(result) == pytest.approx([0.5 - mean, 1.0 - mean, -0.1 - mean])


def test_equal_rewards_are_equal_whatever_the_penalties():
    """A penalty of a thousandth would become an advantage of 1 by the division by the deviation."""
    members = tuple(Member(i, "completed", 1.0, True, 5, penalty=0.001 * i) for i in range(3))
    rewards = [GroupRewards("t", 0, "s", members)]
    assert advantages(rewards, plain())[0].dropped == "equal_rewards"
    (kept,) = advantages(rewards, plain(equal_rewards="keep"))
    assert kept.equal and values(kept) == [0.0, 0.0, 0.0]


def test_leave_one_out_by_hand():
    # the first: 1 - (0 + 0 + 1) / 3
    assert leave_one_out(np.array([1.0, 0, 0, 1])) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


def test_task_norm_by_hand_weighs_a_trajectory_by_its_action_tokens():
    # one suite, rewards 1 and 0 with 3 and 1 tokens, no division: A = +-0.5.
    # mean (3 * 0.5 - 0.5) / 4 = 0.25, mean of squares 0.25, deviation sqrt(0.25 - 0.0625) = 0.43301
    (result,) = advantages([group([1.0, 0.0], tokens=[3, 1])], Algorithm(divide_by_std=False, task_norm="batch"))
    assert values(result) == pytest.approx([0.25 / 0.433013, -0.75 / 0.433013], abs=1e-4)


def test_task_norm_scales_each_suite_by_its_own_tokens():
    small, large = group([0.1, 0.0], suite="a"), group([10.0, 0.0], suite="b", task_id="u")
    algorithm = Algorithm(divide_by_std=False, task_norm="batch")
    a, b = advantages([small, large], algorithm)
    assert values(a) == pytest.approx([1, -1], abs=1e-3)
    assert values(b) == pytest.approx([1, -1], abs=1e-3)


def test_one_and_only_one_scored_member_makes_a_group_unusable_not_nan():
    """tinker-cookbook#644: group_size = 1 divided by zero; trl#5773: one valid sample gave a NaN deviation."""
    for rewards in ([1.0], [1.0, None, None]):
        (result,) = advantages([group(rewards)], plain())
        assert result.dropped == "too_few_scored"
        assert result.values == {}


def test_an_unscored_member_is_outside_the_baseline():
    """trl#5773: a row without a score was summed to 0 and shifted the group's mean."""
    (result,) = advantages([group([1.0, None, 0.0])], plain(divide_by_std=False))
    assert result.values == pytest.approx({0: 0.5, 2: -0.5})
    assert result.unscored == (1,)


def test_equal_rewards_are_found_in_the_group_not_in_the_batch():
    """trl#6365: detected with the deviation of the batch, which is not zero here."""
    equal, mixed = group([1.0, 1.0], visit=0), group([1.0, 0.0], visit=1)
    first, second = advantages([equal, mixed], plain())
    assert first.dropped == "equal_rewards" and first.values == {}
    assert second.dropped is None


def test_equal_sums_of_step_rewards_are_equal_despite_rounding():
    assert 0.1 + 0.2 != 0.3
    (result,) = advantages([group([0.1 + 0.2, 0.3])], plain())
    assert result.dropped == "equal_rewards"


def test_dropped_groups_are_outside_every_statistic():
    mixed = group([1.0, 0.0], tokens=[3, 1], visit=1)
    alone = advantages([mixed], Algorithm())
    both = advantages([group([1.0, 1.0], tokens=[900, 900]), mixed], Algorithm())
    assert both[1].values == alone[0].values
    assert [v for _, v in consumed(both)] == [alone[0].raw]


def test_a_kept_group_of_equal_rewards_is_not_pushed():
    """slime#1918: a group of equal rewards received advantages of -1.09 after normalisation."""
    algorithm = Algorithm(equal_rewards="keep", divide_by_std=False)
    equal, mixed = advantages([group([1.0, 1.0]), group([1.0, 0.0], visit=1, tokens=[3, 1])], algorithm)
    assert equal.values == {0: 0.0, 1: 0.0} and equal.equal and equal.dropped is None
    assert equal.raw.tokens == 2, "kept: it counts in the statistics"
    assert mixed.values[0] != 0


def test_groups_of_uneven_sizes_are_told_apart_by_id_not_position():
    """slime#2230, prime-rl#600: rewards reshaped as one row, so baselines mixed problems."""
    three, two = group([1.0, 0.0, 0.0], visit=4), group([0.0, 1.0], visit=4, task_id="other")
    forward = advantages([three, two], plain(divide_by_std=False))
    backward = advantages([two, three], plain(divide_by_std=False))
    assert forward == backward[::-1]
    assert values(forward[0]) == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert values(forward[1]) == pytest.approx([-0.5, 0.5])


def test_a_group_given_twice_is_an_error():
    with pytest.raises(ValueError, match="twice"):
        advantages([group([1.0, 0.0]), group([0.0, 1.0])], plain())


@pytest.mark.parametrize("status", ["turn_limit", "context_limit", "time_limit", "invalid_action"])
def test_an_unfinished_episode_gets_the_incomplete_reward_unless_it_succeeded(status):
    members = (Member(0, status, 0.7, False, 1), Member(1, status, 1.0, True, 1), Member(2, "completed", 0.0, False, 1))
    (result,) = advantages([GroupRewards("t", 0, "s", members)], plain(divide_by_std=False, incomplete_reward=-0.2))
    mean = (-0.2 + 1.0 + 0.0) / 3
    assert values(result) == pytest.approx([-0.2 - mean, 1 - mean, -mean])


def test_a_cancelled_episode_without_a_score_is_unscored():
    members = (Member(0, "cancelled", None, None, 1), Member(1, "completed", 1.0, True, 1))
    assert advantages([GroupRewards("t", 0, "s", members)], plain())[0].dropped == "too_few_scored"


def test_an_environment_error_must_not_arrive():
    with pytest.raises(ValueError, match="environment error"):
        advantages([group([None, 1.0], status="environment_error")], plain())


def test_a_reward_that_is_not_finite_must_not_arrive():
    with pytest.raises(ValueError, match="finite"):
        advantages([group([math.nan, 1.0])], plain())


def test_running_statistics_are_those_at_the_steps_start():
    algorithm = Algorithm(task_norm="running", divide_by_std=False)
    history = RunningMoments({"s": (Moments.of(np.array([2.0, -2.0]), np.array([1, 1])),)})  # mean 0, deviation 2
    step = [group([1.0, 0.0])]
    assert values(advantages(step, algorithm, history)[0]) == pytest.approx([0.25, -0.25], abs=1e-5)


def test_running_without_history_uses_the_step():
    algorithm = Algorithm(task_norm="running", divide_by_std=False)
    step = [group([1.0, 0.0], tokens=[3, 1])]
    batch = advantages(step, algorithm.model_copy(update={"task_norm": "batch"}))
    assert advantages(step, algorithm, RunningMoments({})) == batch


def test_running_keeps_each_suites_last_groups_and_survives_json():
    state = RunningMoments({})
    for i in range(WINDOW + 3):
        state = state.after([("s", Moments(1, float(i), 0.0))])
    state = state.after([("other", Moments(2, 1.0, 1.0))])
    assert len(state.suites["s"]) == WINDOW
    assert state.suites["s"][0].total == 3
    assert RunningMoments.from_json(state.to_json()) == state


rewards_of_a_group = st.lists(st.one_of(st.none(), st.floats(-2, 2)), min_size=1, max_size=8)


@given(st.lists(rewards_of_a_group, min_size=1, max_size=6), st.sampled_from(["none", "batch"]), st.booleans())
def test_any_rewards_give_finite_advantages_for_scored_members_only(groups, norm, keep):
    algorithm = Algorithm(task_norm=norm, equal_rewards="keep" if keep else "drop")
    results = advantages([group(r, visit=i, suite=f"s{i % 2}") for i, r in enumerate(groups)], algorithm)
    for rewards, result in zip(groups, results, strict=True):
        scored = {i for i, r in enumerate(rewards) if r is not None}
        assert set(result.values) == (set() if result.dropped else scored)
        assert set(result.unscored) == set(range(len(rewards))) - scored
        assert all(math.isfinite(v) for v in result.values.values())


@given(st.lists(st.lists(st.floats(-2, 2), min_size=2, max_size=5), min_size=1, max_size=5))
def test_after_task_norm_a_suites_tokens_have_mean_0_and_deviation_1(groups):
    made = [group(r, visit=i, tokens=list(range(1, len(r) + 1))) for i, r in enumerate(groups)]
    results = advantages(made, Algorithm(task_norm="batch"))
    pairs = [(a, n.loss_tokens) for g, r in zip(made, results) for n, a in zip(g.members, r.values.values())]
    spread = sum((r.raw for r in results if not r.dropped), Moments()).std
    if spread > 1e-2:
        pooled = Moments.of(np.array([a for a, _ in pairs]), np.array([n for _, n in pairs]))
        assert pooled.mean == pytest.approx(0, abs=1e-6)
        assert pooled.std == pytest.approx(1, abs=1e-3)
