"""What every rank did, and when: read from the events of a run, live or simulated, and drawn.

Owns: a rank's spans by role and by what it does, KV in use, groups in flight and ready, staleness of what was trained.
Invariants: the spans of a rank follow each other without a gap from when it joins to when it leaves or the record ends;
memory is bounded by `_POINTS` a curve, however many events there are.
Called by: `springtide simulate --plot`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from springtide.observe.plots import PALETTE
from springtide.schedule.events import Admitted, Event, Fed, RankJoined, RankLeft, RoleChanged, StepStarted, SwitchRole
from springtide.schedule.readiness import Readiness

_POINTS = 2000
DOES = {
    "decodes": PALETTE[0],
    "tools act": "#9fc1f5",
    "waits for episodes": "#e3e8ee",
    "trains": PALETTE[2],
    "computes the reference": PALETTE[3],
    "waits for groups": "#f3d9c2",
    "changes its role": PALETTE[1],
}


@dataclass(slots=True)
class Timeline:
    """spans: of each rank, (start, end, what), in order. curves: by name, (t, value). staleness: groups by steps."""

    spans: dict[str, list[tuple[float, float, str]]] = field(default_factory=dict)
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    staleness: Counter[int] = field(default_factory=Counter)


def read(events: Iterable[Any]) -> Timeline:
    """Of events, and actions between them, in the order of the record. Raises: InvalidEvent, of one that is not."""
    out, state = Timeline(), Readiness({"": 1.0})
    doing: dict[str, tuple[float, str]] = {}
    switching: set[str] = set()
    count, stride = 0, 1
    for event in events:
        if isinstance(event, SwitchRole):
            switching.add(event.rank)
        if not isinstance(event, Event):
            continue
        if isinstance(event, Admitted) and event.suite not in state.mixture:
            state.mixture[event.suite] = 0.0
        state.apply(event)
        if isinstance(event, (RoleChanged, RankLeft)):
            switching.discard(event.rank)
        if isinstance(event, RankLeft) and event.rank in doing:
            start, what = doing.pop(event.rank)
            out.spans[event.rank].append((start, state.now, what))
        if isinstance(event, RankJoined):
            out.spans.setdefault(event.rank, [])
        for name in state.ranks:
            what = _does(state, name, switching)
            start, before = doing.get(name, (state.now, what))
            if what != before:
                if state.now > start:
                    out.spans[name].append((start, state.now, before))
                start = state.now
            doing[name] = start, what
        count += 1
        if count % stride == 0:
            ranks = list(state.rollout_ranks())
            now = {
                "in use": sum(rank.tokens for rank in ranks),
                "budgets": sum(rank.budget for rank in ranks),
                "in flight": len(state.playing),
                "ready": len(state.buffer),
            }
            for curve, value in now.items():
                out.curves.setdefault(curve, []).append((state.now, float(value)))
            if len(out.curves["ready"]) >= 2 * _POINTS:
                stride *= 2
                out.curves = {curve: points[1::2] for curve, points in out.curves.items()}
        if isinstance(event, (StepStarted, Fed)):
            new = state.training_births if isinstance(event, StepStarted) else state.training_births[-1:]
            out.staleness.update(max(0, state.step - birth) for birth in new)
    for name, (start, what) in doing.items():
        out.spans[name].append((start, state.now, what))
    return out


def _does(state: Readiness, name: str, switching: set[str]) -> str:
    rank = state.ranks[name]
    if name in switching:
        return "changes its role"
    if rank.role == "rollout":
        return "decodes" if rank.decoding else "tools act" if rank.acting else "waits for episodes"
    if not state.step_running or state.edge:
        return "waits for groups"
    return "trains" if rank.role == "trainer" else "computes the reference"


def draw(events: Iterable[Any], path: Path) -> None:
    """One picture: ranks by what they do, KV, groups, staleness."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    timeline = read(events)
    names = sorted(timeline.spans)
    begin = min((s[0][0] for s in timeline.spans.values() if s), default=0.0)
    height = 2.0 + 0.22 * len(names)
    figure, axes = plt.subplots(
        4, 1, figsize=(11, height + 5.4), gridspec_kw={"height_ratios": [height, 1.6, 1.6, 1.4]}, layout="constrained"
    )
    ranks, kv, groups, stale = axes
    for row, name in enumerate(names):
        for what, colour in DOES.items():
            bars = [(a - begin, b - a) for a, b, does in timeline.spans[name] if does == what]
            ranks.broken_barh(bars, (row - 0.4, 0.8), color=colour)
    ranks.set_yticks(range(len(names)), names, fontsize=7)
    ranks.invert_yaxis()
    ranks.legend(
        handles=[Patch(color=c, label=n) for n, c in DOES.items()], ncol=4, fontsize=7, frameon=False,
        loc="lower center", bbox_to_anchor=(0.5, 1.0),
    )  # fmt: skip
    for axis, curves, title in (
        (kv, ("in use", "budgets"), "tokens of KV"),
        (groups, ("in flight", "ready"), "groups"),
    ):
        for i, curve in enumerate(curves):
            points = timeline.curves.get(curve, [])
            axis.plot([t - begin for t, _ in points], [v for _, v in points], color=PALETTE[i], lw=1, label=curve)
        axis.set_ylabel(title, fontsize=7)
        axis.legend(fontsize=7, frameon=False)
    groups.set_xlabel("seconds", fontsize=8)
    steps = range(max(timeline.staleness, default=0) + 1)
    stale.bar(list(steps), [timeline.staleness[s] for s in steps], color=PALETTE[0])
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
