"""What the readiness state is made of: episodes, groups, ranks, and smoothed measures.

Owns: their fields. Only `readiness.py` changes them; policies read, and keep what is theirs in an episode's `mark`.
Called by: `readiness.py` and the policies.
"""

from __future__ import annotations

from typing import Any, Literal

from springtide.schedule.events import RankJoined, Role

Key = tuple[int, int]  # visit, member
SMOOTHING = 0.3  # weight of the newest value in every smoothed measure (tiderl_async 1.8.4)


class Episode:
    """One running attempt of a member. phase: `waiting` for a rank, `decoding`, `acting`, `returned` (its tool
    answered while it was parked) or `done`. context: tokens so far. rank: where it is, or was last; None
    before its first placement and after that rank died. since: when its phase began. parked: it stays out of the engine
    from its next tool boundary on, since `parked_at`. mark: of the policy that follows the state, and nobody else's."""

    __slots__ = (
        "context", "group", "key", "mark", "member", "parked", "parked_at", "phase", "rank", "since", "turn_context",
        "turns", "visit",
    )  # fmt: skip

    def __init__(self, group: GroupState, member: int, t: float) -> None:
        self.group, self.visit, self.member = group, group.visit, member
        self.key: Key = (group.visit, member)
        self.mark: Any = None
        self.phase: Literal["waiting", "decoding", "acting", "returned", "done"] = "waiting"
        self.parked = False
        self.rank: str | None = None
        self.context = self.turns = self.turn_context = 0  # the last: when its last turn ended
        self.since = self.parked_at = t


class GroupState:
    """A group that is in flight or ready. since: when that began. played: members that are done; episodes: the others,
    by member. tokens: of a ready group."""

    __slots__ = ("birth", "episodes", "evaluation", "members", "played", "since", "state", "suite", "tokens", "visit")

    def __init__(self, visit: int, suite: str, birth: int, since: float, members: int, evaluation: bool) -> None:
        self.visit, self.suite, self.birth, self.since = visit, suite, birth, since
        self.members, self.evaluation = members, evaluation
        self.state: Literal["in_flight", "ready"] = "in_flight"
        self.played = self.tokens = 0
        self.episodes: dict[int, Episode] = {}


class RankState:
    """A rank. decoding, acting: its episodes by key, those parked at a tool boundary left out; the tokens of each.
    parked: those asked to stay out, that were here last. origin: the role it joined with; a trainer that plays is lent.
    waiting_s: of this step, without an episode."""

    __slots__ = (
        "acting", "acting_tokens", "budget", "decoding", "decoding_tokens", "idle_since", "lendable", "name", "origin",
        "parked", "role", "waiting_s",
    )  # fmt: skip

    def __init__(self, joined: RankJoined) -> None:
        self.name, self.budget, self.lendable = joined.rank, joined.budget, joined.lendable
        self.role: Role = joined.role
        self.origin: Role = joined.role
        self.decoding: dict[Key, Episode] = {}
        self.acting: dict[Key, Episode] = {}
        self.parked: dict[Key, Episode] = {}
        self.decoding_tokens = self.acting_tokens = 0
        self.idle_since: float | None = joined.t
        self.waiting_s = 0.0

    @property
    def tokens(self) -> int:
        """Of all its episodes that are not parked."""
        return self.decoding_tokens + self.acting_tokens

    @property
    def live(self) -> int:
        return len(self.decoding) + len(self.acting)

    def waited(self, now: float) -> float:
        """Seconds of this step, until `now`, in which it had no episode."""
        return self.waiting_s + (now - self.idle_since if self.idle_since is not None else 0.0)


class Smoothed:
    """An exponentially weighted mean; None before its first value. weight: of the newest."""

    __slots__ = ("value", "weight")

    def __init__(self, weight: float = SMOOTHING) -> None:
        self.value: float | None = None
        self.weight = weight

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + self.weight * (value - self.value)


class Line:
    """A straight line through measured points, the older ones forgotten: y at x = 0, and what each x adds."""

    __slots__ = ("_w", "_x", "_xx", "_xy", "_y")

    def __init__(self) -> None:
        self._w = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        keep = 0.998  # of each point's weight, a point later: some 500 count
        self._w, self._x, self._y = keep * self._w + 1, keep * self._x + x, keep * self._y + y
        self._xx, self._xy = keep * self._xx + x * x, keep * self._xy + x * y

    @property
    def fit(self) -> tuple[float, float] | None:
        """(y at 0, slope), neither below 0; None before there are some 30 points."""
        if self._w < 30:
            return None
        mean_x, mean_y = self._x / self._w, self._y / self._w
        spread = self._xx / self._w - mean_x * mean_x
        slope = max(0.0, (self._xy / self._w - mean_x * mean_y) / spread) if spread > 1e-9 else 0.0
        if slope * mean_x > mean_y:
            slope = mean_y / mean_x
        return mean_y - slope * mean_x, slope


class SuiteStats:
    """Smoothed measures of a suite's episodes. Tokens: context when their first turn ends, growth a turn, context at
    the end, sampled in a turn. Seconds: until a tool answers. And turns of an episode."""

    __slots__ = ("final", "first", "growth", "sampled", "tool_s", "turns")

    def __init__(self) -> None:
        self.first = Smoothed()
        # Single turns and episodes differ by far more than their mean moves.
        self.growth, self.final, self.sampled, self.tool_s, self.turns = (Smoothed(0.05) for _ in range(5))
