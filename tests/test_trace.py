"""The trace model refuses what cannot be true, and comes back from disk as it was."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from springtide.trace import (
    Group,
    Message,
    Outcome,
    Segment,
    TaskRef,
    ToolCall,
    Trajectory,
    Turn,
    make_version,
    sampling_seed,
    version_step,
)  # fmt: skip

TASK = TaskRef("s/quick/train/0", "s", "1", "train", "quick", 0, 7)


def segment(mask: list[bool], versions: list[int]) -> Segment:
    n = len(mask)
    return Segment(np.arange(n, dtype=np.int32), np.array(mask), np.zeros(n, np.float32), np.array(versions))


def trajectory(segments: tuple[Segment, ...], turns: tuple[Turn, ...]) -> Trajectory:
    messages = (Message("user", "hi"), Message("assistant", tool_calls=(ToolCall("c", "f", "{"),)))
    return Trajectory(TASK, 3, 1, 0, segments, turns, messages, Outcome("completed", 0.5, False), {"seed": 1})


def test_a_group_survives_the_disk(tmp_path: Path) -> None:
    one = trajectory((segment([False, True], [-1, 5]),), (Turn(0, 1, 2),))
    Group(TASK, 3, (one,)).save(tmp_path / "g")
    back = Group.load(tmp_path / "g")
    assert back.task == TASK
    assert back.trajectories[0].messages == one.messages
    assert back.trajectories[0].outcome == one.outcome
    assert np.array_equal(back.trajectories[0].segments[0].ids, one.segments[0].ids)
    assert [p.name for p in tmp_path.iterdir()] == ["g"]  # no temporary file left


def test_arrays_of_other_lengths_or_types_are_refused() -> None:
    """xtuner#2095: an advantage or mask one longer than its tokens shifts everything silently."""
    with pytest.raises(ValueError, match=r"segment\.loss_mask"):
        Segment(np.zeros(3, np.int32), np.zeros(2, bool), np.zeros(3, np.float32), np.full(3, -1))
    with pytest.raises(ValueError, match=r"segment\.ids"):
        Segment(np.zeros(3, np.int64), np.zeros(3, bool), np.zeros(3, np.float32), np.full(3, -1))


def test_versions_stand_exactly_where_tokens_were_sampled() -> None:
    """slime#1440, slime#1800: an off-policy mask needs a version a token."""
    with pytest.raises(ValueError, match="versions"):
        segment([False, True], [5, 5])


def test_an_environment_error_has_a_cause_and_no_reward() -> None:
    """NeMo-Gym#1351, trl#5773: a failed environment is not reward 0."""
    with pytest.raises(ValueError, match="no reward"):
        Outcome("environment_error", reward=0.0, cause="tool")
    with pytest.raises(ValueError, match="has a cause"):
        Outcome("environment_error")
    with pytest.raises(ValueError, match="finite"):
        Outcome("completed", reward=float("nan"))


def test_staleness_counts_from_the_oldest_current_turn() -> None:
    ids = segment([True, True, True], [9, 2, 7])
    turns = (Turn(0, 0, 1), Turn(0, 1, 2, policy="stale"), Turn(0, 2, 3))
    assert trajectory((ids,), turns).oldest_version() == 7


def test_no_two_incarnations_share_a_version() -> None:
    tags = {make_version(i, s) for i, s in itertools.product(range(4), range(4))}
    assert len(tags) == 16
    assert version_step(make_version(3, 17)) == 17


def test_seeds_differ_for_every_member_visit_retry_and_purpose() -> None:
    """verl#2646, trl#2824: group members that share a seed are one sample."""
    seeds = [
        sampling_seed(0, purpose, "t", visit, member, retry)
        for purpose in ("train", "eval")
        for visit in range(20)
        for member in range(20)
        for retry in range(3)
    ]
    assert len(set(seeds)) == len(seeds)
