"""What every rank did, and when: followed through the events of a run, live or simulated, and drawn.

Owns: a rank's seconds by what it does or waits for, KV in use, groups in flight, ready and in a step, staleness of what
was trained. Invariants: a rank's seconds add up to its life; memory is `_BINS` figures a curve, however many events
there are; an event costs the same however many ranks there are, but for those that concern all of them.
Called by: `observe.{eventlog,ranks}`, `springtide simulate --plot`.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from springtide.observe.plots import PALETTE
from springtide.schedule.events import (
    Admitted,
    Began,
    Event,
    Fed,
    Placed,
    RankJoined,
    RankLeft,
    RoleChanged,
    StepEnded,
    StepStarted,
    SwitchRole,
)
from springtide.schedule.parts import Episode, RankState
from springtide.schedule.readiness import InvalidEvent, Readiness

_BINS = 480
_FIRST_S = 1 / 64  # width of a bin at first; it doubles whenever time runs past the last
_GAP_S = 86400.0  # no episode lasts longer: a clock that jumps further was set, and nothing happened meanwhile
_MARKS = 60  # deaths, changes of role and resumes that are kept, the newest
_MEMBERS = 1 << 16  # no group has as many
_KINDS = frozenset(Event.__args__)
_NOTED = frozenset({StepStarted, Fed, StepEnded, Placed, RankJoined, RankLeft, RoleChanged})

# What a rank does, or why it does nothing, in the order in which it is drawn: (colour, whether it has work).
DOES: dict[str, tuple[str, bool]] = {
    "decodes": (PALETTE[0], True),
    "trains": (PALETTE[2], True),
    "computes the reference": (PALETTE[3], True),
    "publishes weights": ("#4a5d9e", True),
    "changes its role": (PALETTE[4], True),
    "waits for tools": ("#8fb5ee", False),
    "waits for weights": ("#dd7430", False),
    "waits for groups": ("#eeb73e", False),
    "all its episodes are paused": ("#b79ae0", False),
    "episodes wait for a place": ("#b5533c", False),
    "drawing is held": ("#6b7a8f", False),
    "nothing to admit": ("#aab4bf", False),
}
_SEARCHING = frozenset({"episodes wait for a place", "drawing is held", "nothing to admit"})


class Bins:
    """Time from 0 on, in `_BINS` bins of one width. A row is a sum over seconds; all fold when the width doubles."""

    def __init__(self) -> None:
        self.width = _FIRST_S
        self._rows: list[array[float]] = []

    def row(self) -> array[float]:
        self._rows.append(array("d", bytes(8 * _BINS)))
        return self._rows[-1]

    def reach(self, t: float) -> None:
        """Let `t` be within."""
        while t > self.width * _BINS:
            self.width *= 2
            for row in self._rows:
                for i in range(_BINS // 2):
                    row[i] = row[2 * i] + row[2 * i + 1]
                row[_BINS // 2 :] = array("d", bytes(8 * (_BINS - _BINS // 2)))

    def add(self, row: array[float], start: float, end: float, value: float = 1.0) -> None:
        """`value` for the seconds from `start` to `end`."""
        if end <= start:
            return
        width = self.width
        first, last = int(start / width), int(end / width)
        if first == last:
            row[first] += (end - start) * value
            return
        row[first] += ((first + 1) * width - start) * value
        for i in range(first + 1, last):
            row[i] += width * value
        if last < _BINS:
            row[last] += (end - last * width) * value


@dataclass(slots=True)
class _Now:
    """What a rank does, and the tokens it holds, each since when."""

    what: str
    since: float
    tokens: int
    tokens_since: float


class Timeline:
    """Follows a run's events. Times: seconds since the first, those in which no driver ran left out.

    lanes: of each rank, seconds by what it did; kv: tokens times seconds while it plays; groups: their number times
    seconds; playing, seen, evaluating: the seconds of that. trained: staleness of groups, by the step that ended.
    placed: whether the record tells of episodes. refused: how many events contradict those before.
    """

    def __init__(self) -> None:
        self.bins = Bins()
        self.end = 0.0
        self.lanes: dict[str, dict[str, array[float]]] = {}
        self.roles: dict[str, str] = {}
        self.kv: dict[str, array[float]] = {}
        self.playing: dict[str, array[float]] = {}
        self.budgets: dict[str, int] = {}
        self.groups = {name: self.bins.row() for name in ("in flight", "ready", "in a step")}
        self.seen, self.evaluating = self.bins.row(), self.bins.row()
        self.trained: dict[int, Counter[int]] = {}
        self.marks: deque[tuple[float, str]] = deque(maxlen=_MARKS)
        self.placed = False
        self.refused = 0
        self._state = Readiness({"": 1.0})
        self._state.follow(self)
        self._origin: float | None = None  # of our time, on the state's clock
        self._counts, self._since = (0, 0, 0), 0.0
        self._step: Counter[int] = Counter()  # staleness of the step under way
        self._doing: dict[str, _Now] = {}
        self._searching: set[str] = set()  # ranks without any episode
        self._switching: set[str] = set()
        self._phase: tuple[bool, ...] = ()
        self._evaluating = False
        self._left: str | None = None  # where an episode was that goes on elsewhere

    @property
    def staleness(self) -> Counter[int]:
        """Trained groups by how many steps their weights lagged when they were drawn."""
        total: Counter[int] = Counter()
        for groups in self.trained.values():
            total.update(groups)
        return total

    def feed(self, event: Any) -> None:
        """One event or action, in the order of the record; one that the state refuses is counted."""
        if type(event) is SwitchRole:
            if event.rank in self._doing:
                self._switching.add(event.rank)
                self._look(event.rank)
            return
        if type(event) not in _KINDS:
            return
        state = self._state
        try:
            if type(event) is Admitted and event.suite not in state.mixture:
                state.mixture[event.suite] = 0.0
            if type(event) is Admitted and not 0 < event.members < _MEMBERS:
                raise InvalidEvent(f"a group of {event.members} members")
            member = getattr(event, "member", None)
            episode = state.episode(event.visit, member) if member is not None else None
            self._left = episode.rank if episode is not None else None
            state.apply(event)
        except (InvalidEvent, ArithmeticError):  # the latter of a mixture without weights
            self.refused += 1

    def settle(self) -> Timeline:
        """Count what goes on until now; itself."""
        for name in list(self._doing):
            self._flush(self._doing[name], name)
        self._count()
        return self

    def observe(self, state: Readiness, event: Event, touched: list[Episode]) -> None:
        """The state has applied `event`: see `readiness.Follower`."""
        if self._origin is None:
            self._origin = state.now
        elif isinstance(event, Began):
            self._restart(event.step)
        elif state.now - self._origin - self.end > _GAP_S:
            self._origin = state.now - self.end
        end = state.now - self._origin
        self.bins.reach(end)
        if self._evaluating:
            self.bins.add(self.evaluating, self.end, end)
        self.bins.add(self.seen, self.end, end)
        self.end, self._evaluating = end, state.evaluating
        if type(event) in _NOTED:
            self._note(event)
        counts = len(state.playing), len(state.buffer), len(state.training)
        if counts != self._counts:
            self._count()
            self._counts = counts
        phase = state.edge, state.step_running, state.held, bool(state.waiting)
        if phase[:3] != self._phase[:3]:
            names = {*state.ranks, *self._doing}
        else:
            names = {e.rank for e in touched if e.rank is not None}
            names |= {name for name in (self._left, getattr(event, "rank", None)) if name is not None}
            if phase != self._phase:
                names |= self._searching
        self._phase = phase
        for name in names:
            self._look(name)

    # --- what is drawn ------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Ranks, those that joined to play first, then by name; numbers in names count as such."""
        order = {"rollout": 0, "reference": 1}
        return sorted(self.lanes, key=lambda name: (order.get(self.roles[name], 2), _natural(name)))

    def starts(self, fold: int = 1) -> list[float]:
        """Where each bin begins that holds any time; `fold` neighbours count as one, here and below."""
        width = self.bins.width * fold
        return [i * width for i in range(math.ceil(self.end / width))]

    def sums(self, row: array[float], fold: int = 1) -> list[float]:
        """The row by bin."""
        return [sum(row[i : i + fold]) for i in range(0, len(self.starts(fold)) * fold, fold)]

    def total(self, rows: Mapping[str, array[float]]) -> array[float]:
        """The rows added up."""
        return array("d", map(sum, zip(*rows.values(), strict=True))) if rows else array("d", bytes(8 * _BINS))

    def mean(self, row: array[float], seconds: array[float], fold: int = 1) -> list[float]:
        """Of what was counted in `row` for `seconds`, by bin; NaN where there were none."""
        totals = zip(self.sums(row, fold), self.sums(seconds, fold), strict=True)
        return [value / s if s > 1e-9 else math.nan for value, s in totals]

    def shares(self, name: str, fold: int = 1) -> dict[str, list[float]]:
        """Of each bin's time, by what the rank did."""
        width, lane = self.bins.width * fold, self.lanes[name]
        lengths = [min(width, self.end - start) for start in self.starts(fold)]
        return {
            what: [min(1.0, s / length) for s, length in zip(self.sums(lane[what], fold), lengths, strict=True)]
            for what in DOES
            if what in lane
        }

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _note(self, event: Event) -> None:
        """What is counted or marked of the event itself."""
        match event:
            case StepStarted():
                self._step = Counter(max(0, self._state.step - birth) for birth in self._state.training_births)
            case Fed():
                self._step[max(0, self._state.step - self._state.training_births[-1])] += 1
            case StepEnded(_, step):
                if self._step:
                    self.trained[step] = self._step
                    self._step = Counter()
            case Placed():
                self.placed = True
            case RankJoined(_, rank, role, budget):
                self.budgets[rank] = budget
                self.roles.setdefault(rank, role)
            case RankLeft(_, rank):
                self._switching.discard(rank)
                self.marks.append((self.end, f"{rank} left"))
            case RoleChanged(_, rank, role):
                self._switching.discard(rank)
                self.marks.append((self.end, f"{rank} is now of role {role}"))

    def _restart(self, step: int) -> None:
        """A driver began at `step`: what it does not know of is void, and the time without one is not counted."""
        self.settle()
        self._doing.clear()
        self._searching.clear()
        self._switching.clear()
        self._step = Counter()
        self._origin = self._state.now - self.end
        self.trained = {at: groups for at, groups in self.trained.items() if at <= step}
        self.marks.append((self.end, f"began again at step {step}"))

    def _count(self) -> None:
        for row, value in zip(self.groups.values(), self._counts, strict=True):
            self.bins.add(row, self._since, self.end, value)
        self._since = self.end

    def _look(self, name: str) -> None:
        """Note what the rank does now."""
        now, rank = self._doing.get(name), self._state.ranks.get(name)
        if rank is None:
            if now is not None:
                self._flush(now, name)
                del self._doing[name]
                self._searching.discard(name)
            return
        what = _does(self._state, rank, name in self._switching)
        tokens = rank.tokens if rank.role == "rollout" else -1
        if now is None:
            self._doing[name] = _Now(what, self.end, tokens, self.end)
        elif now.what != what or (now.tokens < 0) != (tokens < 0):
            self._flush(now, name)
            now.what, now.tokens = what, tokens
        elif now.tokens != tokens:
            self._hold(now, name)
            now.tokens = tokens
        (self._searching.add if what in _SEARCHING else self._searching.discard)(name)

    def _flush(self, now: _Now, name: str) -> None:
        lane = self.lanes.setdefault(name, {})
        if self.end > now.since:
            row = lane.get(now.what)
            if row is None:
                row = lane[now.what] = self.bins.row()
            self.bins.add(row, now.since, self.end)
            if now.tokens >= 0:
                if name not in self.playing:
                    self.playing[name] = self.bins.row()
                self.bins.add(self.playing[name], now.since, self.end)
        now.since = self.end
        self._hold(now, name)

    def _hold(self, now: _Now, name: str) -> None:
        if now.tokens >= 0 and self.end > now.tokens_since:
            row = self.kv.get(name)
            if row is None:
                row = self.kv[name] = self.bins.row()
            self.bins.add(row, now.tokens_since, self.end, now.tokens)
        now.tokens_since = self.end


def read(events: Iterable[Any]) -> Timeline:
    """Of events, and actions between them, in the order of the record."""
    timeline = Timeline()
    for event in events:
        timeline.feed(event)
    return timeline.settle()


def _natural(name: str) -> list[tuple[bool, int, str]]:
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]


def _does(state: Readiness, rank: RankState, switching: bool) -> str:
    if switching:
        return "changes its role"
    if rank.role == "rollout":
        if rank.decoding:
            return "decodes"
        if rank.acting:
            return "waits for tools"
        if state.edge:
            return "waits for weights"
        if rank.parked:
            return "all its episodes are paused"
        if state.waiting:
            return "episodes wait for a place"
        return "drawing is held" if state.held else "nothing to admit"
    if state.edge:
        return "publishes weights" if rank.role == "trainer" else "waits for weights"
    if not state.step_running:
        return "drawing is held" if state.held else "waits for groups"
    return "trains" if rank.role == "trainer" else "computes the reference"


def draw(events: Iterable[Any], path: Path) -> None:
    """One picture: ranks by what they do, KV, groups, staleness."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    timeline = read(events)
    names, starts = timeline.names(), timeline.starts()
    height = 2.0 + 0.22 * len(names)
    figure, axes = plt.subplots(
        4, 1, figsize=(11, height + 5.4), gridspec_kw={"height_ratios": [height, 1.6, 1.6, 1.4]}, layout="constrained"
    )
    ranks, kv, groups, stale = axes
    used: dict[str, str] = {}
    for row, name in enumerate(names):
        base = [row + 0.4] * len(starts)
        for what, shares in timeline.shares(name).items():
            top = [at - 0.8 * share for at, share in zip(base, shares, strict=True)]
            used[what] = DOES[what][0]
            ranks.fill_between(starts, base, top, step="post", color=used[what], linewidth=0)
            base = top
    ranks.set_yticks(range(len(names)), names, fontsize=7)
    ranks.invert_yaxis()
    ranks.legend(
        handles=[Patch(color=c, label=n) for n, (c, _) in DOES.items() if n in used], ncol=4, fontsize=7,
        frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0),
    )  # fmt: skip
    budgets = {
        name: array("d", (s * timeline.budgets[name] for s in seconds)) for name, seconds in timeline.playing.items()
    }
    total = {"in use": timeline.total(timeline.kv), "budgets of the ranks that play": timeline.total(budgets)}
    for axis, curves, title in ((kv, total, "tokens of KV"), (groups, timeline.groups, "groups")):
        for i, (curve, values) in enumerate(curves.items()):
            axis.plot(starts, timeline.mean(values, timeline.seen), color=PALETTE[i], lw=1, label=curve)
        axis.set_ylabel(title, fontsize=7)
        axis.legend(fontsize=7, frameon=False)
    groups.set_xlabel("seconds", fontsize=8)
    staleness = timeline.staleness
    steps = range(max(staleness, default=0) + 1)
    stale.bar(list(steps), [staleness[s] for s in steps], color=PALETTE[0])
    stale.set_xticks(list(steps))
    stale.set_xlabel("staleness of trained groups, steps", fontsize=8)
    for axis in (ranks, kv, groups):
        axis.sharex(ranks) if axis is not ranks else None
        axis.margins(x=0)
    for axis in axes:
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
