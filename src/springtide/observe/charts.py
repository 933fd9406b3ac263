"""Charts of a report as inline SVG: lines with intervals, stacked bars, lanes over time.

Owns: the drawing. Invariants: shares are drawn on axes from 0 to 100%, all other axes start at 0 (or below, where data
do); a gap in the data is a gap in the line; at most `_POINTS` points a line, each the mean of the steps it stands for.
Figures for the pointer travel as JSON in `data-chart` and are read by `page.js`; without scripts the chart is whole.
Called by: `observe.{report,spent,ranks}`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from springtide.observe.markup import Html, tag

_POINTS = 400  # of a line; a screen shows no more
_BARS = 160  # of a bar chart


@dataclass(frozen=True, slots=True)
class Line:
    """One line. `raw`, if given, is drawn faint behind (the unsmoothed values)."""

    name: str
    color: str
    xs: Sequence[float]
    ys: Sequence[float]
    raw: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """A measured point with its interval; hollow marks are greedy evaluations."""

    name: str
    color: str
    x: float
    y: float
    low: float | None = None
    high: float | None = None
    hollow: bool = False
    shift: float = 0.0  # pixels aside, so that intervals at one step do not hide each other


@dataclass(frozen=True, slots=True)
class Frame:
    """The plot's rectangle and its axes. Pixels of the SVG's own box; y grows upwards in data."""

    width: int
    height: int
    x0: float
    x1: float
    y0: float
    y1: float
    left: int = 46
    right: int = 12
    top: int = 10
    bottom: int = 30

    def x(self, value: float) -> float:
        span = (self.x1 - self.x0) or 1.0
        return round(self.left + (value - self.x0) / span * (self.width - self.left - self.right), 1)

    def y(self, value: float) -> float:
        span = (self.y1 - self.y0) or 1.0
        return round(self.height - self.bottom - (value - self.y0) / span * (self.height - self.top - self.bottom), 1)


def line_chart(
    title: str,
    lines: Sequence[Line],
    marks: Sequence[Mark] = (),
    *,
    unit: str = "",
    x_label: str = "optimiser step",
    x_name: str = "step",
    height: int = 210,
    width: int = 520,
    note: str = "",
) -> Html:
    """Lines over steps. unit "%": values are shares 0..1 and the axis is 0 to 100%."""
    scale = 100.0 if unit == "%" else 1.0
    lines = [_thin(line) for line in lines if len(line.xs)]
    values = [y for line in lines for y in (*line.ys, *(line.raw or ())) if math.isfinite(y)]
    values += [m.y for m in marks]
    xs = [x for line in lines for x in line.xs] + [m.x for m in marks]
    if not values:
        return figure(title, note or "no data yet", [], None)
    low, high = (0.0, 1.0) if unit == "%" else (min(0.0, *values), max(0.0, *values) or 1.0)
    ticks = [0, 0.25, 0.5, 0.75, 1.0] if unit == "%" else nice_ticks(low, high)
    first, last = min(xs), max(max(xs), min(xs) + 1)
    room = 0.02 * (last - first) if marks else 0.0  # for points that stand aside of the first and last step
    frame = Frame(width, height, first - room, last + room, min(low, ticks[0]), max(high, ticks[-1]))
    body = _axes(frame, ticks, scale, unit, x_label)
    for line in lines:
        if line.raw is not None:
            body.append(_path(frame, line.xs, line.raw, line.color, "raw"))
        body.append(_path(frame, line.xs, line.ys, line.color, "line"))
    for m in marks:
        body.append(_mark(frame, m, scale, unit))
    hover = {
        "left": frame.left, "right": frame.width - frame.right, "x0": frame.x0, "x1": frame.x1, "unit": unit,
        "name": x_name,
        "lines": [
            {"name": n.name, "color": n.color, "x": [round(x, 2) for x in n.xs], "y": [_short(y * scale) for y in n.ys]}
            for n in lines
        ],
    }  # fmt: skip
    legend = [(line.name, line.color) for line in lines] if len(lines) > 1 else []
    return figure(title, note, legend, _svg(frame, body, label=title), hover)


def stacked_bars(
    title: str,
    xs: Sequence[float],
    rows: Sequence[Mapping[str, float]],
    colors: Mapping[str, str],
    names: Mapping[str, str],
    *,
    unit: str,
    note: str = "",
    share: bool = False,
    x_label: str = "optimiser step",
    x_name: str = "step",
    width: int = 520,
    height: int = 210,
) -> Html:
    """One bar a step, stacked by the keys of `colors`. share: the rows are shares of 1."""
    if not rows:
        return figure(title, "no data yet", [], None)
    size = math.ceil(len(rows) / _BARS)
    bins = [
        (
            xs[i],
            xs[min(i + size, len(rows)) - 1] + 1,
            {k: sum(r.get(k, 0.0) for r in rows[i : i + size]) / len(rows[i : i + size]) for k in colors},
        )
        for i in range(0, len(rows), size)
    ]
    used = [k for k in colors if any(row[k] > 0 for *_, row in bins)]
    top = 1.0 if share else max(sum(row.values()) for *_, row in bins) or 1.0
    ticks = [0, 0.25, 0.5, 0.75, 1.0] if share else nice_ticks(0.0, top)
    last = xs[-1]
    frame = Frame(width, height, xs[0] - 0.5, last + 0.5, 0.0, max(top, ticks[-1]))
    body = _axes(frame, ticks, 100.0 if share else 1.0, "%" if share else unit, x_label)
    for x, end, row in bins:
        left, right, at = frame.x(x - 0.5), frame.x(end - 0.5), 0.0
        span = f"{x_name}s {x:g} to {end - 1:g}" if end - x > 1 else f"{x_name} {x:g}"
        for key in used:
            if row[key] <= 0:
                continue
            y1, y0 = frame.y(at + row[key]), frame.y(at)
            shown = f"{row[key]:.0%}" if share else f"{row[key]:.3g} {unit}"
            body.append(
                tag(
                    "rect", tag("title", f"{span}: {names.get(key, key)} {shown}"), x=left, y=y1, height=_px(y0 - y1),
                    width=_px(max(0.4, right - left - (1 if right - left > 6 else 0))), fill=colors[key],
                )
            )  # fmt: skip
            at += row[key]
    return figure(title, note, [(names.get(k, k), colors[k]) for k in used], _svg(frame, body, label=title))


def timeline(
    title: str,
    lanes: Mapping[str, Sequence[tuple[float, float, str, float, str]]],
    end: float,
    legend: Sequence[tuple[str, str]],
    ticks_at: Sequence[tuple[float, str]],
    note: str,
) -> Html:
    """Lanes over wall time. A block is (start_s, end_s, colour, filled share of the lane's height, text)."""
    lane_height, gap, width = 40, 12, 1080
    frame = Frame(width, 40 + len(lanes) * (lane_height + gap), 0.0, max(end, 1e-9), 0.0, 1.0, left=66, top=18)
    body: list[Html] = []
    unit_s, unit = (60.0, "min") if end >= 180 else (1.0, "s")
    for t in nice_ticks(0.0, end / unit_s, 8):
        if t * unit_s <= end:
            x = frame.x(t * unit_s)
            body.append(tag("line", x1=x, x2=x, y1=frame.top, y2=frame.height - frame.bottom + 4, class_="grid"))
            body.append(
                tag("text", f"{t:g} {unit}", x=x, y=frame.height - 10, class_="tick", text_anchor="middle")
            )  # fmt: skip
    for index, (name, blocks) in enumerate(lanes.items()):
        y = frame.top + index * (lane_height + gap)
        body.append(tag("text", name, x=frame.left - 8, y=y + lane_height / 2 + 4, class_="lane", text_anchor="end"))
        body.append(
            tag("rect", x=frame.left, y=y, width=_px(frame.x(end) - frame.left), height=lane_height, class_="bed")
        )
        for start, stop, color, share, text in blocks:
            left, full = frame.x(start), lane_height * min(1.0, max(0.0, share))
            if full > 0:
                body.append(
                    tag(
                        "rect", tag("title", text), x=left, width=_px(max(0.35, frame.x(stop) - left)), fill=color,
                        y=_px(y + lane_height - full), height=_px(full),
                    )
                )  # fmt: skip
    for t, text in ticks_at:
        x = frame.x(t)
        body.append(tag("line", tag("title", text), x1=x, x2=x, y1=6, y2=frame.height - frame.bottom, class_="event"))
    return figure(title, note, list(legend), _svg(frame, body, label=title), wide=True)


def share_bar(parts: Sequence[tuple[str, float, str]]) -> Html:
    """One bar of 100%: (name, share, colour). Names are in the legend; parts of 6% and more say their share."""
    return tag(
        "div",
        [
            tag(
                "span", f"{share:.0%}" if share >= 0.06 else "", title=f"{name}: {share:.1%}",
                style=f"width:{100 * share:.3f}%;background:{color}",
            )
            for name, share, color in parts
            if share > 0
        ],
        class_="sharebar",
    )  # fmt: skip


def dumbbell(start: Mark | None, end: Mark | None) -> Html:
    """Two points with intervals on a 0 to 100% axis."""
    frame = Frame(220, 34, 0.0, 1.0, 0.0, 1.0, left=6, right=6, top=4, bottom=4)
    body = [tag("line", x1=frame.x(t), x2=frame.x(t), y1=3, y2=31, class_="grid") for t in (0, 0.25, 0.5, 0.75, 1)]
    for y, mark in ((11, start), (23, end)):
        if mark is not None:
            if mark.low is not None and mark.high is not None:
                x1, x2 = frame.x(mark.low), frame.x(mark.high)
                body.append(tag("line", x1=x1, x2=x2, y1=y, y2=y, stroke=mark.color, stroke_width=3, opacity=0.45))
            body.append(
                tag("circle", tag("title", f"{mark.name} {mark.y:.1%}"), cx=frame.x(mark.y), cy=y, r=4, fill=mark.color)
            )
    return _svg(frame, body, "dumbbell")


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round steps that cover [low, high]."""
    span = (high - low) or 1.0
    base = 10 ** math.floor(math.log10(span / count))
    step = next((base * m for m in (1, 2, 2.5, 5) if span / (base * m) <= count), base * 10)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def _axes(frame: Frame, ticks: Sequence[float], scale: float, unit: str, x_label: str) -> list[Html]:
    out: list[Html] = []
    for t in ticks:
        y = frame.y(t)
        suffix = "%" if unit == "%" else ""
        out.append(tag("line", x1=frame.left, x2=frame.width - frame.right, y1=y, y2=y, class_="grid"))
        out.append(
            tag("text", f"{_figures(t * scale)}{suffix}", x=frame.left - 6, y=y + 4, class_="tick", text_anchor="end")
        )
    whole = [t for t in nice_ticks(frame.x0, frame.x1, 6) if frame.x0 <= t <= frame.x1 and float(t).is_integer()]
    for t in whole:
        out.append(
            tag("text", f"{t:g}", x=frame.x(t), y=frame.height - frame.bottom + 14, class_="tick", text_anchor="middle")
        )
    middle = (frame.left + frame.width - frame.right) / 2
    out.append(tag("text", x_label, x=middle, y=frame.height - 3, class_="axis", text_anchor="middle"))
    return out


def _path(frame: Frame, xs: Sequence[float], ys: Sequence[float], color: str, class_: str) -> Html:
    parts, pen = [], "M"
    for x, y in zip(xs, ys, strict=True):
        if math.isfinite(y):
            parts.append(f"{pen}{frame.x(x)} {frame.y(y)}")
            pen = "L"
        else:
            pen = "M"
    if len(parts) == 1:  # a line of one point would not show
        x, y = next((x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y))
        return tag("circle", cx=frame.x(x), cy=frame.y(y), r=2.5, fill=color, class_=class_)
    return tag("path", d="".join(parts), stroke=color, class_=class_)


def _mark(frame: Frame, mark: Mark, scale: float, unit: str) -> Html:
    x, y = frame.x(mark.x) + mark.shift, frame.y(mark.y)
    text = f"{mark.name}: {mark.y * scale:.1f}{unit}"
    parts: list[Html] = []
    if mark.low is not None and mark.high is not None:
        text += f" [{mark.low * scale:.1f}, {mark.high * scale:.1f}]"
        parts.append(
            tag("line", x1=x, x2=x, y1=frame.y(mark.low), y2=frame.y(mark.high), stroke=mark.color, stroke_width=1.6)
        )
    parts.append(
        tag("circle", cx=x, cy=y, r=4.5, fill="var(--card)" if mark.hollow else mark.color, stroke=mark.color,
            stroke_width=2)
    )  # fmt: skip
    return tag("g", tag("title", text), parts, class_="mark")


def figure(
    title: str,
    note: str,
    legend: Sequence[tuple[str, str]],
    body: Html | None,
    hover: dict[str, Any] | None = None,
    *,
    wide: bool = False,
) -> Html:
    """A chart's frame. legend: (name, CSS background). hover: what the pointer shows, see `page.js`."""
    keys = [tag("span", tag("i", style=f"background:{color}"), name, class_="key") for name, color in legend]
    return tag(
        "figure",
        tag("figcaption", tag("b", title), tag("span", keys, class_="keys") if keys else None),
        body,
        tag("p", note, class_="note") if note else None,
        class_="chart wide" if wide else "chart",
        data_chart=json.dumps(hover, separators=(",", ":")) if hover else None,
    )


def _svg(frame: Frame, body: Sequence[Html], class_: str = "plot", label: str | None = None) -> Html:
    box = f"0 0 {frame.width} {frame.height}"
    return tag("svg", body, viewBox=box, class_=class_, role="img", aria_label=label)


def _thin(line: Line) -> Line:
    size = math.ceil(len(line.xs) / _POINTS)
    if size <= 1:
        return line

    def means(values: Sequence[float]) -> list[float]:
        out = []
        for i in range(0, len(values), size):
            known = [v for v in values[i : i + size] if math.isfinite(v)]
            out.append(sum(known) / len(known) if known else math.nan)
        return out

    return Line(line.name, line.color, means(line.xs), means(line.ys), means(line.raw) if line.raw else None)


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _figures(value: float) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:g}"


def _px(value: float) -> float:
    return round(value, 2)
