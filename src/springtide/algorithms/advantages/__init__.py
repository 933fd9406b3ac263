"""From the rewards of a step's groups to one advantage a trajectory. Pure numpy; called by the driver.

Invariants: a group is known by (task id, visit), never by its place in a list; an environment error never enters; a
member without a score is outside every baseline (it is not 0 and not NaN); a group with fewer than two scored
members, or of equal rewards under `equal_rewards = drop`, is dropped by name and is outside every statistic. Whether
rewards are equal is asked before penalties: these differ a little in any group, and the division by the deviation would
make as much of that as of a reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from springtide.algorithms.advantages.group_relative import group_relative
from springtide.algorithms.advantages.leave_one_out import leave_one_out
from springtide.algorithms.advantages.task_norm import Moments, RunningMoments, task_norm
from springtide.config import Algorithm
from springtide.trace import INCOMPLETE, Group, Status

__all__ = ["GroupAdvantages", "GroupRewards", "Member", "RunningMoments", "advantages"]

Dropped = Literal["equal_rewards", "too_few_scored"]
# Sums of step rewards differ in their last bits by the order of addition; such rewards are equal.
_SAME_REWARD = 1e-9


@dataclass(frozen=True, slots=True)
class Member:
    """One present member of a group. reward: None where nothing scored it. loss_tokens: its action tokens.

    penalty: taken off the reward the trainer uses, whatever the status (the KL to the reference, where that is paid
    for in the reward).
    """

    member: int
    status: Status
    reward: float | None
    success: bool | None
    loss_tokens: int
    penalty: float = 0.0


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """What the advantages need to know of one group."""

    task_id: str
    visit: int
    suite: str
    members: tuple[Member, ...]

    @classmethod
    def of(cls, group: Group) -> GroupRewards:
        members = tuple(
            Member(t.member, t.outcome.status, t.outcome.reward, t.outcome.success, t.loss_tokens)
            for t in group.trajectories
        )
        return cls(group.task.id, group.visit, group.task.suite, members)


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """One group's result. `values` maps member to advantage and is empty where the group is dropped.

    equal: all scored rewards, without penalties, are the same. unscored: members that get no advantage, for want of a
    reward or of action tokens. raw: moments before task_norm.
    """

    task_id: str
    visit: int
    suite: str
    values: dict[int, float]
    dropped: Dropped | None
    equal: bool
    unscored: tuple[int, ...]
    raw: Moments


def advantages(
    groups: Sequence[GroupRewards], algorithm: Algorithm, running: RunningMoments | None = None
) -> list[GroupAdvantages]:
    """One result a group, in the given order. `running` is the state at the step's start (used by task_norm=running).

    A kept group of equal rewards counts in its suite's statistics, but its own advantages stay exactly 0: shifting
    them by -mu/sigma would push all its members for what other groups did (seen in slime#1918 and AgentRL's code).
    Raises: ValueError for an environment error, a group or a member given twice, or a reward that is not finite.
    """
    _check_unique([(g.task_id, g.visit) for g in groups], "group (task, visit)")
    raw = [_raw(group, algorithm) for group in groups]
    if algorithm.task_norm == "none":
        return raw
    suites = {g.suite for g in raw}
    statistics = {s: sum((g.raw for g in raw if g.suite == s and not g.dropped), Moments()) for s in suites}
    if algorithm.task_norm == "running" and running is not None:
        statistics = {s: running.of(s) if running.of(s).tokens else own for s, own in statistics.items()}
    return [_normalised(group, statistics[group.suite]) for group in raw]


def consumed(results: Sequence[GroupAdvantages]) -> list[tuple[str, Moments]]:
    """What `RunningMoments.after` takes: the trained groups of a step."""
    return [(g.suite, g.raw) for g in results if not g.dropped]


def effective_reward(member: Member, incomplete_reward: float) -> float | None:
    """The reward the trainer uses: an unfinished episode's is replaced unless it succeeded. None: unscored."""
    if member.status == "environment_error":
        raise ValueError(f"member {member.member} is an environment error; it must not reach the advantages")
    if member.status in INCOMPLETE and not member.success:
        return incomplete_reward
    if member.reward is not None and not np.isfinite(member.reward):
        raise ValueError(f"member {member.member} has reward {member.reward}; a score that is not finite is an error")
    return member.reward


def _raw(group: GroupRewards, algorithm: Algorithm) -> GroupAdvantages:
    _check_unique([m.member for m in group.members], f"member of {group.task_id} visit {group.visit}")
    rewards = {m.member: effective_reward(m, algorithm.incomplete_reward) for m in group.members}
    # A member that sampled nothing cannot be trained, so its reward is in no baseline either (OpenRLHF#1239).
    scored = [m for m in group.members if rewards[m.member] is not None and m.loss_tokens > 0]
    unscored = tuple(m.member for m in group.members if m not in scored)
    r = np.array([rewards[m.member] for m in scored], dtype=np.float64)
    dropped: Dropped | None = None
    equal = False
    values: dict[int, float] = {}
    moments = Moments()
    if len(scored) < 2:
        dropped = "too_few_scored"
    else:
        equal = bool(np.ptp(r) <= _SAME_REWARD * max(1.0, float(np.abs(r).max())))
        if equal and algorithm.equal_rewards == "drop":
            dropped = "equal_rewards"
        else:
            a = _estimate(r - [m.penalty for m in scored], algorithm) if not equal else np.zeros_like(r)
            values = {m.member: float(x) for m, x in zip(scored, a, strict=True)}
            moments = Moments.of(a, np.array([m.loss_tokens for m in scored]))
    return GroupAdvantages(group.task_id, group.visit, group.suite, values, dropped, equal, unscored, moments)


def _estimate(rewards: np.ndarray, algorithm: Algorithm) -> np.ndarray:
    if algorithm.advantage == "leave_one_out":
        return leave_one_out(rewards)
    return group_relative(rewards, algorithm.divide_by_std)


def _normalised(group: GroupAdvantages, statistics: Moments) -> GroupAdvantages:
    if group.dropped or group.equal:
        return group
    a = task_norm(np.array(list(group.values.values())), statistics)
    values = {m: float(x) for m, x in zip(group.values, a, strict=True)}
    return GroupAdvantages(
        group.task_id, group.visit, group.suite, values, None, group.equal, group.unscored, group.raw
    )


def _check_unique(keys: list, what: str) -> None:
    if len(set(keys)) != len(keys):
        raise ValueError(f"a {what} is given twice: {sorted({k for k in keys if keys.count(k) > 1})}")
