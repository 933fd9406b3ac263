"""The report's part on scheduling: what every rank did or waited for, KV in use, groups, staleness of what was trained.

Owns: how a `Timeline` is shown. Invariants: the size of the part does not grow with the run, and past `_LANES` not with
its ranks; a state is told apart by its pattern and its place as well as by its colour, and every lane says its shares
in words; what the record does not tell is not drawn, and the page says so.
Called by: `observe.report`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from springtide.observe import charts
from springtide.observe.charts import Line
from springtide.observe.markup import Html, tag, wide_table
from springtide.observe.plots import PALETTE
from springtide.observe.timeline import DOES, Timeline

_LANES = 64  # that are drawn
_LINES = 8  # of one chart
_HIGH = 20  # a lane, in units of its own; its width is as many units as there are bins
_STALEST = 50  # steps; what is staler counts as that
_WORK = {"rollout": "play", "reference": "compute the reference", "trainer": "train"}
_EVALUATION = "#4aa3a0"


def section(timeline: Timeline, *, unread: float = 0.0, skipped: int = 0) -> list[Any]:
    """unread: share of the record that is still to be read; skipped: its lines that are no event."""
    if not timeline.end:
        return [tag("p", "No event yet.", class_="lead")]
    notes = _notes(timeline, unread, skipped)
    names = [n for n in timeline.names() if timeline.placed or timeline.roles[n] != "rollout" or not _made(timeline)]
    lanes = [*_totals(timeline, names), _lanes(timeline, names)] if names else []
    playing = sorted(timeline.kv, key=timeline.names().index) if timeline.placed else []
    small = [_kv(timeline, playing)] if playing else []
    small += [_groups(timeline), _staleness(timeline)]
    return [[tag("p", note, class_="callout") for note in notes], lanes, tag("div", small, class_="grid2")]


def _made(timeline: Timeline) -> bool:
    return bool(timeline.trained) or sum(timeline.groups["ready"]) > 0


def _notes(timeline: Timeline, unread: float, skipped: int) -> list[str]:
    notes = []
    if unread:
        notes.append(
            f"events.jsonl is read as far as {1 - unread:.0%} of it; the next refresh of a served page reads on."
        )
    if skipped:
        lines = _count(skipped, "line of events.jsonl is", "lines of events.jsonl are")
        notes.append(f"{lines} no event (torn, or not written by the run): left out.")
    if timeline.refused:
        events = _count(timeline.refused, "event contradicts", "events contradict")
        notes.append(f"{events} what came before: left out.")
    if not timeline.lanes:
        notes.append("This record does not tell of ranks; those of newer runs do.")
    elif not timeline.placed and _made(timeline):
        notes.append(
            'This record does not tell of episodes (observe.events = "groups"), so not of what rollout ranks did.'
        )
    return notes


# --- ranks ------------------------------------------------------------------------------------------------------------


def _totals(timeline: Timeline, names: Sequence[str]) -> list[Html]:
    """A bar for all ranks of each role that they joined with."""
    out: list[Html] = []
    for role, work in _WORK.items():
        ranks = [name for name in names if timeline.roles[name] == role]
        seconds = {what: sum(sum(timeline.lanes[n].get(what, ())) for n in ranks) for what in DOES}
        total = sum(seconds.values())
        if not total:
            continue
        busy = sum(s for what, s in seconds.items() if DOES[what][1]) / total
        title = f"{_count(len(ranks), 'rank', 'ranks')} that joined to {work}: {busy:.0%} at work"
        out += [tag("h3", title), charts.share_bar([(w, s / total, DOES[w][0]) for w, s in seconds.items()])]
    return out


def _lanes(timeline: Timeline, names: Sequence[str]) -> Html:
    shown = [names[i * len(names) // _LANES] for i in range(_LANES)] if len(names) > _LANES else list(names)
    fold = 1 if len(shown) <= 16 else 2 if len(shown) <= 32 else 4
    width, used = timeline.bins.width * fold, set[str]()
    rows: list[Html] = []
    for name in shown:
        shares = timeline.shares(name, fold)
        used |= set(shares)
        lane = timeline.lanes[name]
        life = sum(map(sum, lane.values())) or 1.0
        parts = {what: sum(lane[what]) / life for what in shares}
        rows.append(_lane(name, _said(parts), [(what, _fill(what), values) for what, values in shares.items()],
                          timeline.end / width))  # fmt: skip
    if any(timeline.evaluating):
        shares_ = [min(1.0, s / width) for s in timeline.sums(timeline.evaluating, fold)]
        said = f"{sum(timeline.evaluating) / timeline.end:.0%} of the time"
        rows.append(_lane("evaluation", said, [("an evaluation runs", _EVALUATION, shares_)], timeline.end / width))
    if timeline.marks:
        rows.append(_marks(timeline))
    legend = [(what, _background(what)) for what in DOES if what in used]
    note = (
        f"A column is {_span(width)}: how high a state stands is its share of that time. Plain: at work; striped: why "
        "not. A trainer's waiting includes checkpoints, and a rank with episodes that loads weights decodes here."
    )
    if len(names) > len(shown):
        note += f" {len(shown)} of {len(names)} ranks are drawn, evenly chosen; the bars above count all."
    body = tag("div", _defs(), rows, _axis(timeline), class_="strips")
    return tag(
        "div",
        charts.figure("Rank timeline", note, legend, body, wide=True),
        tag("details", tag("summary", "The same in words"), _table(timeline, shown, used), id="ranks-in-words"),
    )


def _lane(label: str, said: str, parts: Sequence[tuple[str, str, Sequence[float]]], length: float) -> Html:
    """One row: parts (name, fill, share of each column) stand on each other; equal neighbours are one piece."""
    drawn: dict[str, list[str]] = {name: [] for name, _, _ in parts}
    columns: list[tuple[int, ...]] = []
    for shares in zip(*(values for _, _, values in parts), strict=True):
        at, tops = 0.0, []
        for share in shares:
            at += share
            tops.append(round(_HIGH * min(1.0, at)))
        columns.append(tuple(tops))
    start = 0
    for i in range(1, len(columns) + 1):
        if i < len(columns) and columns[i] == columns[start]:
            continue
        below, wide = 0, min(float(i), length) - start
        for (name, _, _), top in zip(parts, columns[start], strict=True):
            if top > below:
                drawn[name].append(f"M{start} {_HIGH - top}h{wide:.4g}v{top - below}h-{wide:.4g}z")
            below = top
        start = i
    paths = [
        tag("path", tag("title", f"{label}: {name}"), d="".join(drawn[name]), fill=fill)
        for name, fill, _ in parts
        if drawn[name]
    ]
    return _row(label, f"{label}: {said}", paths, length)


def _row(label: str, title: str, body: Any, length: float) -> Html:
    svg = tag(
        "svg", tag("title", title), body, viewBox=f"0 0 {length:.2f} {_HIGH}", preserveAspectRatio="none", role="img",
    )  # fmt: skip
    return tag("div", tag("span", label), svg, class_="strip")


def _marks(timeline: Timeline) -> Html:
    """Deaths, changes of role and resumes, the newest."""
    unit = timeline.end / 1000
    lines = [
        tag("rect", tag("title", text), x=round(min(at / unit, 998), 1), y=0, width=2, height=_HIGH, class_="event")
        for at, text in timeline.marks
    ]
    return _row("changes", f"the newest {len(lines)} deaths, changes of role and resumes", lines, 1000)


def _axis(timeline: Timeline) -> Html:
    size, unit = _unit(timeline.end)
    ticks = [t for t in charts.nice_ticks(0.0, timeline.end / size, 5) if t * size <= timeline.end]
    marks = [tag("span", f"{t:g}", style=f"left:{100 * t * size / timeline.end:.2f}%") for t in ticks]
    return tag("div", tag("span", unit), tag("div", marks, class_="ticks"), class_="strip axis")


def _table(timeline: Timeline, names: Sequence[str], used: set[str]) -> Html:
    states = [what for what in DOES if what in used]
    rows = [tag("tr", tag("th", "rank"), [tag("th", what, class_="num") for what in states])]
    for name in names:
        lane = timeline.lanes[name]
        life = sum(map(sum, lane.values())) or 1.0
        cells = [f"{sum(lane[what]) / life:.1%}" if what in lane else "" for what in states]
        rows.append(tag("tr", tag("td", name), [tag("td", cell, class_="num") for cell in cells]))
    changes = [tag("div", f"{_span(at)}: {text}") for at, text in timeline.marks]
    return tag("div", wide_table(rows), changes, class_="card")


def _said(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{what} {share:.0%}" for what, share in parts.items() if share >= 0.005)


def _defs() -> Html:
    """The patterns of what is no work: stripes, each state's at an angle of its own."""
    patterns = [
        tag(
            "pattern", tag("rect", width=6, height=6, fill=color, opacity=0.45),
            tag("rect", width=6, height=3, fill=color),
            id=_pattern(what), width=6, height=6, patternUnits="userSpaceOnUse",
            patternTransform=f"rotate({_angle(what)})",
        )
        for what, (color, busy) in DOES.items()
        if not busy
    ]  # fmt: skip
    return tag("svg", tag("defs", patterns), width=0, height=0, aria_hidden="true", class_="defs")


def _pattern(what: str) -> str:
    return f"is-{what.replace(' ', '-')}"


def _angle(what: str) -> int:
    idle = [name for name, (_, busy) in DOES.items() if not busy]
    return 180 * idle.index(what) // len(idle)


def _fill(what: str) -> str:
    color, busy = DOES[what]
    return color if busy else f"url(#{_pattern(what)})"


def _background(what: str) -> str:
    """The same in CSS; its angles turn from the vertical."""
    color, busy = DOES[what]
    if busy:
        return color
    return f"repeating-linear-gradient({_angle(what) + 180}deg,{color} 0 2px,{color}73 2px 4px)"


# --- curves -----------------------------------------------------------------------------------------------------------


def _kv(timeline: Timeline, names: Sequence[str]) -> Html:
    size, unit = _unit(timeline.end)
    xs = [round(start / size, 4) for start in timeline.starts(2)]
    values = {name: timeline.mean(timeline.kv[name], timeline.playing[name], 2) for name in names}
    if len(names) > _LINES:
        known = [[v for v in column if math.isfinite(v)] for column in zip(*values.values(), strict=True)]
        values = {
            "fullest rank": [max(v, default=math.nan) for v in known],
            "mean of ranks": [sum(v) / len(v) if v else math.nan for v in known],
            "emptiest rank": [min(v, default=math.nan) for v in known],
        }
    lines = [Line(name, PALETTE[i % len(PALETTE)], xs, ys) for i, (name, ys) in enumerate(values.items())]
    budgets = sorted({timeline.budgets[name] for name in names})
    peak = max((v for ys in values.values() for v in ys if math.isfinite(v)), default=0.0)
    note = (
        "Contexts of the episodes that a rank has, those that are paused left out; a prompt that members share counts "
    )
    note += f"for each of them. Budget of a rank: {' or '.join(f'{b:,}' for b in budgets[:3])} tokens."
    if budgets and peak > budgets[-1] / 4:
        lines.append(Line("budget", "#98a3b1", [xs[0], xs[-1]], [budgets[-1]] * 2))
    return charts.line_chart(
        "KV of each playing rank", lines, unit=" tokens", x_label=unit, x_name=unit[:-1], note=note
    )


def _groups(timeline: Timeline) -> Html:
    size, unit = _unit(timeline.end)
    xs = [round(start / size, 4) for start in timeline.starts(2)]
    lines = [
        Line(name, PALETTE[i], xs, timeline.mean(row, timeline.seen, 2))
        for i, (name, row) in enumerate(timeline.groups.items())
    ]
    note = "Means over time: groups whose episodes play, groups in the buffer, and groups in the optimiser step."
    return charts.line_chart("Groups", lines, unit=" groups", x_label=unit, x_name=unit[:-1], note=note)


def _staleness(timeline: Timeline) -> Html:
    counts = timeline.staleness
    most = min(_STALEST, max(counts, default=0))
    rows = [{"groups": float(counts[s])} for s in range(most)]
    rows.append({"groups": float(sum(n for s, n in counts.items() if s >= most))})
    note = "Trained groups by optimiser steps between the newest weights when they were drawn and those being trained."
    if counts:
        mean = sum(s * n for s, n in counts.items()) / counts.total()
        note += f" Mean {mean:.2f} over {counts.total():,} groups."
    if max(counts, default=0) > _STALEST:
        note += f" The last bar is {_STALEST} steps and more."
    return charts.stacked_bars(
        "Staleness of trained groups", list(range(most + 1)), rows if counts else [], {"groups": PALETTE[0]}, {},
        unit="groups", note=note, x_label="staleness, steps", x_name="staleness",
    )  # fmt: skip


def _unit(seconds: float) -> tuple[float, str]:
    return (1.0, "seconds") if seconds < 180 else (60.0, "minutes") if seconds < 10800 else (3600.0, "hours")


def _span(seconds: float) -> str:
    size, unit = _unit(seconds)
    return f"{seconds / size:.3g} {'min' if unit == 'minutes' else unit[0]}"


def _count(n: int, one: str, many: str) -> str:
    return f"{n:,} {one if n == 1 else many}"
