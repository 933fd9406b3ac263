"""The learning curve of a run as a picture, and what pictures and report share: colours and smoothing.

Owns: `curve.png`. Invariants: success axes run from 0 to 100%; a smoothed line never hides the raw values behind it;
an evaluation is a point with its 95% interval, never part of the training line (other tasks, other temperature).
Called by: `observe.report`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PALETTE = ("#2f6fde", "#e07a1f", "#1f9d72", "#a64ac9", "#d1495b", "#6b7a8f", "#0f9bb3", "#9a7b1f")
_INK, _GRID = "#28323f", "#e3e8ee"
_MEAN = "#39434f"


def suite_colors(records: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Suite -> colour, in the order of names, over all that records speak of."""
    names: set[str] = set()
    for r in records:
        if r["kind"] == "step":
            names |= set(r["success"]) - {"mean"} | set(r["mixture"])
        elif r["kind"] == "eval":
            names |= set(r["suites"])
    return {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(sorted(names))}


def window(steps: int) -> int:
    """Steps a smoothed point stands for: a twelfth of the run, odd, at least 1."""
    return max(1, steps // 12) | 1


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Centred moving mean over `width` values, one-sided at the ends; NaN are left out of every mean."""
    half, n = width // 2, len(values)
    known = [math.isfinite(v) for v in values]
    sums = [0.0, *itertools.accumulate(v if k else 0.0 for v, k in zip(values, known, strict=True))]
    counts = [0, *itertools.accumulate(map(int, known))]
    spans = [(max(0, i - half), min(n, i + half + 1)) for i in range(n)]
    return [(sums[b] - sums[a]) / (counts[b] - counts[a]) if counts[b] > counts[a] else math.nan for a, b in spans]


def success_of(steps: Sequence[dict[str, Any]], suite: str, table: str = "success") -> tuple[list[int], list[float]]:
    """Steps and the suite's value at each that has one (a step at which none of its episodes ended has none)."""
    points = [(r["step"], r[table][suite]) for r in steps if suite in r[table]]
    return [p[0] for p in points], [p[1] for p in points]


def label_of(label: str, cold_start_steps: int) -> str:
    """An evaluation's label as people read it: what a run starts from after a cold start is not what it was given."""
    return f"after cold start{label[5:]}" if label.startswith("start") and cold_start_steps else label


def number(value: Any) -> float | None:
    """A finite figure, or None."""
    return None if value is None or not math.isfinite(value) else float(value)


def write_curve(records: list[dict[str, Any]], path: Path) -> None:
    """Training success by suite with the evaluations over it; below, goodput and staleness."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    steps = [r for r in records if r["kind"] == "step"]
    evals = [r for r in records if r["kind"] == "eval"]
    colors, width = suite_colors(records), window(len(steps))
    style: Any = {
        "font.size": 9.5, "axes.edgecolor": "#b9c2cc", "axes.labelcolor": _INK, "text.color": _INK,
        "xtick.color": "#5b6673", "ytick.color": "#5b6673", "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "grid.color": _GRID, "grid.linewidth": 0.8, "axes.axisbelow": True,
    }  # fmt: skip
    with plt.rc_context(style):
        figure = plt.figure(figsize=(9.6, 6.6), layout="constrained")
        grid = figure.add_gridspec(2, 2, height_ratios=(2.5, 1))
        main, goodput, stale = (figure.add_subplot(grid[where]) for where in ((0, slice(None)), (1, 0), (1, 1)))
        _success(main, steps, evals, colors, width)
        xs = [r["step"] for r in steps]
        values = [r["goodput_tokens_per_s"] for r in steps]
        goodput.plot(xs, values, color="#1f9d72", alpha=0.25, linewidth=0.9)
        goodput.plot(xs, smooth(values, width), color="#1f9d72", linewidth=1.8)
        goodput.set(title="goodput (trained tokens per second)", xlabel="optimiser step", ylim=(0, None))
        stale.fill_between(xs, [r["staleness"]["max"] for r in steps], step="mid", color="#e07a1f", alpha=0.14)
        stale.plot(xs, smooth([r["staleness"]["mean"] for r in steps], width), color="#e07a1f", linewidth=1.8)
        top = 1.15 * max([1, *(r["staleness"]["max"] for r in steps)])
        stale.set(title="staleness (steps): mean, and maximum shaded", xlabel="optimiser step", ylim=(0, top))
        for axes in (main, goodput, stale):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.title.set_fontsize(10)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _success(
    axes: Any, steps: list[dict[str, Any]], evals: list[dict[str, Any]], colors: dict[str, str], width: int
) -> None:
    from matplotlib.lines import Line2D

    for suite, color in colors.items():
        xs, ys = success_of(steps, suite)
        if xs:
            axes.plot(xs, [100 * y for y in ys], color=color, alpha=0.2, linewidth=0.9)
            axes.plot(xs, [100 * y for y in smooth(ys, width)], color=color, linewidth=2.0)
    reach = max([1, *(r["step"] for r in (*steps, *evals))])  # the evaluation at the start is at step 0
    for record in evals:
        for place, (suite, result) in enumerate(sorted(record["suites"].items())):
            color = colors[suite]
            # Suites evaluated at one step stand beside each other, or their intervals would hide one another.
            x = record["step"] + (place - (len(record["suites"]) - 1) / 2) * reach * 0.012
            if (y := number(result["success"])) is not None:
                error = [[100 * (y - result["low"])], [100 * (result["high"] - y)]]
                axes.errorbar([x], [100 * y], yerr=error, fmt="o", color=color, markersize=6, elinewidth=1.4, capsize=2)
            if (greedy := number(result["greedy"])) is not None:
                low, high = result["greedy_low"], result["greedy_high"]
                x += reach * 0.005
                axes.errorbar([x], [100 * greedy], yerr=[[100 * (greedy - low)], [100 * (high - greedy)]], fmt="none",
                              ecolor=color, elinewidth=1, alpha=0.6)  # fmt: skip
                axes.plot([x], [100 * greedy], "D", color="white", markeredgecolor=color, markersize=5.5, zorder=3)
    handles = [Line2D([], [], color=c, linewidth=2, label=s) for s, c in colors.items()]
    if evals:
        handles.append(Line2D([], [], color=_MEAN, marker="o", linestyle="", label="evaluation, sampled, 95%"))
        handles.append(Line2D([], [], color="white", markeredgecolor=_MEAN, marker="D", linestyle="", label="greedy"))
    if handles:
        axes.legend(handles=handles, loc="upper left", frameon=False, ncols=min(5, len(handles)), fontsize=9)
    if not steps and not evals:
        axes.text(0.5, 0.5, "no step yet", transform=axes.transAxes, ha="center", color="#8a94a0")
    smoothing = f"mean of {width} steps, every step faint" if width > 1 else "every step"
    axes.set(ylabel="success", xlabel="optimiser step", ylim=(0, 100), xlim=(-0.025 * reach, 1.03 * reach))
    axes.set_yticks(range(0, 101, 20), [f"{t}%" for t in range(0, 101, 20)])
    axes.set_title(f"Success in training by suite ({smoothing})", loc="left", fontsize=11, fontweight="bold")
    ends = {r["label"]: number(r["success"]) for r in evals}
    start, end = ends.get("start"), ends.get("end")
    if start is not None and end is not None:
        axes.set_title(f"evaluation: {start:.1%} → {end:.1%}", loc="right", fontsize=11, fontweight="bold")
