"""The report's part on where the time went: the driver's seconds of each step by cause, and how busy engines were.

Owns: the causes' names and colours, and that they add up. Invariants: the parts of a step's bar add up to its wall
time; what no cause claims is `other`; causes that claim more than there is are scaled to it, and the page says so.
Called by: `observe.report`.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from springtide.observe import charts
from springtide.observe.markup import Html, tag
from springtide.observe.runview import RunView

CAUSES = {  # seconds of the driver by cause, called as on the board, in the order in which they come within a step
    "publish": ("publish", "#8a97ea"),
    "checkpoint": ("checkpoint", "#b79ae0"),
    "evaluate": ("evaluate", "#4aa3a0"),
    "other": ("other", "#9aa5b1"),
    "wait_groups": ("wait: groups", "#eeb73e"),
    "wait_stale_group": ("wait: stale_group", "#dd7430"),
    "wait_ranks": ("wait: ranks", "#b5533c"),
    "train": ("train", "#4459c9"),
}
_BUSY, _IDLE = "#1f9d86", "#c5cdd6"
_CLOCK_S = 1e-6  # by so much sums of a monotonic clock's differences may be off


def section(run: RunView) -> list[Any]:
    """What trainer and engines did and waited for, over the run and step by step."""
    if not run.steps:
        return [tag("p", "No step yet.", class_="lead")]
    parts = [seconds_of(r) for r in run.steps]
    spans = merged(list(zip(run.steps, parts, strict=True)))
    trainer, engine = [], []
    for text, start, end, seconds, busy in spans:
        at = start
        for cause, (name, color) in CAUSES.items():
            if seconds.get(cause, 0.0) > 0:
                trainer.append((at, at + seconds[cause], color, 1.0, f"{text}: {name} {seconds[cause]:.2f} s"))
                at += seconds[cause]
        engine.append((start, end, _BUSY, busy, f"{text}: engine busy {busy:.0%} of {end - start:.2f} s"))
    last = run.steps[-1]["t"]
    totals: Counter[str] = Counter()
    for p in parts:
        totals.update(p)
    wall = sum(totals.values()) or 1.0
    busy = sum(r["engine"]["busy_share"] * r["step_s"] for r in run.steps) / max(
        1e-9, sum(r["step_s"] for r in run.steps)
    )
    used = [(name, color, totals[c] / wall) for c, (name, color) in CAUSES.items() if totals[c] > 0]
    resumes = [
        (next((r["t"] for r in reversed(run.steps) if r["step"] <= n["step"]), 0.0), f"resumed at step {n['step']}")
        for n in run.records
        if n["kind"] == "resume"
    ]
    legend = [(n, c) for n, c, _ in used] + [("engine busy", _BUSY)]
    note = (
        "Trainer: what the driver did for it or waited for, in the order within a step. Engine: the filled height is "
        "the busy share of the step's time; the rest it had nothing to decode, or was paused."
    )
    return [
        tag("h3", f"Trainer: {1 - sum(s for n, _, s in used if n.startswith('wait')):.0%} of the time not waiting"),
        charts.share_bar([(n, s, c) for n, c, s in used]),
        tag("h3", f"Engine: {busy:.0%} busy"),
        charts.share_bar([("busy", busy, _BUSY), ("idle or paused", 1 - busy, _IDLE)]),
        charts.timeline("Trainer and engine", {"trainer": trainer, "engine": engine}, last, legend, resumes, note),
        tag(
            "div",
            charts.stacked_bars(
                "Seconds of a step, by cause", [r["step"] for r in run.steps], parts,
                {c: color for c, (_, color) in CAUSES.items()}, {c: name for c, (name, _) in CAUSES.items()},
                unit="s", note=_adds_up(run, wall),
            ),
            _inside_training(run),
            class_="grid2",
        ),
    ]  # fmt: skip


def seconds_of(record: dict[str, Any]) -> dict[str, float]:
    """A step's seconds by cause, which add up to its `step_s`; what no cause claims is the driver's own ("other")."""
    seconds = {k: max(0.0, v) for k, v in record["seconds"].items()}
    claimed, step_s = sum(seconds.values()), max(0.0, record["step_s"])
    scale = step_s / claimed if claimed > step_s else 1.0
    known = {k if k in CAUSES else "other": 0.0 for k in seconds}
    for cause, value in seconds.items():
        known[cause if cause in CAUSES else "other"] += value * scale
    known["other"] = known.get("other", 0.0) + max(0.0, step_s - claimed)
    return known


def merged(
    rows: list[tuple[dict[str, Any], dict[str, float]]], most: int = 240
) -> list[tuple[str, float, float, Counter[str], float]]:
    """(text, start_s, end_s, seconds by cause, engine's busy share), neighbours merged to at most `most` blocks."""
    size = math.ceil(len(rows) / most)
    out = []
    for i in range(0, len(rows), size):
        part = rows[i : i + size]
        first, last = part[0][0], part[-1][0]
        seconds: Counter[str] = Counter()
        for _, causes in part:
            seconds.update(causes)
        length = sum(r["step_s"] for r, _ in part)
        busy = sum(r["engine"]["busy_share"] * r["step_s"] for r, _ in part) / max(1e-9, length)
        text = f"step {first['step']}" + (f" to {last['step']}" if size > 1 else "")
        out.append((text, first["t"] - first["step_s"], last["t"], seconds, busy))
    return out


def _adds_up(run: RunView, wall: float) -> str:
    over = [sum(r["seconds"].values()) - r["step_s"] for r in run.steps]
    over = [excess for excess in over if excess > _CLOCK_S]
    text = (
        f"The parts of a bar add up to the step's wall time, {wall:,.1f} s over all steps; other is what no cause of "
        "the driver's clock claims: its own work."
    )
    if over:
        text += f" In {len(over)} steps causes claim {sum(over):.2g} s more than there are: scaled to the step."
    return text


def _inside_training(run: RunView) -> Html:
    inside = [
        {k.removesuffix("_s"): v for k, v in r["trainer"].get("seconds", {}).items() if k != "total_s"}
        for r in run.steps
    ]
    names = sorted({k for row in inside for k in row}, key=lambda k: -sum(row.get(k, 0.0) for row in inside))
    shades = ("#4459c9", "#7d8ce0", "#1f9d86", "#e0a43a", "#b79ae0", "#9aa5b1", "#d1495b", "#6b7a8f")
    colors = {name: shades[i % len(shades)] for i, name in enumerate(names)}
    return charts.stacked_bars(
        "Inside the training step", [r["step"] for r in run.steps], inside, colors, {}, unit="s"
    )  # fmt: skip
